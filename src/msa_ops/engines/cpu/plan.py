"""Which keys each (token, KV head) attends, as lists of blocks cut into segments.

Blocks are put in ascending order, each once, those with no visible key left out. Only a block that ends past the visible
keys is partial, and it is then the last: the visible keys of a segment are a *prefix* of its gathered rows, so the engine
needs no mask and never looks at a row that is not attended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...contract import BLOCK_SIZE, DecodeProblem

SEGMENT_BLOCKS = 16
"""Blocks per segment. Longer selections are cut at fixed places, so that a request's bits depend on nothing else; short
enough that one long row still gives every thread work."""

_NO_BLOCK = 2**40
"""Sorts last; past every limit, and times the block size still far from the end of int64."""


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The segments of a range of tokens, in the order (token, KV head, segment).

    Attributes:
        keys: ``(segments,)`` visible keys of each, a list.
        place: ``(segments, blocks)`` int64, where a block lies: its page (paged) or its first row (flat). The blocks of a
            segment come first; what follows them is not to be read.
        heads: ``(segments, 1)`` int64, the KV head.
        segments_per_row: segments of each (token, KV head).
        rows_below_zero: whether a block may begin below row 0 of a flat cache, which only a negative `cu_seqlens_k` does.
    """

    keys: list[int]
    place: Tensor
    heads: Tensor
    segments_per_row: int
    rows_below_zero: bool


def plan_segments(problem: DecodeProblem, begin: int, end: int) -> SegmentPlan:
    """Plan tokens `begin` to `end`. All arithmetic on positions and rows is int64."""
    ids = problem.q2k_indices[:, begin:end].transpose(0, 1).long()
    request = torch.arange(begin, end, device=ids.device) // problem.seqlen_q
    low, limit, first = _visible_range(problem, request, begin, end)
    used = (ids >= 0) & (ids * BLOCK_SIZE < limit) & ((ids + 1) * BLOCK_SIZE > low)
    if problem.page_table is not None:
        table = problem.page_table
        used &= ids < table.shape[1]
        place = table[request[:, None, None], torch.where(used, ids, 0)].long()
        used &= (place >= 0) & (place < problem.k.shape[0])
    else:
        place = first + ids * BLOCK_SIZE
    ids, place = _ascending_once(torch.where(used, ids, _NO_BLOCK), place)
    start = ids * BLOCK_SIZE
    keys = (torch.minimum(start + BLOCK_SIZE, limit) - torch.maximum(start, low)).clamp_(min=0)
    return _cut(problem, keys, place, rows_below_zero=bool((low > 0).any()))


def _visible_range(problem: DecodeProblem, request: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per token, shaped (tokens, 1, 1): first and one past the last visible key, and the flat row of key 0."""
    first = torch.zeros_like(request)
    if problem.cu_seqlens_k is not None:
        bounds = problem.cu_seqlens_k.long()
        first = bounds[request]
        length = bounds[request + 1] - first
    else:
        assert problem.seqused_k is not None
        length = problem.seqused_k.long()[request]
    limit = length
    if problem.causal:
        token = torch.arange(begin, end, device=request.device) % problem.seqlen_q
        if problem.q_offset is not None:
            position = problem.q_offset.long()[request] + token
        elif problem.q_offset_int is not None:
            position = token + problem.q_offset_int
        else:
            position = length - problem.seqlen_q + token
        limit = torch.minimum(length, position + 1)
    low = (-first).clamp(min=0)
    if problem.cu_seqlens_k is not None:
        limit = torch.minimum(limit, problem.k.shape[0] - first)
    return low[:, None, None], limit.clamp(min=0)[:, None, None], first[:, None, None]


def _ascending_once(ids: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each list of blocks, drop repeats, unused ones last."""
    ids, order = ids.sort(-1)
    repeat = (ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] != _NO_BLOCK)
    if bool(repeat.any()):
        ids[..., 1:].masked_fill_(repeat, _NO_BLOCK)
        ids, again = ids.sort(-1)
        order = order.gather(-1, again)
    return ids, place.gather(-1, order)


def _cut(problem: DecodeProblem, keys: Tensor, place: Tensor, *, rows_below_zero: bool) -> SegmentPlan:
    tokens, kv_heads, topk = keys.shape
    blocks = min(topk, SEGMENT_BLOCKS)
    segments = -(-topk // blocks)
    if segments * blocks != topk:
        tail = (0, segments * blocks - topk)
        keys, place = torch.nn.functional.pad(keys, tail), torch.nn.functional.pad(place, tail)
    heads = torch.arange(kv_heads, device=keys.device).repeat_interleave(segments).repeat(tokens)
    counts: list[int] = keys.reshape(-1, blocks).sum(-1).tolist()
    return SegmentPlan(counts, place.reshape(-1, blocks), heads[:, None], segments, rows_below_zero)
