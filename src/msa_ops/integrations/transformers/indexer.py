"""This package's own indexer in place of transformers': which blocks a decode step attends.

Both have the same rule: unscaled dot products in float32, the largest over a block's visible keys, the blocks around the
token taken in any case. transformers' takes the products with all keys at once; this one reads the index keys in their
pages, block by block, in one scoring and one selecting call, and keeps nothing but the blocks' scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer, apply_rotary_pos_emb

from ...selection import TokenExtents
from ...step import choose_blocks, new_scores
from .cache import MAX_DECODE_TOKENS, MSAPagedCache


class MSAIndexer(MiniMaxM3VLIndexer):  # type: ignore[misc]
    """transformers' indexer with its weights, choosing the blocks of a decode step by `msa_ops`."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: Any, position_ids: Tensor
    ) -> Tensor:
        """Ids of the chosen blocks, int64 ``(batch, index heads, q_len, topk)``: ascending, then -1.

        Passes of more than `MAX_DECODE_TOKENS` tokens, and those on another cache than `MSAPagedCache`, are transformers'.
        """
        batch, q_len = hidden_states.shape[:2]
        if q_len > MAX_DECODE_TOKENS or not isinstance(cache, MSAPagedCache):
            theirs: Tensor = super().forward(hidden_states, position_embeddings, cache, position_ids)
            return theirs

        def heads(projection: Any, norm: Any) -> Tensor:
            projected: Tensor = norm(projection(hidden_states).unflatten(-1, (-1, self.head_dim)))
            return projected.transpose(1, 2)

        rotation = (part[..., : self.head_dim] for part in position_embeddings)
        q, k = apply_rotary_pos_emb(heads(self.q_proj, self.q_norm), heads(self.k_proj, self.k_norm), *rotation)
        layer = cache.layers[self.layer_idx]
        layer.update_index(k)
        step = layer.index_step()
        blocks, tokens = step.page_table.shape[1], batch * q_len
        ids = torch.empty(
            tokens, self.num_heads, min(self.topk_blocks, blocks), dtype=torch.int32, device=hidden_states.device
        )
        choose_blocks(
            q.transpose(1, 2).reshape(tokens, self.num_heads, self.head_dim),
            step.pages,
            step.page_table,
            TokenExtents(step.lengths, q_len, True, step.q_offset),
            new_scores((self.num_heads, blocks, tokens), hidden_states.device),
            ids,
            self.local_blocks,
            0,
        )
        return ids.view(batch, q_len, *ids.shape[1:]).transpose(1, 2).long()


def set_indexer(model: torch.nn.Module, own: bool) -> None:
    """Make every indexer in `model` this package's, or transformers' again. Weights and hooks stay."""
    before, after = (MiniMaxM3VLIndexer, MSAIndexer) if own else (MSAIndexer, MiniMaxM3VLIndexer)
    for module in model.modules():
        if type(module) is before:
            module.__class__ = after
