"""Launching the index scores: one kernel, no allocation, no read from the device.

The grid comes from shapes and from the bounds that the caller gives. How the work is shared is settled on the device, from
the lengths as they are there.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...contract import BLOCK_SIZE, FP8, INT32_MAX
from . import programs
from .launch import device_facts, divisor
from .plan import SYSTEM_SHARED

if TYPE_CHECKING:
    from ...selection import ScoreProblem

COLUMNS = (8, 16, 32, 64)
"""(token, head) pairs that meet the keys together in the kernels that serve every call, by entry point. Those for rows of
blocks: `Operands.row_columns`."""
CODE_COLUMNS = 4
"""Those of the kernels for rows that multiply the codes of NVFP4 keys: kernels/score_codes.cuh."""
_PARAMS = struct.Struct("11Q12q14I24i2f")  # struct ScoreParams of kernels/score_work.cuh
_THREADS = 128
_FORMAT = {torch.bfloat16: "bf16", torch.float16: "fp16", FP8: "fp8", torch.uint8: "nvfp4"}
_FORMATS = tuple(_FORMAT.values())  # in the order of the kernel's KV_FORMAT and QueryType
_MAX_WORK = 1 << 30
_ROUNDS_TIMES_PARTS = 1 << 31  # of a row: more of them, and the last part could end before the row does
_TILT = 0.75  # of parts, where more thread blocks than fit take turns: large ones first, small ones even out the end
_PART_BYTES = 1 << 16  # of keys that a part of a row has, as a rule
_CODE_PART_BYTES = 1 << 17  # where codes are multiplied; a team has as many blocks of keys as where they are widened
_MOST_WAVES = 4
# Thread blocks a multiprocessor that settle early what to begin with, where codes are not multiplied; and up to how many, of
# one block of keys each (two of NVFP4), all ask L2 for it. Of more, one does.
_EARLY_BLOCKS = 3
_HINTING_BLOCKS = 2
_FILL_PER_THREAD = 32  # blocks of a token that a thread fills, at most
_FILL_ROW = 16  # neighbouring blocks that a fill block writes where those lie next to each other

calls: Counter[str] = Counter()
"""Launches, by program and entry point."""


@dataclass(frozen=True, slots=True)
class Operands:
    """What the kernels for keys and queries of some formats hold. Thread blocks that a multiprocessor runs at once are given
    in the order of `row_columns` (`one`, `row`) or of `COLUMNS` (`stream`): what registers and shared memory of 9.0 allow."""

    keys: str
    """Their format."""
    row_bytes: int
    """Of a key."""
    together: int = 1
    """Blocks of keys that a thread block scores at once, one a team: `TEAMS` of kernels/score_parts.cuh. Where codes are
    multiplied: `at_once`."""
    query_parts: int = 1
    """Operands whose sum is a query."""
    row_columns: tuple[int, ...] = (8, 16, 32)
    """(token, head) pairs that meet the keys together in the kernels for rows, ascending."""
    one: tuple[int, ...] = (6, 4, 3)
    """Thread blocks of the kernels where each has blocks of keys of its own."""
    row: tuple[int, ...] = (6, 5, 3)
    """Thread blocks of the kernels where a request's thread blocks share its row of blocks."""
    stream: tuple[int, ...] = (4, 3, 3, 3)
    """Thread blocks of the kernels for all else."""

    def at_once(self, kind: str, columns: int) -> int:
        """Blocks of keys that a thread block of the kernels for rows scores at once, one a team: `T::COUNT` of
        kernels/score_row.cu."""
        each_warp = (kind, columns) == ("row", CODE_COLUMNS)  # is a team: where codes are multiplied for shared rows
        return _THREADS // 32 if each_warp else self.together

    def row_shared(self, kind: str, columns: int) -> int:
        """Shared memory of a thread block of the kernels for rows, to within a few hundred bytes, in bytes."""
        key_bytes = self.row_bytes + (8 if self.keys == "nvfp4" else 0)  # with its scales
        keys = self.at_once(kind, columns) * BLOCK_SIZE * key_bytes
        return keys + columns * (256 * self.query_parts + 52) + 512

    def room(self, kind: str, columns: int, shared: int) -> int:
        """Thread blocks of a kernel for rows that `shared` bytes of shared memory hold."""
        return shared // (self.row_shared(kind, columns) + SYSTEM_SHARED)

    def held(self, count: int, counted: bool) -> int:
        """Thread blocks of a kernel for rows that a multiprocessor runs at once where 9.0 runs `count`, for which they were
        `counted`: the rule is `room` of kernels/score_row.cu."""
        return count if counted else count // 2 if self.keys == "nvfp4" else count * 2 // 3

    def program(self, rows: bool) -> programs.KernelProgram:
        """Their kernels for rows of blocks, or for all else."""
        kinds = {"one_": self.one, "row_": self.row} if rows else {"": self.stream}
        widths = self.row_columns if rows else COLUMNS
        entries = {
            f"msa_score_{kind}{columns}": n
            for kind, counts in kinds.items()
            for columns, n in zip(widths, counts, strict=True)
        }
        return programs.KernelProgram(
            f"score-{self.keys}{'-fp16q' * (self.query_parts > 1)}{'-row' * rows}",
            (
                "common.cuh",
                "score.cuh",
                "widen.cuh",
                "score_work.cuh",
                "score_parts.cuh",
                *(("score_copy.cuh",) if rows else ()),
                *(("score_codes.cuh",) if rows and CODE_COLUMNS in self.row_columns else ()),
                "score_row.cu" if rows else "score.cu",
            ),
            tuple(entries),
            (
                f"-DKV_FORMAT={_FORMATS.index(self.keys)}",
                f"-DQUERY_PARTS={self.query_parts}",
                *(f"-DROOM_{entry.removeprefix('msa_score_').upper()}={n}" for entry, n in entries.items()),
            ),
            # Keys on their way to registers pass the first-level cache; those of the row kernels go to shared memory.
            resident=tuple(0 if rows else n for n in entries.values()),
        )


