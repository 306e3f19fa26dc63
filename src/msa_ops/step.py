"""A whole decode step: index scores, the choice of blocks, attention over them."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import torch
from torch import Tensor

from . import ops
from .arguments import check_destination
from .contract import (
    _PLAIN_TENSORS,
    BLOCK_SIZE,
    HEAD_DIM,
    MAX_TOPK,
    DecodeCall,
    DecodeProblem,
    _check_dense_rows,
    _require_tensor,
    check,
)
from .selection import _INDEX_DTYPES, _INT32_MAX, TokenExtents, _check_int, msa_proxy_score, select_blocks
from .workspace import MSASparseAttentionWorkspace

_SCORE_PAD = 4  # a token's scores start on a 16-byte boundary


def msa_decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    *,
    page_table: Tensor,
    seqused_k: Tensor,
    topk: int = 16,
    seqlen_q: int = 1,
    local_blocks: int = 1,
    sink_blocks: int = 0,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_global_scale: float | Tensor | None = None,
    v_global_scale: float | Tensor | None = None,
    q_offset: int | Tensor | None = None,
    partial_dtype: torch.dtype | None = None,
    force_fused: bool | None = None,
    workspace: MSASparseAttentionWorkspace | None = None,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
    q2k_out: Tensor | None = None,
    score_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """One decode step of MiniMax Sparse Attention, from index queries and keys to the attention output.

    The same as `msa_proxy_score`, `msa_topk_select` and `msa_sparse_decode_attention` one after the other, with MiniMax-M3's
    rule: every KV head selects for itself, by its own index query head. A block's score is the largest unscaled dot product
    of the index query with one of the block's index keys that the token sees. A token's last `local_blocks` blocks (its own
    and those before it) and first `sink_blocks` blocks are attended whatever their scores; the others are taken by score,
    the lower block where scores are equal, until there are `topk`. Blocks that hold no key the token sees do not exist.

    Args:
        q, k, v: queries and a paged KV cache, in any form that `msa_sparse_decode_attention` takes; also `k_scale`,
            `v_scale`, `k_global_scale`, `v_global_scale`, `seqlen_q`, `causal`, `softmax_scale`, `q_offset`,
            `partial_dtype`, `force_fused`, `workspace`, `return_softmax_lse`, `out` and `lse_out` are as there.
        index_q: index queries ``(batch * seqlen_q, num_kv_heads, 128)``, bfloat16, float16 or float8_e4m3fn.
        index_k: index keys in the pages of `page_table`, ``(num_pages, 1, 128, 128)`` with any page and token strides, of
            any of these dtypes. One index key head serves all index query heads; a number of heads that divides theirs is
            taken too. The last dim of both is dense, rows are 16-byte aligned.
        page_table: ``(batch, max_pages)`` int32, the pages of K, V and the index keys alike.
        seqused_k: ``(batch,)`` int32, valid keys of each request, those of the step's own tokens among them.
        topk: blocks that a token attends, 1 to 4096, forced ones included. If it is too small for those, sinks come first,
            then local blocks from the last backwards.
        local_blocks, sink_blocks: blocks that are always attended, at the end and at the beginning of a token's sight.
        q2k_out: destination of the chosen ids, int32 ``(batch * seqlen_q, num_kv_heads, topk)``, any strides with a dense
            last dim: ascending, then -1, as `msa_topk_select` returns them.
        score_out: destination of the block scores, float32 ``(num_kv_heads, max_pages, batch * seqlen_q)``, any strides, as
            `msa_proxy_score` returns them. Blocks innermost (a transposed ``(num_kv_heads, batch * seqlen_q, max_pages)``)
            are read fastest.

    Returns:
        What `msa_sparse_decode_attention` returns: the output, and with ``return_softmax_lse`` the LSE.

    Raises:
        TypeError, ValueError: an argument is not of this form; raised before anything runs, with the argument's name.
        RuntimeError: the GPU or its compiler package is missing or unsupported.

    On CUDA these are three kernels, or two where the attention chooses its blocks itself: on compute capability 9.0, as a rule
    for page tables of up to 256 columns and up to 32 ids. (One more where the attention's scratch route merges.) The host
    does nothing between them. With all destinations given nothing is allocated, and after one eager call of the same shapes
    a step may be captured in a CUDA graph; lengths, tables and every tensor's content may change between replays.
    """
    _check_index(q, k, index_q, index_k, page_table, seqused_k)
    for name, value, least, most in (
        ("topk", topk, 1, MAX_TOPK),
        ("local_blocks", local_blocks, 0, _INT32_MAX),
        ("sink_blocks", sink_blocks, 0, _INT32_MAX),
    ):
        _check_int(name, value, least, most)
    tokens, heads = index_q.shape[:2]
    if q2k_out is None:
        q2k_out = torch.empty(tokens, heads, topk, dtype=torch.int32, device=q.device)
    else:
        _check_destination("q2k_out", q2k_out, torch.int32, (tokens, heads, topk), q.device)
    score_shape = (heads, page_table.shape[1], tokens)
    if score_out is None:
        score_out = new_scores(score_shape, q.device)
    else:
        _check_destination("score_out", score_out, torch.float32, score_shape, q.device)
    call = DecodeCall(
        q, k, v, q2k_out.transpose(0, 1), page_table, seqused_k, None, seqlen_q, causal, softmax_scale, return_softmax_lse,
        k_scale, v_scale, k_global_scale, v_global_scale, q_offset, partial_dtype, force_fused, workspace, out, lse_out,
    )  # fmt: skip
    reads_values = not torch.compiler.is_compiling() and os.environ.get("MSA_OPS_CHECK") == "1"
    no_ids = call._replace(q2k_indices=torch.full_like(q2k_out, -1).transpose(0, 1)) if reads_values else call
    problem = check(no_ids)  # ids do not exist yet, and checking mode would read whatever lies in their place
    inputs = {**call._asdict(), "q2k_indices": None, "index_q": index_q, "index_k": index_k}
    check_destination("score_out", score_out, inputs)
    check_destination("q2k_out", q2k_out, {**inputs, "score_out": score_out})
    for name, result in (("out", out), ("lse_out", lse_out)):
        if result is not None:
            check_destination(name, result, {"index_q": index_q, "index_k": index_k})
    if workspace is not None:
        problem = ops.with_scratch(problem, workspace)
    if out is None:
        out = torch.empty(q.shape, dtype=problem.out_dtype, device=q.device)
    lse = lse_out
    if return_softmax_lse and lse is None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    extents = TokenExtents(seqused_k, seqlen_q, causal, q_offset)
    score_blocks(index_q, index_k, page_table, extents, score_out)
    if reads_values or not _choose_and_attend(problem, out, lse, score_out, sink_blocks, local_blocks):
        select_blocks(score_out, topk, extents, q2k_out, sink_blocks, local_blocks)
        if reads_values:
            check(call)
            problem = replace(problem, q2k_indices=call.q2k_indices)
        ops.run(problem, out, lse)
    return (out, lse) if lse is not None else out


def _choose_and_attend(
    problem: DecodeProblem, out: Tensor, lse: Tensor | None, scores: Tensor, sink_blocks: int, local_blocks: int
) -> bool:
    """Both by one kernel, where that is faster; else False, and nothing is done."""
    p = problem
    if not p.q.is_cuda or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    # What torch would hand to Python goes through the op.
    given = (
        p.q, p.k, p.v, p.q2k_indices, p.page_table, p.seqused_k, p.k_scale, p.v_scale, p.k_global_scale, p.v_global_scale,
        p.q_offset, p.workspace, scores, out, lse,
    )  # fmt: skip
    if any(t is not None and type(t) not in _PLAIN_TENSORS for t in given):
        return False
    from .engines import cuda

    if not cuda.choose_and_run(problem, out, lse, scores, sink_blocks, local_blocks):
        return False
    # The kernel writes unseen by autograd.
    torch.autograd.graph.increment_version(out if lse is None else (out, lse))
    return True


def score_blocks(index_q: Tensor, index_k: Tensor, page_table: Tensor, extents: TokenExtents, scores: Tensor) -> None:
    """Write the index scores ``(heads, blocks, tokens)``."""
    e = extents
    msa_proxy_score(
        index_q, index_k, query_starts(page_table.shape[0], e.seqlen_q, index_q.device), page_table=page_table,
        seqused_k=e.lengths, causal=e.causal, max_seqlen_q=e.seqlen_q, max_k_tiles=scores.shape[1], output=scores,
        q_offset=e.q_offset,
    )  # fmt: skip


def choose_blocks(
    index_q: Tensor,
    index_k: Tensor,
    page_table: Tensor,
    extents: TokenExtents,
    scores: Tensor,
    ids: Tensor,
    local_blocks: int,
    sink_blocks: int,
) -> None:
    """Score and select: writes `scores` ``(heads, blocks, tokens)`` and `ids` ``(tokens, heads, topk)``."""
    score_blocks(index_q, index_k, page_table, extents, scores)
    select_blocks(scores, ids.shape[2], extents, ids, sink_blocks, local_blocks)


_starts: dict[tuple[torch.device, int], Tensor] = {}
_starts_lock = threading.Lock()
_outgrown: list[Tensor] = []  # a CUDA graph may hold their addresses


def query_starts(batch: int, seqlen_q: int, device: torch.device) -> Tensor:
    """First query row of each request, and the end: int32 ``(batch + 1,)``, ``0, seqlen_q, 2 * seqlen_q, ...``.

    Kept from call to call, so that a step in a CUDA graph neither makes them nor reads memory of another graph.
    """
    traced = torch.compiler.is_compiling()
    kept = None if traced else _starts.get((device, seqlen_q))
    if kept is not None and batch < kept.shape[0]:
        return kept[: batch + 1]
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    size = 64 if traced else max(64, 1 << batch.bit_length())  # at least batch + 1
    if traced or capturing or size * seqlen_q > _INT32_MAX:
        return torch.arange(0, batch * seqlen_q + 1, seqlen_q, dtype=torch.int32, device=device)
    # Copied from the host, which waits for it: another stream may read it next.
    made = torch.arange(0, size * seqlen_q, seqlen_q, dtype=torch.int32, device="cpu").to(device)
    if type(made) in _PLAIN_TENSORS:
        with _starts_lock:
            replaced = _starts.get((device, seqlen_q))
            if replaced is not None:
                _outgrown.append(replaced)
            _starts[device, seqlen_q] = made
    return made[: batch + 1]


def new_scores(shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Scores with blocks innermost."""
    heads, blocks, tokens = shape
    padded = -(-blocks // _SCORE_PAD) * _SCORE_PAD
    return torch.empty(heads, tokens, padded, dtype=torch.float32, device=device)[..., :blocks].transpose(1, 2)


def _check_index(q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor, page_table: Tensor, seqused_k: Tensor) -> None:
    """What the attention call's own checks do not see: the index tensors, and that the cache is paged."""
    for name, t in (
        ("q", q), ("k", k), ("index_q", index_q), ("index_k", index_k), ("page_table", page_table), ("seqused_k", seqused_k),
    ):  # fmt: skip
        _require_tensor(name, t)
    for name, t in (("index_q", index_q), ("index_k", index_k)):
        if t.dtype not in _INDEX_DTYPES:
            raise ValueError(f"{name} must be bfloat16, float16 or float8_e4m3fn, got {t.dtype}: cast {name}")
        if t.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {t.device}: pass {name}.to(q.device)")
        if t.dim():
            _check_dense_rows(name, t)
    if q.dim() == 3 and k.dim() == 4:  # else the attention's checks say what is wrong
        want = (q.shape[0], k.shape[1], HEAD_DIM)
        if tuple(index_q.shape) != want:
            raise ValueError(
                f"index_q must have shape (tokens, num_kv_heads, {HEAD_DIM}) = {want}, one index head for each KV head, got "
                f"{tuple(index_q.shape)}"
            )
    elif index_q.dim() != 3:
        raise ValueError(f"index_q must have shape (tokens, num_kv_heads, {HEAD_DIM}), got {tuple(index_q.shape)}")
    if index_k.dim() != 4 or tuple(index_k.shape[2:]) != (BLOCK_SIZE, HEAD_DIM):
        raise ValueError(
            f"index_k must have shape (num_pages, 1, {BLOCK_SIZE}, {HEAD_DIM}), paged as k is, got {tuple(index_k.shape)}"
        )
    if index_k.shape[1] == 0 or index_q.shape[1] % index_k.shape[1]:
        raise ValueError(
            f"index_k must have one head, or a number that divides index_q's {index_q.shape[1]}, got {index_k.shape[1]}"
        )
    if page_table.dim() != 2:
        raise ValueError(f"page_table must have shape (batch, max_pages), got {tuple(page_table.shape)}")


def _check_destination(name: str, t: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    _require_tensor(name, t)
    if t.dtype != dtype or tuple(t.shape) != shape or t.device != device:
        raise ValueError(
            f"{name} must be {str(dtype).removeprefix('torch.')} of shape {shape} on {device}, got "
            f"{str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape)} on {t.device}"
        )
    if dtype == torch.int32 and shape[2] > 1 and t.stride(2) != 1:
        raise ValueError(f"{name} must have a dense last dim (stride 1), got strides {t.stride()}")
