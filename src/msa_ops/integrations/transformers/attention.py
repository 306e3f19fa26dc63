"""The attention implementation ``"msa_ops"``, and the step preparation that `enable` adds to a model.

transformers calls an attention implementation with the layer's query, what the cache's ``update`` returned, and, for a
sparse layer, the indexer's ``block_indices``. `MSAPagedCache` hangs the pages onto the keys that it returns, so that a
decode step finds them there; transformers itself stays as it is.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLTextModel

from ...contract import BLOCK_SIZE, HEAD_DIM
from ...decode import msa_sparse_decode_attention
from .cache import MAX_DECODE_TOKENS, MSAPagedCache, PagedStep, paged_step
from .indexer import set_indexer

ModelT = TypeVar("ModelT", bound=torch.nn.Module)

IMPLEMENTATION = "msa_ops"
"""Name of the attention implementation in transformers' registry."""
INDEXERS = ("transformers", IMPLEMENTATION)

_LEFT_PADDED = (
    "attention_mask is left-padded (row {row} starts with 0): sparse blocks are counted from a row's first slot, so "
    "left-padded rows would select other blocks than alone. Pad on the right: tokenizer.padding_side = 'right'"
)


def msa_ops_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, as transformers' `AttentionInterface` calls it.

    Args:
        query: ``(batch, num_qo_heads, q_len, 128)``.
        key, value: what the cache's ``update`` returned, ``(batch, num_kv_heads, kv_len, 128)``.
        attention_mask: None or bool ``(batch, 1, q_len, kv_len)``; positions and lengths rule a decode step instead.
        block_indices: ``(batch, num_kv_heads, q_len, topk)`` int64, -1 tail; None in a dense layer.

    Returns:
        ``(batch, q_len, num_qo_heads, 128)`` and None (no attention weights).

    Raises:
        ValueError: a sparse layer's past lies in another cache than `MSAPagedCache`, or dropout is on in a decode step.
    """
    own = {"scaling": scaling, "dropout": dropout, **kwargs}
    if block_indices is None:
        return transformers_attention(module, query, key, value, attention_mask, **own)
    step = paged_step(key)
    q_len = query.shape[2]
    if step is None and key.shape[2] != q_len:
        raise ValueError(
            f"attn_implementation {IMPLEMENTATION!r} decodes on the pages of an MSAPagedCache, these {key.shape[2]} "
            "keys come from another cache: pass past_key_values=MSAPagedCache(model.config, max_length=...)"
        )
    if step is None or q_len > MAX_DECODE_TOKENS:
        return transformers_attention(module, query, key, value, attention_mask, block_indices=block_indices, **own)
    if dropout:
        raise ValueError(f"dropout must be 0 in a decode step, got {dropout}: call model.eval()")
    return decode_attention(query, block_indices, step, scaling), None


def decode_attention(query: Tensor, block_indices: Tensor, step: PagedStep, scaling: float | None) -> Tensor:
    """A sparse layer's decode step on the cache's pages; shapes as in `msa_ops_attention`."""
    batch, heads, q_len, dim = query.shape
    q = query.transpose(1, 2).reshape(batch * q_len, heads, dim)
    ids = block_indices.to(torch.int32).permute(1, 0, 2, 3).reshape(block_indices.shape[1], batch * q_len, -1)
    out = msa_sparse_decode_attention(q, q2k_indices=ids, seqlen_q=q_len, softmax_scale=scaling, **step.arguments())
    assert isinstance(out, Tensor)
    return out.view(batch, q_len, heads, dim)


def transformers_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' own attention: sdpa, in a sparse layer with the block selection as a dense mask."""
    if block_indices is not None:
        attention_mask = module.indexer.build_block_mask(
            block_indices, attention_mask, key.shape[2], query.dtype, query.device, kwargs["position_ids"]
        )
    result = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return result[0], None


