"""The sides of a comparison: this package and published implementations, each on the same tensors.

Peers are imported only where they are asked for. One that cannot be imported, refuses a shape, or is wrong, is reported
so.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..contract import BLOCK_SIZE, HEAD_DIM
from .inputs import Call, Pool

PEERS = ("flashinfer", "vllm", "sdpa")
UNKNOWN = "unknown"
"""The version of what says none."""


class Refused(Exception):
    """A side cannot serve a shape; the message is its own words, or says which of its properties rules it out."""


@dataclass(frozen=True)
class Side:
    """One implementation: `run` computes a call into ``call.out``."""

    name: str
    run: Callable[[Call], object]
    version: str
    environment: dict[str, str | None] = field(default_factory=dict)

    @contextlib.contextmanager
    def in_environment(self) -> Iterator[None]:
        """Set (or, for `None`, unset) the side's environment variables for the while."""
        before = {name: os.environ.get(name) for name in self.environment}
        _set(self.environment)
        try:
            yield
        finally:
            _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@dataclass(frozen=True)
class Absent:
    """A peer that was asked for and is not here."""

    name: str
    reason: str


def ours(environment: dict[str, str | None] | None = None) -> Side:
    """This package, under the given environment variables."""
    from .. import msa_sparse_decode_attention

    def run(call: Call) -> None:
        decode_with(msa_sparse_decode_attention, call, call.q2k_indices)

    variables = environment or {}
    label = ",".join(f"{n}={'unset' if v is None else v}" for n, v in variables.items())
    version = _version("msa-ops")
    name = f"ours[{label}]" if label else "ours"
    return Side(name, run, "from source" if version == UNKNOWN else version, variables)


def scales_of(pool: Pool) -> dict[str, Any]:
    """The scale arguments of a call on `pool`: those that it has."""
    names = ("k_scale", "v_scale", "k_global_scale", "v_global_scale")
    return {name: value for name in names if (value := getattr(pool, name)) is not None}


def decode_with(decode: Callable[..., object], call: Call, ids: torch.Tensor) -> None:
    """Run a call with the selection `ids` through a function with flashinfer's signature."""
    decode(
        call.q,
        call.pool.k,
        call.pool.v,
        ids,
        page_table=call.page_table,
        seqused_k=call.seqused_k,
        seqlen_q=call.shape.seqlen_q,
        out=call.out,
        **scales_of(call.pool),
    )


def load_peers(names: tuple[str, ...]) -> list[Side | Absent]:
    """The peers by name, in that order. Raises `ValueError` for a name that is none of `PEERS`."""
    makers = {"flashinfer": _flashinfer, "vllm": _vllm, "sdpa": _sdpa}
    found: list[Side | Absent] = []
    for name in names:
        if name not in makers:
            raise ValueError(f"peers are {', '.join(PEERS)}, got {name!r}")
        try:
            found.append(makers[name]())
        except (Exception, SystemExit) as error:  # an import of a foreign package may raise anything
            found.append(Absent(name, f"{type(error).__name__}: {error}"))
    return found


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN


def _flashinfer() -> Side:
    """flashinfer.msa_ops: on compute capability 9.0 fp8 KV in halves of one cache, top-k 16, no LSE, no workspace."""
    decode = importlib.import_module("flashinfer.msa_ops").msa_sparse_decode_attention

    def run(call: Call) -> None:
        decode_with(decode, call, call.q2k_indices)

    return Side("flashinfer", run, _version("flashinfer-python"))


def _vllm() -> Side:
    """vLLM's Triton kernels for MiniMax M3: bf16 and fp8 KV in halves of one cache."""
    ops = importlib.import_module("vllm.models.minimax_m3.common.ops.sparse_attn")

    def run(call: Call) -> None:
        if call.pool.packed is None:
            raise Refused("its kernel reads bf16 and fp8 caches; it has no argument for NVFP4 block scales")
        ops.minimax_m3_sparse_attn_decode(
            call.q,
            call.pool.packed,
            call.q2k_indices,
            call.page_table,
            call.seqused_k,
            call.shape.num_kv_heads,
            HEAD_DIM**-0.5,
            call.out,
            call.shape.seqlen_q,
        )

    return Side("vllm", run, _version("vllm"))


def _sdpa() -> Side:
    """What torch alone does: gather the selected blocks, widen them, scaled_dot_product_attention. A sanity peer."""

    def run(call: Call) -> None:
        shape, pool = call.shape, call.pool
        if pool.packed is None:
            raise Refused("torch has no NVFP4 to bf16 conversion")
        if shape.seqlen_q != 1 or shape.lengths or shape.blocks or shape.context % BLOCK_SIZE or shape.context < 2048:
            raise Refused("the gathered keys are dense only for seqlen_q 1 and equal lengths of whole blocks")
        ids = call.q2k_indices.transpose(0, 1).long()  # (tokens, heads, topk)
        request = torch.arange(shape.tokens, device=ids.device)[:, None, None]
        pages = call.page_table[request, ids].long()
        head = torch.arange(shape.num_kv_heads, device=ids.device)[None, :, None]
        k, v = (_gather(t, pages, head).to(torch.bfloat16).flatten(2, 3) for t in (pool.k, pool.v))
        q = call.q.view(shape.tokens, shape.num_kv_heads, -1, HEAD_DIM)
        call.out.copy_(torch.nn.functional.scaled_dot_product_attention(q, k, v).flatten(1, 2))

    return Side("sdpa", run, torch.__version__)


def _gather(data: torch.Tensor, pages: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    if data.dtype == torch.bfloat16:
        return data[pages, head]
    return data.view(torch.uint8)[pages, head].view(data.dtype)
