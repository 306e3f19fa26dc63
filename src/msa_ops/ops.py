"""The torch.library op: schema, fake, and the choice of an engine by device.

The schema carries the tensors of a `DecodeProblem` and its numbers; `DecodeProblem` is rebuilt from them without checks.
The op writes caller-owned outputs and returns nothing, so that nothing is allocated inside.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .contract import DecodeProblem
from .workspace import MSASparseAttentionWorkspace

_LIBRARY: Any = torch.library.Library("msa_ops", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "sparse_decode_attention("
    "Tensor q, Tensor k, Tensor v, Tensor q2k_indices, Tensor? page_table, Tensor? seqused_k, Tensor? cu_seqlens_k, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? k_global_scale, Tensor? v_global_scale, Tensor? q_offset, "
    "Tensor(a!)? workspace, SymInt seqlen_q, bool causal, float softmax_scale, float output_scale, SymInt? q_offset_int, "
    "bool? force_fused, ScalarType? partial_dtype, Tensor(b!) out, Tensor(c!)? lse) -> ()",
    tags=(torch.Tag.needs_exact_strides,),
)


def run(problem: DecodeProblem, out: Tensor, lse: Tensor | None) -> None:
    """Dispatch one checked problem to the engine of its device; writes `out` and, if given, `lse`."""
    p = problem
    torch.ops.msa_ops.sparse_decode_attention.default(
        p.q, p.k, p.v, p.q2k_indices, p.page_table, p.seqused_k, p.cu_seqlens_k, p.k_scale, p.v_scale, p.k_global_scale,
        p.v_global_scale, p.q_offset, p.workspace, p.seqlen_q, p.causal, p.softmax_scale, p.output_scale, p.q_offset_int,
        p.force_fused, p.partial_dtype, out, lse,
    )  # fmt: skip


def with_scratch(problem: DecodeProblem, workspace: MSASparseAttentionWorkspace) -> DecodeProblem:
    """The problem with the workspace grown to what its route needs. An op cannot grow a tensor that is handed to it."""
    if not problem.q.is_cuda or problem.q.numel() == 0 or torch.compiler.is_compiling():
        return problem
    from .engines.cuda import launch

    return replace(problem, workspace=workspace.reserve(launch.scratch_bytes(problem)))


def _cpu(*args: Any) -> None:
    from .engines import cpu

    cpu.run(DecodeProblem(*args[:-2]), args[-2], args[-1])


def _cuda(*args: Any) -> None:
    from .engines import cuda

    out, lse = args[-2:]
    cuda.run(DecodeProblem(*args[:-2]), out, lse)
    # A kernel writes unseen by autograd; the CPU engine's operations tell it themselves.
    torch.autograd.graph.increment_version(out if lse is None else (out, lse))


def _fake(*args: Any) -> None:
    return None


_LIBRARY.impl("sparse_decode_attention", _cpu, "CPU")
_LIBRARY.impl("sparse_decode_attention", _cuda, "CUDA")
torch.library.register_fake("msa_ops::sparse_decode_attention", _fake, lib=_LIBRARY)
