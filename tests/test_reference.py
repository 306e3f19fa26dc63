"""The oracle against what is independent of it: the shared vectors, exact fractions, and numbers read another way."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import DTYPE_PAIRS, Spec, build
from msa_ops.reference import _round_once, decode_reference
from nvfp4_bytes import E4M3, e4m3_value
from vectors.load import load

VECTORS = sorted((Path(__file__).parent / "vectors").glob("*.npz"))
# dtype: significand bits, smallest normal exponent, largest finite value
FORMATS = {torch.bfloat16: (8, -126, Fraction((2**8 - 1) * 2**120)), torch.float16: (11, -14, Fraction(65504))}


@pytest.mark.parametrize("path", VECTORS, ids=lambda p: p.stem)
def test_oracle_agrees_with_the_vectors(path: Path) -> None:
    args, kwargs, expected, expected_lse, _ = load(path)
    out, lse = decode_reference(*args, round_output=False, **kwargs)
    # Both sides are float64: they may differ by the order of sums alone.
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-11)
    assert torch.equal(out[expected_lse.isneginf()], torch.zeros_like(out[expected_lse.isneginf()]))


@pytest.mark.parametrize(
    "form, q_dtype, kv_dtype",
    [
        (form, *pair)
        for form in ("k_hnd_v_nhd", "planar_pool", "flat_packed")
        for pair in DTYPE_PAIRS
        if form != "planar_pool" or pair[1] == "nvfp4"
    ],
)
def test_oracle_reads_the_bytes_as_their_definition_says(form: str, q_dtype: str, kv_dtype: str) -> None:
    case = build(Spec(q_dtype=q_dtype, kv_dtype=kv_dtype, form=form, lengths=(200, 70), seqlen_q=2, group=1))
    from_bytes = decode_reference(*case.args, round_output=False, **case.kwargs)
    from_numbers = case.oracle()
    assert torch.equal(from_bytes[0], from_numbers[0])
    assert torch.equal(from_bytes[1], from_numbers[1])
    assert from_bytes[0].isfinite().all()


def test_oracle_rounds_to_the_output_dtype() -> None:
    for q_dtype, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp8", torch.bfloat16)):
        case = build(Spec(q_dtype=q_dtype, kv_dtype="fp8"))
        rounded, _ = decode_reference(*case.args, **case.kwargs)
        exact, _ = decode_reference(*case.args, round_output=False, **case.kwargs)
        assert rounded.dtype == dtype
        assert torch.equal(rounded, _round_once(exact, dtype))


def test_e4m3_bytes_mean_what_torch_says() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    torch.testing.assert_close(E4M3, theirs, rtol=0, atol=0, equal_nan=True)
    assert e4m3_value(0x7E) == 448.0


def nearest(x: Fraction, dtype: torch.dtype) -> Fraction | float:
    """`x` rounded to nearest, ties to even, with integers alone. Overflow gives an infinity."""
    bits, smallest, largest = FORMATS[dtype]
    if x == 0:
        return Fraction(0)
    magnitude = abs(x)
    exponent = math.floor(math.log2(magnitude)) if magnitude > 2**-1000 else -1100
    while Fraction(2) ** exponent > magnitude:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    step = Fraction(2) ** (max(exponent, smallest) - bits + 1)
    rounded = round(magnitude / step) * step  # round() of a Fraction is ties to even
    if rounded > largest:
        return math.copysign(math.inf, x)
    return rounded if x > 0 else -rounded


def assert_round_once(x: float, dtype: torch.dtype) -> None:
    got = float(_round_once(torch.tensor([x], dtype=torch.float64), dtype))
    want = nearest(Fraction(x), dtype)
    assert got == want, f"{x.hex()} became {got.hex()}, not {float(want).hex()}"


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@given(x=st.floats(allow_nan=False, allow_infinity=False))
def test_round_once_any_float(dtype: torch.dtype, x: float) -> None:
    assert_round_once(x, dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@given(
    significand=st.integers(0, 2**12),
    exponent=st.integers(-60, 20),
    nudge=st.sampled_from([0.0, 2.0**-40, -(2.0**-40), 2.0**-52, -(2.0**-52)]),
    negative=st.booleans(),
)
def test_round_once_next_to_ties(
    dtype: torch.dtype, significand: int, exponent: int, nudge: float, negative: bool
) -> None:
    # 2 * significand + 1 is a tie for one number of bits or other; the nudge lies below float32's last bit.
    x = math.ldexp((2 * significand + 1) * (1 + nudge), exponent)
    assert_round_once(-x if negative else x, dtype)


def test_rounding_through_float32_would_round_twice() -> None:
    # Just above the middle between two bf16 numbers, by less than float32 shows.
    x = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
    assert float(x.to(torch.bfloat16)) == 1.0
    assert float(_round_once(x, torch.bfloat16)) == 1 + 2**-7


def test_round_once_keeps_special_values() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0], dtype=torch.float64)
    for dtype in FORMATS:
        y = _round_once(x, dtype)
        assert y[0] == math.inf and y[1] == -math.inf and y[2].isnan()
        assert y[3] == 0 and not y[3].signbit() and y[4] == 0 and y[4].signbit()
