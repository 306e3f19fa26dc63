"""Launching the block selection: one kernel, no allocation, no read from the device."""

from __future__ import annotations

import struct
from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import programs
from .launch import device_facts, divisor
from .plan import MAX_GRID

if TYPE_CHECKING:
    from ...selection import Extent

_THREADS = {
    "msa_topk_tokens_64": 256, "msa_topk_tokens_256": 256, "msa_topk_64": 128, "msa_topk_256": 128,
    "msa_topk_tokens_1024": 256, "msa_topk_1024": 128, "msa_topk_cluster_8192": 128, "msa_topk_8192": 512,
    "msa_topk_65536": 1024,
}  # fmt: skip
"""Threads of a block, by entry point. A name ends in the blocks of the longest row."""
_CACHED = ("msa_topk_tokens_64", "msa_topk_tokens_256", "msa_topk_tokens_1024", "msa_topk_8192", "msa_topk_65536")
"""Those whose thread blocks read neighbouring words of a sector, which the first-level cache keeps for them."""
PROGRAM = programs.KernelProgram(
    "topk",
    ("common.cuh", "cluster.cuh", "narrow.cuh", "topk.cuh", "topk_warp.cu", "topk_block.cu", "topk_cluster.cu"),
    tuple(_THREADS),
    resident=tuple(None if entry in _CACHED else 0 for entry in _THREADS),
)
_PARAMS = struct.Struct("4Q7q6I10i")  # struct TopkParams of kernels/topk.cuh
_WARP_BLOCKS = 256  # blocks of the longest row that a warp selects from
_SECTOR = 8  # scores
_CLUSTER = 8  # thread blocks of a row that is a cluster's
MOST_CLUSTERS = 16
"""Rows of a call that are clusters'; more are faster without."""
_LISTED = 24  # blocks that are found among those that a list of 32 holds: as a rule some more reach its floor

calls: Counter[str] = Counter()
"""Launches, by entry point."""


def entry_for(blocks: int, by_tokens: bool = False, by_cluster: bool = False) -> str:
    """The smallest kernel whose rows hold as many blocks. `by_tokens`: see `reads_by_tokens`. `by_cluster`: a row may be a
    cluster's."""
    for entry in PROGRAM.entries:
        if (
            blocks <= int(entry.rpartition("_")[2])
            and ("tokens" in entry) <= by_tokens
            and ("cluster" in entry) <= by_cluster
        ):
            return entry
    raise ValueError(f"no kernel selects from {blocks} blocks")


def entry_of(max_score: Tensor, topk: int, begin: int, end: int, device: int) -> str:
    """The kernel of a call on that device. A few long rows are clusters', unless lists are too short for the blocks they want,
    or all are forced: a cluster's search is slow."""
    heads, blocks, tokens = max_score.shape
    by_tokens = reads_by_tokens(max_score)
    few = heads * tokens <= MOST_CLUSTERS and 0 < topk - begin - end <= _LISTED
    return entry_for(blocks, by_tokens, few and not by_tokens and device_facts(device).has_clusters)


def reads_by_tokens(max_score: Tensor) -> bool:
    """Whether a sector of memory holds the same block's scores for neighbouring tokens: its rows are then read together."""
    return max_score.stride(2) == 1 and max_score.stride(1) >= _SECTOR and max_score.shape[2] >= _SECTOR


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
    entry = entry_of(max_score, topk, begin, end, index)
    function = programs.functions(PROGRAM, index)[entry]
    params = pack(max_score, topk, extent, output, begin, end)
    threads = _THREADS[entry]
    cluster = _CLUSTER if "cluster" in entry else 1
    grid = -(-rows // (threads // 32)) if blocks <= _WARP_BLOCKS else rows * cluster
    programs.launch(function, params, grid, threads, device=index, cluster=cluster)
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
