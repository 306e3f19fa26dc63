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
"""Unused entries become this and what follows: all different, past every limit, and times the block size still far from
the end of int64."""


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The segments of a range of tokens that have keys to attend, longest first.

    Attributes:
        keys: visible keys of each segment, descending.
        place: ``(segments, blocks)`` int64, where a block lies: its page (paged) or its first row (flat). The blocks of
            a segment come first; what follows them is not to be read.
        head: ``(segments, 1)`` int64, the KV head.
        order: ``(segments,)`` int64, the segment's position in the order (token, KV head, segment of the row); None
            where that is the order they are in and none is left out.
        total: segments of all rows, those without keys included.
        per_row: segments of each (token, KV head).
    """

    keys: list[int]
    place: Tensor
    head: Tensor
    order: Tensor | None
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
    """Plan tokens `begin` to `end`. All arithmetic on positions and rows is int64.

    Its time is the cost of starting operations, not of their work, so it starts few.
    """
    ids = problem.q2k_indices[:, begin:end].transpose(0, 1).to(torch.int64, memory_format=torch.contiguous_format)
    request = _requests(problem, begin, end, ids.device)
    first, limit = _visible_range(problem, request, begin, end)
    start = ids * BLOCK_SIZE
    used = (start >= 0) & (start < limit)
    if problem.page_table is not None:
        if isinstance(request, slice):
            place = problem.page_table[request].gather(1, (ids * used).view(len(ids), -1)).view(ids.shape).long()
        else:
            place = problem.page_table[request[:, None, None], ids * used].long()
        least, largest = torch.aminmax(place)
        if int(least) < 0 or int(largest) >= problem.k.shape[0]:
            used &= (place >= 0) & (place < problem.k.shape[0])
    else:
        assert first is not None
        place = start + first
        used &= place > -BLOCK_SIZE
    ids, place = _ascending_once(ids, used, place)
    start = ids * BLOCK_SIZE
    keys = (limit - start).clamp_(0, BLOCK_SIZE)
    if first is not None:  # rows below 0 do not exist
        keys = (keys - (-first - start).clamp_(0, BLOCK_SIZE)).clamp_(min=0)
    return _cut(keys, place)


def _requests(problem: DecodeProblem, begin: int, end: int, device: torch.device) -> Tensor | slice:
    """The request of each token, as an index: a slice where every token has a request of its own."""
    if problem.seqlen_q == 1:
        return slice(begin, end)
    return torch.arange(begin, end, device=device).div_(problem.seqlen_q, rounding_mode="floor")


def _visible_range(
    problem: DecodeProblem, request: Tensor | slice, begin: int, end: int
) -> tuple[Tensor | None, Tensor]:
    """Per token, shaped (tokens, 1, 1): the row of key 0 (None if paged), and one past the last visible key."""
    first = None
    if problem.cu_seqlens_k is not None:
        bounds = problem.cu_seqlens_k.long()
        first = bounds[:-1][request]
        length = bounds[1:][request] - first
        limit = torch.minimum(length, problem.k.shape[0] - first)
    else:
        assert problem.seqused_k is not None and problem.page_table is not None
        length = problem.seqused_k.long()[request]
        limit = length.clamp(max=problem.page_table.shape[1] * BLOCK_SIZE)
    right_aligned = problem.q_offset is None and problem.q_offset_int is None
    if problem.causal and not (right_aligned and problem.seqlen_q == 1):
        token = torch.arange(begin, end, device=limit.device).remainder_(problem.seqlen_q)
        if problem.q_offset is not None:
            position = problem.q_offset.long()[request] + token
        elif problem.q_offset_int is not None:
            position = token + problem.q_offset_int
        else:
            position = length - problem.seqlen_q + token
        limit = torch.minimum(limit, position + 1)
    return None if first is None else first[:, None, None], limit[:, None, None]


def _ascending_once(ids: Tensor, used: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each list of blocks, unused ones last, repeats being unused."""
    if bool(used.all()) and bool((ids[..., 1:] > ids[..., :-1]).all()):
        return ids, place  # what a selection over a long context gives
    unused = torch.arange(_NO_BLOCK, _NO_BLOCK + ids.shape[-1], device=ids.device)
    ids, order = torch.where(used, ids, unused).sort(-1)
    repeat = ids[..., 1:] == ids[..., :-1]
    if bool(repeat.any()):
        ids[..., 1:] = torch.where(repeat, unused[1:], ids[..., 1:])
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
    sums = keys.view(-1, blocks).sum(-1)
    place = place.view(-1, blocks)
    counts = sums.tolist()
    total = len(counts)
    if per_row == 1 and min(counts) == max(counts) > 0:
        head = torch.arange(total, device=keys.device).remainder_(kv_heads)
        return SegmentPlan(counts, place, head[:, None], None, total, 1)
    sums, order = sums.sort(descending=True, stable=True)
    nonempty = total - counts.count(0)
    order = order[:nonempty]
    head = order.div(per_row, rounding_mode="floor").remainder_(kv_heads)
    return SegmentPlan(sums[:nonempty].tolist(), place.index_select(0, order), head[:, None], order, total, per_row)
