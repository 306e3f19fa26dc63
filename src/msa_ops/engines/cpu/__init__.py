"""The CPU engine: vectorised torch, no mask, no widened or copied cache.

A call is cut into segments, the selected blocks of one (token, KV head), at most 16 of them (`plan`). Segments with
equally many visible keys are gathered together into buffers allocated once per call and widened to float32 (`gather`);
torch's fused CPU attention gives each one's output and LSE; segments of one row merge by LSE. Scores, weights and sums are
float32, weights are not rounded.

Every step treats a segment by itself, so a request's bits do not depend on what else is in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...contract import BLOCK_SIZE, HEAD_DIM, DecodeProblem
from ...merge import merge_stacked_states
from .gather import WIDENED_EXPONENT, KeyValueReader
from .plan import SEGMENT_BLOCKS, SegmentPlan, plan_segments

_CHUNK_BLOCKS = 64
"""Blocks of K, and as many of V, gathered at a time: 12 MB (bf16) to 18 MB (NVFP4) of buffers, which caches hold."""
_PLANNED_IDS = 1 << 17
"""Bound on the block ids planned at a time."""
_STATE_ROWS = 1 << 13
"""Bound on the (segment, query head) rows of float32 partial outputs held at a time: 4 MB."""


@torch.no_grad()
def run(problem: DecodeProblem, out: Tensor, lse: Tensor | None) -> None:
    """Write the attention output of `problem` to `out` and, if given, its natural-log LSE to `lse`.

    `force_fused`, `partial_dtype` and `workspace` change nothing here: partial results stay in float32 scratch of this call.
    """
    segments = -(-problem.topk // SEGMENT_BLOCKS)
    per_token = max(1, problem.num_kv_heads * problem.topk)
    step = max(1, min(_PLANNED_IDS // per_token, _STATE_ROWS // max(1, problem.num_qo_heads * segments)))
    if problem.k.shape[0] == 0 or problem.q.numel() == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return
    blocks = min(_CHUNK_BLOCKS, problem.tokens * problem.num_kv_heads * problem.topk)
    reader = KeyValueReader(problem, max(blocks, min(problem.topk, SEGMENT_BLOCKS)) * BLOCK_SIZE)
    score_scale, output_scale = _scales(problem)
    for begin in range(0, problem.tokens, step):
        end = min(begin + step, problem.tokens)
        state, state_lse = _attend(problem, reader, plan_segments(problem, begin, end), begin, end, score_scale)
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
    problem: DecodeProblem, reader: KeyValueReader, plan: SegmentPlan, begin: int, end: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and LSE of a range of tokens, ``(tokens * kv_heads, group, 128)`` and ``(tokens * kv_heads, group)``."""
    group = problem.group_size
    rows = (end - begin) * problem.num_kv_heads
    device = problem.q.device
    queries = problem.q[begin:end].to(torch.float32).reshape(rows, group, HEAD_DIM)
    state = torch.zeros((rows * plan.segments_per_row, group, HEAD_DIM), dtype=torch.float32, device=device)
    lse = torch.full(state.shape[:2], -torch.inf, dtype=torch.float32, device=device)
    of_count: dict[int, list[int]] = {}
    for segment, keys in enumerate(plan.keys):
        if keys:
            of_count.setdefault(keys, []).append(segment)
    for keys, members in of_count.items():
        at_once = max(1, _CHUNK_BLOCKS // min(plan.place.shape[1], -(-keys // BLOCK_SIZE)))
        for i in range(0, len(members), at_once):
            chosen = torch.tensor(members[i : i + at_once], device=device)
            heads = plan.heads.index_select(0, chosen)
            kv = reader.read(_places(problem, plan, chosen, keys), heads)[:, :, None, :keys]
            q = queries.index_select(0, chosen.div(plan.segments_per_row, rounding_mode="floor"))[:, None]
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
                q, kv[0], kv[1], 0.0, False, scale=scale
            )
            state.index_copy_(0, chosen, part[:, 0])
            lse.index_copy_(0, chosen, part_lse[:, 0])
    if plan.segments_per_row == 1:
        return state, lse
    shape = (rows, plan.segments_per_row, group)
    return merge_stacked_states(state.view(*shape, HEAD_DIM), lse.view(shape), dim=1)


def _places(problem: DecodeProblem, plan: SegmentPlan, chosen: Tensor, keys: int) -> Tensor:
    """Pages of the chosen segments, or for a flat cache their visible rows."""
    place = plan.place.index_select(0, chosen)
    if problem.page_table is not None:
        return place[:, : -(-keys // BLOCK_SIZE)]
    rows = (place[:, :, None] + torch.arange(BLOCK_SIZE, device=place.device)).flatten(1)
    if not plan.rows_below_zero:
        return rows[:, :keys]
    # Rare (a negative cu_seqlens_k): leave out the rows below 0, stably, so that the visible ones come first.
    order = (rows < 0).to(torch.uint8).argsort(dim=1, stable=True)
    return rows.gather(1, order)[:, :keys]
