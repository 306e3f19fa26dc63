"""The CUDA engine: one kernel, compiled for the device at hand, one or two launches a call."""

from __future__ import annotations

from torch import Tensor

from ...contract import DecodeProblem


def run(problem: DecodeProblem, out: Tensor, lse: Tensor | None) -> None:
    """Serve one checked problem on the current stream of its device."""
    from . import launch

    launch.run(problem, out, lse)


def choose_and_run(
    problem: DecodeProblem, out: Tensor, lse: Tensor | None, scores: Tensor, sink_blocks: int, local_blocks: int
) -> bool:
    """The same by one kernel that also chooses the blocks, by their scores ``(heads, pages, tokens)``, and writes the
    problem's ids. Returns False, and has done nothing, where a selection before the attention is faster."""
    from . import launch

    return launch.run(problem, out, lse, launch.Choice(scores, sink_blocks, local_blocks))
