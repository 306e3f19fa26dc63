"""Launching the block selection: one kernel, no allocation, no read from the device."""

from __future__ import annotations

import struct
from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import programs
from .launch import divisor
from .plan import MAX_GRID

if TYPE_CHECKING:
    from ...selection import Extent

PROGRAM = programs.KernelProgram("topk", ("topk.cu",), ("msa_topk_256", "msa_topk_8192", "msa_topk_65536"))
_PARAMS = struct.Struct("4Q7q6I10i")  # struct TopkParams of kernels/topk.cu
_WARP_BLOCKS = 256  # blocks of the longest row that a warp selects from
_BLOCK_THREADS = 1024
_FEW_ROWS = 1024  # so many warps find a multiprocessor with room in blocks of one

calls: Counter[str] = Counter()
"""Launches, by entry point."""


def entry_for(blocks: int) -> str:
    """The smallest kernel whose rows hold as many blocks."""
    return next(e for e in PROGRAM.entries if blocks <= int(e.rpartition("_")[2]))


def run(max_score: Tensor, topk: int, extent: Extent, output: Tensor, begin: int, end: int) -> None:
    """Serve checked arguments of `msa_topk_select` on the current stream of their device.

    `extent` is an int, ``(tokens,)`` int32 as given, or `TokenExtents`, from which the kernel works it out.
    """
    if output.numel() == 0:
        return
    index = max_score.device.index
    if index == torch.cuda.current_device():
        _run(max_score, topk, extent, output, begin, end, index)
    else:
        with torch.cuda.device(index):
            _run(max_score, topk, extent, output, begin, end, index)


def _run(max_score: Tensor, topk: int, extent: Extent, output: Tensor, begin: int, end: int, index: int) -> None:
    heads, blocks, tokens = max_score.shape
    rows = heads * tokens
    if rows > MAX_GRID:
        raise ValueError(f"max_score has {rows} (token, head) rows: more than one launch can serve ({MAX_GRID})")
    entry = entry_for(blocks)
    function = programs.functions(PROGRAM, index)[entry]
    params = pack(max_score, topk, extent, output, begin, end)
    if blocks > _WARP_BLOCKS:
        grid, threads = rows, _BLOCK_THREADS
    else:
        warps = 1 if rows <= _FEW_ROWS else 4
        grid, threads = -(-rows // warps), 32 * warps
    programs.launch(function, params, grid, threads, device=index)
    calls[entry] += 1


def pack(max_score: Tensor, topk: int, extent: Extent, output: Tensor, begin: int, end: int) -> bytes:
    """The kernels' parameter block."""
    heads, blocks, tokens = max_score.shape
    values: Tensor | None = None  # where extents come from
    offsets: Tensor | None = None
    given, from_lengths, seqlen_q, causal, offset = 0, False, 1, False, None
    if isinstance(extent, int):
        given = extent
    elif isinstance(extent, Tensor):
        values = extent
    else:
        values, from_lengths, seqlen_q, causal = extent.lengths, True, extent.seqlen_q, extent.causal
        offsets, offset = (extent.q_offset, None) if isinstance(extent.q_offset, Tensor) else (None, extent.q_offset)
    return _PARAMS.pack(
        max_score.data_ptr(), output.data_ptr(),
        0 if values is None else values.data_ptr(), 0 if offsets is None else offsets.data_ptr(),
        *max_score.stride(), output.stride(0), output.stride(1),
        0 if values is None else values.stride(0), 0 if offsets is None else offsets.stride(0),
        *divisor(tokens), *divisor(seqlen_q),
        heads * tokens, blocks, topk, begin, end, given, from_lengths, causal,
        offsets is not None or offset is not None, offset or 0,
    )  # fmt: skip