OPERANDS = {
    "bf16": Operands("bf16", 256),
    "fp16": Operands("fp16", 256),
    "fp8": Operands("fp8", 128, one=(8, 5, 3), row=(8, 5, 3)),
    "nvfp4": Operands(
        "nvfp4", 64, together=2, row_columns=(CODE_COLUMNS, 8, 16, 32), one=(4, 6, 4, 2), row=(4, 6, 3, 2)
    ),
    # fp16 queries of bf16 keys are the sum of two bf16 operands. Those of 32 columns and a block of keys are more than
    # a kernel can have without asking.
    "bf16-fp16q": Operands("bf16", 256, query_parts=2, row_columns=(8, 16), one=(5, 4), row=(5, 4)),
}
PROGRAMS = {(name, rows): operands.program(rows) for name, operands in OPERANDS.items() for rows in (False, True)}
"""By operands, and whether a request has a row of blocks."""


def operands_of(q: torch.dtype, k: torch.dtype) -> str:
    """A key of `OPERANDS`."""
    return "bf16-fp16q" if (q, k) == (torch.float16, torch.bfloat16) else _FORMAT[k]


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """How a call is cut. A tile is `tile_tokens` tokens of a request by `tile_heads` of a KV head's query heads.

    `workers` thread blocks score. If `kind` is ``""`` they share all scored blocks in units of ``2**grain``. Else each
    request has `parts` of them to itself: one for every block of keys (two of NVFP4) that it can have if `kind` is
    ``"one"``, or a part of its blocks for each if it is ``"row"``. `fill_blocks` others, before them, write what no
    token sees: ``2**fill_shift`` tokens side by side, whose blocks `fill_splits` of them share.
    """

    kind: str
    columns: int
    tile_tokens: int
    tile_heads: int
    head_tiles: int
    workers: int
    parts: int
    tilt: float
    """How much more than an even part the first of many thread blocks of a request has, and the last one less: `row_slope`."""
    row_blocks: int
    grain: int
    fill_blocks: int
    fill_shift: int
    fill_splits: int
    keys_stay: bool
    early: int
    """Scoring thread blocks, the first ones, that settle what to begin with while the kernel before still runs, by lengths and
    pages as they are then; from 9.0 on."""
    hinting: int
    """Those of them that also ask L2 for it."""

    @property
    def entry(self) -> str:
        return "_".join(("msa_score", *filter(None, (self.kind,)), str(self.columns)))


