"""Index scores of NVFP4 queries and keys: the same as `msa_proxy_score` at a quarter of the bytes of bf16 keys."""

from __future__ import annotations

from torch import Tensor

from .contract import BLOCK_SIZE, FP8, SCALES_PER_ROW, _check_start, _global_scale, _require_float32, _require_tensor
from .selection import ScoreProblem, _check_flags, _check_index_tensors, score_blocks

_TILE_BYTES = BLOCK_SIZE * SCALES_PER_ROW
_SCALE_ALIGNMENT = 16
"""Bytes: scales of a tile are read as vectors of that size."""


def msa_proxy_score_fp4(
    q_fp4: Tensor,
    k_fp4: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    q_global_scale: float | Tensor,
    k_global_scale: float | Tensor,
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
) -> Tensor:
    """`msa_proxy_score` of NVFP4 queries and keys: for each index head, block of 128 keys and token the largest score.

    The scores are those of the dequantised rows: of ``e2m1(code) * e4m3(scale)``, multiplied with both global scales before
    the largest is taken.

    Args:
        q_fp4: codes of the index queries, uint8 ``(total_q, num_index_heads, 64)``, two a byte, the even element in the
            low nibble, as `nvfp4_quantize` returns them.
        k_fp4: codes of the index keys, uint8: paged ``(num_pages, num_kv_heads, 128, 64)`` with any strides, or flat
            ``(total_k, num_kv_heads, 64)``. Of both the last dim is dense, and rows start on 16-byte boundaries.
        q_scale, k_scale: e4m3 block scales in the 128x4 tiled layout, uint8 or float8_e4m3fn, rank 1 or 2, contiguous:
            rows are ``token * heads + head``, of paged keys ``(page * num_kv_heads + head) * 128 + token``.
        q_global_scale, k_global_scale: ``1 / global_sf`` of `nvfp4_quantize`: a float, or a one-element float32 tensor,
            which on CUDA is read there.
        cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, causal, max_seqlen_q, max_k_tiles, output, reduce_heads,
            q_offset: as in `msa_proxy_score`.

    Returns:
        float32 ``(num_index_heads, max_k_tiles, total_q)``, or ``(1, max_k_tiles, total_q)`` with `reduce_heads`, as
        `msa_proxy_score` does. It is `output` if given.

    Raises:
        TypeError, ValueError: an argument is not of this form; of lengths the same as in `msa_proxy_score`.
        RuntimeError: the GPU or its compiler package is missing or unsupported.
    """
    _check_flags(causal=causal, reduce_heads=reduce_heads)
    _check_index_tensors(q_fp4, k_fp4, page_table, nvfp4=True)
    _check_scale("q_scale", q_scale, q_fp4)
    _check_scale("k_scale", k_scale, k_fp4)
    for name, value in (("q_global_scale", q_global_scale), ("k_global_scale", k_global_scale)):
        if value is None:
            raise TypeError(f"{name} must be a float or a one-element float32 tensor, got None")
    q_factor, q_global = _global_scale("q_global_scale", q_global_scale, q_fp4)
    k_factor, k_global = _global_scale("k_global_scale", k_global_scale, q_fp4)
    _require_float32("q_global_scale * k_global_scale", q_factor * k_factor)
    problem = ScoreProblem(
        q_fp4, k_fp4, cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, q_offset, causal, reduce_heads, q_scale, k_scale,
        q_factor * k_factor, q_global, k_global,
    )  # fmt: skip
    return score_blocks(problem, max_seqlen_q, max_k_tiles, output)


def _check_scale(name: str, scale: Tensor, codes: Tensor) -> None:
    _require_tensor(name, scale)
    rows = codes.shape[:-1].numel()
    need = -(-rows // BLOCK_SIZE) * _TILE_BYTES
    if scale.element_size() != 1 or scale.dtype not in (codes.dtype, FP8):
        raise ValueError(f"{name} must be uint8 or float8_e4m3fn, got {scale.dtype}")
    if scale.dim() not in (1, 2) or not scale.is_contiguous() or scale.numel() < need:
        raise ValueError(
            f"{name} must be contiguous, of rank 1 or 2, and hold at least {need} bytes ({rows} rows padded to a multiple of "
            f"{BLOCK_SIZE}, {SCALES_PER_ROW} scales each, 128x4 tiled), got shape {tuple(scale.shape)}, strides "
            f"{scale.stride()}"
        )
    if scale.device != codes.device:
        raise ValueError(f"{name} must be on {codes.device}, got {scale.device}")
    _check_start(name, scale, _SCALE_ALIGNMENT)
