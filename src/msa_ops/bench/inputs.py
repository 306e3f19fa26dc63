"""What is measured: shapes, KV pools filled on the device, and distinct calls drawn from a pool.

A pool is much larger than the L2 cache, and every call of a CUDA graph gets its own page tables, selections and
queries, so that no call finds its keys in the cache. A pool is filled once per (KV format, KV heads) and serves all
batch sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract import BLOCK_SIZE, FP8, HEAD_DIM, SCALES_PER_ROW, KVFormat
from .sizes import row_bytes

KV_KINDS = ("fp8", "bf16", "nvfp4-planar", "nvfp4-tiled")
"""KV formats with their layout: fp8 and bf16 are the K and V halves of one packed cache."""
# Exact in float32, and unequal to one, so that a side that drops them is seen to be wrong.
_NVFP4_GLOBAL_SCALES = (0.875, 1.125)
_FILL_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class Shape:
    """One decode step. `lengths` (keys per request) and `blocks` (selected blocks per request) default to `context`
    for every request and to as many blocks as `topk` and the length allow."""

    kv: str
    batch: int
    num_qo_heads: int
    num_kv_heads: int
    seqlen_q: int = 1
    context: int = 32768
    topk: int = 16
    overlap: bool = False
    lengths: tuple[int, ...] | None = None
    blocks: tuple[int, ...] | None = None

    @property
    def tokens(self) -> int:
        return self.batch * self.seqlen_q

    @property
    def heads(self) -> str:
        return f"{self.num_qo_heads}/{self.num_kv_heads}"

    @property
    def request_lengths(self) -> tuple[int, ...]:
        return self.lengths or (self.context,) * self.batch

    @property
    def max_pages(self) -> int:
        """Columns of the page table."""
        return -(-max(self.context, *self.request_lengths) // BLOCK_SIZE)

    @property
    def used_pages(self) -> int:
        """Pages that the requests of one call own together."""
        return sum(-(-n // BLOCK_SIZE) for n in self.request_lengths)

    @property
    def row_bytes(self) -> int:
        """Bytes of one K (or V) row, scales included."""
        return row_bytes(KVFormat(self.kv.partition("-")[0]))

    @property
    def page_bytes(self) -> int:
        return self.num_kv_heads * BLOCK_SIZE * 2 * self.row_bytes


@dataclass(frozen=True)
class Pool:
    """A paged KV cache. `packed` is the ``(pages, kv_heads, 128, 256)`` tensor whose halves are `k` and `v`."""

    kv: str
    k: Tensor
    v: Tensor
    packed: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_global_scale: float | None = None
    v_global_scale: float | None = None

    @property
    def pages(self) -> int:
        return self.k.shape[0]


@dataclass(frozen=True)
class Call:
    """The arguments of one call. `unique_bytes` counts each K and V row that it must read once."""

    shape: Shape
    pool: Pool
    q: Tensor
    q2k_indices: Tensor
    page_table: Tensor
    seqused_k: Tensor
    out: Tensor
    unique_bytes: int

    def inputs(self) -> tuple[Tensor, ...]:
        """What a side reads and may not change; the pool is too large to be compared."""
        return self.q, self.q2k_indices, self.page_table, self.seqused_k


def make_pool(kv: str, pages: int, num_kv_heads: int, generator: torch.Generator) -> Pool:
    """Fill a pool: normal values for bf16 and fp8, random codes and scales of 2^-3 to 2^-1 for NVFP4."""
    device = generator.device
    if kv == "nvfp4-planar":
        return _planar_pool(pages, num_kv_heads, generator)
    if kv == "nvfp4-tiled":
        shape = (pages, num_kv_heads, BLOCK_SIZE, HEAD_DIM // 2)
        k, v = (torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(2))
        size = pages * num_kv_heads * BLOCK_SIZE * SCALES_PER_ROW
        scales = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        for codes, scale in zip((k, v), scales, strict=True):
            _random_bytes(codes, generator)
            _random_scales(scale, generator)
        return Pool(kv, k, v, None, scales[0], scales[1], *_NVFP4_GLOBAL_SCALES)
    dtype = torch.bfloat16 if kv == "bf16" else FP8
    packed = torch.empty((pages, num_kv_heads, BLOCK_SIZE, 2 * HEAD_DIM), dtype=dtype, device=device)
    flat = packed.view(-1)
    for start in range(0, flat.numel(), _FILL_ELEMENTS):
        part = flat[start : start + _FILL_ELEMENTS]
        part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=device, generator=generator))
    return Pool(kv, packed[..., :HEAD_DIM], packed[..., HEAD_DIM:], packed)


def _planar_pool(pages: int, heads: int, generator: torch.Generator) -> Pool:
    """Pages of ``[K data | K scale | V data | V scale]``, ``heads * 18,432`` bytes each."""
    data, scale = heads * BLOCK_SIZE * HEAD_DIM // 2, heads * BLOCK_SIZE * SCALES_PER_ROW
    storage = torch.empty((pages, 2 * (data + scale)), dtype=torch.uint8, device=generator.device)
    _random_bytes(storage, generator)
    views = []
    for start in (0, data + scale):
        codes = storage[:, start : start + data].view(pages, heads, BLOCK_SIZE, HEAD_DIM // 2)
        scales = storage[:, start + data : start + data + scale].view(pages, heads, BLOCK_SIZE, SCALES_PER_ROW)
        _random_scales(scales, generator)
        views += [codes, scales]
    k, k_scale, v, v_scale = views
    return Pool("nvfp4-planar", k, v, None, k_scale, v_scale, *_NVFP4_GLOBAL_SCALES)


def _random_bytes(t: Tensor, generator: torch.Generator) -> None:
    t.view(-1).view(torch.int32).random_(-(2**31), 2**31 - 1, generator=generator)


def _random_scales(t: Tensor, generator: torch.Generator) -> None:
    """e4m3 bytes 0x20 to 0x2f: 0.125 to 0.47, which makes values of about unit size."""
    t.random_(0x20, 0x30, generator=generator)


def make_calls(shape: Shape, pool: Pool, count: int, generator: torch.Generator, *, q_scale: float = 1.0) -> list[Call]:
    """`count` calls of one shape with distinct queries, selections and page tables, on the generator's device.

    The outputs are parts of one NaN-filled tensor.
    """
    device = generator.device
    full = (count, shape.tokens, shape.num_qo_heads, HEAD_DIM)
    q = torch.randn(full, dtype=torch.bfloat16, device=device, generator=generator) * q_scale
    out = torch.full(full, torch.nan, dtype=torch.bfloat16, device=device)
    ids = select_blocks(shape, count, generator)
    lengths = torch.tensor(shape.request_lengths, dtype=torch.int32, device=device)
    size = unique_bytes(shape, ids, lengths)
    tables = _page_tables(shape, pool.pages, count, generator)
    return [Call(shape, pool, q[i], ids[i], next(tables), lengths.clone(), out[i], size[i]) for i in range(count)]


def _page_tables(shape: Shape, pages: int, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Page tables whose owned pages are distinct within a call and, as far as the pool reaches, between calls."""
    device = generator.device
    need = shape.used_pages
    columns = torch.arange(shape.max_pages, device=device)
    owned = torch.tensor([-(-n // BLOCK_SIZE) for n in shape.request_lengths], device=device)
    used = columns[None, :] < owned[:, None]
    order, position = torch.empty(0, dtype=torch.int64, device=device), 0
    for _ in range(count):
        if position + need > order.numel():
            repeats = -(-need // pages)  # only where the pool is smaller than the batch
            order = torch.cat([torch.randperm(pages, device=device, generator=generator) for _ in range(repeats)])
            position = 0
        table = torch.randint(pages, used.shape, dtype=torch.int32, device=device, generator=generator)
        table[used] = order[position : position + need].to(torch.int32)
        position += need
        yield table


def select_blocks(shape: Shape, count: int, generator: torch.Generator) -> list[Tensor]:
    """Ascending block ids ``(kv_heads, tokens, topk)`` per call, -1 at the end, each token's own block among them.

    Without `overlap` every (token, head) draws its own blocks. With it, a request's next token keeps 3/4 to all but one
    of the previous token's blocks (12 to 15 of 16) and draws the others anew.
    """
    blocks, device = shape.max_pages, generator.device
    lengths = torch.tensor(shape.request_lengths, device=device).repeat(count)
    wanted = torch.full((shape.batch,), shape.topk) if shape.blocks is None else torch.tensor(shape.blocks)
    wanted = wanted.to(device).repeat(count)
    columns = torch.arange(blocks, device=device)
    previous: Tensor | None = None
    chosen = []
    for i in range(shape.seqlen_q):
        own = (lengths - shape.seqlen_q + i).clamp(min=0) // BLOCK_SIZE
        score = torch.rand((shape.num_kv_heads, lengths.numel(), blocks), device=device, generator=generator)
        if previous is not None:
            score = _prefer_previous(score, previous, own, shape.topk, generator)
        score = score.masked_fill(columns > own[:, None], -1.0).masked_fill(columns == own[:, None], 8.0)
        ids = score.argsort(dim=-1, descending=True)[..., : shape.topk]
        rank = torch.arange(ids.shape[-1], device=device)
        live = (rank < wanted[:, None]) & (rank <= own[:, None])
        chosen.append(_ascending(ids, live, shape.topk))
        if shape.overlap:
            mask = torch.zeros(score.shape, dtype=torch.bool, device=device)
            previous = mask.scatter(2, ids, live.expand_as(ids))
    # (kv_heads, count * batch, seqlen_q, topk): the tokens of a call lie together
    ids = torch.stack(chosen, 2).view(shape.num_kv_heads, count, shape.tokens, shape.topk)
    return [t.contiguous() for t in ids.unbind(1)]


def _prefer_previous(score: Tensor, previous: Tensor, own: Tensor, topk: int, generator: torch.Generator) -> Tensor:
    """Raise the scores of the previous token's blocks that are kept, and sink those that are not."""
    own_column = torch.arange(score.shape[2], device=score.device) == own[:, None]
    candidates = previous & ~own_column
    rank = torch.where(candidates, score, -2.0).argsort(dim=-1, descending=True).argsort(dim=-1)
    shared = torch.randint(topk * 3 // 4, topk, (*score.shape[:2], 1), device=score.device, generator=generator)
    kept = candidates & (rank < shared - 1)  # the token's own block is the last one shared
    return torch.where(kept, score + 2, torch.where(candidates, -0.5, score))


def _ascending(ids: Tensor, live: Tensor, topk: int) -> Tensor:
    sentinel = torch.iinfo(torch.int32).max
    padded = torch.full((*ids.shape[:2], topk), sentinel, dtype=torch.int32, device=ids.device)
    padded[..., : ids.shape[2]] = torch.where(live, ids, sentinel).to(torch.int32)
    padded = padded.sort(dim=-1).values
    return padded.masked_fill(padded == sentinel, -1)


def unique_bytes(shape: Shape, ids: list[Tensor], lengths: Tensor) -> list[int]:
    """Bytes of K and V that each call must read: a block that several tokens of a request select counts once."""
    rows = []
    for t in ids:
        per_request = t.view(shape.num_kv_heads, shape.batch, -1).sort(dim=-1).values
        first = torch.ones_like(per_request, dtype=torch.bool)
        first[..., 1:] = per_request[..., 1:] != per_request[..., :-1]
        filled = (lengths[None, :, None] - per_request * BLOCK_SIZE).clamp(max=BLOCK_SIZE)
        rows.append((filled * (first & (per_request >= 0))).sum())
    return [int(n) * 2 * shape.row_bytes for n in torch.stack(rows).tolist()]