def msa_ops_mask(
    *, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """transformers' sdpa mask, for models whose step was not prepared by `enable`: padded rows cannot decode there."""
    if attention_mask is not None and not bool(attention_mask.all()):
        refuse_left_padding(attention_mask)
        if kv_length != q_length:
            raise ValueError(
                "attention_mask pads a batch that decodes with a cache: call "
                "msa_ops.integrations.transformers.enable(model), which keeps each row at its own length"
            )
    mask = sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs)
    assert mask is None or isinstance(mask, Tensor)
    return mask


def refuse_left_padding(attention_mask: Tensor) -> None:
    """Raise `ValueError` where a row of a ``(batch, length)`` mask starts with padding and holds tokens after it."""
    keep = attention_mask.bool()
    padded = ~keep[:, 0] & keep.any(dim=1)
    if bool(padded.any()):
        raise ValueError(_LEFT_PADDED.format(row=int(padded.nonzero()[0])))


def enable(model: ModelT, *, indexer: str = "transformers") -> ModelT:
    """Switch every MiniMax-M3 text model in `model` to the implementation ``"msa_ops"``, and prepare its steps.

    The preparation is a forward pre-hook: it refuses left-padded masks, keeps each row of a right-padded batch at its
    own length in an `MSAPagedCache`, and checks that positions follow the cache. It stays useful, and stays in place,
    when the model is switched back with ``set_attn_implementation("sdpa")``; so does the indexer. Calling `enable` twice is
    harmless.

    Args:
        model: what holds the text models.
        indexer: who chooses the blocks of a decode step: ``"transformers"``, or ``"msa_ops"``, whose scoring and selecting
            read the index keys in an `MSAPagedCache`'s pages. Both choose the same blocks, but where scores are equal or
            differ by rounding. Prefill is transformers' either way. A later call may switch it.

    Returns:
        `model`.

    Raises:
        ValueError: no MiniMax-M3 text model in `model`, or one whose head_dim or index block is not 128, or whose index
            heads are not its KV heads; an unknown `indexer`, or this package's for an index head dim other than 128.
    """
    if indexer not in INDEXERS:
        raise ValueError(f"indexer must be 'transformers' or {IMPLEMENTATION!r}, got {indexer!r}")
    own_indexer = indexer == IMPLEMENTATION
    text_models = [m for m in model.modules() if isinstance(m, MiniMaxM3VLTextModel)]
    if not text_models:
        raise ValueError(f"model must contain a transformers MiniMaxM3VLTextModel, got {type(model).__name__}")
    for text_model in text_models:
        check_config(text_model.config, own_indexer)
    for text_model in text_models:
        text_model.set_attn_implementation(IMPLEMENTATION)
        set_indexer(text_model, own_indexer)
        if prepare_step not in text_model._forward_pre_hooks.values():
            text_model.register_forward_pre_hook(prepare_step, with_kwargs=True)
    return model


def check_config(config: Any, own_indexer: bool) -> None:
    """Raise `ValueError` for a text configuration that the decode step, or this package's indexer, cannot serve."""
    facts = [("head_dim", HEAD_DIM), ("index_block_size", BLOCK_SIZE)]
    if own_indexer:
        facts.append(("index_head_dim", HEAD_DIM))
    for name, want in facts:
        if getattr(config, name) != want:
            raise ValueError(f"config.{name} must be {want}, got {getattr(config, name)}")
    if config.index_n_heads != config.num_key_value_heads:
        raise ValueError(
            f"config.index_n_heads must equal num_key_value_heads = {config.num_key_value_heads} (one selection per KV "
            f"head), got {config.index_n_heads}"
        )


