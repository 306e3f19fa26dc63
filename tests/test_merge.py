"""Merging attention states by LSE."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from msa_ops.merge import merge_attention_states, merge_stacked_states


def _state(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The state of keys with these scores ``(rows, keys)`` and values ``(keys, dim)``."""
    return torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1)


def _scores(device: str, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 40, generator=generator, dtype=torch.float64) * spread
    return scores.to(device), torch.randn(40, 8, generator=generator, dtype=torch.float64).to(device)


@pytest.mark.parametrize("spread", [0.1, 3.0, 300.0])
def test_merge_is_the_softmax_of_the_union(device: str, spread: float) -> None:
    scores, values = _scores(device, spread)
    a, b = _state(scores[:, :13], values[:13]), _state(scores[:, 13:], values[13:])
    out, lse = merge_attention_states(*a, *b)
    want_out, want_lse = _state(scores, values)
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_stacked_merge_is_the_softmax_of_the_union_along_any_dim(device: str) -> None:
    scores, values = _scores(device)
    states = [_state(scores[:, i : i + 8], values[i : i + 8]) for i in range(0, 40, 8)]
    want_out, want_lse = _state(scores, values)
    for dim in (0, 1, -1):
        outs = torch.stack([s[0] for s in states], dim=dim if dim >= 0 else 1)
        out, lse = merge_stacked_states(outs, torch.stack([s[1] for s in states], dim=dim), dim)
        torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_no_keys_on_either_side_is_exactly_zero_and_minus_inf(device: str) -> None:
    out = torch.full((2, 4), math.nan, device=device)
    lse = torch.full((2,), -math.inf, device=device)
    merged, merged_lse = merge_attention_states(out, lse, out, lse)
    assert torch.equal(merged, torch.zeros_like(out))
    assert torch.equal(merged_lse, lse)


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
def test_an_empty_state_is_neutral_whatever_its_output_holds(device: str, garbage: float) -> None:
    out = torch.randn(3, 4, device=device)
    lse = torch.tensor([-200.0, 0.0, 90.0], device=device)
    empty = torch.full_like(out, garbage), torch.full_like(lse, -math.inf)
    for merged, merged_lse in (merge_attention_states(out, lse, *empty), merge_attention_states(*empty, out, lse)):
        assert torch.equal(merged, out)
        assert torch.equal(merged_lse, lse)


def test_no_states_at_all_are_the_state_of_no_keys(device: str) -> None:
    out, lse = merge_stacked_states(torch.empty(0, 3, 4, device=device), torch.empty(0, 3, device=device))
    assert torch.equal(out, torch.zeros(3, 4, device=device))
    assert torch.equal(lse, torch.full((3,), -math.inf, device=device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_outputs_are_merged_in_float32(device: str, dtype: torch.dtype) -> None:
    a, b = torch.full((1, 2), 1.0, dtype=dtype, device=device), torch.full((1, 2), 2.0, dtype=dtype, device=device)
    lse_a, lse_b = torch.zeros(1, device=device), torch.full((1,), math.log(3.0), device=device)
    out, lse = merge_attention_states(a, lse_a, b, lse_b)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert torch.equal(out, torch.full_like(a, 1.75))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(4.0)))


def test_errors_name_the_argument_and_the_remedy() -> None:
    out, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"lse_a must have out_a's shape without its last dim, \(2, 3\), got \(2, 4\)"):
        merge_attention_states(out, torch.zeros(2, 4), out, torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"out_b must have out_a's shape \(2, 3, 4\), got \(2, 3, 5\)"):
        merge_attention_states(out, lse, torch.zeros(2, 3, 5), lse)
    with pytest.raises(
        TypeError, match=r"lse_b must have lse_a's dtype torch.float32, got torch.float64: pass lse_b.to"
    ):
        merge_attention_states(out, lse, out, lse.double())
    with pytest.raises(TypeError, match=r"lses must be float16, bfloat16, float32 or float64, got torch\.int64"):
        merge_stacked_states(out, lse.long())
    for wrong, kind in (([0.0], "torch.Tensor"), (lse.to_sparse(), "strided tensor")):
        with pytest.raises(TypeError, match=f"out_b must be a {kind}"):
            merge_attention_states(out, lse, wrong, lse)
        with pytest.raises(TypeError, match=f"lses must be a {kind}"):
            merge_stacked_states(out, wrong)
    with pytest.raises(TypeError, match="dim must be an int, got float"):
        merge_stacked_states(out, lse, dim=0.0)
    with pytest.raises(ValueError, match=r"dim must be in \[-2, 1\] for lses of rank 2, got 2"):
        merge_stacked_states(out, lse, dim=2)
