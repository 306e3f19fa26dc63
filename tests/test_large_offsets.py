"""17. Offsets past 2^31, in every stride that can hold one (of the known ways to go wrong, see test_pitfalls).

On the CPU the memory is reserved and, but for the few pages in use, never touched: the operating system hands out
nothing for it. An engine that copied or scanned a cache would show here as gigabytes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import nvfp4_bytes
from cases import DTYPES, Case, Spec, build
from compare import assert_matches_oracle

BEYOND = 2**31


def reserve(nbytes: int, device: str) -> Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        pytest.skip(f"this machine does not even reserve {nbytes} bytes: {error}")


def moved_page(page: int, pages: int) -> int:
    """Where page `page` of a small case goes in a cache of `pages`: the far end, page 0 last."""
    return pages - 1 - page


def move_pages(case: Case, k: Tensor, v: Tensor) -> Case:
    """The same call on the caches `k` and `v`, with the small case's pages copied to their far ends."""
    pages = k.shape[0]
    small = case.args[1].shape[0]
    for p in range(small):
        for source, target in zip(case.args[1:3], (k, v), strict=True):
            target[moved_page(p, pages)].copy_(source[p])
    table = case.kwargs["page_table"]
    inside = (table >= 0) & (table < small)
    kwargs = {**case.kwargs, "page_table": torch.where(inside, pages - 1 - table, table)}
    moved = Case(case.spec, (case.args[0], k, v, case.args[3]), kwargs, case.keys, case.values)
    # The oracle keeps asking the small cache.
    moved.oracle_kwargs = {"page_table": table}
    return moved


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
def test_pages_past_the_offset(kv_dtype: str, device: str) -> None:
    case = build(Spec(kv_dtype=kv_dtype, lengths=(300, 129), kv_heads=1), device)
    size = DTYPES[kv_dtype].itemsize
    pages = BEYOND // (128 * 256) + 12
    storage = reserve(pages * 128 * 256 * size, device).view(DTYPES[kv_dtype]).view(pages, 1, 128, 256)
    moved = move_pages(case, storage[..., :128], storage[..., 128:])
    assert moved.args[1].stride(0) * (pages - 9) > BEYOND
    assert_matches_oracle(moved)


def test_kv_heads_past_the_offset(device: str) -> None:
    """Heads outermost: the stride of one head alone is past 2^31."""
    case = build(Spec(kv_dtype="fp8", lengths=(300, 129), kv_heads=2), device)
    pages = BEYOND // (128 * 128) + 1
    storage = reserve((pages + 20) * 128 * 128 + 20 * 128 * 128, device).view(DTYPES["fp8"])

    def view(start: int) -> Tensor:
        return storage.as_strided((10, 2, 128, 128), (128 * 128, pages * 128 * 128, 128, 1), start)

    moved = move_pages(case, view(0), view(10 * 128 * 128))
    assert moved.args[1].stride(1) > BEYOND
    assert_matches_oracle(moved)


def test_planar_pages_past_the_offset(device: str) -> None:
    """One layer of a pool of many, so that pages lie far apart: codes and scales alike."""
    case = build(Spec(kv_dtype="nvfp4", form="planar", lengths=(300, 129), kv_heads=2), device)
    n = case.args[1].shape[0]
    stride = -(-BEYOND // 4 // 256) * 256
    last = stride * (n - 1)
    assert last > BEYOND
    storage = reserve(last + nvfp4_bytes.planar_page_bytes(2), device)
    k, ks, v, vs = nvfp4_bytes.planar_views(storage, n, 2, stride)
    moved = move_pages(case, k, v)
    for name, target in (("k_scale", ks), ("v_scale", vs)):
        for p in range(n):
            target[moved_page(p, n)].copy_(case.kwargs[name][p])
        moved.kwargs[name] = target
    assert_matches_oracle(moved)


def test_tiled_scales_of_a_large_cache(device: str) -> None:
    case = build(Spec(kv_dtype="nvfp4", lengths=(300, 129), kv_heads=1), device)
    small = case.args[1].shape[0]
    pages = BEYOND // (128 * 64) + 12
    caches = [reserve(pages * 128 * 64, device).view(pages, 1, 128, 64) for _ in "kv"]
    moved = move_pages(case, caches[0], caches[1])
    for name in ("k_scale", "v_scale"):
        scale = reserve(pages * 1024, device).view(pages, 1024)
        tiles = case.kwargs[name][: small * 1024].view(small, 1024)  # one KV head: a page is one tile pair
        for p in range(small):
            scale[moved_page(p, pages)].copy_(tiles[p])
        moved.kwargs[name] = scale
    assert_matches_oracle(moved)


def test_flat_rows_past_the_offset(device: str) -> None:
    case = build(Spec(kv_dtype="fp8", form="flat", lengths=(300, 129), kv_heads=2), device)
    rows = case.args[1].shape[0]
    start = BEYOND // 512 + 5
    storage = reserve((start + rows) * 512, device).view(DTYPES["fp8"]).view(start + rows, 4, 128)
    k, v = storage[:, :2], storage[:, 2:]
    k[start:].copy_(case.args[1])
    v[start:].copy_(case.args[2])
    cu = case.kwargs["cu_seqlens_k"]
    kwargs = {**case.kwargs, "cu_seqlens_k": cu + start}
    moved = Case(case.spec, (case.args[0], k, v, case.args[3]), kwargs, case.keys, case.values)
    moved.oracle_kwargs = {"cu_seqlens_k": cu}
    assert (start + rows - 9) * k.stride(0) > BEYOND
    assert_matches_oracle(moved)


@pytest.mark.parametrize("order", ["tokens", "heads"])
def test_query_rows_past_the_offset(order: str, device: str) -> None:
    case = build(Spec(q_dtype="fp8", kv_dtype="fp8", lengths=(300, 129), kv_heads=1, group=2), device)
    far = BEYOND + 128
    storage = reserve(far + 2048, device).view(DTYPES["fp8"])
    strides = (far, 128, 1) if order == "tokens" else (128, far, 1)
    q = storage.as_strided((2, 2, 128), strides)
    q.copy_(case.args[0])
    case.args = (q, *case.args[1:])
    assert_matches_oracle(case)


@pytest.mark.gpu
@pytest.mark.slow
def test_output_past_the_offset() -> None:
    """tokens * heads * 128 above 2^31: the last rows are right. On the CPU so many rows would take too long."""
    heads, tokens = 64, BEYOND // (64 * 128) + 40
    case = build(Spec(kv_dtype="fp8", lengths=(1,) * 8, kv_heads=1, group=heads, topk=1, ids="all"), "cuda")
    table, lens = case.kwargs["page_table"], case.kwargs["seqused_k"]
    request = torch.arange(tokens, device="cuda") % 8
    q = case.args[0][request]
    out = torch.full((tokens, heads, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    case.kwargs.update(page_table=table[request].contiguous(), seqused_k=lens[request].contiguous())
    ids = case.args[3][:, request].contiguous()
    few, few_lse = build(case.spec, "cuda").run(force_fused=True)
    case.args = (q, *case.args[1:3], ids)
    got, lse = case.run(out=out, force_fused=True)
    for start in (0, tokens // 2 // 8 * 8, tokens - 48 - tokens % 8):
        assert torch.equal(got[start : start + 8], few)
        assert torch.equal(lse[start : start + 8], few_lse)
    assert not got[-40:].isnan().any()
