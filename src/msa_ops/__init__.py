"""The decode step of MiniMax Sparse Attention, on CPUs and NVIDIA GPUs."""

from .decode import msa_sparse_decode_attention
from .kv_cache import SUPPORTS_PACKED_KV, OutOfPagesError, PagedKVCache, supports_packed_kv
from .nvfp4 import (
    nvfp4_dequantize,
    nvfp4_planar_pages,
    nvfp4_planar_views,
    nvfp4_planar_write,
    nvfp4_quantize,
)
from .proxy_score import msa_proxy_score_fp4
from .runtime import (
    Explanation,
    explain,
    msa_decode_nvfp4_specialized_stats,
    msa_decode_nvfp4_specialized_warmup,
    warmup,
)
from .selection import msa_proxy_score, msa_topk_select
from .step import msa_decode_step
from .workspace import MSASparseAttentionWorkspace

__all__ = [
    "SUPPORTS_PACKED_KV",
    "Explanation",
    "MSASparseAttentionWorkspace",
    "OutOfPagesError",
    "PagedKVCache",
    "explain",
    "msa_decode_nvfp4_specialized_stats",
    "msa_decode_nvfp4_specialized_warmup",
    "msa_decode_step",
    "msa_proxy_score",
    "msa_proxy_score_fp4",
    "msa_sparse_decode_attention",
    "msa_topk_select",
    "nvfp4_dequantize",
    "nvfp4_planar_pages",
    "nvfp4_planar_views",
    "nvfp4_planar_write",
    "nvfp4_quantize",
    "supports_packed_kv",
    "warmup",
]
