"""Stand-ins for the packages that the benchmark compares with, put where it imports them from."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from msa_ops import msa_sparse_decode_attention

FLASHINFER = "flashinfer.msa_ops"
VLLM = "vllm.models.minimax_m3.common.ops.sparse_attn"


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
