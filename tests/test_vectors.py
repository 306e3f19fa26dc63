"""The shared vectors: answers made by a program that shares no code with this project (tests/vectors/README.md)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compare import assert_lse_close, assert_rows_close
from msa_ops import msa_sparse_decode_attention
from vectors.load import load

VECTORS = sorted((Path(__file__).parent / "vectors").glob("*.npz"))
pytestmark = pytest.mark.usefixtures("poisoned_empty")


def test_all_vectors_are_here() -> None:
    assert len(VECTORS) == 24


@pytest.mark.parametrize("force_fused", [None, True, False])
@pytest.mark.parametrize("path", VECTORS, ids=lambda p: p.stem)
def test_vector(path: Path, force_fused: bool | None, device: str) -> None:
    args, kwargs, expected, expected_lse, _ = load(path, device)
    result = msa_sparse_decode_attention(*args, **kwargs, force_fused=force_fused)
    assert isinstance(result, tuple)
    out, lse = result
    assert out.dtype == (torch.float16 if args[0].dtype == torch.float16 else torch.bfloat16)
    assert_rows_close(out, expected)
    assert_lse_close(lse, expected_lse)
