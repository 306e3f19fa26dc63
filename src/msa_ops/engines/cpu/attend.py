"""Attention of planned segments: in float32, and again in float64 for the few rows whose range float32 does not hold.

float32 is enough for every row of ordinary numbers, but formats and scales reach further. Products ``q * k`` of a bf16
cache pass 1e38 long before the *scaled* score does, sums of weights times values before the output does. Such rows are
found, before (`extreme_rows`) or by what they left behind (`attend`), and computed again, each by itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...contract import HEAD_DIM, KVFormat
from ...merge import merge_stacked_states
from .gather import KeyValueReader
from .plan import SegmentPlan

QUERY_EXPONENT = {KVFormat.BF16: -16, KVFormat.FP16: 0, KVFormat.FP8: 0, KVFormat.NVFP4: 0}
"""Queries are multiplied by two to this power, the scale of their scores by its inverse. Every bf16 query stays exact,
subnormals included."""
_LARGEST_QUERY = {KVFormat.BF16: 2.0**9, KVFormat.FP16: 2.0**100, KVFormat.FP8: 2.0**100, KVFormat.NVFP4: 2.0**100}
"""With query elements up to this, no partial sum of 128 products passes float32, whatever the cache holds: elements of
K are below 2**128 (bf16), 2**16 (fp16) or, as widened, 2 (fp8, NVFP4)."""
_LARGEST_LSE = 2.0**13
"""float32 holds scores up to this size to 5e-4, an error of that share in a weight."""
_SCALE_EXPONENT = 60
"""Score scales within two to plus or minus this power are ordinary: what underflows in a product stays far below 1."""


def is_ordinary_scale(scale: float) -> bool:
    """Whether scores with this scale (NaN: no) may be computed in float32."""
    return scale == 0 or 2.0**-_SCALE_EXPONENT <= abs(scale) <= 2.0**_SCALE_EXPONENT


def extreme_rows(queries: Tensor, kv_format: KVFormat) -> Tensor | None:
    """Rows, ``(rows,)`` bool, whose query elements are not finite or past `_LARGEST_QUERY`; None where there is none.

    Args:
        queries: ``(rows, group, 128)`` float32, not scaled.
    """
    limit = _LARGEST_QUERY[kv_format]
    least, largest = torch.aminmax(queries)
    if -limit <= float(least) and float(largest) <= limit:
        return None
    return ~(queries.abs().amax(dim=(1, 2)) <= limit)


def attend(
    queries: Tensor, reader: KeyValueReader, plan: SegmentPlan, chunks: list[tuple[int, int, int]], scale: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output and LSE of the rows of a plan, and which rows float32 may not have held.

    Args:
        queries: ``(rows, group, 128)`` float32, a row being a (token, KV head).

    Returns:
        ``(rows, group, 128)`` and ``(rows, group)`` float32; 0 and ``-inf`` where a row attends nothing. Last
        ``(rows,)`` bool, the rows to compute again, None where there is none.
    """
    rows, group, _ = queries.shape
    if plan.order is not None:
        queries = queries.index_select(0, plan.order.div(plan.per_row, rounding_mode="floor"))
    queries = queries[:, None]
    parts, part_lses = [], []
    for begin, end, keys in chunks:
        k, v = reader.read(begin, end, keys)
        part, part_lse = _segment_attention(queries[begin:end], k, v, scale)
        parts.append(part)
        part_lses.append(part_lse)
    if not parts:
        return queries.new_zeros((rows, group, HEAD_DIM)), queries.new_full((rows, group), -torch.inf), None
    state, lse = torch.cat(parts).squeeze(1), torch.cat(part_lses).squeeze(1)
    doubtful = _doubtful_segments(state, lse)
    if plan.order is not None:
        state = state.new_zeros((plan.total, group, HEAD_DIM)).index_copy_(0, plan.order, state)
        lse = lse.new_full((plan.total, group), -torch.inf).index_copy_(0, plan.order, lse)
        if doubtful is not None:
            doubtful = doubtful.new_zeros(plan.total).index_copy_(0, plan.order, doubtful)
    if doubtful is not None:
        doubtful = doubtful.view(rows, -1).any(dim=1)
    if plan.per_row > 1:
        shape = (rows, plan.per_row, group)
        state, lse = merge_stacked_states(state.view(*shape, HEAD_DIM), lse.view(shape), dim=1)
    # A sum takes a fraction of the time of isfinite. It may overflow by itself: then the second look finds nothing.
    if not math.isfinite(float(state.sum())):
        infinite = ~state.isfinite().flatten(1).all(dim=1)
        doubtful = infinite if doubtful is None else doubtful | infinite
    return state, lse, doubtful


