"""Reading K and V where they lie: selected blocks into a buffer, then widened to float32.

float8 and NVFP4 values are widened by integer operations on their bytes (torch's own float8 conversion takes about
seven times as long), up to a power of two that the engine folds into the softmax scale (K) and the output (V).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...contract import BLOCK_SIZE, HEAD_DIM, SCALE_GROUP, SCALES_PER_ROW, DecodeProblem, KVFormat, ScaleLayout
from .plan import SEGMENT_BLOCKS, SegmentPlan

_TILE_ROWS = 128
_TILE_BYTES = _TILE_ROWS * SCALES_PER_ROW

WIDENED_EXPONENT = {KVFormat.BF16: 0, KVFormat.FP16: 0, KVFormat.FP8: 8, KVFormat.NVFP4: 14 + 8}
"""A widened value times two to this power is the stored value."""


@dataclass(frozen=True, slots=True)
class Indexed:
    """Equal items of a strided tensor as a one-dimensional list, so that one `index_select` serves all heads.

    The item at (place, head) is ``items[place * place_step + head * head_step]``. Items may overlap: they are only
    read.
    """

    items: Tensor
    place_step: int
    head_step: int

    @staticmethod
    def of(t: Tensor, rows: int = 0) -> Indexed:
        """Items ``t[place, head]``; with `rows`, ``t[place : place + rows, head]`` of a flat cache."""
        places = t.shape[0] - max(0, rows - 1)
        steps = [t.stride(0) if places > 1 else 0, t.stride(1) if t.shape[1] > 1 else 0]
        unit = math.gcd(*steps) or 1
        place_step, head_step = steps[0] // unit, steps[1] // unit
        count = (places - 1) * place_step + (t.shape[1] - 1) * head_step + 1
        shape, stride = tuple(t.shape[2:]), t.stride()[2:]
        if rows:
            shape, stride = (rows, *shape), (t.stride(0), *stride)
        return Indexed(t.as_strided((count, *shape), (unit, *stride)), place_step, head_step)

    def index(self, place: Tensor, head: Tensor) -> Tensor:
        return place * self.place_step + head * self.head_step


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The parts of a reader's buffers that a chunk of one shape uses.

    Attributes:
        raw: gathered K and V, one after the other.
        items: the same, where `index_select` puts K and V.
        steps: the chunk cut for widening, each ``(raw, scratch, wide)``.
        wide: all of the widened chunk, ``(segments, K or V, rows * 128)``.
        result: K and V of it, ``(segments, 1, rows, 128)``.
    """

    raw: Tensor
    items: tuple[Tensor, Tensor]
    steps: list[tuple[Tensor, list[Tensor], Tensor]]
    wide: Tensor
    result: tuple[Tensor, Tensor]


