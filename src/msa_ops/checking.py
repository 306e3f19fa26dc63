"""Checking mode (``MSA_OPS_CHECK=1``): the device values that a call would otherwise skip or misread in silence."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .contract import BLOCK_SIZE, DecodeProblem


def check_values(problem: DecodeProblem) -> None:
    """Read lengths, tables and scales (one synchronisation) and raise `ValueError` for what engines would skip or misread.

    Ids of unselected or out-of-range blocks are normal and are not reported.
    """
    if problem.q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("MSA_OPS_CHECK=1 reads device values, which a CUDA graph capture forbids: unset it to capture")
    for name in ("k_global_scale", "v_global_scale"):
        t = getattr(problem, name)
        if t is not None and not math.isfinite(float(t)):
            raise ValueError(f"{name} must be finite, got {float(t)}")
    if problem.page_table is None:
        assert problem.cu_seqlens_k is not None
        starts = problem.cu_seqlens_k.cpu().long()
        if (starts[1:] < starts[:-1]).any() or int(starts[0]) < 0 or int(starts[-1]) > problem.k.shape[0]:
            raise ValueError(
                f"cu_seqlens_k must ascend from >= 0 to at most total_k = {problem.k.shape[0]}, got {starts.tolist()[:8]}..."
            )
        return
    assert problem.seqused_k is not None
    table, lens = problem.page_table.cpu(), problem.seqused_k.cpu().long()
    room = table.shape[1] * BLOCK_SIZE
    if bool((lens > room).any()):
        b = int((lens > room).nonzero()[0])
        raise ValueError(
            f"seqused_k[{b}] = {int(lens[b])} needs more than page_table's {table.shape[1]} pages ({room} keys)"
        )
    _check_selected_pages(problem, table, lens)


def _check_selected_pages(problem: DecodeProblem, table: Tensor, lens: Tensor) -> None:
    ids = problem.q2k_indices.cpu().long()
    request = torch.arange(problem.tokens) // problem.seqlen_q
    blocks = (lens[request] + BLOCK_SIZE - 1).clamp(min=0) // BLOCK_SIZE
    used = (ids >= 0) & (ids < blocks[None, :, None])
    if not bool(used.any()):
        return
    page = table.long()[request[None, :, None].expand_as(ids)[used], ids[used]]
    bad = (page < 0) | (page >= problem.k.shape[0])
    if bool(bad.any()):
        _, t, _ = used.nonzero()[int(bad.nonzero()[0])].tolist()
        raise ValueError(
            f"page_table[{int(request[t])}] names page {int(page[bad][0])} for a selected block, and the cache has "
            f"{problem.k.shape[0]} pages"
        )
