"""Which blocks a query token attends: index scores per block, and the top-k of them.

Stage one of MiniMax Sparse Attention (arXiv:2606.13392): `msa_proxy_score` gives each block its largest index score,
`msa_topk_select` turns the scores into the block ids that `msa_sparse_decode_attention` takes.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from .arguments import check_destination
from .contract import _PLAIN_TENSORS, BLOCK_SIZE, FP8, HEAD_DIM, MAX_TOPK, _check_dense_rows, _require_tensor
from .nvfp4 import CODE_BYTES, dequantize_rows, e4m3_to_float32, tiled_scale_offsets

_CHUNK = 1 << 18
"""Elements of the largest temporaries: 1 MB of float32 scores or keys, 2 MB of int64 sort keys. They stay in cache:
with four times as many, fp8 scores took over twice as long on one CPU core."""
_NEVER = -(1 << 63)
_FORCED = (1 << 62) + (1 << 40)
"""Above every score's sort key, of which the largest, of +inf, is below 2^62."""
_INT32_MAX = 2**31 - 1
_INDEX_DTYPES = (torch.bfloat16, torch.float16, FP8)
_KERNEL_BLOCKS = 65_536
"""Blocks of the longest row that the CUDA kernel selects from."""


@dataclass(frozen=True, slots=True)
class TokenExtents:
    """Blocks that each token of a batch can see a key of, from lengths on the device: positions as in the attention call.

    `lengths` is ``(batch,)`` int32, `q_offset` None, an int or ``(batch,)`` int32; token ``t`` is the ``t % seqlen_q``-th
    of request ``t // seqlen_q``.
    """

    lengths: Tensor
    seqlen_q: int
    causal: bool
    q_offset: int | Tensor | None

    def values(self) -> Tensor:
        """The extents, int64 ``(tokens,)``; not bounded by the blocks that there are."""
        length = self.lengths.long().clamp(min=0).unsqueeze(-1)
        seen = length.expand(-1, self.seqlen_q)
        if self.causal:
            first = length - self.seqlen_q if self.q_offset is None else self.q_offset
            first = first.long().view(-1, 1) if isinstance(first, Tensor) else first
            query = torch.arange(self.seqlen_q, device=length.device)
            seen = torch.minimum(seen, (first + query + 1).clamp(min=0))
        return (seen.flatten() + BLOCK_SIZE - 1) // BLOCK_SIZE