class KeyValueReader:
    """Gathers selected K and V of one problem as float32, in buffers allocated once.

    Widened data lies as ``(segments, K or V, rows, 128)``: every operation on it, and the attention after it, then cuts
    the same segments among the threads, so that a thread reads what it wrote itself. With all K before all V, widening
    took three times as long on two threads.

    Args:
        problem: the checked call.
        max_blocks: blocks of K, and as many of V, that one `read` may ask for.
    """

    def __init__(self, problem: DecodeProblem, max_blocks: int) -> None:
        self._format = problem.kv_format
        self._paged = problem.page_table is not None
        self._flat_rows = problem.k.shape[0]
        data = [problem.k, problem.v]
        if self._format is KVFormat.FP8:
            data = [t.view(torch.uint8) for t in data]
        self._width = data[0].shape[-1]
        self._scales = _BlockScales(problem) if self._format is KVFormat.NVFP4 else None
        self._rows: list[Indexed] = []
        if self._paged:
            self._blocks = [Indexed.of(t) for t in data]
        else:
            self._rows = [Indexed.of(t) for t in data]
            whole = self._flat_rows >= BLOCK_SIZE
            self._blocks = [Indexed.of(t, rows=BLOCK_SIZE) for t in data] if whole else []
        self._allocate(2 * max_blocks * BLOCK_SIZE, data[0].dtype, problem.k.device)
        self._shapes: dict[tuple[int, int, bool], _Buffers] = {}

    def _allocate(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._raw = torch.empty(rows * self._width, dtype=dtype, device=device)
        self._wide = torch.empty(rows * HEAD_DIM, dtype=torch.float32, device=device)
        # Scratch of one segment per thread: what a thread has written there is still in its cache at the next step.
        self._step = torch.get_num_threads()
        size = min(rows, 2 * self._step * SEGMENT_BLOCKS * BLOCK_SIZE) * self._width
        dtypes = {KVFormat.FP8: [torch.int16], KVFormat.NVFP4: [torch.int32] * 2}.get(self._format, [])
        self._scratch = [torch.empty(size, dtype=d, device=device) for d in dtypes]

    def load_plan(self, plan: SegmentPlan) -> None:
        """Turn the plan's places into indices; `read` then takes ranges of its segments."""
        self._plan = plan
        self._index: list[Tensor] = []
        for i, source in enumerate(self._blocks):
            first = self._blocks[0]
            same = i > 0 and (source.place_step, source.head_step) == (first.place_step, first.head_step)
            self._index.append(self._index[0] if same else source.index(plan.place, plan.head))

    def read(self, begin: int, end: int, keys: int) -> tuple[Tensor, Tensor]:
        """K and V of segments `begin` to `end` of the plan, each ``(segments, 1, keys, 128)`` float32.

        Each segment has `keys` visible keys. The result is valid until the next `read`.
        """
        blocks = -(-keys // BLOCK_SIZE)
        if not self._paged:
            place = self._plan.place[begin:end, :blocks]
            inside = bool(self._blocks) and int(place.min()) >= 0 and int(place.max()) <= self._flat_rows - BLOCK_SIZE
            if not inside:
                return self._read_rows(begin, end, keys)
        buffers = self._part(end - begin, blocks * BLOCK_SIZE, in_blocks=True)
        k_index, v_index = self._index
        index = k_index[begin:end, :blocks].reshape(-1)
        torch.index_select(self._blocks[0].items, 0, index, out=buffers.items[0])
        if v_index is not k_index:
            index = v_index[begin:end, :blocks].reshape(-1)
        torch.index_select(self._blocks[1].items, 0, index, out=buffers.items[1])
        self._widen(buffers)
        if self._scales is not None:
            place, head = self._plan.place[begin:end, :blocks], self._plan.head[begin:end]
            self._scales.apply(buffers.wide, place, head, whole_blocks=True)
        k, v = buffers.result
        return (k, v) if blocks * BLOCK_SIZE == keys else (k[:, :, :keys], v[:, :, :keys])

    def _read_rows(self, begin: int, end: int, keys: int) -> tuple[Tensor, Tensor]:
        """`read` of a flat cache, row by row: where a block reaches past its end or begins before it."""
        head = self._plan.head[begin:end]
        rows = _visible_rows(self._plan.place[begin:end], keys)
        buffers = self._part(end - begin, keys, in_blocks=False)
        for source, out in zip(self._rows, buffers.items, strict=True):
            torch.index_select(source.items, 0, source.index(rows, head).view(-1), out=out)
        self._widen(buffers)
        if self._scales is not None:
            self._scales.apply(buffers.wide, rows, head, whole_blocks=False)
        return buffers.result

    def _part(self, segments: int, rows: int, *, in_blocks: bool) -> _Buffers:
        """Buffers for `segments` segments of `rows` rows; cut once per shape, for chunks are mostly alike."""
        key = (segments, rows, in_blocks)
        buffers = self._shapes.get(key)
        if buffers is None:
            raw = self._raw[: 2 * segments * rows * self._width].view(2, segments, -1)
            item = (-1, BLOCK_SIZE, self._width) if in_blocks else (-1, self._width)
            wide = self._wide[: 2 * segments * rows * HEAD_DIM].view(segments, 2, -1)
            # A thread's share of every operation is the same run of segments, so a step takes one from each run. bf16
            # and fp16 take one pass and no scratch.
            count = -(-segments // self._step) if self._scratch else 1
            steps = []
            for i in range(count):
                part, wide_part = raw.transpose(0, 1)[i::count], wide[i::count]
                steps.append((part, [t[: part.numel()].view(part.shape) for t in self._scratch], wide_part))
            kv = wide.view(segments, 2, rows, HEAD_DIM)
            buffers = _Buffers(raw, (raw[0].view(item), raw[1].view(item)), steps, wide, (kv[:, :1], kv[:, 1:]))
            self._shapes[key] = buffers
        return buffers

    def _widen(self, buffers: _Buffers) -> None:
        # First, while the bytes are still in the processor's caches.
        any_nan = self._format is KVFormat.FP8 and has_nan_e4m3(buffers.raw)
        for raw, scratch, wide in buffers.steps:
            if self._format is KVFormat.FP8:
                widen_e4m3(raw, scratch[0], wide, any_nan=any_nan)
            elif self._format is KVFormat.NVFP4:
                widen_e2m1(raw, scratch[0], scratch[1], wide)
            else:
                wide.copy_(raw)


class _BlockScales:
    """NVFP4 block scales of gathered rows, from either layout."""

    def __init__(self, problem: DecodeProblem) -> None:
        assert problem.k_scale is not None and problem.v_scale is not None
        self._kv_heads = problem.num_kv_heads
        self._paged = problem.page_table is not None
        scales = [t.view(torch.uint8) for t in (problem.k_scale, problem.v_scale)]
        self._planar: list[Indexed] = []
        self._words: list[Tensor] = []
        if problem.scale_layout is ScaleLayout.PLANAR:
            # The 1,024 bytes of each (page, head).
            flat = [t.as_strided((*t.shape[:2], _TILE_BYTES), (*t.stride()[:2], 1)) for t in scales]
            self._planar = [Indexed.of(t) for t in flat]
        else:
            rows = problem.k.shape[0] * problem.num_kv_heads * (BLOCK_SIZE if self._paged else 1)
            used = -(-rows // _TILE_ROWS) * _TILE_BYTES
            # Four scales, one 32-bit word, is what lies together in the tiled layout.
            self._words = [t.flatten()[:used].view(torch.int32) for t in scales]

    def apply(self, wide: Tensor, place: Tensor, head: Tensor, *, whole_blocks: bool) -> None:
        """Multiply gathered rows, ``(segments, K or V, rows * 128)``, by their block scales times 2**-8.

        `place` counts pages, or rows of a flat cache: the first rows of whole blocks, or else single rows.
        """
        if self._planar:
            codes = [self._planar_codes(part, place, head) for part in (0, 1)]
        else:
            codes = self._tiled(place, head, whole_blocks)
        both = torch.stack([c.view(len(place), -1) for c in codes], dim=1)
        lanes = torch.empty(both.shape, dtype=torch.int16, device=wide.device)
        scale = torch.empty(both.shape, dtype=torch.float32, device=wide.device)
        widen_e4m3(both, lanes, scale)
        wide.view(-1, SCALE_GROUP).mul_(scale.view(-1, 1))

    def _tiled(self, place: Tensor, head: Tensor, whole_blocks: bool) -> list[Tensor]:
        if self._paged:
            # A (page, head) has a pair of tiles of its own: words [s // 4][row % 32][row // 32].
            tile = (place * self._kv_heads + head).view(-1)
            pairs = [w.view(-1, 2, 32, 4).index_select(0, tile) for w in self._words]
            return [p.permute(0, 3, 2, 1).contiguous().view(torch.uint8) for p in pairs]
        if whole_blocks:
            place = (place[:, :, None] + torch.arange(BLOCK_SIZE, device=place.device)).flatten(1)
        row = (place * self._kv_heads + head).view(-1)
        word = (row >> 7) * 256 + (row & 31) * 4 + ((row & 127) >> 5)
        pair = torch.stack((word, word + 128), dim=-1).view(-1)
        return [w.index_select(0, pair).view(torch.uint8) for w in self._words]

    def _planar_codes(self, part: int, place: Tensor, head: Tensor) -> Tensor:
        source = self._planar[part]
        tiles = source.items.index_select(0, source.index(place, head).view(-1))
        # K is linear in (token, s); V has byte (token // 4) * 32 + 4 * s + token % 4.
        return tiles if part == 0 else tiles.view(-1, SCALES_PER_ROW, 4).transpose(1, 2).contiguous()


def _visible_rows(place: Tensor, keys: int) -> Tensor:
    """Rows of a flat cache, ``(segments, keys)``: of blocks that reach past its end, or begin before it."""
    rows = (place[:, :, None] + torch.arange(BLOCK_SIZE, device=place.device)).flatten(1)
    # Rows below 0 are left out, stably, so that the visible ones come first.
    order = (rows < 0).to(torch.uint8).argsort(dim=1, stable=True)
    return rows.gather(1, order)[:, :keys]


def has_nan_e4m3(raw: Tensor) -> bool:
    """Whether one of the e4m3 bytes `raw` is 0x7F or 0xFF."""
    return int(raw.view(torch.int8).amax()) == 0x7F or int(raw.amax()) == 0xFF


def widen_e4m3(raw: Tensor, lanes: Tensor, wide: Tensor, *, any_nan: bool | None = None) -> None:
    """e4m3 bytes to float32 times 2**-8: sign and the other seven bits go where float16 has them.

    Exact for every finite byte, subnormals included; the two NaN bytes give NaN. `lanes` is int16 scratch. `any_nan`
    is `has_nan_e4m3` of the bytes, or True, where the caller knows it.
    """
    lanes.copy_(raw.view(torch.int8))  # extends the sign
    lanes.mul_(128).bitwise_and_(-0x4001)  # torch's int16 multiply is faster than its shift
    wide.copy_(lanes.view(torch.float16))
    # float16 has no NaN at these bits.
    if has_nan_e4m3(raw) if any_nan is None else any_nan:
        wide.masked_fill_(raw.bitwise_and(0x7F) == 0x7F, torch.nan)


def widen_e2m1(raw: Tensor, lanes: Tensor, sign: Tensor, wide: Tensor) -> None:
    """e2m1 code pairs to float32 times 2**-14: in each half of a 32-bit lane, sign to bit 15, magnitude to 11..9.

    `lanes` and `sign` are int32 scratch.
    """
    lanes.copy_(raw)
    lanes.mul_((1 << 9) | (1 << 21))  # low nibble to 12..9, high nibble to 28..25; other bits are cut below
    torch.bitwise_and(lanes, 0x10001000, out=sign)
    lanes.bitwise_and_(0x0E000E00).bitwise_or_(sign.bitwise_left_shift_(3))
    wide.copy_(lanes.view(torch.float16))
