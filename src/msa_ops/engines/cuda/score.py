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
from .launch import divisor

if TYPE_CHECKING:
    from ...selection import ScoreProblem

COLUMNS = (8, 16, 32, 64)
"""(token, head) pairs that meet the keys together, by entry point."""
_PARAMS = struct.Struct("11Q12q12I22i2f")  # struct ScoreParams of kernels/score_work.cuh
_THREADS = 128
_ENTRIES = tuple(f"msa_score_{n}" for n in COLUMNS)
_FORMAT = {torch.bfloat16: "bf16", torch.float16: "fp16", FP8: "fp8", torch.uint8: "nvfp4"}
_FORMATS = tuple(_FORMAT.values())  # in the order of the kernel's KV_FORMAT and QueryType
_MAX_WORK = 1 << 30
_FILL_PER_THREAD = 32  # blocks of a token that a thread fills, at most
_FILL_ROW = 16  # neighbouring blocks that a fill block writes where those lie next to each other

calls: Counter[str] = Counter()
"""Launches, by program and entry point."""


def resident_blocks(columns: int) -> int:
    """Thread blocks that a multiprocessor runs at once, as the kernel's launch bounds say."""
    return 4 if columns == COLUMNS[0] else 3


def _program(k_format: str, split_query: bool) -> programs.KernelProgram:
    return programs.KernelProgram(
        f"score-{k_format}{'-fp16q' if split_query else ''}",
        ("common.cuh", "score.cuh", "widen.cuh", "score_work.cuh", "score.cu"),
        _ENTRIES,
        (f"-DKV_FORMAT={_FORMATS.index(k_format)}", f"-DQUERY_PARTS={2 if split_query else 1}"),
        resident=tuple(resident_blocks(columns) for columns in COLUMNS),
    )


_BY_FORMAT = {name: _program(name, False) for name in _FORMATS}
_SPLIT_QUERY = _program("bf16", True)
PROGRAMS = (*_BY_FORMAT.values(), _SPLIT_QUERY)


def program_for(q: torch.dtype, k: torch.dtype) -> programs.KernelProgram:
    """fp16 queries of bf16 keys are the sum of two bf16 operands, and have a program of their own."""
    return _SPLIT_QUERY if (q, k) == (torch.float16, torch.bfloat16) else _BY_FORMAT[_FORMAT[k]]


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """How a call is cut. A tile is `tile_tokens` tokens of a request by `tile_heads` of a KV head's query heads.

    `workers` thread blocks share the scored blocks in units of ``2**grain``, or `each` of them have a request to
    themselves, if that is not 0: one for every block that it can have. `fill_blocks` others, before them, write
    what no token sees: ``2**fill_shift`` tokens side by side, whose blocks `fill_splits` of them share.
    """

    columns: int
    tile_tokens: int
    tile_heads: int
    head_tiles: int
    workers: int
    each: int
    grain: int
    fill_blocks: int
    fill_shift: int
    fill_splits: int
    keys_stay: bool

    @property
    def entry(self) -> str:
        return f"msa_score_{self.columns}"


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
    sms: int,
) -> ScorePlan:
    """The plan of a call whose result is not empty; a pure function.

    `blocks` are those of the result, `key_blocks` those that a request can have, `seqlen_q` bounds the tokens of a request
    (the plan serves more, too) and `blocks_innermost` tells that neighbouring blocks of the result are neighbours in memory.
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

    slots = sms * resident_blocks(columns)
    slots -= min(fill_blocks, slots // 16)
    workers = min(tiles * key_blocks, slots)
    if tiles and workers // tiles * tiles * 4 >= 3 * workers:
        workers -= workers % tiles  # so that equal requests are not cut across their borders
    # The kernel counts work in 32 bits.
    most = (total_q // tile_tokens + batch) * apart * key_blocks
    grain = max((most // _MAX_WORK).bit_length(), 0)
    keys_stay = tokens > tile_tokens or head_tiles > 1
    # Decoding: one row of blocks a request. Where there is a thread block for each, its number tells which.
    one_row = tiles == batch and kv_heads * head_tiles == 1 and (seqlen_q is not None or batch == 1)
    each = key_blocks if one_row and 0 < workers == batch * key_blocks else 0
    return ScorePlan(
        columns, tile_tokens, tile_heads, head_tiles, workers, each, grain, fill_blocks, shift, splits, keys_stay
    )


def plan_for(p: ScoreProblem, seqlen_q: int | None, output: Tensor, sms: int) -> ScorePlan:
    """The plan of a problem."""
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
        sms=sms,
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
        *divisor(max(plan.each, 1)),
        row_step, most_keys, batch, q.shape[0], output.shape[1], k.shape[0] if paged else 0,
        p.page_table.shape[1] if p.page_table is not None else 0, k.shape[1], q.shape[1] // k.shape[1],
        _FORMATS.index(_FORMAT[q.dtype]), offset, p.q_offset is not None, p.causal, paged, p.reduce_heads,
        plan.head_tiles, plan.grain, plan.fill_blocks, plan.fill_shift, plan.fill_splits, plan.keys_stay,
        plan.each,
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
    plan = plan_for(problem, seqlen_q, output, _multiprocessors(index))
    program = program_for(problem.q.dtype, problem.k.dtype)
    function = programs.functions(program, index)[plan.entry]
    programs.launch(function, pack(problem, plan, output), plan.fill_blocks + plan.workers, _THREADS, device=index)
    calls[f"{program.name} {plan.entry}"] += 1


@lru_cache(maxsize=64)
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