Extent: TypeAlias = "int | Tensor | TokenExtents"
"""Blocks that exist for a token: one number for all, ``(tokens,)`` int32, or worked out from lengths."""


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
        RuntimeError: the GPU or its compiler package is missing or unsupported.

    On CUDA it is one kernel, which with `output` given allocates nothing and may be captured in a graph. Under
    `torch.compile`, and for more than 65,536 blocks, it is torch operations there.
    """
    _check_select(max_score, topk, num_valid_pages, force_begin_blocks, force_end_blocks)
    heads, blocks, tokens = max_score.shape
    if output is None:
        output = torch.empty(tokens, heads, topk, dtype=torch.int32, device=max_score.device)
    else:
        _check_select_output(output, (tokens, heads, topk), max_score.device)
        check_destination("output", output, {"max_score": max_score, "num_valid_pages": num_valid_pages})
    extent = blocks if num_valid_pages is None else num_valid_pages
    select_blocks(max_score, topk, extent, output, force_begin_blocks, force_end_blocks)
    return output


def select_blocks(max_score: Tensor, topk: int, extent: Extent, output: Tensor, begin: int, end: int) -> None:
    """`msa_topk_select` for checked arguments."""
    heads, blocks, tokens = max_score.shape
    traced = torch.compiler.is_compiling() or type(max_score) not in _PLAIN_TENSORS
    if max_score.is_cuda and not traced and blocks <= _KERNEL_BLOCKS:
        from .engines.cuda import topk as kernel

        kernel.run(max_score, topk, extent, output, begin, end)
        return
    chosen = min(topk, blocks)
    output[..., chosen:] = -1
    if chosen == 0:
        return
    if isinstance(extent, TokenExtents):
        extent = extent.values()
    if isinstance(extent, Tensor):
        extent = extent.long().clamp(0, blocks)
    step = max(_CHUNK // (heads * blocks), 1)
    for first in range(0, tokens, step):
        some = slice(first, first + step)
        limit = extent[some] if isinstance(extent, Tensor) else extent
        order = _sort_keys(max_score[..., some].detach(), limit, begin, end)
        value, block = order.topk(chosen, dim=-1, sorted=False)
        block = block.masked_fill_(value == _NEVER, _INT32_MAX).sort(dim=-1).values
        output[some, :, :chosen] = block.masked_fill_(block == _INT32_MAX, -1).transpose(0, 1).to(torch.int32)


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


def _check_select(max_score: Tensor, topk: int, num_valid_pages: int | Tensor | None, begin: int, end: int) -> None:
    """Check the inputs of `msa_topk_select`."""
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
    if isinstance(num_valid_pages, Tensor):
        _check_int32("num_valid_pages", num_valid_pages, (tokens,), max_score.device)
    elif num_valid_pages is not None:
        _check_int("num_valid_pages", num_valid_pages, 0, blocks)


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
            reads KV head ``h // (num_index_heads // num_kv_heads)``. Of q and k the last dim is dense, and rows start on
            16-byte boundaries.
        cu_seqlens_q: ``(batch + 1,)`` int32: request ``b`` owns query rows ``cu_seqlens_q[b]`` to
            ``cu_seqlens_q[b + 1]``. Rows of no request (padding) get ``-inf``.
        cu_seqlens_k: ``(batch + 1,)`` int32, flat keys only.
        page_table, seqused_k: ``(batch, max_pages)`` and ``(batch,)`` int32, paged keys only.
        causal: token ``i`` of a request sees keys up to its position, ``seqlen_k - seqlen_q + i`` or ``q_offset + i``.
        max_seqlen_q: an upper bound of the requests' query tokens. On CUDA it tells a decoding step, which has faster
            kernels (more tokens than promised are served all the same; scores of `msa_proxy_score_fp4` may differ in
            their last bits); elsewhere it is checked, otherwise without effect.
        max_k_tiles: blocks of the result, at least those of the longest request. Default those of `output`, or without
            one those of the longest request, which are read on the host.
        output: float32 destination of the result's shape, any strides, apart from the inputs.
        reduce_heads: keep only the largest score over all index heads: one selection for all KV heads.
        q_offset: position of each request's first query token, an int for all or ``(batch,)`` int32.
        use_fp32_acc: accepted for compatibility: products are exact in float32 and always accumulate in it.

    Returns:
        float32 ``(num_index_heads, max_k_tiles, total_q)``, or ``(1, max_k_tiles, total_q)`` with `reduce_heads`;
        ``-inf`` where a token sees no key of a block. Keys past a request's length, and pages outside the cache, have
        no effect. It is `output` if given.

    Raises:
        TypeError, ValueError: an argument is not of this form. On CUDA lengths are not read on the host, and not checked,
            if `max_k_tiles` or `output` is given, unless ``MSA_OPS_CHECK=1`` is set; blocks past `max_k_tiles` and rows
            outside q and k then are left out.
        RuntimeError: the GPU or its compiler package is missing or unsupported.

    On CUDA it is one kernel, which with `output` given allocates nothing and may be captured in a graph: lengths may
    change between replays. Under `torch.compile` it is torch operations there.
    """
    _check_flags(causal=causal, reduce_heads=reduce_heads, use_fp32_acc=use_fp32_acc)
    _check_index_tensors(q, k, page_table)
    problem = ScoreProblem(
        q, k, cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, q_offset, causal, reduce_heads
    )  # fmt: skip
    return score_blocks(problem, max_seqlen_q, max_k_tiles, output)


@dataclass(frozen=True, slots=True)
class ScoreProblem:
    """What is scored: the arguments of `msa_proxy_score`, or with `q_scale` and `k_scale` of `msa_proxy_score_fp4`.

    Scores are multiplied with `factor` and with the one-element tensors `q_global` and `k_global`.
    """

    q: Tensor
    k: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    page_table: Tensor | None
    seqused_k: Tensor | None
    q_offset: int | Tensor | None
    causal: bool
    reduce_heads: bool
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    factor: float = 1.0
    q_global: Tensor | None = None
    k_global: Tensor | None = None