@lru_cache(maxsize=1024)
def make_plan(
    *,
    total_q: int,
    batch: int,
    heads: int,
    kv_heads: int,
    blocks: int,
    key_blocks: int,
    seqlen_q: int | None,
    reduce_heads: bool,
    blocks_innermost: bool,
    paged: bool,
    operands: str,
    sms: int,
    shared: int,
    counted: bool = True,
) -> ScorePlan:
    """The plan of a call whose result is not empty; a pure function.

    `blocks` are those of the result, `key_blocks` those that a request can have, `seqlen_q` bounds the tokens of a request
    (the plan serves more, too), `paged` tells the form of the cache, and `blocks_innermost` that neighbouring blocks of the
    result are neighbours in memory.
    `shared` bytes of shared memory has each of `sms` multiprocessors. `counted`: they are 9.0's, whose registers were counted.
    """
    group = heads // kv_heads
    tokens = max(min(-(-total_q // max(batch, 1)) if seqlen_q is None else seqlen_q, total_q), 1)
    columns = next((n for n in COLUMNS if group * tokens <= n), COLUMNS[-1])
    tile_heads, tile_tokens = min(group, columns), max(columns // group, 1)
    head_tiles = -(-group // tile_heads)
    apart = 1 if reduce_heads else kv_heads * head_tiles
    tiles = batch * apart * -(-tokens // tile_tokens)

    shift = min(total_q - 1, _THREADS - 1).bit_length()
    if blocks_innermost:
        shift = min(shift, (_THREADS // _FILL_ROW).bit_length() - 1)
    splits = -(-blocks // (_FILL_PER_THREAD * (_THREADS >> shift)))
    fill_blocks = min(-(-total_q >> shift) * splits, sms)

    # The kernel counts work in 32 bits.
    most = (total_q // tile_tokens + batch) * apart * key_blocks
    grain = max((most // _MAX_WORK).bit_length(), 0)
    keys_stay = tokens > tile_tokens or head_tiles > 1
    kind, workers, parts, tilt, early = "", 0, 0, 0.0, 0
    o = OPERANDS[operands]
    one_row = tiles == batch and kv_heads * head_tiles == 1 and (seqlen_q is not None or batch == 1)
    width = _row_width(o, group * tokens, paged, shared) if one_row and batch and key_blocks else None
    if width is not None:
        columns, tile_tokens = width, width // group
        place = o.row_columns.index(width)
        counts = {"one": o.one[place], "row": o.row[place]}
        fits = {n: sms * min(o.room(n, width, shared), o.held(count, counted)) for n, count in counts.items()}
        fit_one, fit_row = (fit - min(fill_blocks, fit // 2) for fit in fits.values())
        kind, parts = _row_parts(o, width, batch, key_blocks, fit_one, fit_row)
        workers = parts * batch
        tilt = _TILT if kind == "row" and workers > fit_row and parts > 1 else 0.0
        # Where codes are multiplied all that fit settle early: the ones that do not are the last to end
        # (kernel-notes, "Beside the products").
        early = min(workers, fits[kind] if width == CODE_COLUMNS else _EARLY_BLOCKS * sms)
    else:
        slots = sms * o.stream[COLUMNS.index(columns)]
        slots -= min(fill_blocks, slots // 16)
        workers = min(tiles * key_blocks, slots)
        if tiles and workers // tiles * tiles * 4 >= 3 * workers:
            workers -= workers % tiles  # so that equal requests are not cut across their borders
    return ScorePlan(
        kind, columns, tile_tokens, tile_heads, head_tiles, workers, parts, tilt, key_blocks, grain, fill_blocks, shift, splits,
        keys_stay, early, _hinting_blocks(kind, workers, sms),
    )  # fmt: skip


def _hinting_blocks(kind: str, workers: int, sms: int) -> int:
    """Thread blocks that ask L2 for keys before the wait. More would ask again for what is under way (kernel-notes, "Asking
    before")."""
    if not kind:
        return 0
    return workers if kind == "one" and workers <= _HINTING_BLOCKS * sms else min(workers, sms)


def _row_width(o: Operands, pairs: int, paged: bool, shared: int) -> int | None:
    """The columns of the kernels for rows that serve so many (token, head) pairs; None if kernels for all else have to.

    Each thread block waits for its keys: those kernels need several on a multiprocessor, more than half of what 9.0 runs.
    Codes are multiplied where caches are paged: there the scales of four keys, 32 apart, are 16 bytes in one place.
    """
    for columns, one, row in zip(o.row_columns, o.one, o.row, strict=True):
        if pairs > columns or (columns == CODE_COLUMNS and not paged):
            continue
        if 2 * o.room("one", columns, shared) > one and 2 * o.room("row", columns, shared) > row:
            return columns
        if columns != CODE_COLUMNS:
            return None
    return None


def _row_parts(o: Operands, columns: int, batch: int, key_blocks: int, fit_one: int, fit_row: int) -> tuple[str, int]:
    """Which kernel scores a row of blocks for each of `batch` requests, and with how many thread blocks for each, where so
    many of either kernel fit at once."""
    each = -(-key_blocks // o.at_once("one", columns))
    if 2 * batch * each <= 3 * fit_one:
        return "one", each
    if columns == CODE_COLUMNS and batch == 1:
        wanted = fit_row  # all parts take equally long: more than fit at once would even out nothing
    else:
        # Parts long enough to be worth their start. More of them than fit at once even out the end, and leave room early for
        # the kernel that selects; but requests may be shorter than they can be, and thread blocks with nothing to do are not
        # free.
        size = batch * key_blocks * o.row_bytes * BLOCK_SIZE
        part = _CODE_PART_BYTES if columns == CODE_COLUMNS else _PART_BYTES
        wanted = size // part
        if 2 * wanted < 3 * fit_row:
            wanted = max(size // (part // 2), fit_row)
    most = -(-key_blocks // o.at_once("row", columns))
    parts = max(min(min(wanted, _MOST_WAVES * fit_row) // batch, most, _ROUNDS_TIMES_PARTS // most), 1)
    # No more than the longest of even parts asks for. But where that leaves places empty, uneven parts have more under way at
    # once (kernel-notes, "Whole blocks without a branch").
    fewest = -(-most // -(-most // parts))
    return "row", fewest if 8 * batch * fewest >= 7 * fit_row else parts


def row_slope(parts: int, tilt: float) -> tuple[int, int]:
    """What the kernel cuts a row into parts by: the n-th begins at ``n * (step - n * bend)`` of 2**31, rounded up to whole
    rounds of blocks. The last one ends at most `parts` short of 2**31, which is rounded up to the end of the row if rounds
    times parts are no more than `_ROUNDS_TIMES_PARTS`. The first of many parts is ``1 + tilt`` times as long as an even one,
    the last ``1 - tilt`` times; of few, less so."""
    bend = int(tilt * 2**31) // parts**2
    return (2**31 - 1) // parts + parts * bend, bend


def plan_for(
    p: ScoreProblem, seqlen_q: int | None, output: Tensor, sms: int, shared: int, counted: bool = True
) -> ScorePlan:
    """The plan of a problem on so many multiprocessors with so much shared memory each; `counted`: see `make_plan`."""
    blocks = output.shape[1]
    room = -(-p.k.shape[0] // BLOCK_SIZE) if p.page_table is None else p.page_table.shape[1]
    return make_plan(
        total_q=p.q.shape[0],
        batch=p.cu_seqlens_q.shape[0] - 1,
        heads=p.q.shape[1],
        kv_heads=p.k.shape[1],
        blocks=blocks,
        key_blocks=min(blocks, room),
        seqlen_q=seqlen_q,
        reduce_heads=p.reduce_heads,
        blocks_innermost=output.stride(1) < output.stride(2),
        paged=p.page_table is not None,
        operands=operands_of(p.q.dtype, p.k.dtype),
        sms=sms,
        shared=shared,
        counted=counted,
    )


def pack(p: ScoreProblem, plan: ScorePlan, output: Tensor) -> bytes:
    """The kernel's parameter block."""
    q, k = p.q, p.k
    paged = p.page_table is not None
    lengths = p.seqused_k if paged else p.cu_seqlens_k
    assert lengths is not None
    size = k.element_size()
    page_step, head_step, row_step = (k.stride(0), k.stride(1), k.stride(2)) if paged else (0, k.stride(1), k.stride(0))
    row_step *= size
    if k.shape[2 if paged else 0] < 2:
        row_step = 0  # there is no second row, and the stride may be anything
    if row_step >= 1 << 31:
        raise ValueError(f"k must have tokens less than 2 GiB apart, got a stride of {row_step} bytes")
    most_keys = min(p.page_table.shape[1] * BLOCK_SIZE if p.page_table is not None else k.shape[0], INT32_MAX)
    table_row, table_column = p.page_table.stride() if p.page_table is not None else (0, 0)
    offset, offsets = (0, p.q_offset) if isinstance(p.q_offset, Tensor) else (p.q_offset or 0, None)
    batch = p.cu_seqlens_q.shape[0] - 1
    return _PARAMS.pack(
        q.data_ptr(), k.data_ptr(), _pointer(p.q_scale), _pointer(p.k_scale), _pointer(p.q_global), _pointer(p.k_global),
        p.cu_seqlens_q.data_ptr(), lengths.data_ptr(), _pointer(p.page_table), _pointer(offsets), output.data_ptr(),
        q.stride(0) * q.element_size(), q.stride(1) * q.element_size(), page_step * size, head_step * size,
        p.cu_seqlens_q.stride(0), lengths.stride(0), table_row, table_column, 0 if offsets is None else offsets.stride(0),
        output.stride(0), output.stride(1), output.stride(2),
        *divisor(max(plan.workers, 1)), *divisor(plan.tile_tokens), *divisor(plan.tile_heads),
        *divisor(max(batch, 1)), *row_slope(max(plan.parts, 1), plan.tilt),
        row_step, most_keys, batch, q.shape[0], output.shape[1], k.shape[0] if paged else 0,
        p.page_table.shape[1] if p.page_table is not None else 0, k.shape[1], q.shape[1] // k.shape[1],
        _FORMATS.index(_FORMAT[q.dtype]), offset, p.q_offset is not None, p.causal, paged, p.reduce_heads,
        plan.head_tiles, plan.grain, plan.fill_blocks, plan.fill_shift, plan.fill_splits, plan.keys_stay,
        plan.row_blocks, plan.early, plan.hinting,
        p.factor, batch / max(plan.workers, 1),
    )  # fmt: skip


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def run(problem: ScoreProblem, seqlen_q: int | None, output: Tensor) -> None:
    """Serve one checked problem on the current stream of its device. `seqlen_q`: most tokens of a request, if known."""
    if output.numel() == 0:
        return
    index = problem.q.device.index
    if index == torch.cuda.current_device():
        _run(problem, seqlen_q, output, index)
    else:
        with torch.cuda.device(index):
            _run(problem, seqlen_q, output, index)


def _run(problem: ScoreProblem, seqlen_q: int | None, output: Tensor, index: int) -> None:
    facts = device_facts(index)
    counted = facts.capability == (9, 0)
    plan = plan_for(problem, seqlen_q, output, facts.multiprocessors, facts.shared_per_multiprocessor, counted)
    program = PROGRAMS[operands_of(problem.q.dtype, problem.k.dtype), bool(plan.kind)]
    function = programs.functions(program, index)[plan.entry]
    programs.launch(function, pack(problem, plan, output), plan.fill_blocks + plan.workers, _THREADS, device=index)
    calls[f"{program.name} {plan.entry}"] += 1
