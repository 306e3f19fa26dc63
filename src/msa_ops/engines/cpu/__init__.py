"""The CPU engine: vectorised torch, no mask, no widened or copied cache.

A call is cut into segments, the selected blocks of one (token, KV head), at most 16 of them (`plan`). Segments with
equally many visible keys are gathered together into buffers allocated once per call and widened to float32 (`gather`);
torch's fused CPU attention gives each one's output and LSE; segments of one row merge by LSE. Scores, weights and sums
are float32, and weights are not rounded.

Every step treats a segment by itself, so a request's bits do not depend on what else is in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...contract import HEAD_DIM, DecodeProblem
from ...merge import merge_stacked_states
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
    score_scale, output_scale = _scales(problem)
    for begin in range(0, problem.tokens, step):
        end = min(begin + step, problem.tokens)
        plan = plan_segments(problem, begin, end)
        reader.load_plan(plan)
        queries = problem.q[begin:end].to(torch.float32).reshape(-1, problem.group_size, HEAD_DIM)
        state, state_lse = _attend(queries, reader, plan, plan.chunks(chunk), score_scale)
        out[begin:end].copy_(state.mul_(output_scale).view(out[begin:end].shape))
        if lse is not None:
            lse[begin:end].copy_(state_lse.view(lse[begin:end].shape))


def _scales(problem: DecodeProblem) -> tuple[float, float]:
    """Factor of the scores and of the output, powers of two from widening included."""
    exponent = WIDENED_EXPONENT[problem.kv_format]
    score, output = (2.0**exponent * s for s in (problem.softmax_scale, problem.output_scale))
    if problem.k_global_scale is not None:
        score *= float(problem.k_global_scale)
    if problem.v_global_scale is not None:
        output *= float(problem.v_global_scale)
    return score, output


def _attend(
    queries: Tensor, reader: KeyValueReader, plan: SegmentPlan, chunks: list[tuple[int, int, int]], scale: float
) -> tuple[Tensor, Tensor]:
    """Output and LSE of the rows of a plan.

    Args:
        queries: ``(rows, group, 128)`` float32, a row being a (token, KV head).

    Returns:
        ``(rows, group, 128)`` and ``(rows, group)`` float32; 0 and ``-inf`` where a row attends nothing.
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
    if plan.order is None:
        return torch.cat(parts).squeeze(1), torch.cat(part_lses).squeeze(1)
    state = queries.new_zeros((plan.total, group, HEAD_DIM))
    lse = queries.new_full((plan.total, group), -torch.inf)
    if parts:
        state.index_copy_(0, plan.order, torch.cat(parts).squeeze(1))
        lse.index_copy_(0, plan.order, torch.cat(part_lses).squeeze(1))
    if plan.per_row == 1:
        return state, lse
    shape = (rows, plan.per_row, group)
    return merge_stacked_states(state.view(*shape, HEAD_DIM), lse.view(shape), dim=1)


def _segment_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output and LSE of each segment, its arithmetic the same however many there are.

    torch shares the segments out among its threads, and each thread multiplies matrices alone. A single segment would
    be multiplied by all threads together, with sums in another order: it is computed twice, side by side.
    """
    single = len(q) == 1 and torch.get_num_threads() > 1
    if single:
        q, k, v = (t.expand(2, -1, -1, -1) for t in (q, k, v))
    # The public scaled_dot_product_attention ends here too, but keeps the LSE to itself.
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, scale=scale)
    return (out[:1], lse[:1]) if single else (out, lse)
