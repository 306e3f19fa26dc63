"""The kernels of quantize.cu in NumPy, instruction by instruction, run from their packed parameters on the host's memory.

With `on_host` the engine's Python runs as on a GPU, its tensors on the CPU and its launches here.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from msa_ops import kv_cache
from msa_ops.contract import KVFormat
from msa_ops.engines.cuda import programs, quantize

F32, U32 = np.float32, np.uint32
Array = Any  # numpy.ndarray


def bits(x: Array) -> Array:
    return np.asarray(x, F32).view(U32)


def floats(x: Array) -> Array:
    return np.asarray(x, U32).view(F32)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding to float32.

    The product is exact in float64 and the sum is rounded to odd there, which rounding once more to float32 cannot see.
    """
    product, c = np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64)
    with np.errstate(all="ignore"):
        total = np.asarray(product + c)
        part = total - product
        error = (product - (total - part)) + (c - part)
    even = (total.view(np.int64) & 1) == 0
    inexact = np.isfinite(total) & np.isfinite(error) & (error != 0)
    nudged = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    with np.errstate(over="ignore"):
        return np.where(inexact & even, nudged, total).astype(F32)


def round_e4m3(x: Array) -> tuple[Array, Array]:
    """Byte and value of ``0 <= x <= 448``."""
    exponent = np.maximum(bits(x) & U32(0x7F800000), U32(121 << 23))
    anchor = exponent + U32(20 << 23)
    total = np.asarray(x, F32) + floats(anchor)
    return bits(total) - anchor + ((exponent - U32(121 << 23)) >> U32(20)), total - floats(anchor)


def narrow_e4m3(x: Array) -> Array:
    """Bytes of magnitudes up to 1024 or NaN, as targets without the conversion instruction do it."""
    return np.where(np.isnan(x), U32(0x7F), np.minimum(round_e4m3(np.nan_to_num(x))[0], U32(0x7E))).astype(np.uint8)


def narrow_e2m1(x: Array) -> Array:
    """Codes of magnitudes up to about 6."""
    anchor = F32(2**23)
    lines = fma(x, 2.0, anchor), np.asarray(x, F32) + (anchor + F32(2)), fma(x, 0.5, anchor + F32(4))
    return (np.minimum(np.minimum(*map(bits, lines[:2])), bits(lines[2])) & U32(15)).astype(np.uint8)


def times(x: Array, high: Array, low: Array) -> Array:
    return fma(x, high, np.asarray(x, F32) * low)


def reciprocal(divisor: Array, ulps: int = 0) -> tuple[Array, Array]:
    """In two parts. `ulps` is the error of the instruction that begins it, which may be off by one."""
    divisor = np.asarray(divisor, F32)
    approx = floats((bits(F32(1) / divisor).astype(np.int64) + ulps).astype(U32))
    high = fma(fma(-divisor, approx, 1.0), approx, approx)
    return high, fma(-divisor, high, 1.0) * high


SIXTH, SIXTH_REST = F32(0.16666667163372040), F32(-4.9670537e-9)


@np.errstate(all="ignore")
def quantize_nvfp4(x: Array, factor: float, ulps: int = 0) -> tuple[Array, Array, Array]:
    """Codes ``(..., 8)`` and scales ``(...)`` as bytes of ``(..., 16)`` float32, and whether all 16 were finite."""
    magnitudes = np.abs(x)
    most = magnitudes.max(-1)
    largest = most * F32(factor)
    byte, scale = round_e4m3(times(np.fmin(largest, F32(2688)), SIXTH, SIXTH_REST))
    nan = np.isnan(largest)
    byte, scale = np.where(nan, U32(0x7F), byte), np.where(nan, F32(0), scale)
    high, low = (part[..., None] for part in reciprocal(np.maximum(scale, F32(2**-9)), ulps))
    products = magnitudes * F32(factor)
    clamped = ~(largest <= scale * F32(6.5))
    products = np.where(clamped[..., None], np.fmin(products, (scale * F32(6))[..., None]), products)
    codes = narrow_e2m1(times(products, high, low))
    codes |= np.where((scale > 0)[..., None], np.signbit(x).astype(np.uint8) << 3, 0).astype(np.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), byte.astype(np.uint8), np.isfinite(most)


@np.errstate(all="ignore")
def fp8_bytes(x: Array, numbers: tuple[float, ...]) -> Array:
    """``e4m3(x / divisor)`` of float32 `x`, by what `quantize.fp8_divisor` gives."""
    power, mantissa, high, low = map(F32, numbers)
    magnitude = np.abs(x * power)
    magnitude = np.where(np.isnan(magnitude), magnitude, np.minimum(magnitude, F32(1024)))
    near = times(magnitude, high, low)
    q = fma(fma(-near, mantissa, magnitude), high, near)
    return narrow_e4m3(q) | (np.signbit(x).astype(np.uint8) << 7)


# --- threads -----------------------------------------------------------------------------------------------------------


def _elements(address: int, dtype: str) -> Array:
    """16 elements of one thread, in float32."""
    size = 64 if dtype == "fp32" else 32
    assert address % 16 == 0
    data = ctypes.string_at(address, size)
    if dtype == "bf16":
        return floats(np.frombuffer(data, np.uint16).astype(U32) << U32(16))
    return np.frombuffer(data, np.float16 if dtype == "fp16" else F32).astype(F32)


