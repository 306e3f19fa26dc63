"""MiniMax-M3 in Hugging Face transformers (5.17 and newer) decoding through `msa_ops`.

    from msa_ops.integrations.transformers import MSAPagedCache, enable

    enable(model)                                              # a model with minimax_m3_vl's text part
    cache = MSAPagedCache(model.config, max_length=16384)      # kv_dtype="bf16", "fp8" or "nvfp4"
    model.generate(input_ids, past_key_values=cache, max_new_tokens=64)

Importing this module registers the attention implementation ``"msa_ops"`` with transformers. With it, a sparse
layer's decode step is one `msa_ops.msa_sparse_decode_attention` call on the cache's pages, in place; dense layers and
prefill run transformers' own path (sdpa with the block mask) on the same cache. The blocks of a step are chosen by
transformers' indexer, or with ``enable(model, indexer="msa_ops")`` by `msa_ops.msa_proxy_score` and
`msa_ops.msa_topk_select`.
"""

from .attention import IMPLEMENTATION, enable
from .cache import MAX_DECODE_TOKENS, MSAPagedCache

__all__ = ["IMPLEMENTATION", "MAX_DECODE_TOKENS", "MSAPagedCache", "enable"]
