"""The public call."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .contract import DecodeCall, check
from .engines.cuda import prepared
from .workspace import MSASparseAttentionWorkspace


def msa_sparse_decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_indices: Tensor,
    *,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqlen_q: int = 1,
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
) -> Tensor | tuple[Tensor, Tensor]:
    """One decode step of MiniMax Sparse Attention: block-sparse grouped-query attention over a KV cache.

    Each of ``seqlen_q`` query tokens per request attends the keys of the 128-key blocks named in ``q2k_indices`` and no
    others: ``out = softmax(softmax_scale * k_global_scale * q K^T) V * v_global_scale`` over those keys, causally masked.
    The same call takes every form below on every supported device; forms are told apart by dtype, rank and strides.

    Args:
        q: ``(batch * seqlen_q, num_qo_heads, 128)``, bfloat16, float16 or float8_e4m3fn; any token and head strides.
        k, v: paged ``(num_pages, num_kv_heads, 128, 128)`` with any page, head and token strides (NHD caches transposed,
            halves of a packed cache, one layer of a pool), or flat ``(total_k, num_kv_heads, 128)``. bfloat16, float16,
            float8_e4m3fn, or uint8 with a last dim of 64 for NVFP4 (two e2m1 codes a byte, even element in the low
            nibble). Read in place, never copied. ``num_qo_heads`` is a multiple of ``num_kv_heads``.
        q2k_indices: ``(num_kv_heads, batch * seqlen_q, topk)`` int32 block ids, any strides with a dense last dim; ids
            outside the request's blocks (-1 padding included) are skipped wherever they stand, duplicates count once.
            `msa_topk_select`'s result is passed as ``.transpose(0, 1)``.
        page_table: ``(batch, max_pages)`` int32, paged caches only: block ``i`` of request ``b`` is page
            ``page_table[b, i]``, with ``stride(1)`` 1. A page id outside the cache makes a skipped block.
        seqused_k: ``(batch,)`` int32, paged caches only: valid keys of each request. 0 (or less) is an empty request.
        cu_seqlens_k: ``(batch + 1,)`` int32, flat caches only: request ``b`` owns rows ``cu_seqlens_k[b]`` to
            ``cu_seqlens_k[b + 1]``.
        seqlen_q: query tokens per request, the same for all.
        causal: token ``i`` of a request sits at position ``seqlen_k - seqlen_q + i`` (or ``q_offset + i``) and sees keys at
            positions up to its own. ``False``: all keys of the selected blocks, ``q_offset`` then has no effect.
        softmax_scale: factor of the scores, any sign; default ``128 ** -0.5``.
        return_softmax_lse: also return the log-sum-exp.
        k_scale, v_scale: NVFP4 block scales, e4m3 as uint8 or float8_e4m3fn: rank 1 or 2 for the 128x4 tiled layout, rank
            4 ``(num_pages, num_kv_heads, 128, 8)`` for the views of a planar page (`msa_ops.nvfp4`).
        k_global_scale, v_global_scale: factors of all K and all V, for every KV dtype: a float, or a one-element float32
            tensor on q's device, read there without a synchronisation.
        q_offset: position of each request's first query token: an int for all, or ``(batch,)`` int32.
        partial_dtype: dtype of partial results where a route stores them in memory (float32, bfloat16, float16,
            float8_e4m3fn); routes that merge on chip keep float32.
        force_fused: ``True``: one thread block per (token, KV head), so that a request's bits do not depend on its batch;
            ``False``: split as far as the device allows; ``None``: chosen by shape and device. A hint on the CPU.
        workspace: scratch for the routes that need some (`MSASparseAttentionWorkspace`).
        out: ``(batch * seqlen_q, num_qo_heads, 128)`` contiguous destination in the output dtype; it is what is returned.
        lse_out: ``(batch * seqlen_q, num_qo_heads)`` float32 contiguous destination of the LSE.

    Returns:
        The output, in q's dtype (bfloat16 for float8 q). With ``return_softmax_lse`` also the natural-log LSE of the
        scaled scores, float32 ``(batch * seqlen_q, num_qo_heads)``. A token with no key to attend gives exactly 0 and an
        LSE of ``-inf``.

    Raises:
        TypeError, ValueError: an argument is not of the form above; raised before anything runs, with the argument's
            name, what was expected, what came, and what to do.
        RuntimeError: the GPU or its compiler package is missing or unsupported.

    The mathematics is grouped-query softmax attention (Ainslie et al., 2023, arXiv:2305.13245) restricted to selected
    key blocks; partial results merge by their log-sum-exp (Dao et al., 2022, arXiv:2205.14135).
    """
    likeness = None
    if not torch.compiler.is_compiling():
        served, found = prepared.serve(
            q, k, v, q2k_indices, page_table, seqused_k, cu_seqlens_k, seqlen_q, causal, softmax_scale, return_softmax_lse,
            k_scale, v_scale, k_global_scale, v_global_scale, q_offset, partial_dtype, force_fused, workspace, out, lse_out,
        )  # fmt: skip
        if served:
            return found  # type: ignore[no-any-return]
        likeness = found
    problem = check(
        DecodeCall(
            q, k, v, q2k_indices, page_table, seqused_k, cu_seqlens_k, seqlen_q, causal, softmax_scale,
            return_softmax_lse, k_scale, v_scale, k_global_scale, v_global_scale, q_offset, partial_dtype, force_fused,
            workspace, out, lse_out,
        )
    )  # fmt: skip
    if workspace is not None:
        problem = ops.with_scratch(problem, workspace)
    if out is None:
        out = torch.empty(q.shape, dtype=problem.out_dtype, device=q.device)
    lse = lse_out
    if return_softmax_lse and lse is None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    ops.run(problem, out, lse)
    if likeness is not None:
        prepared.remember(likeness, problem, out, lse)
    return (out, lse) if lse is not None else out
