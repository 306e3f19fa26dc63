"""Widening NVFP4 is exact: all 256 code bytes times all 254 finite scale bytes, through V and through K.

Every request attends one key, so its weight is exactly 1 and the output is the V row itself (at most 6 significant bits,
which bfloat16 holds); the query of head h is 1 at dim h alone, so its LSE is one element of K.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import nvfp4_bytes
from msa_ops import msa_sparse_decode_attention

SCALES = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
ROWS = 254 * 256 // 64
"""Rows that hold every pair of a code byte and a scale byte once: 8 groups of 8 code bytes each."""

SOFTMAX_SCALE = 4096.0  # an LSE is float32, with an absolute error too: a key of 2^-10 must stand out


def rows(shift: int) -> tuple[Tensor, Tensor]:
    """Codes ``(ROWS, 64)`` and scales ``(ROWS, 8)``, every combination once; `shift` moves them against each other."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(254).view(ROWS, 8, 8)
    scales = SCALES.repeat_interleave(32).view(ROWS, 8)
    return codes.flatten(1).roll(shift, 0), scales.roll(shift, 0)


def test_the_rows_hold_every_combination_once() -> None:
    codes, scales = rows(0)
    pairs = codes.view(ROWS, 8, 8).long() * 256 + scales.long()[:, :, None]
    assert pairs.unique().numel() == 254 * 256 == pairs.numel()


def in_pages(data: Tensor, fill: int) -> Tensor:
    """``(ROWS, n)`` as ``(ROWS, 1, 128, n)``: one page a row, the row first, everything behind it `fill`."""
    pages = torch.full((ROWS, 1, 128, data.shape[1]), fill, dtype=torch.uint8)
    pages[:, 0, 0] = data
    return pages


def call(form: str, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K and V values in float64, output and LSE."""
    (k, ks), (v, vs) = rows(0), rows(300)
    one_hot = torch.eye(128).bfloat16().expand(ROWS, 128, 128).contiguous()
    ids = torch.zeros(1, ROWS, 1, dtype=torch.int32)
    kwargs: dict[str, Any] = {"softmax_scale": SOFTMAX_SCALE, "return_softmax_lse": True}
    if form == "flat":
        need = nvfp4_bytes.tiled_size(ROWS)
        place = torch.full((need,), 0x7F, dtype=torch.uint8)
        args = [one_hot, k[:, None].contiguous(), v[:, None].contiguous(), ids]
        kwargs.update(
            cu_seqlens_k=torch.arange(ROWS + 1, dtype=torch.int32),
            k_scale=nvfp4_bytes.tile(ks, place),
            v_scale=nvfp4_bytes.tile(vs, place),
        )
    else:
        kwargs.update(
            page_table=torch.arange(ROWS, dtype=torch.int32)[:, None].contiguous(),
            seqused_k=torch.ones(ROWS, dtype=torch.int32),
        )
        k_pages, v_pages, k_scales, v_scales = (in_pages(t, 0x7F) for t in (k, v, ks, vs))
        if form == "planar":
            size = nvfp4_bytes.planar_page_bytes(1)
            storage = torch.zeros(ROWS * size, dtype=torch.uint8).to(device)
            views = nvfp4_bytes.planar_views(storage, ROWS, 1, size)
            for view, data in zip(
                views, (k_pages, k_scales, v_pages, nvfp4_bytes.interleave_v_scales(v_scales)), strict=True
            ):
                view.copy_(data)
            args = [one_hot, views[0], views[2], ids]
            kwargs.update(k_scale=views[1], v_scale=views[3])
        else:
            place = torch.full((nvfp4_bytes.tiled_size(ROWS * 128),), 0x7F, dtype=torch.uint8)
            args = [one_hot, k_pages, v_pages, ids]
            kwargs.update(
                k_scale=nvfp4_bytes.tile(k_scales.view(-1, 8), place),
                v_scale=nvfp4_bytes.tile(v_scales.view(-1, 8), place),
            )
    moved = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in kwargs.items()}
    out, lse = msa_sparse_decode_attention(*(t.to(device) for t in args), **moved)
    return nvfp4_bytes.values(k, ks), nvfp4_bytes.values(v, vs), out.cpu(), lse.cpu()


@pytest.mark.parametrize("form", ["tiled", "planar", "flat"])
def test_every_code_times_every_scale(form: str, device: str) -> None:
    keys, values, out, lse = call(form, device)
    assert torch.equal(out.double(), values[:, None].expand(-1, 128, -1))
    torch.testing.assert_close(lse.double(), keys * SOFTMAX_SCALE, rtol=1e-6, atol=0)
