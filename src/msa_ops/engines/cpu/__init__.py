"""The CPU engine: vectorised torch, no mask, no widened or copied cache.

A call is cut into segments, the selected blocks of one (token, KV head), at most 16 of them (`plan`). Segments with
equally many visible keys are gathered together into buffers allocated once per call and widened to float32 (`gather`);
torch's fused CPU attention gives each one's output and LSE; segments of one row merge by LSE. Scores, weights and sums
are float32, and weights are not rounded; rows of numbers past what float32 holds on the way are computed again in
float64 (`attend`).

Every step treats a segment by itself, so a request's bits do not depend on what else is in the batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...contract import HEAD_DIM, DecodeProblem
from .attend import QUERY_EXPONENT, attend, attend_in_float64, extreme_rows, is_ordinary_scale
from .gather import WIDENED_EXPONENT, KeyValueReader
from .plan import SEGMENT_BLOCKS, SegmentPlan, plan_segments

_CHUNK_BLOCKS = 64
"""Blocks of K, and as many of V, gathered at a time for up to four threads: 10 MB (bf16) to 13 MB (NVFP4) of buffers,
which caches hold. At least one segment."""
_MAX_CHUNK_BLOCKS = 160
"""The bound for many threads: 34 MB of buffers."""
_PLANNED_IDS = 1 << 17
"""Bound on the block ids planned at a time."""
_STATE_ROWS = 1 << 13
"""Bound on the (segment, query head) rows of float32 partial outputs held at a time: 4 MB."""


@torch.no_grad()
def run(problem: DecodeProblem, out: Tensor, lse: Tensor | None) -> None:
    """Write the attention output of `problem` to `out` and, if given, its natural-log LSE to `lse`.

    `force_fused`, `partial_dtype` and `workspace` change nothing here: partial results stay in float32 scratch of this
    call.
    """
    no_pages = problem.page_table is not None and problem.page_table.shape[1] == 0
    if problem.k.shape[0] == 0 or problem.q.numel() == 0 or no_pages:
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return
    per_row = -(-problem.topk // SEGMENT_BLOCKS)
    step = min(_PLANNED_IDS // (problem.num_kv_heads * problem.topk), _STATE_ROWS // (problem.num_qo_heads * per_row))
    step = max(1, step)
    chunk = min(max(_CHUNK_BLOCKS, SEGMENT_BLOCKS * torch.get_num_threads()), _MAX_CHUNK_BLOCKS)
    chunk = min(chunk, problem.tokens * problem.num_kv_heads * problem.topk)
    reader = KeyValueReader(problem, chunk)
    score_scale, output_factors = _score_scale(problem), _output_factors(problem)
    for begin in range(0, problem.tokens, step):
        end = min(begin + step, problem.tokens)
        plan = plan_segments(problem, begin, end)
        reader.load_plan(plan)
        queries = problem.q[begin:end].to(torch.float32).reshape(-1, problem.group_size, HEAD_DIM)
        state, state_lse = _attend_any(problem, queries, reader, plan, chunk, score_scale)
        for factor in output_factors:
            state.mul_(factor)
        if not math.isfinite(output_factors[0]):  # 0 times it is NaN
            _clear_rows_without_keys(state, plan)
        out[begin:end].copy_(state.view(out[begin:end].shape))
        if lse is not None:
            lse[begin:end].copy_(state_lse.view(lse[begin:end].shape))


def _score_scale(problem: DecodeProblem) -> float:
    """Factor of the products of queries and widened keys. A Python float: it may be past float32."""
    scale = problem.softmax_scale * 2.0 ** WIDENED_EXPONENT[problem.kv_format]
    return scale if problem.k_global_scale is None else scale * float(problem.k_global_scale)


def _output_factors(problem: DecodeProblem) -> tuple[float, ...]:
    """Factors of sums of widened values: one, or two where float32 does not hold their product."""
    scale = problem.output_scale * 2.0 ** WIDENED_EXPONENT[problem.kv_format]
    if problem.v_global_scale is not None:
        scale *= float(problem.v_global_scale)
    if scale == 0 or not math.isfinite(scale) or 2.0**-126 <= abs(scale) < 2.0**127:
        return (scale,)
    mantissa, exponent = math.frexp(scale)
    return math.ldexp(mantissa, exponent // 2), 2.0 ** (exponent - exponent // 2)


def _attend_any(
    problem: DecodeProblem, queries: Tensor, reader: KeyValueReader, plan: SegmentPlan, chunk: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and LSE of the rows of a plan: ``(rows, group, 128)`` and ``(rows, group)`` float32.

    float32 where it serves, float64 for other rows, or for all where the scale is extreme.
    """
    again: Tensor | None = None
    if is_ordinary_scale(scale):
        exponent = QUERY_EXPONENT[problem.kv_format]
        again = extreme_rows(queries, problem.kv_format)
        small = queries * 2.0**exponent if exponent else queries
        state, lse, doubtful = attend(small, reader, plan, plan.chunks(chunk), scale * 2.0**-exponent)
        if doubtful is not None:
            again = doubtful if again is None else again | doubtful
        if again is None:
            return state, lse
    else:
        state, lse = torch.zeros_like(queries), queries.new_full(queries.shape[:2], -torch.inf)
    rows, exact, exact_lse = attend_in_float64(queries, reader, plan, again, scale)
    return state.index_copy_(0, rows, exact), lse.index_copy_(0, rows, exact_lse)


def _clear_rows_without_keys(state: Tensor, plan: SegmentPlan) -> None:
    if plan.order is not None:
        empty = torch.ones(len(state), dtype=torch.bool, device=state.device)
        empty[plan.order.div(plan.per_row, rounding_mode="floor")] = False
        state[empty] = 0.0
