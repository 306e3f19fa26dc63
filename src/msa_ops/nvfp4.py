"""NVFP4: quantise, dequantise, the two scale layouts, and the planar page.

An NVFP4 row of 128 elements is 64 bytes of e2m1 codes (two a byte, even element in the low nibble) and 8 bytes of e4m3
block scales, one per 16 elements; ``value = e2m1(code) * e4m3(scale) * global_scale``. Data formats: OCP Microscaling
Formats v1.0 (e2m1) and Micikevicius et al., 2022, arXiv:2209.05433 (e4m3).

Three arrangements of the scale bytes appear here, all uint8 (or float8_e4m3fn, the same bytes):

- row-linear ``(..., 8)``: byte ``s`` of a row is the scale of its elements ``16 s .. 16 s + 15``. K in a planar page.
- 128x4 tiled ``(rows padded to a multiple of 128, 8)``: the shape only sizes it; the scale of row ``r``, group ``s`` is
  byte ``((r//128)*2 + s//4)*512 + (r%32)*16 + ((r%128)//32)*4 + s%4``.
- planar V ``(num_pages, num_kv_heads, 128, 8)``: byte ``(token//4)*32 + 4*s + token%4`` of a head's 1024 bytes.

The arithmetic is correctly rounded float32, here in torch for CPU tensors and in a kernel for CUDA tensors: both give the
same bits.
"""

from __future__ import annotations

import ctypes
import math
import os
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import require_int
from .contract import BLOCK_SIZE, FP8, HEAD_DIM, ROW_ALIGNMENT, SCALE_GROUP, SCALES_PER_ROW, _require_tensor

