"""How results are held against the truth: the row error measure, bits, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cases import Case

ROW_TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Largest ``norm(out - exp) / norm(exp)`` of a row, by output dtype. One rounding of P and one of the output pass: they
give up to 2.9e-3 with P in bf16, and 3.2e-4 with P in fp16 and fp16 output."""
LSE_TOLERANCE = 1e-4


def assert_rows_close(out: Tensor, expected: Tensor, term_norms: Tensor | None = None) -> None:
    """Hold rows of `out`, one per (token, query head), against float64 `expected`; rows expected 0 must be exactly 0.

    An output row is the sum of terms ``p_i * v_i``. Each term carries a rounding of its own (P in 16 bits), so the
    error grows with the root of the sum of squares of the terms, not with their sum, which can cancel: two keys with v
    and -v leave an error of the size of v. Where `term_norms` gives that root, a row is held to the tolerance times the
    larger of it and ``norm(exp)``. For random V both have one size, and the bound is that of the vectors.
    """
    assert out.shape == expected.shape
    got = out.detach().cpu().double()
    size = expected.norm(dim=-1)
    if term_norms is not None:
        size = torch.maximum(size, torch.where(size > 0, term_norms, size))
    error = (got - expected).norm(dim=-1)
    wrong = ~(error <= ROW_TOLERANCE[out.dtype] * size)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} rows are off; first (token, head) {wrong.nonzero()[0].tolist()}: "
        f"error {float(error[wrong][0]):.3e} against {ROW_TOLERANCE[out.dtype]:.0e} * {float(size[wrong][0]):.3e}"
    )


def assert_lse_close(lse: Tensor, expected: Tensor) -> None:
    """LSE within 1e-4 where finite, ``-inf`` exactly where expected."""
    assert lse.dtype == torch.float32 and lse.shape == expected.shape
    got = lse.detach().cpu().double()
    empty = expected.isneginf()
    where = got.isneginf()
    assert torch.equal(where, empty), f"-inf at {where.nonzero().tolist()}, not {empty.nonzero().tolist()}"
    error = (got - expected)[~empty].abs()
    assert (error <= LSE_TOLERANCE).all(), f"LSE off by up to {float(error.max()):.3e}"


def assert_matches_oracle(
    case: Case, result: tuple[Tensor, Tensor] | None = None, **changes: Any
) -> tuple[Tensor, Tensor]:
    """Run `case` (or take the result of a run with `changes`), hold it against the oracle, and return it."""
    out, lse = case.run(**changes) if result is None else result
    assert out.dtype == (torch.float16 if case.spec.q_dtype == "fp16" else torch.bfloat16)
    asked = {n: a for n, a in changes.items() if n not in ("out", "lse_out")}
    expected, expected_lse = case.oracle(**asked)
    assert_lse_close(lse, expected_lse)
    empty = out[expected_lse.isneginf().to(out.device)]
    assert bool((empty == 0).all()), "a row with nothing to attend is not exactly 0"
    try:
        assert_rows_close(out, expected)
    except AssertionError:
        # Only now, because it costs a second run of the oracle: rows that cancel.
        assert_rows_close(out, expected, case.term_norms(**asked))
    return out, lse


def bits(t: Tensor) -> Tensor:
    """The bits of a 16- or 32-bit float tensor as integers, so that NaN equals itself and 0 differs from -0."""
    return t.detach().cpu().contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32)


def assert_same_bits(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    """Output and LSE of two runs are equal to the bit; says where they first differ."""
    for name, x, y in zip(("out", "lse"), a, b, strict=True):
        differ = bits(x) != bits(y)
        where = differ.nonzero().tolist()
        assert not where, f"{name} differs in {len(where)} places, first at {where[0]}"