def _doubtful_segments(outs: Tensor, lses: Tensor) -> Tensor | None:
    """Segments ``(n,)`` bool whose LSE ``(n, group)`` does not tell their weight; None where there is none.

    It is 0, with an output of 0, where torch's kernel has met scores that were all ``-inf`` (and, rarely, where all is
    well: that is only computed twice). Past `_LARGEST_LSE` it is too coarse.
    """
    least, largest = torch.aminmax(lses.abs())
    if float(least) > 0 and float(largest) <= _LARGEST_LSE:
        return None
    without_score = (lses == 0) & (outs == 0).all(dim=-1)
    return (without_score | ~(lses.abs() <= _LARGEST_LSE)).any(dim=1)


def attend_in_float64(
    queries: Tensor, reader: KeyValueReader, plan: SegmentPlan, chosen: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and LSE of the `chosen` rows of a plan, computed in float64 one segment at a time.

    Args:
        queries: ``(rows, group, 128)`` float32, not scaled.
        chosen: ``(rows,)`` bool; None for all rows.
        scale: of the scores, any number; not finite, it gives what IEEE arithmetic gives.

    Returns:
        The rows that have keys, ``(n,)`` int64, and their ``(n, group, 128)`` and ``(n, group)`` float32. Only an LSE
        can be past float32. Scores that are all ``-inf`` even in float64, by infinities in K or q, have no softmax: NaN.
    """
    segments: dict[int, list[int]] = {}
    order = range(plan.total) if plan.order is None else plan.order.tolist()
    flags = None if chosen is None else chosen.tolist()
    for position, place in enumerate(order):
        row = place // plan.per_row
        if flags is None or flags[row]:
            segments.setdefault(row, []).append(position)
    shape = (len(segments), *queries.shape[1:])
    state, lse = queries.new_empty(shape), queries.new_empty(shape[:2])
    for i, (row, positions) in enumerate(segments.items()):
        query = queries[row].double()
        parts = [_segment_in_float64(query, reader, plan, position, scale) for position in positions]
        outs, totals, largest = (torch.stack(t) for t in zip(*parts, strict=True))
        top = largest.amax(dim=0)
        weights = totals * torch.exp(largest - top).masked_fill_(largest == -math.inf, 0.0)
        total = weights.sum(dim=0)
        state[i] = (outs * (weights / total)[..., None]).sum(dim=0)  # NaN where the total is 0
        lse[i] = top + total.log()
    return torch.tensor(list(segments), dtype=torch.int64, device=queries.device), state, lse


def _segment_in_float64(
    query: Tensor, reader: KeyValueReader, plan: SegmentPlan, position: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One segment in float64: output ``(group, 128)``, and ``(group,)`` its sum of exponentials and largest score.

    An LSE in place of the last two would lose the sum beside a score of 1e30. Scores of 16-bit numbers are mostly exact
    before they are scaled, so equal keys have equal scores in any order of adding.
    """
    k, v = (t[0, 0].double() for t in reader.read(position, position + 1, plan.keys[position]))
    scores = (query @ k.T) * scale
    largest = scores.amax(dim=-1)
    weights = torch.exp(scores - largest[:, None].masked_fill(largest[:, None] == -math.inf, 0.0))
    total = weights.sum(dim=-1)
    # Divided first, so that the product stays among the values; a segment without weight gives 0.
    return (weights / total.masked_fill(total == 0, 1.0)[:, None]) @ v, total, largest


def _segment_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output and LSE of each segment, its arithmetic the same however many there are.

    torch shares the segments out among its threads, and each thread multiplies matrices alone. A single segment would
    be multiplied by all threads together, with sums in another order: it is computed twice, side by side. Four and five
    rows were seen to be multiplied in another order by a lone thread than by one of several (MKL, on an x86 CPU with AMX);
    eight are not, so few rows are made eight.
    """
    group = q.shape[2]
    if 4 <= group < 8:
        q = torch.nn.functional.pad(q, (0, 0, 0, 8 - group))
    single = len(q) == 1 and torch.get_num_threads() > 1
    if single:
        q, k, v = (t.expand(2, -1, -1, -1) for t in (q, k, v))
    # The public scaled_dot_product_attention ends here too, but keeps the LSE to itself.
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, scale=scale)
    if single:
        out, lse = out[:1], lse[:1]
    return out[:, :, :group], lse[:, :, :group]
