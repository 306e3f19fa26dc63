"""NVFP4: the quantiser against an independent one in exact arithmetic, the scale layouts, the planar page."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from msa_ops import nvfp4
from msa_ops.contract import FP8
from msa_ops.nvfp4 import (
    nvfp4_dequantize,
    nvfp4_planar_pages,
    nvfp4_planar_views,
    nvfp4_planar_write,
    nvfp4_quantize,
    nvfp4_scales_from_planar_v,
    nvfp4_scales_from_tiled,
    nvfp4_scales_to_planar_v,
    nvfp4_scales_to_tiled,
)

E2M1 = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def e4m3_value(byte: int) -> Fraction:
    """Magnitude of a finite non-negative e4m3 byte, from the format's definition."""
    exponent, mantissa = byte >> 3, byte & 7
    return Fraction(mantissa, 2**9) if exponent == 0 else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


E4M3 = [e4m3_value(b) for b in range(0x7F)]


def nearest_even(x: Fraction, values: list[Fraction]) -> int:
    """Index of the value nearest to x >= 0; a tie goes to the even index; beyond the last, the last."""
    best = min(abs(x - v) for v in values)
    at = [i for i, v in enumerate(values) if abs(x - v) == best]
    return at[0] if len(at) == 1 else next(i for i in at if i % 2 == 0)


def f32(x: Fraction) -> Fraction:
    """One rounding to float32: exact rational to the nearest 24-bit significand, ties to even (overflow to 2^128)."""
    if x == 0:
        return x
    sign, x = (-1 if x < 0 else 1), abs(x)
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    exponent += x >= Fraction(2) ** (exponent + 1)
    exponent -= x < Fraction(2) ** exponent
    ulp = Fraction(2) ** (max(exponent, -126) - 23)
    return sign * min(round(x / ulp) * ulp, Fraction(2) ** 128)


def reference_group(x: list[float], global_sf: float) -> tuple[list[int], int]:
    """16 codes and the scale byte of one group, by the rule, each float32 step rounded from exact arithmetic."""
    xs, sf = [Fraction(v) for v in x], Fraction(global_sf)
    scale = nearest_even(min(Fraction(448), f32(f32(sf * max(map(abs, xs))) / 6)), E4M3)
    if scale == 0:
        return [0] * 16, 0
    codes = []
    for value, given in zip(xs, x, strict=True):
        y = f32(f32(value * sf) / E4M3[scale])
        negative = str(given).startswith("-")
        codes.append(nearest_even(min(Fraction(6), abs(y)), E2M1) | (8 if negative else 0))
    return codes, scale


