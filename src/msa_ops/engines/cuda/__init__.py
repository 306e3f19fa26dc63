"""The CUDA engine."""

from __future__ import annotations

from torch import Tensor

from ...contract import DecodeProblem


def run(problem: DecodeProblem, out: Tensor, lse: Tensor | None) -> None:
    raise RuntimeError("msa_ops has no CUDA engine in this version: move the tensors to the CPU")
