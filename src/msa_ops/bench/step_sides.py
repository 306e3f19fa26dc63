"""The sides of preset step: each with its own entry points for scoring, selecting and attending.

A side runs only what it has: vLLM scores and selects in one call, and so has no selection to time alone. Where a side has
no call for the whole step, the step is its parts one after the other, in one graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from .peers import Absent, Refused, Side, decode_with, ours, scales_of
from .step_inputs import StepCall

PARTS = ("score", "select", "score+select", "attend", "step")
APART = "in three calls"
"""Our own step made of the three calls, measured beside the one call."""

Part = Callable[[StepCall], object]


@dataclass(frozen=True)
class StepSide:
    """`parts` by their names in `PARTS`; `missing` says in a word why others are not there."""

    side: Side
    parts: Mapping[str, Part]
    missing: Mapping[str, str] = field(default_factory=dict)
    scores_by_token: bool = False
    ids_by_head: bool = False

    @property
    def name(self) -> str:
        return self.side.name

    def run(self, part: str) -> Part:
        """The function of a part; one that refuses where the part is missing."""
        if part in self.parts:
            return self.parts[part]

        def refuse(_: StepCall) -> None:
            raise Refused(self.missing[part])

        return refuse

    def call(self, call: StepCall) -> StepCall:
        """`call` with results laid out as this side writes them."""
        return call.with_buffers(scores_by_token=self.scores_by_token, ids_by_head=self.ids_by_head)


def our_step(environment: dict[str, str | None] | None = None) -> tuple[StepSide, StepSide]:
    """This package: `msa_decode_step` for the whole, and the same in three calls, which has that part alone."""
    import msa_ops

    def score(c: StepCall) -> None:
        msa_ops.msa_proxy_score(c.index_q, c.index_k, c.cu_seqlens_q, **_score_arguments(c))

    def select(c: StepCall, scores: Tensor) -> None:
        msa_ops.msa_topk_select(scores, c.shape.topk, output=c.ids_out.transpose(0, 1), force_end_blocks=1)

    def attend(c: StepCall, ids: Tensor) -> None:
        decode_with(msa_ops.msa_sparse_decode_attention, c.call, ids)

    side = ours(environment)
    apart = Side(f"{side.name} {APART}", side.run, side.version, side.environment)
    parts = _apart(score, select, attend)
    return (
        StepSide(side, parts | {"step": lambda c: _one_call(msa_ops.msa_decode_step, c)}, scores_by_token=True),
        StepSide(apart, {"step": parts["step"]}, scores_by_token=True),
    )


def _one_call(step: Callable[..., object], c: StepCall) -> None:
    call, pool = c.call, c.call.pool
    step(
        call.q, pool.k, pool.v, c.index_q, c.index_k, topk=c.shape.topk, page_table=call.page_table,
        seqused_k=call.seqused_k, seqlen_q=c.shape.seqlen_q, local_blocks=1, sink_blocks=0, out=call.out,
        q2k_out=c.ids_out.transpose(0, 1), score_out=c.score_out, **scales_of(pool),
    )  # fmt: skip


def _apart(
    score: Part, select: Callable[[StepCall, Tensor], object], attend: Callable[[StepCall, Tensor], object]
) -> dict[str, Part]:
    """The parts of a side that has all three calls."""

    def score_and_select(c: StepCall) -> None:
        score(c)
        select(c, c.score_out)

    def whole(c: StepCall) -> None:
        score_and_select(c)
        attend(c, c.ids_out)

    return {
        "score": score,
        "select": lambda c: select(c, c.scores),
        "score+select": score_and_select,
        "attend": lambda c: attend(c, c.call.q2k_indices),
        "step": whole,
    }


def _score_arguments(c: StepCall) -> dict[str, Any]:
    return {
        "page_table": c.call.page_table, "seqused_k": c.call.seqused_k, "max_seqlen_q": c.shape.seqlen_q,
        "max_k_tiles": c.shape.max_pages, "output": c.score_out,
    }  # fmt: skip


def load_step_peers(sides: Sequence[Side]) -> list[StepSide | Absent]:
    """The step of each peer that was found for the attention."""
    makers = {"flashinfer": _flashinfer, "vllm": _vllm}
    found: list[StepSide | Absent] = []
    for side in sides:
        if side.name not in makers:
            found.append(StepSide(side, {"attend": _attend_alone(side)}, dict.fromkeys(PARTS, "it has no indexer")))
            continue
        try:
            found.append(makers[side.name](side))
        except (Exception, SystemExit) as error:  # an import of a foreign package may raise anything
            found.append(Absent(side.name, f"{type(error).__name__}: {error}"))
    return found


def _attend_alone(side: Side) -> Part:
    return lambda c: side.run(c.call)


def _flashinfer(side: Side) -> StepSide:
    """flashinfer.msa_ops. On compute capability 9.0 its attention wants ids by head and its selection writes them by
    token, so that its step holds a copy of the ids. Its selection gets each token's extent, made beforehand: with a forced last
    block and no extents, 0.7.4 reads memory that is not its own."""
    ops = importlib.import_module("flashinfer.msa_ops")

    def score(c: StepCall) -> None:
        ops.msa_proxy_score(c.index_q, c.index_k, c.cu_seqlens_q, **_score_arguments(c))

    def select(c: StepCall, scores: Tensor) -> None:
        ops.msa_topk_select(scores, c.shape.topk, c.extents, c.ids_out.transpose(0, 1), force_end_blocks=1)

    def attend(c: StepCall, ids: Tensor) -> None:
        decode_with(ops.msa_sparse_decode_attention, c.call, ids.contiguous())

    return StepSide(side, _apart(score, select, attend))


def _vllm(side: Side) -> StepSide:
    """vLLM's Triton kernels for MiniMax M3. Forced blocks are marked in the scores, and ids come in order of them."""
    index = importlib.import_module("vllm.models.minimax_m3.common.ops.index_topk")

    def inputs(c: StepCall) -> tuple[Any, ...]:
        call, longest = c.call, max(c.shape.request_lengths)
        return c.index_q, c.index_k[:, 0], call.page_table, call.seqused_k, longest

    def sizes(c: StepCall) -> tuple[int, ...]:
        """No first block forced in, one last block, KV heads, query length and its bound."""
        return 0, 1, c.shape.num_kv_heads, c.shape.seqlen_q, c.shape.seqlen_q

    def score(c: StepCall) -> None:
        index.minimax_m3_index_decode_score(*inputs(c), *sizes(c), score_out=c.score_out.transpose(1, 2))

    def score_and_select(c: StepCall) -> None:
        index.minimax_m3_index_decode(
            *inputs(c), c.shape.topk, *sizes(c), out=c.ids_out, score_out=c.score_out.transpose(1, 2)
        )

    def attend(c: StepCall, ids: Tensor) -> None:
        side.run(replace(c.call, q2k_indices=ids))

    def whole(c: StepCall) -> None:
        score_and_select(c)
        attend(c, c.ids_out)

    parts: dict[str, Part] = {
        "score": score, "score+select": score_and_select, "attend": lambda c: attend(c, c.call.q2k_indices),
        "step": whole,
    }  # fmt: skip
    missing = {"select": "its decode indexer scores and selects in one call"}
    return StepSide(side, parts, missing, scores_by_token=True, ids_by_head=True)
