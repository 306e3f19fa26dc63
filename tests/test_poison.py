"""No unused byte reaches the output: runs that differ only there give identical bits.

`cases` decides what is unused: slots past the length or ahead of every token, blocks and pages of nobody and their
table entries, table columns past the length, block scales of those slots and their padding, flat rows of nobody, gaps
between strided rows, what lies behind each row of ids.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given

from cases import DTYPE_PAIRS, FILLS, FLAT_FORMS, PAGED_FORMS, PLANAR_FORMS, Case, Spec, build
from compare import assert_matches_oracle, assert_same_bits, bits
from test_properties import specs

pytestmark = pytest.mark.usefixtures("poisoned_empty")

FORMS_OF_DTYPE = [
    (form, kv_dtype)
    for kv_dtype in ("bf16", "fp16", "fp8", "nvfp4")
    for form in [*PAGED_FORMS, *FLAT_FORMS, *(PLANAR_FORMS if kv_dtype == "nvfp4" else ())]
]


def assert_fills_do_not_matter(spec: Spec, device: str) -> Case:
    case = build(spec, device)
    results = [build(replace(spec, fill=fill), device).run() for fill in FILLS]
    for result in results[1:]:
        assert_same_bits(results[0], result)
    assert_matches_oracle(case, results[0])
    return case


@pytest.mark.parametrize("form, kv_dtype", FORMS_OF_DTYPE)
def test_unused_bytes_of_every_form(form: str, kv_dtype: str, device: str) -> None:
    spec = Spec(
        q_dtype="fp16" if kv_dtype == "fp16" else "bf16",
        kv_dtype=kv_dtype,
        form=form,
        lengths=(300, 0, 129, 3, 512),
        seqlen_q=3,
        topk=5,
        q_form="padded_rows",
        ids_form="padded",
        k_global_scale=0.3,
    )
    assert_fills_do_not_matter(spec, device)


@given(spec=specs())
def test_unused_bytes_of_any_call(device: str, spec: Spec) -> None:
    assert_fills_do_not_matter(spec, device)


@pytest.mark.parametrize("q_dtype, kv_dtype", DTYPE_PAIRS)
@pytest.mark.parametrize("form", ["packed", "flat"])
def test_keys_ahead_of_one_token_but_not_of_the_next(form: str, q_dtype: str, kv_dtype: str, device: str) -> None:
    """A key of NaN bytes changes the tokens that see it, and no bit of the tokens before it."""
    spec = Spec(
        q_dtype=q_dtype, kv_dtype=kv_dtype, form=form, lengths=(258,), seqlen_q=5, ids="all", topk=3, scale_dtype="fp8"
    )  # fmt: skip
    clean, spoiled = build(spec, device), build(spec, device)
    # The last key, seen by the last token alone, and the one before it.
    for position in (257, 256):
        for name, t in zip(("k_scale", "v_scale"), spoiled.args[1:3], strict=True):
            if kv_dtype == "nvfp4":
                spoil_scale(spoiled, name, position)
            elif t.dim() == 4:
                page = int(spoiled.kwargs["page_table"][0, position // 128])
                t[page, :, position % 128].copy_(torch.full_like(t[page, :, 0], float("nan"), dtype=torch.float32))
            else:
                row = int(spoiled.kwargs["cu_seqlens_k"][0]) + position
                t[row].copy_(torch.full_like(t[row], float("nan"), dtype=torch.float32))
    expected, got = clean.run(), spoiled.run()
    assert_same_bits((got[0][:3], got[1][:3]), (expected[0][:3], expected[1][:3]))
    changed = (bits(got[0][3:]) != bits(expected[0][3:])).flatten(1).any(dim=1)
    assert changed.all(), "the spoiled keys were not read by the tokens that see them"


def spoil_scale(case: Case, name: str, position: int) -> None:
    """NaN into the tiled block scales of one key position of request 0, for every KV head."""
    scale = case.kwargs[name].view(torch.uint8).view(-1)
    heads = case.spec.kv_heads
    for h in range(heads):
        if case.spec.paged:
            row = (int(case.kwargs["page_table"][0, position // 128]) * heads + h) * 128 + position % 128
        else:
            row = (int(case.kwargs["cu_seqlens_k"][0]) + position) * heads + h
        s = torch.arange(8, device=scale.device)
        scale[((row // 128) * 2 + s // 4) * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + s % 4] = 0x7F
