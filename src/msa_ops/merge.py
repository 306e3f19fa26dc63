"""Merging attention states.

Softmax attention over a set of keys is summed up by its *state*: the normalised output and the natural log of the sum
of exponentials of the scaled scores (LSE). The states of two disjoint key sets give that of their union:

    lse = log(exp(lse_a) + exp(lse_b))
    out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)

Merging is commutative and associative up to rounding, and the state of no keys, ``(0, -inf)``, is its neutral element.
Sources: the split softmax of FlashAttention (Dao et al., 2022, arXiv:2205.14135) and the attention-state algebra of
FlashInfer (Ye et al., 2025, arXiv:2501.01005).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .arguments import require_int
from .contract import _require_tensor


def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention states of two disjoint key sets.

    Args:
        out_a, out_b: ``(..., head_dim)`` outputs, one floating-point dtype.
        lse_a, lse_b: ``(...)`` natural-log LSE of the scaled scores, one floating-point dtype. ``-inf`` means no keys:
            the output beside it has no weight, whatever it holds, NaN included.

    Returns:
        ``(out, lse)`` in the dtypes of the inputs; computed in float32, or in float64 if any input is float64. Where
        both LSE are ``-inf`` the output is exactly 0 and the LSE ``-inf``.

    Raises:
        TypeError: an input is not a floating-point tensor, or the dtypes of a pair differ.
        ValueError: shapes or devices do not fit.
    """
    _check_pair("out_a", out_a, "out_b", out_b)
    _check_pair("lse_a", lse_a, "lse_b", lse_b)
    _check_state("out_a", out_a, "lse_a", lse_a)
    return merge_stacked_states(torch.stack((out_a, out_b)), torch.stack((lse_a, lse_b)))


def merge_stacked_states(outs: Tensor, lses: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """Merge any number of attention states, stacked along one dimension.

    Args:
        outs: ``(..., head_dim)`` outputs, one of the leading dimensions counting the states.
        lses: ``(...)`` natural-log LSE, ``-inf`` for a state of no keys (see `merge_attention_states`).
        dim: the dimension of `lses` that counts the states; it is gone from the result.

    Returns:
        ``(out, lse)``, dtypes and empty states as in `merge_attention_states`. No states at all give ``(0, -inf)``.

    Raises:
        TypeError: an input is not a floating-point tensor.
        ValueError: shapes or devices do not fit, or `dim` is out of range.
    """
    _check_state("outs", outs, "lses", lses)
    if not -lses.dim() <= require_int("dim", dim) < lses.dim():
        raise ValueError(f"dim must be in [{-lses.dim()}, {lses.dim() - 1}] for lses of rank {lses.dim()}, got {dim}")
    dim %= lses.dim()
    compute = torch.promote_types(torch.promote_types(outs.dtype, lses.dtype), torch.float32)
    wide = lses.to(compute)
    lse = torch.logsumexp(wide, dim)  # -inf where every state is empty, also where there is none
    empty = wide == -math.inf
    # (-inf) - (-inf) is NaN, so an empty state's weight is set, and its output, which may hold anything, is replaced.
    # An LSE of 1e6 has steps of 0.06: weights taken against the rounded total would not add up to 1.
    weight = torch.exp(wide - lse.unsqueeze(dim)).masked_fill(empty, 0.0)
    weight = (weight / weight.sum(dim, keepdim=True).masked_fill(empty.all(dim, keepdim=True), 1.0)).unsqueeze(-1)
    out = (outs.to(compute).masked_fill(empty.unsqueeze(-1), 0.0) * weight).sum(dim)
    return out.to(outs.dtype), lse.to(lses.dtype)


def _check_pair(name_a: str, a: Tensor, name_b: str, b: Tensor) -> None:
    _require_tensor(name_a, a)
    _require_tensor(name_b, b)
    if a.dtype != b.dtype:
        raise TypeError(f"{name_b} must have {name_a}'s dtype {a.dtype}, got {b.dtype}: pass {name_b}.to({a.dtype})")
    if a.shape != b.shape:
        raise ValueError(f"{name_b} must have {name_a}'s shape {tuple(a.shape)}, got {tuple(b.shape)}")
    if a.device != b.device:
        raise ValueError(f"{name_b} must be on {name_a}'s device {a.device}, got {b.device}")


def _check_state(out_name: str, out: Tensor, lse_name: str, lse: Tensor) -> None:
    for name, t in ((out_name, out), (lse_name, lse)):
        _require_tensor(name, t)
        if not t.is_floating_point() or t.element_size() < 2:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {t.dtype}")
    if out.dim() == 0 or out.shape[:-1] != lse.shape:
        want = tuple(out.shape[:-1])
        raise ValueError(
            f"{lse_name} must have {out_name}'s shape without its last dim, {want}, got {tuple(lse.shape)}"
        )
    if out.device != lse.device:
        raise ValueError(f"{lse_name} must be on {out_name}'s device {out.device}, got {lse.device}")
