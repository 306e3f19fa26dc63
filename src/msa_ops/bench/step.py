"""Preset step: what a decode step costs with its indexer, in parts and as a whole.

Each part is timed alone, with a cold L2; the whole runs as it would be served, so that what a part leaves in L2 serves the
next. The selection alone gets random scores. Every part is checked first: scores and output against float64, selections
for being best by the exact scores, the step's output for the blocks that the step itself chose.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .exact import exact_output, relative_error
from .inputs import Shape, make_pool
from .measure import Prepared
from .peers import Absent
from .presets import Job
from .step_inputs import (
    StepCall,
    StepPool,
    exact_scores,
    index_dtype,
    index_page_bytes,
    make_index,
    make_step_calls,
    own_blocks,
    part_bytes,
    score_fault,
    selection_fault,
)
from .step_sides import PARTS, StepSide, load_step_peers, our_step

if TYPE_CHECKING:
    from .runner import Runner

_SAMPLED_TOKENS = 6
_LEAST_CALLS = 2


@dataclass(frozen=True)
class _Sample:
    """Tokens of one call that are looked at, with their exact scores."""

    index: int
    tokens: Tensor
    own: Tensor
    scores: Tensor
    tolerance: Tensor


class StepRunner:
    """Measures the jobs of preset step for a `Runner`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._pool: tuple[tuple[str, int], StepPool] | None = None
        self._sides: list[StepSide] | None = None

    def release_pool(self) -> None:
        self._pool = None

    def rows(self, job: Job, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """A row for each part of one job, its name as the row's label."""
        shape = job.shape
        pool = self._pool_of(shape, [j.shape for j in jobs if j.preset == "step"])
        calls = make_step_calls(shape, pool, self._count(shape), self._runner.generator)
        samples = self._samples(calls)
        # A side's parts share its results: they are checked one after the other, before any is timed.
        buffers = {side.name: [side.call(call) for call in calls] for side in self.sides()}
        found = []
        for part in PARTS:
            sides, ready = self._gate(part, buffers, samples)
            self._runner.time(ready, sides)
            nbytes = sum(part_bytes(part, call) for call in calls) / len(calls)
            row = self._runner.row(replace(job, label=part), nbytes, len(calls), sides, pool.kv.pages)
            found.append(row | {"index_dtype": str(index_dtype(shape.kv)).removeprefix("torch.")})
        return found

    def sides(self) -> list[StepSide]:
        """Ours, each followed by itself in three calls, and the peers; one without its indexer is named as absent."""
        if self._sides is None:
            environments = self._runner.options.sweep or ({},)
            self._sides = list(itertools.chain.from_iterable(our_step(dict(e)) for e in environments))
            for side in load_step_peers(self._runner.peers):
                if isinstance(side, Absent):
                    self._runner.absent.append(Absent(f"{side.name} with its indexer", side.reason))
                else:
                    self._sides.append(side)
        return self._sides

    def _pool_of(self, shape: Shape, shapes: Sequence[Shape]) -> StepPool:
        key = (shape.kv, shape.num_kv_heads)
        if self._pool is None or self._pool[0] != key:
            from .runner import POOL_BYTES

            runner = self._runner
            self.release_pool()
            runner.release_pool()
            pages = max(s.used_pages for s in (*shapes, shape) if (s.kv, s.num_kv_heads) == key)
            if not runner.options.smoke:
                pages = max(pages, -(-POOL_BYTES // shape.page_bytes))
            pages = runner.pages_that_fit(pages, shape.page_bytes + index_page_bytes(shape.kv))
            pool = make_pool(shape.kv, pages, shape.num_kv_heads, runner.generator)
            self._pool = key, StepPool(pool, make_index(shape.kv, pages, runner.generator))
        return self._pool[1]

    def _count(self, shape: Shape) -> int:
        """Calls of one graph: about 0.4 ms of work, 2 to 24 calls."""
        from .runner import GRAPH_TARGET_US

        if self._runner.options.calls is not None:
            return self._runner.options.calls
        nbytes = shape.batch * shape.max_pages * index_page_bytes(shape.kv)
        nbytes += shape.tokens * shape.num_kv_heads * shape.topk * 256 * shape.row_bytes
        return max(_LEAST_CALLS, min(24, round(GRAPH_TARGET_US / (10 + nbytes / self._runner.ceiling * 1e6))))

    def _samples(self, calls: Sequence[StepCall]) -> list[_Sample]:
        """Some tokens of the first and the last call, the first and the last token among them."""
        runner, count = self._runner, calls[0].shape.tokens
        found = []
        for i in sorted({0, len(calls) - 1}):
            drawn = torch.randperm(count, device=runner.device, generator=runner.generator)[: _SAMPLED_TOKENS - 2]
            tokens = torch.tensor(sorted({0, count - 1, *drawn.tolist()}), device=runner.device)
            scores, tolerance = exact_scores(calls[i], tokens)
            found.append(_Sample(i, tokens, own_blocks(calls[i], tokens), scores, tolerance))
        return found

    def _gate(
        self, part: str, buffers: dict[str, list[StepCall]], samples: Sequence[_Sample]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, Prepared]]:
        sides: dict[str, dict[str, Any]] = {}
        ready: dict[str, Prepared] = {}
        for side in self.sides():
            if part not in side.parts and part not in side.missing:
                continue  # ours in three calls is there for the step alone
            calls = buffers[side.name]
            result = self._checked(part, side, calls, samples)
            if isinstance(result, dict):
                sides[side.name] = result
            else:
                ready[side.name], error = result
                sides[side.name] = {"status": "ok", "error": float(f"{error:.3g}")}
        return sides, ready

    def _checked(
        self, part: str, side: StepSide, calls: list[StepCall], samples: Sequence[_Sample]
    ) -> tuple[Prepared, float] | dict[str, Any]:
        def poison() -> None:
            for call in calls:
                call.poison()

        prepared = self._runner.replayed(side.name, side.side, side.run(part), calls, poison)
        if isinstance(prepared, dict):
            return prepared
        worst = 0.0
        for sample in samples:
            fault, error = _fault(part, calls[sample.index], sample)
            if fault:
                return {"status": "wrong", "reason": fault}
            worst = max(worst, error)
        return prepared, worst


def _fault(part: str, call: StepCall, sample: _Sample) -> tuple[str, float]:
    """What is wrong with the results of a part, or nothing; and the row error of its output, where it has one."""
    from .runner import WRONG_ABOVE

    tokens, ids = sample.tokens, call.ids_out[:, sample.tokens]
    if part == "score":
        found = call.score_out[..., tokens].transpose(1, 2)
        return score_fault(found, sample.scores, sample.tolerance, sample.own), 0.0
    if part == "select":
        return selection_fault(ids, call.scores[..., tokens].transpose(1, 2), sample.own), 0.0
    if part in ("score+select", "step"):
        # Two scores near each other may each be off towards the other.
        fault = selection_fault(ids, sample.scores, sample.own, 2 * sample.tolerance)
        if fault or part == "score+select":
            return fault, 0.0
    selected = call.call if part == "attend" else replace(call.call, q2k_indices=call.ids_out)
    error = relative_error(call.call.out[tokens], exact_output(selected, tokens))
    unwritten = int(call.call.out.isnan().sum())
    if unwritten:
        return f"{unwritten} elements are NaN or unwritten", error
    return ("" if error <= WRONG_ABOVE else f"row error {error:.3g} over {WRONG_ABOVE}"), error