def score_blocks(
    problem: ScoreProblem, max_seqlen_q: int | None, max_k_tiles: int | None, output: Tensor | None
) -> Tensor:
    """`msa_proxy_score` and its NVFP4 counterpart, from checked index tensors on."""
    _check_lengths(problem)
    traced = torch.compiler.is_compiling() or type(problem.q) not in _PLAIN_TENSORS
    kernel = problem.q.is_cuda and not traced
    if max_k_tiles is None and isinstance(output, Tensor) and output.dim() == 3:
        max_k_tiles = output.shape[1]
    requests = None
    if not kernel or max_k_tiles is None or os.environ.get("MSA_OPS_CHECK") == "1":
        requests = _read_requests(problem)
    output = _score_output(problem, requests, max_seqlen_q, max_k_tiles, output)
    inputs = {name: getattr(problem, name) for name in ("q", "k", "page_table", "q_scale", "k_scale")}
    check_destination("output", output, inputs)
    if kernel:
        from .engines.cuda import score

        score.run(problem, max_seqlen_q, output)
        return output
    assert requests is not None
    output.fill_(-math.inf)
    for b, request in enumerate(requests):
        pages = None if problem.page_table is None else problem.page_table[b]
        for tokens, blocks, part in _score_request(problem, request, pages):
            output[:, blocks, tokens] = part.amax(0, keepdim=True) if problem.reduce_heads else part
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
    problem: ScoreProblem, request: _Request, pages: Tensor | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tiles of one request's scores: the token and block slices of a ``(heads, blocks, tokens)`` tile, and the tile."""
    heads, kv_heads = problem.q.shape[1], problem.k.shape[1]
    device, causal, group, length = problem.q.device, problem.causal, heads // kv_heads, request.length
    factor = problem.factor
    for t in (problem.q_global, problem.k_global):
        factor *= 1.0 if t is None else float(t)
    q_step = max(_CHUNK // (heads * BLOCK_SIZE), 1)
    for first in range(0, request.q_tokens, q_step):
        count = min(q_step, request.q_tokens - first)
        rows = slice(request.q_start + first, request.q_start + first + count)
        low = min(request.position + first + 1, length) if causal else length  # keys that all of these tokens see
        high = min(request.position + first + count, length) if causal else length  # keys that any of them sees
        queries = torch.unflatten(_load_queries(problem, rows), 1, (kv_heads, group)).permute(1, 2, 0, 3)
        queries = queries.reshape(kv_heads, group * count, HEAD_DIM)
        block_step = max(_CHUNK // (BLOCK_SIZE * max(heads * count, kv_heads * HEAD_DIM)), 1)
        for block in range(0, -(-high // BLOCK_SIZE), block_step):
            end = min(block + block_step, -(-high // BLOCK_SIZE))
            keys, missing = _load_blocks(problem, request.k_start, pages, block, end)
            with torch.autocast(device.type, enabled=False):  # which would round the products to 16 bits
                score = torch.bmm(queries, keys.transpose(1, 2))
            if factor != 1.0:
                score.mul_(factor)
            score = score.view(heads, count, end - block, BLOCK_SIZE)
            if end * BLOCK_SIZE > low:
                key = torch.arange(block * BLOCK_SIZE, end * BLOCK_SIZE, device=device).view(-1, BLOCK_SIZE)
                seen = torch.full((count,), length, device=device)
                if causal:
                    seen = torch.arange(count, device=device).add_(request.position + first + 1).clamp_(max=length)
                score = torch.where(key < seen.view(-1, 1, 1), score, -math.inf)
            best = score.amax(-1)
            if missing is not None:
                best = best.masked_fill_(missing, -math.inf)
            yield rows, slice(block, end), best.transpose(1, 2)


def _load_queries(problem: ScoreProblem, rows: slice) -> Tensor:
    """Query rows, float32 ``(tokens, heads, 128)``."""
    q = problem.q[rows].detach()
    if problem.q_scale is None:
        return q.float()
    heads = problem.q.shape[1]
    number = torch.arange(rows.start * heads, rows.stop * heads, device=q.device).view(-1, heads)
    return dequantize_rows(q, _scales_of(problem.q_scale, number))


def _load_blocks(
    problem: ScoreProblem, k_start: int, pages: Tensor | None, block: int, end: int
) -> tuple[Tensor, Tensor | None]:
    """Keys of blocks ``block..end``, float32 ``(kv_heads, keys, 128)``, and which of the blocks have no page."""
    k = problem.k.detach()
    raw = k.view(torch.uint8) if k.dtype == FP8 else k  # torch lacks some indexing for fp8
    heads = torch.arange(k.shape[1], device=k.device)
    missing = None
    if pages is None:
        first, last = k_start + block * BLOCK_SIZE, min(k_start + end * BLOCK_SIZE, k.shape[0])
        keys = raw[first:last].transpose(0, 1)
        row = torch.arange(first, last, device=k.device) * k.shape[1] + heads.view(-1, 1)
    else:
        page = pages[block:end].long()
        missing = (page < 0) | (page >= k.shape[0])
        page = page.masked_fill(missing, 0)
        if k.shape[0] == 0:  # what missing blocks read
            return raw.new_zeros(k.shape[1], (end - block) * BLOCK_SIZE, HEAD_DIM, dtype=torch.float32), missing
        keys = raw[page].transpose(0, 1).flatten(1, 2)
        token = torch.arange(BLOCK_SIZE, device=k.device)
        row = ((page.view(-1, 1) * k.shape[1] + heads.view(-1, 1, 1)) * BLOCK_SIZE + token).flatten(1)
    if problem.k_scale is not None:
        keys = dequantize_rows(keys, _scales_of(problem.k_scale, row))
    else:
        keys = e4m3_to_float32(keys) if k.dtype == FP8 else keys.float()
    short = (end - block) * BLOCK_SIZE - keys.shape[1]
    if short:  # the last block of a flat cache; the keys added are past the length
        keys = torch.nn.functional.pad(keys, (0, 0, 0, short))
    return keys, missing


def _scales_of(tiled: Tensor, row: Tensor) -> Tensor:
    """Scale bytes ``(..., 8)`` of rows in the 128x4 tiled layout."""
    return tiled.view(torch.uint8).view(-1)[tiled_scale_offsets(row)]


def _check_flags(**flags: bool) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {type(flag).__name__}")


def _check_index_tensors(q: Tensor, k: Tensor, page_table: Tensor | None, *, nvfp4: bool = False) -> None:
    q_name, k_name = ("q_fp4", "k_fp4") if nvfp4 else ("q", "k")
    width = CODE_BYTES if nvfp4 else HEAD_DIM
    for name, t in ((q_name, q), (k_name, k)):
        _require_tensor(name, t)
        if nvfp4 and t.dtype != torch.uint8:
            raise ValueError(f"{name} must be uint8, two e2m1 codes a byte, got {t.dtype}: see nvfp4_quantize")
        if not nvfp4 and t.dtype not in _INDEX_DTYPES:
            raise ValueError(f"{name} must be bfloat16, float16 or float8_e4m3fn, got {t.dtype}: cast {name}")
    if q.dim() != 3 or q.shape[2] != width:
        raise ValueError(f"{q_name} must have shape (total_q, num_index_heads, {width}), got {tuple(q.shape)}")
    want = f"(total_k, num_kv_heads, {width}), flat"
    if page_table is not None:
        _require_tensor("page_table", page_table)
        if page_table.dim() != 2:
            raise ValueError(f"page_table must have shape (batch, max_pages), got {tuple(page_table.shape)}")
        want = f"(num_pages, num_kv_heads, {BLOCK_SIZE}, {width}), paged"
    ok = k.dim() == (3 if page_table is None else 4) and k.shape[-1] == width
    if not ok or (page_table is not None and k.shape[2] != BLOCK_SIZE):
        raise ValueError(f"{k_name} must have shape {want}, got {tuple(k.shape)}")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q_name} must have a multiple of {k_name}'s heads, got {q.shape[1]} index heads and {k.shape[1]} KV heads"
        )
    if k.device != q.device:
        raise ValueError(
            f"{k_name} must be on {q_name}'s device {q.device}, got {k.device}: pass {k_name}.to(q.device)"
        )
    for name, t in ((q_name, q), (k_name, k)):
        _check_dense_rows(name, t)


def _check_lengths(problem: ScoreProblem) -> None:
    """Check the tensors that say which keys are whose; no value is read."""
    p, device = problem, problem.q.device
    _require_tensor("cu_seqlens_q", p.cu_seqlens_q)
    if p.cu_seqlens_q.dim() != 1 or p.cu_seqlens_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q must have shape (batch + 1,), got {tuple(p.cu_seqlens_q.shape)}")
    batch = p.cu_seqlens_q.shape[0] - 1
    _check_int32("cu_seqlens_q", p.cu_seqlens_q, (batch + 1,), device)
    if p.page_table is None:
        if p.cu_seqlens_k is None or p.seqused_k is not None:
            raise ValueError(
                "flat keys take cu_seqlens_k; paged keys take page_table and seqused_k: pass one or the other"
            )
        _check_int32("cu_seqlens_k", p.cu_seqlens_k, (batch + 1,), device)
    else:
        if p.seqused_k is None or p.cu_seqlens_k is not None:
            raise ValueError("paged keys take page_table and seqused_k; cu_seqlens_k belongs to flat keys")
        _check_int32("page_table", p.page_table, (batch, p.page_table.shape[-1]), device)
        _check_int32("seqused_k", p.seqused_k, (batch,), device)
    if isinstance(p.q_offset, Tensor):
        _check_int32("q_offset", p.q_offset, (batch,), device)
    elif p.q_offset is not None:
        _check_int("q_offset", p.q_offset, -_INT32_MAX - 1, _INT32_MAX)


def _read_requests(problem: ScoreProblem) -> list[_Request]:
    """Read the lengths on the host, and check them."""
    p = problem
    if p.q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "a CUDA graph capture forbids reading lengths: give max_k_tiles or output, and unset MSA_OPS_CHECK"
        )
    q_starts = _ascending("cu_seqlens_q", p.cu_seqlens_q, p.q.shape[0])
    batch = len(q_starts) - 1
    if p.page_table is None:
        assert p.cu_seqlens_k is not None
        k_starts = _ascending("cu_seqlens_k", p.cu_seqlens_k, p.k.shape[0])
        lengths = [b - a for a, b in itertools.pairwise(k_starts)]
    else:
        assert p.seqused_k is not None
        k_starts = [0] * batch
        lengths = [max(n, 0) for n in p.seqused_k.tolist()]
        if max(lengths, default=0) > p.page_table.shape[1] * BLOCK_SIZE:
            raise ValueError(
                f"seqused_k must fit page_table's {p.page_table.shape[1]} pages of {BLOCK_SIZE} keys, got {max(lengths)}"
            )
    q_tokens = [b - a for a, b in itertools.pairwise(q_starts)]
    if p.q_offset is None:
        positions = [n - m for n, m in zip(lengths, q_tokens, strict=True)]
    else:
        positions = p.q_offset.tolist() if isinstance(p.q_offset, Tensor) else [p.q_offset] * batch
    return [_Request(*row) for row in zip(q_starts, q_tokens, k_starts, lengths, positions, strict=False)]


def _score_output(
    problem: ScoreProblem,
    requests: list[_Request] | None,
    max_seqlen_q: int | None,
    max_k_tiles: int | None,
    output: Tensor | None,
) -> Tensor:
    """Check the bounds, as far as the lengths are known, and the destination; returns it, a new one if none is given."""
    q = problem.q
    longest = max((r.blocks for r in requests or ()), default=0)
    blocks = longest if max_k_tiles is None else max_k_tiles
    _check_int("max_k_tiles", blocks, longest, _INT32_MAX)
    if max_seqlen_q is not None:
        _check_int("max_seqlen_q", max_seqlen_q, max((r.q_tokens for r in requests or ()), default=0), _INT32_MAX)
    shape = (1 if problem.reduce_heads else q.shape[1], blocks, q.shape[0])
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
