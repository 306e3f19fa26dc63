"""The decode step of MiniMax Sparse Attention, on CPUs and NVIDIA GPUs."""

from .decode import msa_sparse_decode_attention
from .workspace import MSASparseAttentionWorkspace

__all__ = ["MSASparseAttentionWorkspace", "msa_sparse_decode_attention"]
