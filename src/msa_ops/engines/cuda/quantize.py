"""Launching the quantising kernels: rows to NVFP4, and new tokens into the slots of a paged cache as NVFP4 or fp8.

Nothing is read back from the device, so all of it may be captured in a CUDA graph.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ...contract import BLOCK_SIZE, HEAD_DIM, SCALES_PER_ROW
from . import programs
from .launch import divisor
from .plan import MAX_GRID

_INPUT_NAME = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
PROGRAM = programs.KernelProgram(
    "quantize",
    ("common.cuh", "quantize.cu"),
    tuple(
        f"msa_{kernel}_{name}"
        for kernel in ("quantize_nvfp4", "write_nvfp4", "write_fp8")
        for name in _INPUT_NAME.values()
    ),
)
_ROWS = struct.Struct("5Q3q6Ifi")  # struct RowsParams of kernels/quantize.cu
_SIDE = struct.Struct("4Q7q4f6I")  # struct Side
_TAIL = struct.Struct("Q2q3I2i4x")  # what follows the two sides in struct WriteParams
_THREADS = 256
_ROWS_PER_BLOCK = 64
_TOKENS_PER_BLOCK = 32
_ALIGNMENT = 16
_SCALE_BYTES = BLOCK_SIZE * SCALES_PER_ROW

calls: Counter[str] = Counter()
"""Launches, by entry point."""


class ScaleOrder(NamedTuple):
    """struct ScaleOrder: the byte of a token's scale `s` in the 1024 bytes of a page's head."""

    token_bits: int
    low_token: int
    high_token: int
    low_s: int
    high_s: int


LINEAR = ScaleOrder(5, SCALES_PER_ROW, 32 * SCALES_PER_ROW, 1, 4)
"""K of a planar page: ``token * 8 + s``."""
PLANAR_V = ScaleOrder(2, 1, 32, 4, 16)
"""V of a planar page: ``(token // 4) * 32 + 4 * s + token % 4``."""
TILED = ScaleOrder(5, 16, 4, 1, 512)
"""128x4 tiles, two a page's head: ``(s // 4) * 512 + (token % 32) * 16 + (token // 32) * 4 + s % 4``."""


class Scales(NamedTuple):
    """Block scales of a paged NVFP4 cache: bytes, and where a page's head has its 1024."""

    data: Tensor
    page_stride: int
    head_stride: int
    order: ScaleOrder


def planar_scales(data: Tensor, order: ScaleOrder) -> Scales:
    """Scales of K (`LINEAR`) or V (`PLANAR_V`) in planar pages, ``(num_pages, num_kv_heads, 128, 8)`` uint8."""
    return Scales(data, data.stride(0), data.stride(1), order)


def tiled_scales(data: Tensor, heads: int) -> Scales:
    """128x4 tiled scales of a paged cache, ``(num_pages * heads * 128, 8)`` uint8, contiguous."""
    return Scales(data, heads * _SCALE_BYTES, _SCALE_BYTES, TILED)


def load(device: torch.device) -> None:
    """Load the kernels, so that a later write cannot fail for want of them. Raises `RuntimeError`."""
    with _on(device):
        programs.functions(PROGRAM, device.index)


# --- rows --------------------------------------------------------------------------------------------------------------


def quantize_rows(x: Tensor, factor: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`nvfp4_quantize` of checked arguments, on the current stream of x's device.

    Args:
        x: ``(..., 128)`` bfloat16, float16 or float32, any strides, at least one row.
        factor: the global_sf, a float or a one-element float32 tensor on x's device.

    Returns:
        codes and scales, as `nvfp4_quantize` gives them, and faults: int32 ``(2,)``, on the device, not 0 where x has NaN
        or inf, and where the factor is not positive and finite.
    """
    rows = x.numel() // HEAD_DIM
    blocks = -(-rows // BLOCK_SIZE) * BLOCK_SIZE // _ROWS_PER_BLOCK
    if rows > 2**31 - 2 * BLOCK_SIZE:
        raise ValueError(f"x has {rows} rows of {HEAD_DIM}: more than one launch can serve ({2**31 - 2 * BLOCK_SIZE})")
    with _on(x.device):
        x = _readable(x)
        dims = collapse(x)
        if dims is None:
            x = x.contiguous()
            dims = collapse(x)
            assert dims is not None
        codes = torch.empty(*x.shape[:-1], HEAD_DIM // 2, dtype=torch.uint8, device=x.device)
        padded = blocks * _ROWS_PER_BLOCK
        scales = torch.empty(padded, SCALES_PER_ROW, dtype=torch.uint8, device=x.device)
        faults = torch.zeros(2, dtype=torch.int32, device=x.device)
        params = pack_rows(x, dims, factor, codes, scales, faults)
        _launch("quantize_nvfp4", x, params, blocks)
    return codes, scales, faults


def pack_rows(
    x: Tensor, dims: Sequence[tuple[int, int]], factor: float | Tensor, codes: Tensor, scales: Tensor, faults: Tensor
) -> bytes:
    """struct RowsParams; `dims` is what `collapse` gives."""
    (_, outer), (middle_size, middle), (inner_size, inner) = dims
    value, address = _factor(factor)
    return _ROWS.pack(
        x.data_ptr(), address, codes.data_ptr(), scales.data_ptr(), faults.data_ptr(),
        outer * x.element_size(), middle * x.element_size(), inner * x.element_size(),
        *divisor(middle_size), *divisor(inner_size), value, x.numel() // HEAD_DIM,
    )  # fmt: skip


def collapse(x: Tensor) -> list[tuple[int, int]] | None:
    """The leading dims of x as three of (size, stride in elements), merged where memory allows; None if it takes more.

    Where one is enough it comes last with a size of 1, which nothing is divided by: its stride is that of all rows.
    """
    merged: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if len(merged) > 3:
        return None
    if len(merged) <= 1:
        return [(1, 0), (1, 0), (1, merged[0][1] if merged else 0)]
    return [(1, 0)] * (3 - len(merged)) + merged


# --- tokens into slots -------------------------------------------------------------------------------------------------


def write_nvfp4(
    slots: Tensor,
    k: tuple[Tensor, float | Tensor, Tensor, Scales],
    v: tuple[Tensor, float | Tensor, Tensor, Scales],
) -> None:
    """Quantise tokens and store them in a paged NVFP4 cache, on the current stream; arguments are checked already.

    Args:
        slots: ``(tokens,)`` int32 or int64, ``page * 128 + token``, any stride. Those outside the cache are skipped; of
            equal ones it is not defined whose bytes stay.
        k, v: the input ``(tokens, heads, 128)``, its global_sf, the codes ``(num_pages, heads, 128, 64)`` uint8 whose rows
            start on 8-byte boundaries, and where the scales go.
    """
    sides = []
    for x, factor, codes, scales in (k, v):
        value, address = _factor(factor)
        sides.append(_Side(x, codes, (value, 0.0, 0.0, 0.0), address, scales))
    _write("write_nvfp4", slots, *sides)


def write_fp8(slots: Tensor, k: tuple[Tensor, float, Tensor], v: tuple[Tensor, float, Tensor]) -> None:
    """Store tokens in a paged fp8 cache as ``e4m3(x / scale)``, saturating, NaN staying NaN; otherwise as `write_nvfp4`.

    Args:
        slots: as for `write_nvfp4`.
        k, v: the input ``(tokens, heads, 128)``, the scale (2^-126 to 2^126), and the cache ``(num_pages, heads, 128,
            128)`` float8_e4m3fn or its bytes, whose rows start on 16-byte boundaries.
    """
    _write("write_fp8", slots, *(_Side(x, cache, fp8_divisor(scale), 0, None) for x, scale, cache in (k, v)))


def fp8_divisor(scale: float) -> tuple[float, float, float, float]:
    """For division by `scale` rounded to float32, ``m * 2^e``: ``2^-e``, m in [1, 2), and 1 / m as a sum of two floats."""
    fraction, exponent = math.frexp(_float32(scale))
    mantissa = 2 * fraction
    reciprocal = _float32(1 / mantissa)
    return math.ldexp(1.0, 1 - exponent), mantissa, reciprocal, _float32(1 / mantissa - reciprocal)


class _Side(NamedTuple):
    """K or V of one write."""

    x: Tensor
    out: Tensor
    numbers: tuple[float, float, float, float]
    factor_address: int
    scales: Scales | None

    def pack(self) -> bytes:
        """struct Side."""
        size, x_size = self.out.element_size(), self.x.element_size()
        scales = self.scales
        return _SIDE.pack(
            self.x.data_ptr(), self.factor_address, self.out.data_ptr(), 0 if scales is None else scales.data.data_ptr(),
            self.x.stride(0) * x_size, self.x.stride(1) * x_size,
            self.out.stride(0) * size, self.out.stride(1) * size, self.out.stride(2) * size,
            0 if scales is None else scales.page_stride, 0 if scales is None else scales.head_stride,
            *self.numbers, *(ScaleOrder(0, 0, 0, 0, 0) if scales is None else scales.order), 0,
        )  # fmt: skip


def _write(kernel: str, slots: Tensor, k: _Side, v: _Side) -> None:
    if k.x.numel() == 0:
        return
    with _on(k.x.device):
        x_k, x_v = k.x, v.x
        if x_k.dtype != x_v.dtype:
            x_k, x_v = x_k.float(), x_v.float()  # exact
        k, v = k._replace(x=_readable(x_k)), v._replace(x=_readable(x_v))
        _launch(kernel, k.x, pack_write(slots, k, v), write_blocks(k.x))


def write_blocks(x: Tensor) -> int:
    """Thread blocks for an input of ``(tokens, heads, 128)``."""
    blocks = -(-x.shape[0] // _TOKENS_PER_BLOCK) * x.shape[1]
    if blocks > MAX_GRID:
        raise ValueError(f"k has {x.shape[0]} tokens of {x.shape[1]} heads: more than one launch can serve")
    return blocks


def pack_write(slots: Tensor, k: _Side, v: _Side) -> bytes:
    """struct WriteParams."""
    tokens, heads, _ = k.x.shape
    tail = _TAIL.pack(
        slots.data_ptr(), slots.stride(0), k.out.shape[0], *divisor(heads), tokens, slots.dtype == torch.int64
    )
    return k.pack() + v.pack() + tail


# --- shared ------------------------------------------------------------------------------------------------------------


def _on(device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def _launch(kernel: str, x: Tensor, params: bytes, blocks: int) -> None:
    entry = f"msa_{kernel}_{_INPUT_NAME[x.dtype]}"
    index = x.device.index
    programs.launch(programs.functions(PROGRAM, index)[entry], params, blocks, _THREADS, device=index)
    calls[entry] += 1


def _readable(x: Tensor) -> Tensor:
    """x, or a copy of it, whose rows are dense and start on 16-byte boundaries."""
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    size = x.element_size()
    if x.stride(-1) == 1 and not any(place % _ALIGNMENT for place in (x.data_ptr(), *(step * size for step in steps))):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _factor(factor: float | Tensor) -> tuple[float, int]:
    """The factor by value, and its address if it is read on the device."""
    return (0.0, factor.data_ptr()) if isinstance(factor, Tensor) else (factor, 0)


def _float32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])
