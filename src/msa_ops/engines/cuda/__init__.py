"""The CUDA engine: one kernel, compiled for the device at hand, one or two launches a call."""

from __future__ import annotations

from torch import Tensor

from ...contract import DecodeProblem


def run(problem: DecodeProblem, out: Tensor, lse: Tensor | None) -> None:
    """Serve one checked problem on the current stream of its device."""
    from . import launch

    launch.run(problem, out, lse)
