"""Joint items: two tokens of a request in one block, which reads once what both selected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from cases import FILLS, Spec, build
from compare import assert_matches_oracle, assert_same_bits
from msa_ops import explain, msa_sparse_decode_attention
from msa_ops.bench.exact import exact_output
from msa_ops.bench.inputs import KV_KINDS, Call, Shape, make_calls, make_pool
from msa_ops.selftest import ROW_TOLERANCE
from test_properties import specs

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def joint(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    monkeypatch.setenv("MSA_OPS_COMBINE", "joint")


@given(spec=specs())
def test_any_call(poisoned_empty: None, spec: Spec) -> None:
    """Against the oracle, and to the bit whatever lies in unused places."""
    spec = replace(spec, topk=min(spec.topk, 32))
    case = build(spec, "cuda")
    assert explain(*case.args, **case.kwargs).route == "joint"
    first = case.run()
    assert_matches_oracle(case, first)
    for fill in FILLS:
        assert_same_bits(first, build(replace(spec, fill=fill), "cuda").run())


@pytest.mark.parametrize("seqlen_q", range(1, 9))
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "nvfp4"])
def test_requests_shorter_than_their_tokens(kv_dtype: str, seqlen_q: int) -> None:
    """Tokens without a key, alone or beside one that has some."""
    spec = Spec(kv_dtype=kv_dtype, lengths=(0, 1, 2, 3, 127, 128, 129, 260), seqlen_q=seqlen_q, topk=3, ids="all")
    assert_matches_oracle(build(spec, "cuda"))


def attend(call: Call) -> tuple[Tensor, Tensor]:
    p = call.pool
    keywords: dict[str, Any] = {"k_scale": p.k_scale, "v_scale": p.v_scale} if p.k_scale is not None else {}
    keywords |= {"k_global_scale": p.k_global_scale, "v_global_scale": p.v_global_scale}
    result = msa_sparse_decode_attention(
        call.q, p.k, p.v, call.q2k_indices, page_table=call.page_table, seqused_k=call.seqused_k,
        seqlen_q=call.shape.seqlen_q, return_softmax_lse=True, **keywords,
    )  # fmt: skip
    assert isinstance(result, tuple)
    return result


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seqlen_q", [2, 3, 4])
@pytest.mark.parametrize("kv", KV_KINDS)
def test_many_items_a_block(kv: str, seqlen_q: int, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring tokens that share most blocks, or next to none; twice with the same bits."""
    shape = Shape(kv, 130, 32, 2, seqlen_q=seqlen_q, context=8000, overlap=overlap)
    generator = torch.Generator("cuda").manual_seed(0)
    call = make_calls(shape, make_pool(kv, 9000, 2, generator), 1, generator)[0]
    out, lse = attend(call)
    tokens = torch.arange(shape.tokens, device="cuda")
    expected = exact_output(call, tokens)
    error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.max()) <= ROW_TOLERANCE[torch.bfloat16]
    assert_same_bits((out, lse), attend(call))
    monkeypatch.setenv("MSA_OPS_COMBINE", "none")
    torch.testing.assert_close(lse, attend(call)[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("seen_by", [0, 1])
def test_a_value_that_one_token_attends_does_not_reach_the_other(seen_by: int) -> None:
    """NaN in the last row, which the first token may not see, and in a block that one of the tokens selected."""
    k, v = (torch.randn(4, 1, 128, 128, device="cuda").bfloat16() for _ in "kv")
    q = torch.randn(2, 16, 128, device="cuda").bfloat16()
    ids = torch.tensor([[[0, 2, 3], [0, 2, 3]]], dtype=torch.int32, device="cuda")
    ids[0, 1 - seen_by, 1] = 1
    keywords: dict[str, Any] = {
        "page_table": torch.arange(4, dtype=torch.int32, device="cuda")[None],
        "seqused_k": torch.tensor([400], dtype=torch.int32, device="cuda"),
        "seqlen_q": 2,
    }
    clean = msa_sparse_decode_attention(q, k, v, ids, **keywords)
    v[2, :, 5] = torch.nan
    if seen_by == 1:
        v[3, :, 400 - 3 * 128 - 1] = torch.nan
    spoilt = msa_sparse_decode_attention(q, k, v, ids, **keywords)
    assert isinstance(clean, Tensor) and isinstance(spoilt, Tensor)
    assert torch.equal(spoilt[1 - seen_by], clean[1 - seen_by]) and bool(spoilt[seen_by].isnan().all())
