"""Every route against the float64 oracle, on random calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import DTYPE_PAIRS, FLAT_FORMS, PAGED_FORMS, PLANAR_FORMS, Case, Spec, build
from compare import assert_matches_oracle, assert_same_bits

pytestmark = pytest.mark.usefixtures("poisoned_empty")

_LENGTH = st.one_of(
    st.sampled_from([0, 1, 2, 127, 128, 129, 255, 256, 257, 384, 640]),
    st.integers(1, 560),
)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any supported call that the oracle answers in well under a second."""
    q_dtype, kv_dtype = draw(st.sampled_from(DTYPE_PAIRS))
    paged = draw(st.booleans())
    forms = [*PAGED_FORMS, *(PLANAR_FORMS * 3 if kv_dtype == "nvfp4" else ())] if paged else [*FLAT_FORMS]
    length = st.one_of(_LENGTH, st.sampled_from([-1, -300])) if paged else _LENGTH
    lengths = draw(st.lists(length, min_size=1, max_size=3))
    # q of one size and a softmax scale of its inverse give scores that float32 resolves, whatever the size.
    size = draw(st.sampled_from([1.0, 1.0, *{"bf16": [1e-9, 2e5], "fp16": [1e-2, 4e3], "fp8": []}[q_dtype]]))
    scale = draw(st.sampled_from([None, 0.0, -0.05, 0.11, 0.3])) if size == 1.0 else 128**-0.5 / size
    position = st.integers(-3, 600)
    offsets = st.one_of(st.none(), position, st.tuples(*[position] * len(lengths)))
    return Spec(
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        form=draw(st.sampled_from(forms)),
        lengths=tuple(lengths),
        seqlen_q=draw(st.integers(1, 5)),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 24)),
        topk=draw(st.integers(1, 40)),
        ids=draw(st.sampled_from(["mixed", "mixed", "ascending", "all", "none"])),
        ids_form=draw(st.sampled_from(["plain", "token_major", "padded"])),
        q_form=draw(st.sampled_from(["dense", "fused_qkv", "head_major", "padded_rows"])),
        q_size=size,
        causal=draw(st.sampled_from([True, True, False])),
        softmax_scale=scale,
        k_global_scale=draw(st.sampled_from([None, 0.3, 1.0, -0.7])),
        v_global_scale=draw(st.sampled_from([None, 0.25, 3.0, -1.5, 0.0])),
        global_scale_tensors=draw(st.booleans()),
        q_offset=draw(offsets),
        share_prefix=draw(st.booleans()),
        scale_rank=draw(st.sampled_from([1, 2])),
        scale_dtype=draw(st.sampled_from(["uint8", "fp8"])),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(max_examples=5 * settings().max_examples)
@given(spec=specs(), force_fused=st.sampled_from([None, True, False]), given_out=st.booleans())
def test_any_call_matches_the_oracle(device: str, spec: Spec, force_fused: bool | None, given_out: bool) -> None:
    case = build(spec, device)
    outputs: dict[str, Any] = {}
    if given_out:
        outputs["out"] = torch.full(
            (spec.tokens, spec.kv_heads * spec.group, 128),
            float("nan"),
            dtype=torch.float16 if spec.q_dtype == "fp16" else torch.bfloat16,
            device=device,
        )
        outputs["lse_out"] = torch.full(outputs["out"].shape[:2], float("nan"), device=device)
    out, lse = case.run(force_fused=force_fused, **outputs)
    if given_out:
        assert out is outputs["out"] and lse is outputs["lse_out"]
    assert_matches_oracle(case, (out, lse))


@given(spec=specs())
def test_equal_inputs_give_equal_bits(device: str, spec: Spec) -> None:
    case = build(spec, device)
    assert_same_bits(case.run(), case.run())


@given(spec=specs(), data=st.data())
def test_a_fused_request_does_not_depend_on_its_batch(device: str, spec: Spec, data: st.DataObject) -> None:
    """With `force_fused=True`, each request alone gives the bits that it gives in the batch."""
    case = build(spec, device)
    out, lse = case.run(force_fused=True)
    b = data.draw(st.integers(0, len(spec.lengths) - 1))
    mine = slice(b * spec.seqlen_q, (b + 1) * spec.seqlen_q)
    assert_same_bits(one_request(case, b).run(force_fused=True), (out[mine], lse[mine]))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("topk", [3, 24])
def test_a_fused_request_does_not_depend_on_its_batch_with_more_threads(topk: int, threads: int) -> None:
    """On the CPU, whatever the number of threads: a batch is shared out among them, one request alone is not."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in range(10, 30):
            lengths = ((2048, 2048), (3000, 17, 4000, 700, 4000))[seed % 2]
            case = build(Spec(lengths=lengths, group=7, topk=topk, ids="ascending", seed=seed))
            out, lse = case.run(force_fused=True)
            for b in range(len(lengths)):
                assert_same_bits(one_request(case, b).run(force_fused=True), (out[b : b + 1], lse[b : b + 1]))
    finally:
        torch.set_num_threads(before)


def one_request(case: Case, b: int) -> Case:
    """Request `b` of a case, alone."""
    spec = case.spec
    mine = slice(b * spec.seqlen_q, (b + 1) * spec.seqlen_q)
    q, k, v, ids = case.args
    alone: dict[str, Any] = dict(case.kwargs)
    for name in ("page_table", "seqused_k"):
        if name in alone:
            alone[name] = alone[name][b : b + 1]
    if "cu_seqlens_k" in alone:
        alone["cu_seqlens_k"] = alone["cu_seqlens_k"][b : b + 2]
    if isinstance(alone["q_offset"], torch.Tensor):
        alone["q_offset"] = alone["q_offset"][b : b + 1]
    return Case(spec, (q[mine], k, v, ids[:, mine]), alone, case.keys, case.values)


@given(spec=specs())
def test_the_lse_request_does_not_change_the_output(device: str, spec: Spec) -> None:
    case = build(spec, device)
    out, lse = case.run()
    alone = case.run_output()
    assert_same_bits((alone, lse), (out, lse))