E2M1_MAX = 6.0
E4M3_MAX = 448.0
CODE_BYTES = HEAD_DIM // 2
"""Bytes of one row's e2m1 codes."""
PLANAR_BYTES_PER_HEAD = 2 * BLOCK_SIZE * (CODE_BYTES + SCALES_PER_ROW)
"""Bytes that one KV head takes in a planar page: K and V codes and scales of 128 tokens (18,432)."""

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_TILE_ROWS = 128
_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def nvfp4_quantize(x: Tensor, global_sf: float | Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows of 128 elements to NVFP4.

    With ``a`` the largest magnitude of 16 elements: ``scale = e4m3(min(448, global_sf * a / 6))`` and
    ``code = e2m1(x * global_sf / scale)``, all in float32, rounded to nearest even; codes saturate at 6 and are 0 where
    the scale is 0. A negative element that rounds to zero keeps its sign (code 8).

    Args:
        x: ``(..., 128)`` bfloat16, float16 or float32, on any device. Rows are the flattened leading dims:
            ``(token, head)`` for a flat cache, ``(page, head, token)`` for a paged one.
        global_sf: factor applied before rounding, > 0: a float or a one-element float32 tensor. ``448 * 6 / amax`` uses
            the whole range. The attention call takes ``1 / global_sf`` as ``k_global_scale`` or ``v_global_scale``.

    Returns:
        Codes, uint8 ``(..., 64)``, and scales, uint8 ``(rows padded to a multiple of 128, 8)`` in the 128x4 tiled
        layout; the bytes of padding rows are 0.

    Raises:
        TypeError, ValueError: wrong dtype or shape, a global_sf that is not positive and finite in float32, or NaN or
            inf in `x`, which NVFP4 cannot hold. On CUDA the kernel looks at the values, and reading what it found
            synchronises once. A CUDA graph capture cannot: there inf saturates and a NaN makes its group's scale NaN.
        RuntimeError: on CUDA, a missing compiler package or an unsupported GPU.
    """
    check_rows("x", x)
    if x.is_cuda and x.numel():
        return _quantize_on_cuda(x.detach(), as_factor(global_sf, x))
    sf = check_global_sf(global_sf, x)
    check_finite("x", x)
    codes, scales = quantize_rows(x, sf)
    return codes, nvfp4_scales_to_tiled(scales)


def _quantize_on_cuda(x: Tensor, global_sf: float | Tensor) -> tuple[Tensor, Tensor]:
    from .engines.cuda import quantize

    codes, scales, faults = quantize.quantize_rows(x, global_sf)
    if not is_capturing(x.device):
        bad_x, bad_sf = faults.tolist()
        if bad_sf:
            raise _bad_global_sf("global_sf", float(global_sf))
        if bad_x:
            raise _not_finite("x")
    return codes, scales


def quantize_rows(x: Tensor, global_sf: Tensor) -> tuple[Tensor, Tensor]:
    """`nvfp4_quantize` with row-linear scales ``(..., 8)``; `x` and the scalar `global_sf` are checked already.

    What is not finite is defined all the same, as the writers of CUDA caches need it: inf saturates, and a NaN makes its
    group's scale NaN (0x7F) with codes of 0.
    """
    groups = torch.unflatten(x.float(), -1, (SCALES_PER_ROW, SCALE_GROUP))
    largest = groups.abs().amax(-1) * global_sf
    # Divided by a tensor: torch on CUDA turns a division by a Python number into a product with its reciprocal.
    scale = (largest / torch.full_like(global_sf, E2M1_MAX)).clamp(max=E4M3_MAX).to(FP8)
    divisor = scale.float().unsqueeze(-1)
    codes = torch.where(divisor > 0, _e2m1_codes(groups * global_sf / divisor), 0).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale.view(torch.uint8)


def _e2m1_codes(y: Tensor) -> Tensor:
    """Round to nearest-even e2m1, saturating: 4-bit codes as uint8. NaN (0 / 0) gives an unspecified code."""
    magnitude = y.abs().nan_to_num(0.0).clamp(max=E2M1_MAX)
    # e2m1 has steps of 1/2 below 2, of 1 below 4 and of 2 up to 6; in each range codes count those steps.
    code = torch.where(
        magnitude < 2,
        torch.round(magnitude * 2),
        torch.where(magnitude < 4, torch.round(magnitude) + 2, torch.round(magnitude * 0.5) + 4),
    )
    return code.to(torch.uint8) | (torch.signbit(y).to(torch.uint8) << 3)


def nvfp4_dequantize(
    codes: Tensor,
    scales: Tensor,
    global_scale: float | Tensor = 1.0,
    *,
    planar_v: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values of NVFP4 codes: ``e2m1(code) * e4m3(scale) * global_scale``, in float32, then cast to `dtype`.

    Args:
        codes: ``(..., 64)`` uint8, any strides.
        scales: uint8 or float8_e4m3fn. Rank 1 or 2: 128x4 tiled, over the flattened leading dims of `codes`. Otherwise
            the shape of `codes` with 8 for 64: row-linear (K of a planar page), or with `planar_v` V of one.
        global_scale: what the attention call gets, ``1 / global_sf`` of `nvfp4_quantize`.
        planar_v: `scales` of rank 4 or more hold V of a planar page.
        dtype: floating-point dtype of the result.

    Returns:
        ``(..., 128)`` of `dtype`. A NaN scale byte gives NaN.

    Raises:
        TypeError, ValueError: another type, dtype or shape; a `global_scale` of more than one element.
    """
    _check_codes(codes)
    if isinstance(global_scale, bool) or not isinstance(global_scale, (int, float, Tensor)):
        raise TypeError(f"global_scale must be a float or a tensor, got {type(global_scale).__name__}")
    if isinstance(global_scale, Tensor):
        if global_scale.numel() != 1:
            raise ValueError(f"global_scale must have one element, got shape {tuple(global_scale.shape)}")
        global_scale = global_scale.reshape(())
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point dtype, got {dtype}")
    scales = _scale_bytes("scales", scales)
    if scales.dim() <= 2:
        if planar_v:
            raise ValueError(f"planar_v needs scales of a planar page (rank 4), got shape {tuple(scales.shape)}")
        linear = nvfp4_scales_from_tiled(scales, math.prod(codes.shape[:-1])).view(*codes.shape[:-1], SCALES_PER_ROW)
    else:
        want = (*codes.shape[:-1], SCALES_PER_ROW)
        if tuple(scales.shape) != want:
            raise ValueError(
                f"scales must have shape {want} for codes of shape {tuple(codes.shape)}, got {tuple(scales.shape)}"
            )
        linear = nvfp4_scales_from_planar_v(scales) if planar_v else scales
    return dequantize_rows(codes, linear, global_scale).to(dtype)


def dequantize_rows(codes: Tensor, linear_scales: Tensor, global_scale: float | Tensor = 1.0) -> Tensor:
    """`nvfp4_dequantize` with row-linear uint8 scales ``(..., 8)``; float32 ``(..., 128)``."""
    table = torch.tensor(_E2M1_VALUES, device=codes.device)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    values = table.index_select(0, nibbles.flatten().int()).view(*codes.shape[:-1], SCALES_PER_ROW, SCALE_GROUP)
    return (values * e4m3_to_float32(linear_scales).unsqueeze(-1)).flatten(-2) * global_scale


def e4m3_to_float32(x: Tensor) -> Tensor:
    """The values of e4m3 bytes (float8_e4m3fn or uint8, any strides), float32 of the same shape."""
    table = torch.arange(256, dtype=torch.uint8, device=x.device).view(FP8).float()
    # On one CPU core 7 times as fast as torch's conversion.
    return table.index_select(0, x.view(torch.uint8).flatten().int()).view(x.shape)


def nvfp4_scales_to_tiled(scales: Tensor) -> Tensor:
    """Row-linear scales ``(..., 8)`` to 128x4 tiled ones, ``(rows padded to a multiple of 128, 8)``, padding 0."""
    scales = _linear_scales(scales)
    rows = scales.reshape(-1, SCALES_PER_ROW)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % _TILE_ROWS))
    # (tile, r % 128 // 32, r % 32, s // 4, s % 4) -> (tile, s // 4, r % 32, r % 128 // 32, s % 4)
    tiled = rows.view(-1, 4, 32, 2, 4).permute(0, 3, 2, 1, 4)
    return tiled.reshape(-1, SCALES_PER_ROW)


