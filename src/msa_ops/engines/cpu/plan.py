"""Which keys each (token, KV head) attends, as lists of blocks cut into segments.

Blocks are put in ascending order, each once, those with no visible key left out. Only a block that ends past the
visible keys is partial, and it is then the last: the visible keys of a segment are a *prefix* of its gathered rows. So
the engine needs no mask, and never looks at a row that is not attended.
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
    """The segments of a range of tokens that have keys to attend, longest first.

    Attributes:
        keys: visible keys of each segment, descending.
        place: ``(segments, blocks)`` int64, where a block lies: its page (paged) or its first row (flat). The blocks of
            a segment come first; what follows them is not to be read.
        head: ``(segments, 1)`` int64, the KV head.
        order: ``(segments,)`` int64, the segment's position in the order (token, KV head, segment of the row).
        row: ``(segments,)`` int64, the (token, KV head) it belongs to.
        total: segments of all rows, those without keys included.
        per_row: segments of each (token, KV head).
    """

    keys: list[int]
    place: Tensor
    head: Tensor
    order: Tensor
    row: Tensor
    total: int
    per_row: int

    def chunks(self, max_blocks: int) -> list[tuple[int, int, int]]:
        """Runs ``(begin, end, keys)`` of segments with equally many keys, at most `max_blocks` blocks together."""
        result = []
        begin = 0
        while begin < len(self.keys):
            keys = self.keys[begin]
            end = begin
            last = begin + max(1, max_blocks // min(self.place.shape[1], -(-keys // BLOCK_SIZE)))
            while end < min(last, len(self.keys)) and self.keys[end] == keys:
                end += 1
            result.append((begin, end, keys))
            begin = end
        return result


def plan_segments(problem: DecodeProblem, begin: int, end: int) -> SegmentPlan:
    """Plan tokens `begin` to `end`. All arithmetic on positions and rows is int64."""
    ids = problem.q2k_indices[:, begin:end].transpose(0, 1).long()
    request = torch.arange(begin, end, device=ids.device) // problem.seqlen_q
    low, limit, first = _visible_range(problem, request, begin, end)
    start = ids * BLOCK_SIZE
    used = (ids >= 0) & (start < limit) & (start + BLOCK_SIZE > low)
    if problem.page_table is not None:
        table = problem.page_table
        used &= ids < table.shape[1]
        place = table[request[:, None, None], torch.where(used, ids, 0)].long()
        used &= (place >= 0) & (place < problem.k.shape[0])
    else:
        place = first + start
    ids, place = _ascending_once(torch.where(used, ids, _NO_BLOCK), place)
    start = ids * BLOCK_SIZE
    keys = (torch.minimum(start + BLOCK_SIZE, limit) - torch.maximum(start, low)).clamp_(min=0)
    return _cut(keys, place)


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
    low = (-first).clamp(min=0)  # rows below 0 do not exist
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


def _cut(keys: Tensor, place: Tensor) -> SegmentPlan:
    _, kv_heads, topk = keys.shape
    blocks = min(topk, SEGMENT_BLOCKS)
    per_row = -(-topk // blocks)
    if per_row * blocks != topk:
        tail = (0, per_row * blocks - topk)
        keys, place = torch.nn.functional.pad(keys, tail), torch.nn.functional.pad(place, tail)
    counts, order = keys.reshape(-1, blocks).sum(-1).sort(descending=True, stable=True)
    total = counts.numel()
    nonempty = int((counts > 0).sum())
    order = order[:nonempty]
    row = order.div(per_row, rounding_mode="floor")
    place = place.reshape(-1, blocks).index_select(0, order)
    return SegmentPlan(counts[:nonempty].tolist(), place, row.remainder(kv_heads)[:, None], order, row, total, per_row)
