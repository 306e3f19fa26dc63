"""Reading K and V where they lie: selected rows into a buffer, then widened to float32.

float8 and NVFP4 values are widened by integer operations on their bytes (torch's own float8 conversion takes about seven
times as long), up to a power of two that the engine folds into the softmax scale (K) and the output (V).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...contract import BLOCK_SIZE, FP8, HEAD_DIM, SCALE_GROUP, SCALES_PER_ROW, DecodeProblem, KVFormat, ScaleLayout

_KEYS_PER_TILE = 128
_TILE_BYTES = _KEYS_PER_TILE * SCALES_PER_ROW

WIDENED_EXPONENT = {
    KVFormat.BF16: 0,
    KVFormat.FP16: 0,
    KVFormat.FP8: 8,
    KVFormat.NVFP4: 14 + 8,
}
"""A widened value times two to this power is the stored value."""


@dataclass(frozen=True, slots=True)
class Indexed:
    """A strided tensor as a one-dimensional list of equal items, so that one `index_select` serves all heads.

    Item ``place * place_step + head * head_step`` of `items` is ``t[place, head]``. Items overlap; they are only read.
    """

    items: Tensor
    place_step: int
    head_step: int

    @staticmethod
    def of(t: Tensor) -> Indexed:
        steps = [t.stride(d) if t.shape[d] > 1 else 0 for d in (0, 1)]
        unit = math.gcd(*steps) or 1
        place_step, head_step = steps[0] // unit, steps[1] // unit
        count = (t.shape[0] - 1) * place_step + (t.shape[1] - 1) * head_step + 1
        items = t.as_strided((count, *t.shape[2:]), (unit, *t.stride()[2:]))
        return Indexed(items, place_step, head_step)

    def index(self, place: Tensor, head: Tensor) -> Tensor:
        return (place * self.place_step + head * self.head_step).flatten()

    def take(self, place: Tensor, head: Tensor, out: Tensor) -> None:
        """``out[i] = t[place[i], head[i]]``; `out` is contiguous."""
        torch.index_select(self.items, 0, self.index(place, head), out=out.view(-1, *self.items.shape[1:]))


class KeyValueReader:
    """Gathers selected K and V rows of one problem as float32, in buffers allocated once.

    Args:
        problem: the checked call.
        capacity: rows (keys) of K, and as many of V, that one `read` may ask for; a multiple of 128.
    """

    def __init__(self, problem: DecodeProblem, capacity: int) -> None:
        self._format = problem.kv_format
        self._scale_layout = problem.scale_layout
        self._paged = problem.page_table is not None
        self._kv_heads = problem.num_kv_heads
        data = [problem.k, problem.v]
        if self._format is KVFormat.FP8:
            data = [t.view(torch.uint8) for t in data]
        self._data = [Indexed.of(t) for t in data]
        self._scales = [_scale_items(t, problem) for t in (problem.k_scale, problem.v_scale) if t is not None]
        width = data[0].shape[-1]
        device = problem.k.device
        rows = 2 * capacity
        self._raw = torch.empty(rows * width, dtype=data[0].dtype, device=device)
        self._wide = torch.empty(rows * HEAD_DIM, dtype=torch.float32, device=device)
        if self._format is KVFormat.FP8:
            self._lanes = torch.empty(rows * HEAD_DIM, dtype=torch.int16, device=device)
        elif self._format is KVFormat.NVFP4:
            self._lanes = torch.empty((2, rows * width), dtype=torch.int32, device=device)

    def read(self, place: Tensor, heads: Tensor) -> Tensor:
        """Return ``(2, segments, rows, 128)`` float32, K then V, valid until the next `read`.

        Args:
            place: ``(segments, n)`` int64, pages (each gives 128 rows) or rows of a flat cache.
            heads: ``(segments, 1)`` int64 KV heads.
        """
        segments, n = place.shape
        rows = n * BLOCK_SIZE if self._paged else n
        total = 2 * segments * rows
        raw = self._raw[: total * (self._raw.numel() * HEAD_DIM // self._wide.numel())]
        wide = self._wide[: total * HEAD_DIM]
        for part, source in zip(raw.view(2, -1), self._data, strict=True):
            source.take(place, heads, part)
        if self._format is KVFormat.FP8:
            _widen_e4m3(raw, self._lanes[: raw.numel()], wide)
        elif self._format is KVFormat.NVFP4:
            _widen_e2m1(raw, self._lanes[0, : raw.numel()], self._lanes[1, : raw.numel()], wide)
            self._apply_block_scales(place, heads, wide)
        else:
            wide.copy_(raw)
        return wide.view(2, segments, rows, HEAD_DIM)

    def _apply_block_scales(self, place: Tensor, heads: Tensor, wide: Tensor) -> None:
        codes = torch.stack([self._scale_bytes(i, place, heads) for i in (0, 1)])
        lanes = torch.empty(codes.shape, dtype=torch.int16, device=codes.device)
        scale = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        _widen_e4m3(codes, lanes, scale)
        wide.view(-1, SCALE_GROUP).mul_(scale.view(-1, 1))

    def _scale_bytes(self, which: int, place: Tensor, heads: Tensor) -> Tensor:
        """``(rows, 8)`` e4m3 bytes of the gathered rows of K (0) or V (1), from either layout."""
        if self._scale_layout is ScaleLayout.PLANAR:
            source = self._scales[which]
            assert isinstance(source, Indexed)
            tiles = source.items.index_select(0, source.index(place, heads))
            if which == 0:
                return tiles.view(-1, SCALES_PER_ROW)
            # V: byte (token // 4) * 32 + 4 * s + token % 4.
            return tiles.view(-1, SCALES_PER_ROW, 4).transpose(1, 2).reshape(-1, SCALES_PER_ROW)
        words = self._scales[which]
        assert isinstance(words, Tensor)
        row = (place * self._kv_heads + heads).flatten()
        if self._paged:
            # A (page, head) is exactly one 128-row pair of tiles, [s // 4][token % 32][token // 32] words of 4 scales.
            tiles = words.view(-1, 2, 32, 4).index_select(0, row)
            return tiles.permute(0, 3, 2, 1).contiguous().view(torch.uint8).view(-1, SCALES_PER_ROW)
        word = (row >> 7) * 256 + (row & 31) * 4 + ((row & 127) >> 5)
        pair = torch.stack((word, word + 128), dim=-1).flatten()
        return words.index_select(0, pair).view(torch.uint8).view(-1, SCALES_PER_ROW)


def _scale_items(scale: Tensor, problem: DecodeProblem) -> Indexed | Tensor:
    """Planar: the 1,024 scale bytes of each (page, head). Tiled: the tiles as 32-bit words of four scales."""
    scale = scale.view(torch.uint8)
    if problem.scale_layout is ScaleLayout.PLANAR:
        return Indexed.of(scale.as_strided((*scale.shape[:2], _TILE_BYTES), (*scale.stride()[:2], 1)))
    rows = problem.k.shape[0] * problem.num_kv_heads * (BLOCK_SIZE if problem.page_table is not None else 1)
    used = -(-rows // _KEYS_PER_TILE) * _TILE_BYTES
    return scale.flatten()[:used].view(torch.int32)


def _widen_e4m3(raw: Tensor, lanes: Tensor, wide: Tensor) -> None:
    """e4m3 bytes to float32 times 2**-8: sign and the other seven bits go where float16 has them.

    Exact for every finite byte, subnormals included.
    """
    lanes.copy_(raw.view(torch.int8))  # sign-extended
    lanes.bitwise_left_shift_(7).bitwise_and_(-0x4001)
    wide.copy_(lanes.view(torch.float16))


def _widen_e2m1(raw: Tensor, lanes: Tensor, sign: Tensor, wide: Tensor) -> None:
    """e2m1 code pairs to float32 times 2**-14: in each half of a 32-bit lane, sign to bit 15, magnitude to 11..9."""
    lanes.copy_(raw)
    lanes.mul_((1 << 9) | (1 << 21))  # low nibble to 12..9, high nibble to 28..25; other bits are cut below
    torch.bitwise_and(lanes, 0x10001000, out=sign)
    lanes.bitwise_and_(0x0E000E00).bitwise_or_(sign.bitwise_left_shift_(3))
    wide.copy_(lanes.view(torch.float16))


__all__ = ["FP8", "WIDENED_EXPONENT", "Indexed", "KeyValueReader"]