def unpack(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def tiled_byte(row: int, s: int) -> int:
    return ((row // 128) * 2 + s // 4) * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + s % 4


def check_against_reference(x: Tensor, global_sf: float) -> None:
    codes, scales = nvfp4_quantize(x, global_sf)
    assert codes.dtype == scales.dtype == torch.uint8
    assert codes.shape == (*x.shape[:-1], 64)
    rows = x.float().cpu().view(-1, 8, 16)
    assert scales.shape == (-(-rows.shape[0] // 128) * 128, 8)
    got, flat = unpack(codes).cpu().view(-1, 8, 16).tolist(), scales.cpu().flatten().tolist()
    exact_sf = float(torch.tensor(global_sf, dtype=torch.float32))
    for r, s in itertools.product(range(rows.shape[0]), range(8)):
        want_codes, want_scale = reference_group(rows[r, s].tolist(), exact_sf)
        assert flat[tiled_byte(r, s)] == want_scale, (r, s)
        assert got[r][s] == want_codes, (r, s)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("global_sf", [1.0, 0.37, 448 * 6 / 3.1, 3e-3])
def test_quantize_matches_exact_arithmetic(dtype: torch.dtype, global_sf: float, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.randint(-14, 9, (5, 3, 8, 1), generator=generator).float())
    x = (torch.randn(5, 3, 8, 16, generator=generator) * spread).view(5, 3, 128).to(dtype)
    check_against_reference(x.to(device), global_sf)


def test_quantize_rounds_every_code_tie_to_even(device: str) -> None:
    # With a largest magnitude of 6 the scale is exactly 1, so elements are rounded to e2m1 as they stand.
    below = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    want = torch.tensor([0, 2, 2, 4, 4, 6, 6], dtype=torch.uint8)
    for values, expected in (
        (below, want),
        (torch.nextafter(below, torch.tensor(0.0)), torch.arange(7, dtype=torch.uint8)),
        (torch.nextafter(below, torch.tensor(9.0)), torch.arange(1, 8, dtype=torch.uint8)),
    ):
        x = torch.zeros(1, 128)
        x[0, :7], x[0, 7], x[0, 8:15], x[0, 15] = values, 6.0, -values, -6.0
        codes, scales = nvfp4_quantize(x.to(device), 1.0)
        got = unpack(codes).cpu()[0]
        assert scales.view(FP8).float().cpu().flatten()[0] == 1
        assert got[:7].tolist() == expected.tolist()
        assert got[8:15].tolist() == (expected | 8).tolist()
        assert (got[7], got[15]) == (7, 15)


def test_quantize_rounds_every_scale_and_every_scale_tie_to_even(device: str) -> None:
    values = torch.tensor([float(v) for v in E4M3], dtype=torch.float64)
    middles = (values[1:] + values[:-1]) / 2  # exact in float32, and 6 times it too
    even = torch.tensor([i if i % 2 == 0 else i + 1 for i in range(len(middles))])
    tie = middles.float() * 6
    for largest, want in (
        (values.float() * 6, torch.arange(len(values))),
        (tie, even),
        (torch.nextafter(tie, torch.tensor(1e9)), None),
        (torch.nextafter(tie, torch.tensor(0.0)), None),
    ):
        # A neighbour of a tie may still divide to the tie in float32: the rule rounds that quotient.
        quotient = (largest.double() / 6).float().double()
        exact = torch.tensor([nearest_even(Fraction(q), E4M3) for q in quotient.tolist()])
        assert want is None or torch.equal(exact, want)
        x = torch.zeros(len(largest), 128)
        x[:, 5] = largest
        x[:, 16 + 9] = -largest
        _, scales = nvfp4_quantize(x.to(device), 1.0)
        linear = nvfp4_scales_from_tiled(scales, len(largest)).cpu().long()
        assert torch.equal(linear[:, 0], exact) and torch.equal(linear[:, 1], exact)
        assert (linear[:, 2:] == 0).all()


def test_torch_rounds_float32_to_e4m3_to_nearest_even(device: str) -> None:
    values = torch.tensor([float(v) for v in E4M3])
    middles = (values[1:] + values[:-1]) / 2
    for x in (
        middles,
        torch.nextafter(middles, torch.tensor(0.0)),
        torch.nextafter(middles, torch.tensor(500.0)),
        values,
    ):
        want = [nearest_even(Fraction(v), E4M3) for v in x.tolist()]
        assert x.to(device).to(FP8).view(torch.uint8).cpu().tolist() == want


def test_quantize_saturates(device: str) -> None:
    x = torch.zeros(2, 128)
    x[0, 0], x[0, 1], x[0, 2] = 3e38, -3e38, 448 * 6.0
    x[1, 0], x[1, 1] = 448 * 6.0, -448 * 7.0
    for global_sf in (1.0, 1e3):  # the larger one overflows float32 on the way
        codes, scales = nvfp4_quantize(x.to(device), global_sf)
        assert nvfp4_scales_from_tiled(scales, 2)[:, 0].tolist() == [0x7E, 0x7E]
        assert unpack(codes).cpu()[0, :4].tolist() == [7, 15, 7, 0]
        assert unpack(codes).cpu()[1, :2].tolist() == [7, 15]


def test_codes_are_zero_where_the_scale_is_zero_and_keep_signs_elsewhere(device: str) -> None:
    x = torch.zeros(1, 128)
    x[0, :16] = torch.tensor([1e-4, -1e-4] * 8)  # 1e-4 / 6 is under half of the smallest scale, 2^-9
    x[0, 16], x[0, 17], x[0, 18] = 6.0, -0.1, -0.0
    codes, scales = nvfp4_quantize(x.to(device), 1.0)
    assert nvfp4_scales_from_tiled(scales, 1).cpu()[0, :3].tolist() == [0, 0x38, 0]
    assert unpack(codes).cpu()[0, :19].tolist() == [0] * 16 + [7, 8, 8]
    assert (nvfp4_dequantize(codes, scales)[0, :16] == 0).all()


def test_global_sf_may_be_a_one_element_tensor(device: str) -> None:
    x = torch.randn(7, 2, 128, generator=torch.Generator().manual_seed(1)).to(device)
    want = nvfp4_quantize(x, 123.4)
    for sf in (torch.tensor(123.4, device=device), torch.tensor([123.4], device=device)):
        got = nvfp4_quantize(x, sf)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_rows_are_the_flattened_leading_dims_whatever_the_strides(device: str) -> None:
    x = torch.randn(3, 128, 4, 128, generator=torch.Generator().manual_seed(2)).to(device)
    view = x.transpose(1, 2)  # (page, head, token, 128)
    got, want = nvfp4_quantize(view, 10.0), nvfp4_quantize(view.reshape(-1, 128), 10.0)
    assert torch.equal(got[0].view(-1, 64), want[0]) and torch.equal(got[1], want[1])


def test_quantize_of_no_rows_is_empty(device: str) -> None:
    codes, scales = nvfp4_quantize(torch.empty(0, 4, 128, device=device), 1.0)
    assert codes.shape == (0, 4, 64) and scales.shape == (0, 8)
    assert nvfp4_dequantize(codes, scales).shape == (0, 4, 128)


def test_dequantize_reads_every_code_and_every_scale_byte(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(256, 1).expand(256, 64).contiguous()
    linear = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 8)
    got = nvfp4_dequantize(codes.to(device), nvfp4_scales_to_tiled(linear).to(device), 0.25).cpu()
    for byte in range(256):
        low, high = (float(E2M1[n & 7]) * (-1 if n & 8 else 1) for n in (byte & 15, byte >> 4))
        if byte & 0x7F == 0x7F:
            assert got[byte].isnan().all()
            continue
        scale = float(E4M3[byte & 0x7F]) * (-1 if byte & 0x80 else 1)
        assert torch.equal(got[byte, 0::2], torch.full((64,), low * scale * 0.25))
        assert torch.equal(got[byte, 1::2], torch.full((64,), high * scale * 0.25))


def test_dequantize_is_close_to_what_was_quantised(device: str) -> None:
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(3)).to(device)
    sf = 448 * 6 / float(x.abs().max())
    back = nvfp4_dequantize(*nvfp4_quantize(x, sf), 1 / sf)
    # A code is off by at most half its widest step (1 of 6, twice that where a scale rounded down cuts at 6: 6/16).
    largest = x.view(40, 8, 16).abs().amax(-1, keepdim=True)
    assert ((back - x).view(40, 8, 16).abs() <= largest / 6 * 1.07).all()
    assert nvfp4_dequantize(*nvfp4_quantize(x, sf), 1 / sf, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [1, 31, 128, 129, 300])
def test_tiled_layout_is_the_formula(rows: int) -> None:
    linear = torch.randint(0, 256, (rows, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    tiled = nvfp4_scales_to_tiled(linear)
    padded = torch.zeros(-(-rows // 128) * 1024, dtype=torch.uint8)
    for r, s in itertools.product(range(rows), range(8)):
        padded[tiled_byte(r, s)] = linear[r, s]
    assert torch.equal(tiled.flatten(), padded)
    assert torch.equal(nvfp4_scales_from_tiled(tiled, rows), linear)
    assert torch.equal(nvfp4_scales_from_tiled(tiled.flatten().view(FP8), rows), linear)
    assert torch.equal(tiled.flatten()[nvfp4.tiled_scale_offsets(torch.arange(rows))], linear)


def test_planar_v_layout_is_the_formula() -> None:
    linear = torch.randint(0, 256, (2, 3, 128, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    planar = nvfp4_scales_to_planar_v(linear)
    for token, s in itertools.product(range(128), range(8)):
        byte = (token // 4) * 32 + 4 * s + token % 4
        assert torch.equal(planar.flatten(2)[..., byte], linear[:, :, token, s])
    assert torch.equal(nvfp4_scales_from_planar_v(planar), linear)


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_planar_write_fills_the_regions_of_the_page(heads: int, device: str) -> None:
    generator = torch.Generator().manual_seed(5)
    pool = nvfp4_planar_pages(4, heads, device=device)
    assert pool.shape == (4, heads * 18432)
    pool.fill_(0xFF)
    slots = torch.randperm(4 * 128, generator=generator)[:200]
    k, v = (torch.randn(200, heads, 128, generator=generator).to(device) for _ in range(2))
    nvfp4_planar_write(pool, slots.to(device), k, v, k_global_sf=300.0, v_global_sf=200.0)
    views = nvfp4_planar_views(pool, heads)
    assert all(view.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr() for view in views)
    got_k = nvfp4_dequantize(views.k, views.k_scale, 1 / 300)
    got_v = nvfp4_dequantize(views.v, views.v_scale.view(FP8), 1 / 200, planar_v=True)
    page, token = slots // 128, slots % 128
    assert torch.equal(got_k[page, :, token], nvfp4_dequantize(*nvfp4_quantize(k, 300.0), 1 / 300))
    assert torch.equal(got_v[page, :, token], nvfp4_dequantize(*nvfp4_quantize(v, 200.0), 1 / 200))
    # Byte for byte where the specification puts them.
    raw, codes_k, codes_v = pool.cpu(), nvfp4_quantize(k, 300.0)[0].cpu(), nvfp4_quantize(v, 200.0)[0].cpu()
    scales_v = nvfp4_scales_from_tiled(nvfp4_quantize(v, 200.0)[1], 200 * heads).view(200, heads, 8).cpu()
    p, t, h = int(page[17]), int(token[17]), heads - 1
    assert torch.equal(raw[p, (h * 128 + t) * 64 :][:64], codes_k[17, h])
    v_data = heads * (8192 + 1024)
    assert torch.equal(raw[p, v_data + (h * 128 + t) * 64 :][:64], codes_v[17, h])
    v_scale = v_data + heads * 8192 + h * 1024
    assert [int(raw[p, v_scale + (t // 4) * 32 + 4 * s + t % 4]) for s in range(8)] == scales_v[17, h].tolist()
    # Slots not named keep their bytes.
    untouched = torch.ones(4, 128, dtype=torch.bool)
    untouched[page, token] = False
    for view in (views.k.cpu(), views.v.cpu(), views.k_scale.cpu(), nvfp4_scales_from_planar_v(views.v_scale).cpu()):
        assert (view.transpose(1, 2)[untouched] == 0xFF).all()


def test_planar_views_keep_the_offset_and_stride_of_a_pool() -> None:
    pool = torch.arange(3 * 2 * 18432 * 2, dtype=torch.int32).to(torch.uint8).view(3, 2, 2 * 18432)
    layer = nvfp4_planar_views(pool[:, 1], 2)
    assert layer.k.stride() == (4 * 18432, 8192, 64, 1) and layer.k.storage_offset() == 2 * 18432
    assert layer.v_scale.stride() == (4 * 18432, 1024, 8, 1)
    assert torch.equal(layer.v.reshape(3, -1), pool[:, 1, 18432 : 18432 + 16384])


BAD_INPUT = {
    "NaN": (lambda: nvfp4_quantize(torch.full((1, 128), float("nan")), 1.0), "x must be finite"),
    "inf": (lambda: nvfp4_quantize(torch.full((1, 128), float("-inf")).half(), 1.0), "x must be finite"),
    "dtype": (lambda: nvfp4_quantize(torch.zeros(1, 128, dtype=torch.float64), 1.0), "x must be bfloat16"),
    "shape": (lambda: nvfp4_quantize(torch.zeros(1, 64), 1.0), r"x must have shape \(\.\.\., 128\), got \(1, 64\)"),
    "zero sf": (lambda: nvfp4_quantize(torch.zeros(1, 128), 0.0), "global_sf must be positive"),
    "negative sf": (lambda: nvfp4_quantize(torch.zeros(1, 128), -1.0), "global_sf must be positive"),
    "tiny sf": (lambda: nvfp4_quantize(torch.zeros(1, 128), 1e-50), "in float32, got 1e-50"),
    "huge sf": (lambda: nvfp4_quantize(torch.zeros(1, 128), 1e39), "in float32, got 1e\\+39"),
    "NaN sf": (lambda: nvfp4_quantize(torch.zeros(1, 128), float("nan")), "global_sf must be positive"),
    "two sf": (lambda: nvfp4_quantize(torch.zeros(1, 128), torch.ones(2)), "one-element float32"),
    "double sf": (lambda: nvfp4_quantize(torch.zeros(1, 128), torch.ones(1).double()), "one-element float32"),
    "codes": (lambda: nvfp4_dequantize(torch.zeros(2, 128, dtype=torch.uint8), U8), "codes must be uint8"),
    "few scales": (lambda: nvfp4_dequantize(torch.zeros(200, 64, dtype=torch.uint8), U8), "at least 2048 bytes"),
    "rank 2 planar": (lambda: nvfp4_dequantize(CODES, U8, planar_v=True), "planar_v needs scales of a planar page"),
    "scale shape": (lambda: nvfp4_dequantize(CODES, U8.view(1, 1, 128, 8)), r"scales must have shape \(1, 2, 128, 8\)"),
    "scale dtype": (lambda: nvfp4_dequantize(CODES, U8.float()), "scales must be uint8 or float8_e4m3fn"),
    "two global scales": (lambda: nvfp4_dequantize(CODES, U8, torch.ones(2)), r"one element, got shape \(2,\)"),
    "page size": (lambda: nvfp4_planar_views(torch.zeros(2, 18432, dtype=torch.uint8), 2), r"\(num_pages, 36864\)"),
    "slot": (lambda: write(torch.tensor([0, 256])), r"slots must lie in 0\.\.255"),
    "negative slot": (lambda: write(torch.tensor([0, -1])), r"slots must lie in 0\.\.255"),
    "slot twice": (lambda: write(torch.tensor([7, 7])), "slots must be distinct"),
    "big sf": (lambda: nvfp4_quantize(torch.zeros(1, 128), 10**400), "global_sf must be positive and finite in float32"),
    "big negative sf": (lambda: nvfp4_quantize(torch.zeros(1, 128), -(10**400)), "global_sf must be positive and"),
    "no heads": (lambda: nvfp4_planar_views(torch.zeros(2, 0, dtype=torch.uint8), 0), "num_kv_heads must be at least 1"),
    "pages overlap": (
        lambda: nvfp4_planar_write(
            nvfp4_planar_pages(1, 1).expand(2, -1), torch.tensor([0, 128]), torch.zeros(2, 1, 128), torch.zeros(2, 1, 128)
        ),
        "pages must not overlap when they are written, got a page stride of 0 bytes",
    ),
    "slot count": (lambda: write(torch.tensor([0])), r"slots must be int32 or int64 of shape \(2,\)"),
}  # fmt: skip
U8 = torch.zeros(128, 8, dtype=torch.uint8)
CODES = torch.zeros(1, 2, 128, 64, dtype=torch.uint8)


def write(slots: Tensor) -> None:
    nvfp4_planar_write(nvfp4_planar_pages(2, 1), slots, torch.zeros(2, 1, 128), torch.zeros(2, 1, 128))


@pytest.mark.parametrize("name", list(BAD_INPUT))
def test_bad_input_is_refused(name: str) -> None:
    call, message = BAD_INPUT[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match="global_sf must be a float"):
        nvfp4_quantize(torch.zeros(1, 128), "1")  # type: ignore[arg-type]
    pages = nvfp4_planar_pages(1, 1)
    k = torch.zeros(1, 1, 128)
    calls = {
        "x": lambda x: nvfp4_quantize(x, 1.0),
        "codes": lambda x: nvfp4_dequantize(x, U8),
        "scales": lambda x: nvfp4_dequantize(CODES, x),
        "pages": lambda x: nvfp4_planar_views(x, 1),
        "slots": lambda x: nvfp4_planar_write(pages, x, k, k),
        "k": lambda x: nvfp4_planar_write(pages, torch.tensor([0]), x, k),
        "v": lambda x: nvfp4_planar_write(pages, torch.tensor([0]), k, x),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"^{name} must be a torch.Tensor, got list"):
            call([0])
        with pytest.raises(TypeError, match=f"^{name} must be a strided tensor, got torch.sparse_coo"):
            call(torch.zeros(1, 128).to_sparse())
    with pytest.raises(TypeError, match=r"pages must be a torch\.Tensor, got list"):
        nvfp4_planar_write([0], torch.tensor([0]), k, k)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="global_scale must be a float or a tensor, got str"):
        nvfp4_dequantize(CODES, U8.view(-1), "1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dtype must be a floating-point dtype, got torch\.int32"):
        nvfp4_dequantize(CODES, U8.view(-1), dtype=torch.int32)
    one, scales = torch.full((1, 1, 1, 1, 1), 0.5), torch.full((256, 8), 0x38, dtype=torch.uint8)
    assert torch.equal(nvfp4_dequantize(CODES + 2, scales, one), nvfp4_dequantize(CODES + 2, scales, 0.5))
    with pytest.raises(TypeError, match="num_pages must be an int, got float"):
        nvfp4_planar_pages(1.0, 1)  # type: ignore[arg-type]
