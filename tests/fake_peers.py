"""Stand-ins for the packages that the benchmark compares with, put where it imports them from."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from msa_ops import msa_proxy_score, msa_sparse_decode_attention, msa_topk_select

FLASHINFER = "flashinfer.msa_ops"
VLLM = "vllm.models.minimax_m3.common.ops.sparse_attn"
VLLM_INDEX = "vllm.models.minimax_m3.common.ops.index_topk"


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """Make ``import name`` give a module that holds `functions`."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:i]))
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(sys.modules[name]).update(functions)


def right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flashinfer that gives the right result."""
    install(monkeypatch, FLASHINFER, msa_sparse_decode_attention=msa_sparse_decode_attention)


def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flashinfer whose softmax scale is a tenth off."""

    def decode(*args: Any, **kwargs: Any) -> Any:
        return msa_sparse_decode_attention(*args, softmax_scale=1.1 * 128**-0.5, **kwargs)

    install(monkeypatch, FLASHINFER, msa_sparse_decode_attention=decode)


def refusing(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """A vLLM that serves nothing and says so in `words`."""

    def decode(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(words)

    install(monkeypatch, VLLM, minimax_m3_sparse_attn_decode=decode)


def with_indexers(monkeypatch: pytest.MonkeyPatch, *, worst: bool = False) -> None:
    """A flashinfer and a vLLM that serve a whole step. With `worst` this vLLM takes the worst blocks, not the best."""

    def attend(q: Tensor, packed: Tensor, ids: Tensor, table: Tensor, lengths: Tensor, *rest: Any) -> None:
        heads, scale, out, seqlen_q = rest
        assert heads == packed.shape[1]
        k, v = packed.split(128, -1)
        where = {"page_table": table, "seqused_k": lengths, "seqlen_q": seqlen_q}
        msa_sparse_decode_attention(q, k, v, ids, softmax_scale=scale, out=out, **where)

    def score(
        index_q: Tensor, index_k: Tensor, table: Tensor, lengths: Tensor, longest: int, init: int, local: int, *rest: Any,
        score_out: Tensor,
    ) -> Tensor:  # fmt: skip
        heads, seqlen_q, most = rest
        assert (init, local, heads, seqlen_q) == (0, 1, index_q.shape[1], most) and index_k.dim() == 3
        starts = torch.arange(0, index_q.shape[0] + 1, seqlen_q, dtype=torch.int32)
        found = msa_proxy_score(index_q, index_k[:, None], starts, page_table=table, seqused_k=lengths)
        found[:, (longest - 1) // 128] = 1e29  # how a forced block is marked
        score_out.copy_(found.transpose(1, 2))
        return score_out

    def choose(*arguments: Any, out: Tensor, score_out: Tensor) -> Tensor:
        *inputs, topk, init, local, heads, seqlen_q, most = arguments
        scores = score(*inputs, init, local, heads, seqlen_q, most, score_out=score_out)
        ids = scores.topk(min(topk, scores.shape[-1]), -1, largest=not worst).indices  # best first, not ascending
        out.fill_(-1)[..., : ids.shape[-1]] = ids.int()
        return out

    install(
        monkeypatch, FLASHINFER, msa_sparse_decode_attention=msa_sparse_decode_attention,
        msa_proxy_score=msa_proxy_score, msa_topk_select=msa_topk_select,
    )  # fmt: skip
    install(monkeypatch, VLLM, minimax_m3_sparse_attn_decode=attend)
    install(monkeypatch, VLLM_INDEX, minimax_m3_index_decode_score=score, minimax_m3_index_decode=choose)


def die(*_: Any) -> None:
    """End a process as one that is killed for its memory does: without a word."""
    os._exit(9)
