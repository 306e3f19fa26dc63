"""Which blocks a query token attends: index scores per block, and the top-k of them.

Stage one of MiniMax Sparse Attention (arXiv:2606.13392): `msa_proxy_score` gives each block its largest index score,
`msa_topk_select` turns the scores into the block ids that `msa_sparse_decode_attention` takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .arguments import check_destination
from .contract import BLOCK_SIZE, FP8, HEAD_DIM, MAX_TOPK, _require_tensor
from .nvfp4 import e4m3_to_float32

_CHUNK = 1 << 18
"""Elements of the largest temporaries: 1 MB of float32 scores or keys, 2 MB of int64 sort keys. They stay in cache:
with four times as many, fp8 scores took over twice as long on one CPU core."""
_NEVER = -(1 << 63)
_FORCED = (1 << 62) + (1 << 40)
"""Above every score's sort key, of which the largest, of +inf, is below 2^62."""
_INT32_MAX = 2**31 - 1
_INDEX_DTYPES = (torch.bfloat16, torch.float16, FP8)


def msa_topk_select(
    max_score: Tensor,
    topk: int,
    num_valid_pages: int | Tensor | None = None,
    output: Tensor | None = None,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
) -> Tensor:
    """Choose the `topk` best blocks of every token and head.

    Args:
        max_score: ``(heads, blocks, tokens)`` float32, any strides: what `msa_proxy_score` returns. ``-inf`` and NaN
            are never chosen (unless forced), ``+inf`` is a score like any other, and -0.0 equals 0.0.
        topk: ids per token and head, 1 to 4096.
        num_valid_pages: extent of a token: only blocks below it exist for the token. An int in ``0..blocks`` for all
            tokens, or ``(tokens,)`` int32, clamped to ``0..blocks`` on the device. Default all blocks.
        output: destination, int32 ``(tokens, heads, topk)``, any strides with a dense last dim, apart from the inputs.
            For the layout of the attention call pass ``buffer.transpose(0, 1)`` of a ``(heads, tokens, topk)`` buffer.
        force_begin_blocks, force_end_blocks: the first and the last blocks of each token's extent are chosen before any
            other, whatever their scores; a block forced twice counts once. If `topk` is too small for all of them, the
            first blocks win in ascending order, then the last blocks from the end backwards.

    Returns:
        int32 ``(tokens, heads, topk)``: ascending block ids, then -1. Of equal scores the lower block is chosen: the
        result is unique. ``.transpose(0, 1)`` of it is ``q2k_indices`` of the attention call. It is `output` if given.

    Raises:
        TypeError, ValueError: an argument is not of this form. No device value is read.
    """
    valid = _check_select(max_score, topk, num_valid_pages, force_begin_blocks, force_end_blocks)
    heads, blocks, tokens = max_score.shape
    if output is None:
        output = torch.empty(tokens, heads, topk, dtype=torch.int32, device=max_score.device)
    else:
        _check_select_output(output, (tokens, heads, topk), max_score.device)
        check_destination("output", output, {"max_score": max_score, "num_valid_pages": num_valid_pages})
    chosen = min(topk, blocks)
    output[..., chosen:] = -1
    if chosen == 0:
        return output
    step = max(_CHUNK // (heads * blocks), 1)
    for first in range(0, tokens, step):
        some = slice(first, first + step)
        extent = valid[some] if isinstance(valid, Tensor) else valid
        order = _sort_keys(max_score[..., some].detach(), extent, force_begin_blocks, force_end_blocks)
        value, block = order.topk(chosen, dim=-1, sorted=False)
        block = block.masked_fill_(value == _NEVER, _INT32_MAX).sort(dim=-1).values
        output[some, :, :chosen] = block.masked_fill_(block == _INT32_MAX, -1).transpose(0, 1).to(torch.int32)
    return output


def _sort_keys(score: Tensor, extent: int | Tensor, begin: int, end: int) -> Tensor:
    """Distinct int64 keys ``(heads, tokens, blocks)``: the better the block, the larger; `_NEVER` for not at all.

    `score` is ``(heads, blocks, tokens)`` float32, `extent` an int or ``(tokens,)`` int64 in ``0..blocks``.
    """
    blocks = score.shape[1]
    block = torch.arange(blocks, device=score.device)
    limit = extent.unsqueeze(-1) if isinstance(extent, Tensor) else extent
    # float32 bits as an int that ascends with the value: negative floats have their magnitude bits flipped.
    bits = (score.transpose(1, 2) + 0.0).contiguous().view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ascending = (bits ^ ((bits >> 31) & _INT32_MAX)).long()
    key = (ascending << 31) + (blocks - 1 - block)
    key = torch.where(score.transpose(1, 2) > -math.inf, key, _NEVER)  # false for NaN as well
    if end:
        key = torch.where(block >= limit - end, _FORCED - begin - (limit - 1 - block), key)
    if begin:
        key = torch.where(block < begin, _FORCED - block, key)
    return torch.where(block < limit, key, _NEVER)


def _check_select(
    max_score: Tensor, topk: int, num_valid_pages: int | Tensor | None, begin: int, end: int
) -> int | Tensor:
    """Check the inputs of `msa_topk_select`; the extent as an int, or int64 ``(tokens,)`` clamped to the blocks."""
    _require_tensor("max_score", max_score)
    if max_score.dtype != torch.float32 or max_score.dim() != 3 or max_score.shape[0] == 0:
        raise ValueError(
            f"max_score must be float32 of shape (heads, blocks, tokens), got {max_score.dtype} of shape "
            f"{tuple(max_score.shape)}"
        )
    for name, value, least, most in (
        ("topk", topk, 1, MAX_TOPK),
        ("force_begin_blocks", begin, 0, _INT32_MAX),
        ("force_end_blocks", end, 0, _INT32_MAX),
    ):
        _check_int(name, value, least, most)
    blocks, tokens = max_score.shape[1:]
    if num_valid_pages is None:
        return blocks
    if not isinstance(num_valid_pages, Tensor):
        _check_int("num_valid_pages", num_valid_pages, 0, blocks)
        return num_valid_pages
    _check_int32("num_valid_pages", num_valid_pages, (tokens,), max_score.device)
    return num_valid_pages.long().clamp(0, blocks)


def _check_select_output(output: Tensor, shape: tuple[int, int, int], device: torch.device) -> None:
    _check_int32("output", output, shape, device)
    if shape[2] > 1 and output.stride(2) != 1:
        raise ValueError(f"output must have a dense last dim (stride 1), got strides {output.stride()}")


def msa_proxy_score(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = True,
    max_seqlen_q: int | None = None,
    max_k_tiles: int | None = None,
    output: Tensor | None = None,
    reduce_heads: bool = False,
    q_offset: int | Tensor | None = None,
    use_fp32_acc: bool = True,
) -> Tensor:
    """For each index query head, block of 128 keys and token: the largest unscaled dot product with a visible key.

    Args:
        q: index queries ``(total_q, num_index_heads, 128)``, bfloat16, float16 or float8_e4m3fn.
        k: index keys, any of these dtypes: paged ``(num_pages, num_kv_heads, 128, 128)`` with any strides, or flat
            ``(total_k, num_kv_heads, 128)``. ``num_index_heads`` is a multiple of ``num_kv_heads``; query head ``h``
            reads KV head ``h // (num_index_heads // num_kv_heads)``.
        cu_seqlens_q: ``(batch + 1,)`` int32: request ``b`` owns query rows ``cu_seqlens_q[b]`` to
            ``cu_seqlens_q[b + 1]``. Rows of no request (padding) get ``-inf``.
        cu_seqlens_k: ``(batch + 1,)`` int32, flat keys only.
        page_table, seqused_k: ``(batch, max_pages)`` and ``(batch,)`` int32, paged keys only.
        causal: token ``i`` of a request sees keys up to its position, ``seqlen_k - seqlen_q + i`` or ``q_offset + i``.
        max_seqlen_q: an upper bound of the requests' query tokens; checked, otherwise without effect.
        max_k_tiles: blocks of the result, at least those of the longest request, which is the default.
        output: float32 destination of the result's shape, any strides, apart from the inputs.
        reduce_heads: keep only the largest score over all index heads: one selection for all KV heads.
        q_offset: position of each request's first query token, an int for all or ``(batch,)`` int32.
        use_fp32_acc: accepted for compatibility: products are exact in float32 and always accumulate in it.

    Returns:
        float32 ``(num_index_heads, max_k_tiles, total_q)``, or ``(1, max_k_tiles, total_q)`` with `reduce_heads`;
        ``-inf`` where a token sees no key of a block. Keys past a request's length, and pages outside the cache, have
        no effect. It is `output` if given.

    Raises:
        TypeError, ValueError: an argument is not of this form. Lengths are read on the host (CUDA synchronises).
    """
    _check_flags(causal=causal, reduce_heads=reduce_heads, use_fp32_acc=use_fp32_acc)
    _check_index_tensors(q, k, page_table)
    requests = _read_requests(q, k, cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, q_offset)
    output = _score_output(output, q, requests, max_seqlen_q, max_k_tiles, reduce_heads)
    check_destination("output", output, {"q": q, "k": k, "page_table": page_table})
    output.fill_(-math.inf)
    for b, request in enumerate(requests):
        pages = None if page_table is None else page_table[b]
        for tokens, blocks, score in _score_request(q.detach(), k.detach(), request, pages, causal):
            output[:, blocks, tokens] = score.amax(0, keepdim=True) if reduce_heads else score
    return output


@dataclass(frozen=True, slots=True)
class _Request:
    """Query rows from `q_start`, keys of a flat cache from `k_start`, and the position of the first query."""

    q_start: int
    q_tokens: int
    k_start: int
    length: int
    position: int

    @property
    def blocks(self) -> int:
        return -(-self.length // BLOCK_SIZE)


def _score_request(
    q: Tensor, k: Tensor, request: _Request, pages: Tensor | None, causal: bool
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tiles of one request's scores: the token and block slices of a ``(heads, blocks, tokens)`` tile, and the tile."""
    heads, kv_heads = q.shape[1], k.shape[1]
    group = heads // kv_heads
    length = request.length
    q_step = max(_CHUNK // (heads * BLOCK_SIZE), 1)
    for first in range(0, request.q_tokens, q_step):
        count = min(q_step, request.q_tokens - first)
        rows = slice(request.q_start + first, request.q_start + first + count)
        low = min(request.position + first + 1, length) if causal else length  # keys that all of these tokens see
        high = min(request.position + first + count, length) if causal else length  # keys that any of them sees
        queries = torch.unflatten(q[rows].float(), 1, (kv_heads, group)).permute(1, 2, 0, 3)
        queries = queries.reshape(kv_heads, group * count, HEAD_DIM)
        block_step = max(_CHUNK // (BLOCK_SIZE * max(heads * count, kv_heads * HEAD_DIM)), 1)
        for block in range(0, -(-high // BLOCK_SIZE), block_step):
            end = min(block + block_step, -(-high // BLOCK_SIZE))
            keys, missing = _load_blocks(k, request.k_start, pages, block, end)
            with torch.autocast(q.device.type, enabled=False):  # which would round the products to 16 bits
                score = torch.bmm(queries, keys.transpose(1, 2))
            score = score.view(heads, count, end - block, BLOCK_SIZE)
            if end * BLOCK_SIZE > low:
                key = torch.arange(block * BLOCK_SIZE, end * BLOCK_SIZE, device=q.device).view(-1, BLOCK_SIZE)
                seen = torch.full((count,), length, device=q.device)
                if causal:
                    seen = torch.arange(count, device=q.device).add_(request.position + first + 1).clamp_(max=length)
                score = torch.where(key < seen.view(-1, 1, 1), score, -math.inf)
            best = score.amax(-1)
            if missing is not None:
                best = best.masked_fill_(missing, -math.inf)
            yield rows, slice(block, end), best.transpose(1, 2)


def _load_blocks(k: Tensor, k_start: int, pages: Tensor | None, block: int, end: int) -> tuple[Tensor, Tensor | None]:
    """Keys of blocks ``block..end``, float32 ``(kv_heads, keys, 128)``, and which of the blocks have no page."""
    raw = k.view(torch.uint8) if k.dtype == FP8 else k  # torch lacks some indexing for fp8
    missing = None
    if pages is None:
        first = k_start + block * BLOCK_SIZE
        keys = raw[first : k_start + end * BLOCK_SIZE].transpose(0, 1)
        short = (end - block) * BLOCK_SIZE - keys.shape[1]
        if short:  # the last block of the cache; the keys added are past the length
            keys = torch.nn.functional.pad(keys, (0, 0, 0, short))
    else:
        page = pages[block:end].long()
        missing = (page < 0) | (page >= k.shape[0])
        if k.shape[0] == 0:
            raw = raw.new_zeros(1, *k.shape[1:])  # what missing blocks read
        keys = raw[page.masked_fill(missing, 0)].transpose(0, 1).flatten(1, 2)
    return (e4m3_to_float32(keys) if k.dtype == FP8 else keys.float()), missing


def _check_flags(**flags: bool) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {type(flag).__name__}")


def _check_index_tensors(q: Tensor, k: Tensor, page_table: Tensor | None) -> None:
    for name, t in (("q", q), ("k", k)):
        _require_tensor(name, t)
        if t.dtype not in _INDEX_DTYPES:
            raise ValueError(f"{name} must be bfloat16, float16 or float8_e4m3fn, got {t.dtype}: cast {name}")
    if q.dim() != 3 or q.shape[2] != HEAD_DIM:
        raise ValueError(f"q must have shape (total_q, num_index_heads, {HEAD_DIM}), got {tuple(q.shape)}")
    want = f"(total_k, num_kv_heads, {HEAD_DIM}), flat"
    if page_table is not None:
        _require_tensor("page_table", page_table)
        if page_table.dim() != 2:
            raise ValueError(f"page_table must have shape (batch, max_pages), got {tuple(page_table.shape)}")
        want = f"(num_pages, num_kv_heads, {BLOCK_SIZE}, {HEAD_DIM}), paged"
    ok = k.dim() == (3 if page_table is None else 4) and k.shape[-1] == HEAD_DIM
    if not ok or (page_table is not None and k.shape[2] != BLOCK_SIZE):
        raise ValueError(f"k must have shape {want}, got {tuple(k.shape)}")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q must have a multiple of k's heads, got {q.shape[1]} index heads and {k.shape[1]} KV heads")
    if k.device != q.device:
        raise ValueError(f"k must be on q's device {q.device}, got {k.device}: pass k.to(q.device)")


def _read_requests(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    page_table: Tensor | None,
    seqused_k: Tensor | None,
    q_offset: int | Tensor | None,
) -> list[_Request]:
    """Check the lengths and read them on the host."""
    _require_tensor("cu_seqlens_q", cu_seqlens_q)
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q must have shape (batch + 1,), got {tuple(cu_seqlens_q.shape)}")
    batch = cu_seqlens_q.shape[0] - 1
    _check_int32("cu_seqlens_q", cu_seqlens_q, (batch + 1,), q.device)
    q_starts = _ascending("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    if page_table is None:
        if cu_seqlens_k is None or seqused_k is not None:
            raise ValueError(
                "flat keys take cu_seqlens_k; paged keys take page_table and seqused_k: pass one or the other"
            )
        _check_int32("cu_seqlens_k", cu_seqlens_k, (batch + 1,), q.device)
        k_starts = _ascending("cu_seqlens_k", cu_seqlens_k, k.shape[0])
        lengths = [b - a for a, b in itertools.pairwise(k_starts)]
    else:
        if seqused_k is None or cu_seqlens_k is not None:
            raise ValueError("paged keys take page_table and seqused_k; cu_seqlens_k belongs to flat keys")
        _check_int32("page_table", page_table, (batch, page_table.shape[-1]), q.device)
        _check_int32("seqused_k", seqused_k, (batch,), q.device)
        k_starts = [0] * batch
        lengths = [max(n, 0) for n in seqused_k.tolist()]
        if max(lengths, default=0) > page_table.shape[1] * BLOCK_SIZE:
            raise ValueError(
                f"seqused_k must fit page_table's {page_table.shape[1]} pages of {BLOCK_SIZE} keys, got {max(lengths)}"
            )
    q_tokens = [b - a for a, b in itertools.pairwise(q_starts)]
    if q_offset is None:
        positions = [n - m for n, m in zip(lengths, q_tokens, strict=True)]
    elif isinstance(q_offset, Tensor):
        _check_int32("q_offset", q_offset, (batch,), q.device)
        positions = q_offset.tolist()
    else:
        _check_int("q_offset", q_offset, -_INT32_MAX - 1, _INT32_MAX)
        positions = [q_offset] * batch
    return [_Request(*row) for row in zip(q_starts, q_tokens, k_starts, lengths, positions, strict=False)]


def _score_output(
    output: Tensor | None,
    q: Tensor,
    requests: list[_Request],
    max_seqlen_q: int | None,
    max_k_tiles: int | None,
    reduce_heads: bool,
) -> Tensor:
    """Check the bounds and the destination of `msa_proxy_score`; returns the destination, a new one if none is given."""
    longest = max((r.blocks for r in requests), default=0)
    blocks = longest if max_k_tiles is None else max_k_tiles
    _check_int("max_k_tiles", blocks, longest, _INT32_MAX)
    if max_seqlen_q is not None:
        _check_int("max_seqlen_q", max_seqlen_q, max((r.q_tokens for r in requests), default=0), _INT32_MAX)
    shape = (1 if reduce_heads else q.shape[1], blocks, q.shape[0])
    if output is None:
        return torch.empty(shape, dtype=torch.float32, device=q.device)
    _require_tensor("output", output)
    if output.dtype != torch.float32 or tuple(output.shape) != shape or output.device != q.device:
        raise ValueError(
            f"output must be float32 of shape {shape} on {q.device}, got {output.dtype} of shape {tuple(output.shape)} "
            f"on {output.device}"
        )
    return output


def _ascending(name: str, cumulative: Tensor, total: int) -> list[int]:
    values: list[int] = cumulative.tolist()
    if values[0] < 0 or values[-1] > total or any(a > b for a, b in itertools.pairwise(values)):
        raise ValueError(f"{name} must ascend from at least 0 to at most {total}, the rows there are, got {values[:8]}")
    return values


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"{name} must lie in {least}..{most}, got {value}")


def _check_int32(name: str, t: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    _require_tensor(name, t)
    if t.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, got {t.dtype}: pass {name}.to(torch.int32)")
    if tuple(t.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(t.shape)}")
    if t.device != device:
        raise ValueError(f"{name} must be on {device}, got {t.device}")