@functools.cache
def _forward_names(forward: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def prepare_step(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of the text model: tells the cache how many tokens of each row are real, and masks likewise."""
    kwargs = {**dict(zip(_forward_names(type(module).forward), args, strict=False)), **kwargs}
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        refuse_left_padding(mask)
    # transformers 5.17 names the argument past_key_values; 5.24 names it cache and takes both.
    cache = kwargs.get("cache") if kwargs.get("cache") is not None else kwargs.get("past_key_values")
    if not isinstance(cache, MSAPagedCache):
        return (), kwargs
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask must be None or (batch, tokens) with an MSAPagedCache, got {shape}: a decode step sees "
            "each row's own tokens, causally, and no custom mask"
        )
    tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    batch, q_len = tokens.shape[:2]
    counts = new_tokens_per_row(mask, cache.row_lengths(batch), q_len)
    on_pages = module.config._attn_implementation == IMPLEMENTATION and q_len <= MAX_DECODE_TOKENS
    starts = cache.begin_step(counts, q_len, reads_pages=on_pages)
    positions = torch.tensor(starts, device=tokens.device)[:, None] + torch.arange(q_len, device=tokens.device)
    check_positions(kwargs.get("position_ids"), positions, counts)
    uniform = len(set(starts)) == 1 and min(counts) == q_len
    longest = max(s + c for s, c in zip(starts, counts, strict=True))
    # Padding beyond the longest row would be in a block that transformers' indexer does not know.
    kwargs["position_ids"] = positions[:1] if uniform else positions.clamp_(max=max(longest - 1, 0))
    kwargs["attention_mask"] = None
    if not uniform:
        slots = torch.arange(longest, device=tokens.device)
        kwargs["attention_mask"] = slots <= positions[:, None, :, None]
    return (), kwargs


def new_tokens_per_row(mask: Tensor | None, lengths: list[int], q_len: int) -> list[int]:
    """How many of a step's `q_len` tokens are real in each row.

    Args:
        mask: None (all are real) or ``(batch, past + q_len)``, 1 for a real token; real tokens come first in a step.
        lengths: tokens that the cache holds of each row.
    """
    if mask is None:
        return [q_len] * len(lengths)
    keep = mask.bool()
    if keep.shape[0] != len(lengths) or keep.shape[1] < q_len:
        raise ValueError(
            f"attention_mask must be (batch, past + {q_len} tokens) for a batch of {len(lengths)}, got "
            f"{tuple(keep.shape)}"
        )
    past, new = keep[:, : keep.shape[1] - q_len].sum(dim=1).tolist(), keep[:, keep.shape[1] - q_len :]
    if past != lengths:
        raise ValueError(
            f"attention_mask must have a 1 for each token in the cache: it holds {lengths} tokens of the rows, and the "
            f"mask's columns before this step's {q_len} have {past}"
        )
    if bool((new[:, 1:] & ~new[:, :-1]).any()):
        raise ValueError("attention_mask must have each row's real tokens before its padding: pad on the right")
    return [int(n) for n in new.sum(dim=1).tolist()]


def check_positions(given: Tensor | None, positions: Tensor, counts: list[int]) -> None:
    """Raise `ValueError` unless the given position ids of real tokens are the rows' slots in the cache."""
    if given is None:
        return
    if given.dim() != 2 or given.shape[1] != positions.shape[1] or given.shape[0] not in (1, positions.shape[0]):
        raise ValueError(f"position_ids must be (batch, tokens) = {tuple(positions.shape)}, got {tuple(given.shape)}")
    real = (
        torch.arange(positions.shape[1], device=positions.device)
        < torch.tensor(counts, device=positions.device)[:, None]
    )
    wrong = (given.to(positions.device) != positions) & real
    if bool(wrong.any()):
        row = int(wrong.any(dim=1).nonzero()[0])
        raise ValueError(
            f"position_ids must continue each row's tokens in the cache: row {row} is at "
            f"{positions[row].tolist()[:4]}, got {given[min(row, given.shape[0] - 1)].tolist()[:4]}: leave it out"
        )


AttentionInterface.register(IMPLEMENTATION, msa_ops_attention)
AttentionMaskInterface.register(IMPLEMENTATION, msa_ops_mask)