def nvfp4_scales_from_tiled(tiled: Tensor, rows: int) -> Tensor:
    """128x4 tiled scales (rank 1 or 2, contiguous) to row-linear ``(rows, 8)``; bytes of padding rows are dropped."""
    tiled = _scale_bytes("tiled", tiled)
    need = -(-rows // _TILE_ROWS) * _TILE_ROWS * SCALES_PER_ROW
    if tiled.dim() not in (1, 2) or not tiled.is_contiguous() or tiled.numel() < need:
        raise ValueError(
            f"tiled must be contiguous, of rank 1 or 2, and hold at least {need} bytes for {rows} rows, got shape "
            f"{tuple(tiled.shape)}, strides {tiled.stride()}"
        )
    tiles = tiled.view(-1)[:need].view(-1, 2, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1, SCALES_PER_ROW)[:rows]


def tiled_scale_offsets(rows: Tensor) -> Tensor:
    """Byte offsets ``(..., 8)`` int64 of the scales of row numbers ``(...)`` int64 in the 128x4 tiled layout."""
    s = torch.arange(SCALES_PER_ROW, device=rows.device)
    r = rows.unsqueeze(-1)
    return ((r // 128) * 2 + s // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + s % 4


def nvfp4_scales_to_planar_v(scales: Tensor) -> Tensor:
    """Row-linear scales ``(..., 128, 8)`` of whole pages to the byte order of V in a planar page, same shape."""
    scales = _page_scales(scales)
    return torch.unflatten(scales, -2, (BLOCK_SIZE // 4, 4)).transpose(-1, -2).reshape(scales.shape)


def nvfp4_scales_from_planar_v(scales: Tensor) -> Tensor:
    """The inverse of `nvfp4_scales_to_planar_v`: row-linear ``(..., 128, 8)``."""
    scales = _page_scales(scales)
    return planar_v_groups(scales).transpose(-1, -2).reshape(scales.shape)


def planar_v_groups(scales: Tensor) -> Tensor:
    """``(..., 128, 8)`` bytes of planar V, inner strides (8, 1), as ``(..., token // 4, s, token % 4)``: a view."""
    return torch.unflatten(scales.flatten(-2), -1, (BLOCK_SIZE // 4, SCALES_PER_ROW, 4))


class PlanarViews(NamedTuple):
    """The four regions of planar pages, as the attention call takes them: views, nothing copied.

    `k`, `v`: ``(num_pages, num_kv_heads, 128, 64)`` codes. `k_scale` (row-linear) and `v_scale` (planar V byte order):
    ``(num_pages, num_kv_heads, 128, 8)``.
    """

    k: Tensor
    k_scale: Tensor
    v: Tensor
    v_scale: Tensor


def nvfp4_planar_pages(num_pages: int, num_kv_heads: int, device: torch.device | str | None = None) -> Tensor:
    """Allocate planar pages ``[K data | K scale | V data | V scale]``: uint8 ``(num_pages, num_kv_heads * 18432)``.

    The memory is not initialised: slots that no token was written to may hold anything.
    """
    for name, value, least in (("num_pages", num_pages, 0), ("num_kv_heads", num_kv_heads, 1)):
        if require_int(name, value) < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    return torch.empty(num_pages, num_kv_heads * PLANAR_BYTES_PER_HEAD, dtype=torch.uint8, device=device)


def nvfp4_planar_views(pages: Tensor, num_kv_heads: int) -> PlanarViews:
    """Split planar pages into their regions, in place.

    Args:
        pages: uint8 ``(num_pages, num_kv_heads * 18432)``, any page stride (a multiple of 16 bytes for the attention
            call), rows dense: what `nvfp4_planar_pages` gives, or one layer of a larger pool.
        num_kv_heads: KV heads in a page.
    """
    _require_tensor("pages", pages)
    if require_int("num_kv_heads", num_kv_heads) < 1:
        raise ValueError(f"num_kv_heads must be at least 1, got {num_kv_heads}")
    want = num_kv_heads * PLANAR_BYTES_PER_HEAD
    if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.shape[1] != want:
        raise ValueError(
            f"pages must be uint8 of shape (num_pages, {want}) for {num_kv_heads} KV heads, got {pages.dtype} of shape "
            f"{tuple(pages.shape)}"
        )
    if pages.stride(1) != 1:
        raise ValueError(f"pages must have dense rows (stride 1 in dim 1), got strides {pages.stride()}")
    data, scale = (num_kv_heads * BLOCK_SIZE * n for n in (CODE_BYTES, SCALES_PER_ROW))
    regions = torch.split(pages, [data, scale, data, scale], dim=1)
    inner = (CODE_BYTES, SCALES_PER_ROW, CODE_BYTES, SCALES_PER_ROW)
    return PlanarViews(
        *(torch.unflatten(r, 1, (num_kv_heads, BLOCK_SIZE, n)) for r, n in zip(regions, inner, strict=True))
    )


def nvfp4_planar_write(
    pages: Tensor,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_global_sf: float | Tensor = 1.0,
    v_global_sf: float | Tensor = 1.0,
) -> None:
    """Quantise tokens and store them in planar pages; only the slots named are touched.

    Args:
        pages: uint8 ``(num_pages, num_kv_heads * 18432)``; the number of KV heads is taken from `k`.
        slots: ``(tokens,)`` int32 or int64, ``page * 128 + token``: distinct, inside the pages.
        k, v: ``(tokens, num_kv_heads, 128)`` bfloat16, float16 or float32, quantised as by `nvfp4_quantize`.
        k_global_sf, v_global_sf: the factors of `nvfp4_quantize`.

    On the CPU all values are checked before anything is stored. On CUDA the call is one kernel that reads nothing back, so
    that it may be captured in a CUDA graph: slots outside the pages are skipped, of equal slots any token's bytes may stay,
    inf saturates, a NaN makes its 16 elements read as NaN, and a device tensor that is no valid global_sf gives
    unspecified bytes. ``MSA_OPS_CHECK=1`` has the values checked there too, with a synchronisation.

    Raises:
        TypeError, ValueError: arguments that are not of this form, values that are not (where they are checked), and on
            CUDA pages that are not on 16-byte boundaries.
        RuntimeError: on CUDA, a missing compiler package or an unsupported GPU.
    """
    _require_tensor("pages", pages)
    _require_tensor("slots", slots)
    for name, x in (("k", k), ("v", v)):
        check_rows(name, x)
        if x.dim() != 3 or x.shape != k.shape:
            raise ValueError(f"{name} must have shape (tokens, num_kv_heads, {HEAD_DIM}), got {tuple(x.shape)}")
    for name, x in (("slots", slots), ("k", k), ("v", v)):
        if x.device != pages.device:
            raise ValueError(f"{name} must be on the pages' device {pages.device}, got {x.device}")
    if slots.dtype not in (torch.int32, torch.int64) or slots.shape != k.shape[:1]:
        raise ValueError(
            f"slots must be int32 or int64 of shape ({k.shape[0]},), got {slots.dtype} of shape {tuple(slots.shape)}"
        )
    views = nvfp4_planar_views(pages, k.shape[1])
    if pages.shape[0] > 1 and abs(pages.stride(0)) < pages.shape[1]:
        raise ValueError(f"pages must not overlap when they are written, got a page stride of {pages.stride(0)} bytes")
    factors = as_factor(k_global_sf, k, "k_global_sf"), as_factor(v_global_sf, v, "v_global_sf")
    k, v = k.detach(), v.detach()
    if pages.is_cuda:
        step = pages.stride(0) if pages.shape[0] > 1 else 0
        if pages.data_ptr() % ROW_ALIGNMENT or step % ROW_ALIGNMENT:
            raise ValueError(
                f"pages must start on {ROW_ALIGNMENT}-byte boundaries on CUDA, got a page stride of {step} bytes and an "
                f"address {pages.data_ptr() % ROW_ALIGNMENT} bytes past one"
            )
    if reads_values(pages):
        _check_slots(slots, pages.shape[0])
        for name, x, factor in (("k", k, factors[0]), ("v", v, factors[1])):
            check_global_sf(factor, x, f"{name}_global_sf")
            check_finite(name, x)
    if pages.is_cuda:
        from .engines.cuda import quantize

        k_scales = quantize.planar_scales(views.k_scale, quantize.LINEAR)
        v_scales = quantize.planar_scales(views.v_scale, quantize.PLANAR_V)
        quantize.write_nvfp4(slots, (k, factors[0], views.k, k_scales), (v, factors[1], views.v, v_scales))
        return
    quantized_k = quantize_rows(k, check_global_sf(factors[0], k, "k_global_sf"))
    quantized_v = quantize_rows(v, check_global_sf(factors[1], v, "v_global_sf"))
    page, token = slots.long() // BLOCK_SIZE, slots.long() % BLOCK_SIZE
    planar_store(views, page, token, quantized_k, quantized_v)


def _check_slots(slots: Tensor, num_pages: int) -> None:
    room = num_pages * BLOCK_SIZE
    if bool(((slots < 0) | (slots >= room)).any()):
        raise ValueError(f"slots must lie in 0..{room - 1} ({num_pages} pages of {BLOCK_SIZE} tokens)")
    if bool((slots.sort().values.diff() == 0).any()):
        raise ValueError("slots must be distinct, got one more than once: which token it would hold is not defined")


def planar_store(
    views: PlanarViews, page: Tensor, token: Tensor, k: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor]
) -> None:
    """Store quantised tokens: codes ``(tokens, heads, 64)`` and row-linear scales ``(tokens, heads, 8)``."""
    views.k[page, :, token] = k[0]
    views.k_scale[page, :, token] = k[1]
    views.v[page, :, token] = v[0]
    planar_v_groups(views.v_scale)[page, :, token // 4, :, token % 4] = v[1]


def check_rows(name: str, x: Tensor) -> None:
    """Raise unless `x` is a floating tensor of rows of 128."""
    _require_tensor(name, x)
    if x.dtype not in _INPUT_DTYPES:
        raise ValueError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}: cast {name}")
    if x.dim() == 0 or x.shape[-1] != HEAD_DIM:
        raise ValueError(f"{name} must have shape (..., {HEAD_DIM}), got {tuple(x.shape)}")


def check_finite(name: str, x: Tensor) -> None:
    """Raise if `x` holds what NVFP4 cannot. Synchronises on CUDA."""
    if not bool(torch.isfinite(x).all()):
        raise _not_finite(name)


def _not_finite(name: str) -> ValueError:
    return ValueError(f"{name} must be finite to be quantised to NVFP4, got NaN or inf: clean {name} first")


def reads_values(destination: Tensor) -> bool:
    """Whether values are checked before they are stored: on the CPU always, on CUDA, where it synchronises, if asked for."""
    if not destination.is_cuda:
        return True
    if os.environ.get("MSA_OPS_CHECK") != "1":
        return False
    if is_capturing(destination.device):
        raise ValueError("MSA_OPS_CHECK=1 reads device values, which a CUDA graph capture forbids: unset it to capture")
    return True


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a CUDA device is being captured."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def as_factor(value: float | Tensor, x: Tensor, name: str = "global_sf") -> float | Tensor:
    """A factor for `x`: a positive, finite float of float32's values, or a float32 tensor of one element, not read here."""
    if isinstance(value, Tensor):
        _require_tensor(name, value)
        if value.dtype != torch.float32 or value.numel() != 1:
            raise ValueError(
                f"{name} must be a float or a one-element float32 tensor, got {value.dtype}, shape {tuple(value.shape)}"
            )
        if value.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {value.device}: pass {name}.to(x.device)")
        return value.detach()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float or a one-element float32 tensor, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # an int past every float
        number = math.inf if value > 0 else -math.inf
    factor = ctypes.c_float(number).value
    if not 0 < factor < math.inf:
        raise _bad_global_sf(name, number)
    return factor


def check_global_sf(value: float | Tensor, x: Tensor, name: str = "global_sf") -> Tensor:
    """A positive, finite factor as a float32 scalar on x's device. Reading a CUDA tensor synchronises."""
    factor = as_factor(value, x, name)
    if not isinstance(factor, Tensor):
        return torch.full((), factor, dtype=torch.float32, device=x.device)
    if not 0 < float(factor) < math.inf:
        raise _bad_global_sf(name, float(factor))
    return factor.reshape(())


def _bad_global_sf(name: str, got: float) -> ValueError:
    return ValueError(f"{name} must be positive and finite in float32, got {got}")


def _check_codes(codes: Tensor) -> None:
    _require_tensor("codes", codes)
    if codes.dtype != torch.uint8 or codes.dim() == 0 or codes.shape[-1] != CODE_BYTES:
        raise ValueError(
            f"codes must be uint8 of shape (..., {CODE_BYTES}), got {codes.dtype} of shape {tuple(codes.shape)}"
        )


def _scale_bytes(name: str, scales: Tensor) -> Tensor:
    _require_tensor(name, scales)
    if scales.dtype not in (torch.uint8, FP8):
        raise ValueError(f"{name} must be uint8 or float8_e4m3fn, got {scales.dtype}")
    return scales.view(torch.uint8)


def _linear_scales(scales: Tensor) -> Tensor:
    scales = _scale_bytes("scales", scales)
    if scales.dim() == 0 or scales.shape[-1] != SCALES_PER_ROW:
        raise ValueError(f"scales must have shape (..., {SCALES_PER_ROW}), got {tuple(scales.shape)}")
    return scales


def _page_scales(scales: Tensor) -> Tensor:
    scales = _linear_scales(scales)
    if scales.dim() < 2 or scales.shape[-2] != BLOCK_SIZE:
        raise ValueError(f"scales must have shape (..., {BLOCK_SIZE}, {SCALES_PER_ROW}), got {tuple(scales.shape)}")
    return scales
