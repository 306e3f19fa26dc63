"""Quantise, append, decode: an NVFP4 cache against exact arithmetic from the first number to the last."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import msa_ops
from compare import LSE_TOLERANCE, ROW_TOLERANCE
from test_nvfp4 import E2M1, E4M3, reference_group

HEADS, GROUP = 2, 4
K_SCALE, V_SCALE = 0.0113, 0.37


def exact(x: Tensor, scale: float) -> Tensor:
    """What a cache with this global scale holds of `x`, in float64, group by group of Python's fractions."""
    sf = float(torch.tensor(1 / scale, dtype=torch.float32))
    found = []
    for group in x.float().cpu().reshape(-1, 16).tolist():
        codes, byte = reference_group(group, sf)
        found.append([float(E2M1[code & 7] * E4M3[byte]) * (-1 if code & 8 else 1) for code in codes])
    return torch.tensor(found, dtype=torch.float64).view(x.shape) * float(torch.tensor(scale, dtype=torch.float32))


@pytest.mark.parametrize("layout", ["planar", "tiled"])
def test_decoded_tokens_are_those_of_an_exact_quantiser(layout: str, device: str) -> None:
    g = torch.Generator().manual_seed(11)
    cache = msa_ops.PagedKVCache(
        4, HEADS, kv_format="nvfp4", layout=layout, device=device, k_global_scale=K_SCALE, v_global_scale=V_SCALE
    )
    requests = [cache.add_request(), cache.add_request()]
    whole: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for counts in ((21, 6), (1, 1), (0, 2), (1, 1)):
        # A factor for each row: groups whose scale is subnormal, usual, and at its largest.
        k, v = (
            torch.randn(sum(counts), HEADS, 128, generator=g)
            * 2.0 ** torch.randint(-8, 5, (sum(counts), HEADS, 1), generator=g)
            for _ in "kv"
        )
        k, v = k.bfloat16(), v.bfloat16()
        cache.append(requests, k.to(device), v.to(device), list(counts))
        for mine, new_k, new_v in zip(whole, k.split(counts), v.split(counts), strict=True):
            mine.append((new_k, new_v))
    q = torch.randn(2, HEADS * GROUP, 128, generator=g).bfloat16()
    ids = torch.zeros(HEADS, 2, 1, dtype=torch.int32, device=device)
    arguments = cache.arguments(requests)
    out, lse = msa_ops.msa_sparse_decode_attention(
        q.to(device), arguments.pop("k"), arguments.pop("v"), ids, return_softmax_lse=True, **arguments
    )
    for t, parts in enumerate(whole):
        keys, values = (
            exact(torch.cat(x), s) for x, s in zip(zip(*parts, strict=True), (K_SCALE, V_SCALE), strict=True)
        )
        for h in range(HEADS * GROUP):
            scores = keys[:, h // GROUP] @ q[t, h].double() / 128**0.5
            want = torch.softmax(scores, 0) @ values[:, h // GROUP]
            assert float((out[t, h].cpu().double() - want).norm() / want.norm()) <= ROW_TOLERANCE[out.dtype]
            assert abs(float(lse[t, h]) - float(torch.logsumexp(scores, 0))) <= LSE_TOLERANCE * max(
                1, float(scores.abs().max())
            )