def _float_at(address: int, otherwise: float) -> float:
    return ctypes.c_float.from_address(address).value if address else otherwise


def _put(address: int, data: bytes) -> None:
    assert address % len(data) == 0
    ctypes.memmove(address, data, len(data))


def _quotient(n: int, divisor: tuple[int, int, int]) -> int:
    _, multiplier, shift = divisor
    return (n * multiplier >> 32) >> shift if multiplier else n


def run_rows(params: bytes, blocks: int, dtype: str) -> None:
    """msa_quantize_nvfp4_*, a thread at a time."""
    unpacked = quantize._ROWS.unpack(params)
    x, factor_at, codes, scales, faults, outer, middle, inner = unpacked[:8]
    middle_size, inner_size, value, rows = unpacked[8:11], unpacked[11:14], unpacked[14], unpacked[15]
    factor = _float_at(factor_at, value)
    todo = []
    for block in range(blocks):
        for thread in range(256):
            lane, warp = thread & 31, thread >> 5
            s, quarter, tile, line = lane & 7, lane >> 3, block >> 1, (block & 1) * 16 + warp
            for i in range(2):
                row = tile * 128 + quarter * 32 + line + 8 * i
                scale = scales + tile * 1024 + s // 4 * 512 + (line + 8 * i) * 16 + quarter * 4 + s % 4
                if row >= rows:
                    _put(scale, b"\0")
                    continue
                offset = row * inner
                if inner_size[1]:
                    rest = _quotient(row, inner_size)
                    first = _quotient(rest, middle_size)
                    offset = (
                        first * outer + (rest - first * middle_size[0]) * middle + (row - rest * inner_size[0]) * inner
                    )
                size = 4 if dtype == "fp32" else 2
                todo.append((_elements(x + offset + s * 16 * size, dtype), codes + row * 64 + s * 8, scale))
    if todo:
        packed, bytes_, finite = quantize_nvfp4(np.stack([t[0] for t in todo]), factor)
        for i, (_, code, scale) in enumerate(todo):
            _put(code, packed[i].tobytes())
            _put(scale, bytes_[i].tobytes())
        if not finite.all():
            _put(faults, np.int32(1).tobytes())
    if not 0 < factor < np.inf:
        _put(faults + 4, np.int32(1).tobytes())


def run_write(params: bytes, blocks: int, kernel: str, dtype: str) -> None:
    """msa_write_*, a thread at a time."""
    size = quantize._SIDE.size
    sides = [quantize._SIDE.unpack(params[i * size : (i + 1) * size]) for i in range(2)]
    slots, step, pages, *heads, tokens, wide = quantize._TAIL.unpack(params[2 * size :])
    for side in sides:
        x, factor_at, out, scales, x_token, x_head, out_page, out_head, out_token, s_page, s_head = side[:11]
        numbers, (token_bits, low_token, high_token, low_s, high_s) = side[11:15], side[15:20]
        todo = []
        for block in range(blocks):
            chunk = _quotient(block, tuple(heads))
            head = block - chunk * heads[0]
            for thread in range(256):
                lane = thread & 31
                token, s = (chunk * 8 + (thread >> 5)) * 4 + lane // 8, lane & 7
                if token >= tokens:
                    continue
                slot_type = ctypes.c_int64 if wide else ctypes.c_int32
                slot = slot_type.from_address(slots + token * step * ctypes.sizeof(slot_type)).value
                item = 4 if dtype == "fp32" else 2
                elements = _elements(x + token * x_token + head * x_head + s * 16 * item, dtype)
                if not 0 <= slot < pages * 128:
                    continue
                page, t = slot // 128, slot % 128
                high = t >> token_bits
                offset = (t - (high << token_bits)) * low_token + high * high_token + s % 4 * low_s + s // 4 * high_s
                row = out + page * out_page + head * out_head + t * out_token
                todo.append((elements, row, s, scales + page * s_page + head * s_head + offset))
        if not todo:
            continue
        stacked = np.stack([t[0] for t in todo])
        if kernel == "write_fp8":
            for (_, row, s, _), data in zip(todo, fp8_bytes(stacked, numbers), strict=True):
                _put(row + s * 16, data.tobytes())
        else:
            codes, scale_bytes, _ = quantize_nvfp4(stacked, _float_at(factor_at, numbers[0]))
            for (_, row, s, at), code, scale in zip(todo, codes, scale_bytes, strict=True):
                _put(row + s * 8, code.tobytes())
                _put(at, scale.tobytes())


def _launch(function: str, params: bytes, blocks: int, threads: int, **_: Any) -> None:
    assert threads == 256 and blocks > 0
    kernel, dtype = function.removeprefix("msa_").rsplit("_", 1)
    if kernel == "quantize_nvfp4":
        run_rows(params, blocks, dtype)
    else:
        run_write(params, blocks, kernel, dtype)


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Engine calls take CPU tensors and run here; caches on the CPU store fp8 and NVFP4 as those on a GPU do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "_on", lambda device: contextlib.nullcontext())
        patch.setattr(programs, "functions", lambda program, device: {entry: entry for entry in program.entries})
        patch.setattr(programs, "launch", _launch)
        patch.setattr(
            kv_cache, "_is_quantized_on_cuda", lambda kv_format, device: kv_format in (KVFormat.FP8, KVFormat.NVFP4)
        )
        yield
