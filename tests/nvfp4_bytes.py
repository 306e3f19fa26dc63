"""The NVFP4 byte layouts, written from their definitions alone. Shares no code with the package.

Block scales are handed in as rows: ``(rows, 8)`` uint8 for the tiled layout, ``(pages, kv_heads, 128, 8)`` for planar
pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Magnitudes of e2m1, in the order of the three low code bits; the fourth bit is the sign.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]).double()


def e4m3_value(byte: int) -> float:
    """One e4m3 byte as a number: sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7F and 0xFF are NaN."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3 = torch.tensor([e4m3_value(byte) for byte in range(256)]).double()


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """``(..., 64)`` codes and ``(..., 8)`` scales, uint8, as ``(..., 128)`` float64; even element in the low nibble."""
    elements = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    return E2M1[elements] * E4M3[scales.long()].repeat_interleave(16, dim=-1)


def tile(rows: Tensor, fill: Tensor) -> Tensor:
    """``(rows, 8)`` scales in the 128x4 tiled layout, one flat tensor; `fill` is its initial content (row padding)."""
    out = fill.clone()
    r = torch.arange(rows.shape[0])[:, None]
    s = torch.arange(8)[None, :]
    out[((r // 128) * 2 + s // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + s % 4] = rows
    return out


def tiled_size(rows: int) -> int:
    """Bytes of the tiled layout of so many scale rows."""
    return -(-rows // 128) * 128 * 8


def planar_page_bytes(kv_heads: int) -> int:
    """Bytes of one planar page ``[K data | K scale | V data | V scale]``."""
    return kv_heads * (128 * 64 + 128 * 8) * 2


def planar_views(storage: Tensor, pages: int, kv_heads: int, page_stride: int, start: int = 0) -> tuple[Tensor, ...]:
    """k, k_scale, v, v_scale: views of planar pages that lie `page_stride` bytes apart in flat uint8 storage."""

    def region(offset: int, inner: int) -> Tensor:
        shape, strides = (pages, kv_heads, 128, inner), (page_stride, 128 * inner, inner, 1)
        return storage.as_strided(shape, strides, start + offset)

    k, ks = region(0, 64), region(kv_heads * 8192, 8)
    return k, ks, region(kv_heads * 9216, 64), region(kv_heads * (9216 + 8192), 8)


def interleave_v_scales(scales: Tensor) -> Tensor:
    """V block scales ``(..., 128, 8)`` by (token, s) in the byte order of a planar page, as a tensor of the same shape.

    Byte ``(token // 4) * 32 + 4 * s + token % 4`` of a head's 1024 holds the scale of (token, s).
    """
    flat = scales.flatten(-2)
    token, s = torch.arange(128)[:, None], torch.arange(8)[None, :]
    out = torch.empty_like(flat)
    out[..., ((token // 4) * 32 + 4 * s + token % 4).flatten()] = flat
    return out.view(scales.shape)
