"""`MSAPagedCache`: a transformers cache whose sparse layers keep K and V in pages that the decode step reads in place.

Sparse layers share one `PagedKVCache`, in bf16, fp16, fp8 or NVFP4. Dense layers and the indexer's keys, which
transformers' own path reads whole, lie in preallocated buffers of the model's dtype; rows of index keys are whole pages
one after the other, which is how `msa_proxy_score` reads them. Nothing is concatenated: a step writes its new tokens and no
others, and going back to an earlier length is a change of numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...contract import BLOCK_SIZE, KVFormat
from ...kv_cache import PagedKVCache, check_global_scale

_STEP = "_msa_ops_step"
_PLAIN = {torch.bfloat16: KVFormat.BF16, torch.float16: KVFormat.FP16}
SPARSE_LAYER = "minimax_m3_sparse"
MAX_DECODE_TOKENS = 8
"""Passes of up to this many tokens a row decode on the pages; longer ones are prefill, by transformers' path."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Where one sparse layer's K and V lie after a step wrote its tokens: what a decode needs beside q and the ids.

    `starts` are the rows' lengths before the step, `counts` how many of the step's tokens are real in each row.
    """

    pool: PagedKVCache
    requests: tuple[int, ...]
    layer: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `msa_sparse_decode_attention`, q, ids and ``seqlen_q`` apart."""
        arguments = self.pool.arguments(self.requests, layer=self.layer)
        if len(set(self.counts)) > 1:
            # Padded rows: real tokens come first in a row, so they are not aligned with its end.
            arguments["q_offset"] = torch.tensor(self.starts, dtype=torch.int32, device=self.pool.device)
        return arguments


def paged_step(key: Tensor) -> PagedStep | None:
    """The pages behind the keys that an `MSAPagedCache` returned; None for any other tensor."""
    return getattr(key, _STEP, None)


class RowBuffer:
    """Tokens of a batch, ``(batch, capacity, heads, dim)`` allocated once, each row filled to its own length."""

    def __init__(self, like: Tensor, capacity: int) -> None:
        batch, heads, _, dim = like.shape
        # Zeros: the attention multiplies masked slots by 0, which a NaN in unwritten memory would survive.
        self.data = torch.zeros(batch, capacity, heads, dim, dtype=like.dtype, device=like.device)

    def write(self, new: Tensor, starts: list[int], counts: list[int]) -> Tensor:
        """Store ``(batch, heads, tokens, dim)``; returns a view of all, ``(batch, heads, longest row, dim)``."""
        rows = new.transpose(1, 2)
        if len(set(starts)) == 1 and len(set(counts)) == 1:
            self.data[:, starts[0] : starts[0] + counts[0]] = rows[:, : counts[0]]
        else:
            for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
                self.data[row, start : start + count] = rows[row, :count]
        longest = max(s + c for s, c in zip(starts, counts, strict=True))
        return self.data[:, :longest].transpose(1, 2)


class IndexKeys(RowBuffer):
    """A sparse layer's index keys: rows of whole pages."""

    def __init__(self, like: Tensor, capacity: int) -> None:
        pages = -(-capacity // BLOCK_SIZE)
        super().__init__(like, pages * BLOCK_SIZE)
        batch, _, heads, dim = self.data.shape
        self.pages = self.data.view(batch * pages, BLOCK_SIZE, heads, dim).transpose(1, 2)
        self.page_table = torch.arange(batch * pages, dtype=torch.int32, device=like.device).view(batch, pages)


@dataclass(frozen=True, slots=True)
class IndexStep:
    """Where one sparse layer's index keys lie after a step wrote its own: what scoring and selecting need beside queries.

    `pages` is ``(pages, 1, 128, 128)``, `page_table` is as wide as the longest row; `lengths` and `q_offset` are those of
    the layer's attention.
    """

    pages: Tensor
    page_table: Tensor
    lengths: Tensor
    q_offset: Tensor | None


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What both kinds of layer share: the rows' lengths, which the owner also reads."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, owner: MSAPagedCache) -> None:
        super().__init__()
        self.owner = owner
        self.lengths: list[int] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.lengths = [0] * key_states.shape[0]
        self.is_initialized = True

    def advance(self, new: Tensor) -> tuple[list[int], list[int]]:
        """Note a step's tokens; returns the rows' lengths before it and the numbers of real new tokens."""
        batch, q_len = new.shape[0], new.shape[2]
        if new.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "MSAPagedCache keeps no gradients: run the model under torch.inference_mode() or no_grad()"
            )
        if batch != len(self.lengths):
            raise ValueError(
                f"the cache holds a batch of {len(self.lengths)}, got {batch} rows: make a new MSAPagedCache"
            )
        starts, counts = self.lengths, self.owner.step_counts(batch, q_len)
        self.owner.check_room(starts, counts)
        self.lengths = [s + c for s, c in zip(starts, counts, strict=True)]
        return starts, counts

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return max(self.lengths, default=0)

    def get_max_length(self) -> int:
        return self.owner.max_length

    def truncate(self, lengths: list[int]) -> None:
        self.lengths = [min(a, b) for a, b in zip(self.lengths, lengths, strict=True)]

    def crop(self, tokens_to_remove: int) -> None:
        """Drop that many tokens (a negative number, as in transformers) from the end of every row."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove must not be positive, got {tokens_to_remove}: -n drops n tokens; "
                "MSAPagedCache.truncate takes a length"
            )
        self.truncate([max(n + tokens_to_remove, 0) for n in self.lengths])

    def reset(self) -> None:
        self.truncate([0] * len(self.lengths))

    def _refuse(self, what: str) -> None:
        raise NotImplementedError(
            f"MSAPagedCache does not {what}: decode greedily or by sampling, one sequence per row"
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._refuse("reorder rows (beam search)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse("repeat rows")

    def batch_select_indices(self, indices: Tensor) -> None:
        self._refuse("select rows")


class _DenseLayer(_Layer):
    """A layer that attends everything, by transformers' own path."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.k = RowBuffer(key_states, self.owner.max_length)
        self.v = RowBuffer(value_states, self.owner.max_length)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        starts, counts = self.advance(key_states)
        return self.k.write(key_states, starts, counts), self.v.write(value_states, starts, counts)


class _SparseLayer(_Layer):
    """A layer with an indexer: K and V in pages, index keys in a buffer."""

    def __init__(self, owner: MSAPagedCache, pool_layer: int) -> None:
        super().__init__(owner)
        self.pool_layer = pool_layer
        self.index_keys: IndexKeys | None = None
        self._last: tuple[list[int], list[int]] = ([], [])
        self._step: PagedStep | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        starts, counts = self._last = self.advance(key_states)
        pool = self.owner.grow_pool(key_states, self.lengths, counts)
        pool.write(self.pool_layer, _real_tokens(key_states, counts), _real_tokens(value_states, counts))
        keys, values = self._dense(pool, key_states)
        self._step = PagedStep(pool, self.owner.requests, self.pool_layer, tuple(starts), tuple(counts))
        setattr(keys, _STEP, self._step)
        return keys, values

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Append index keys ``(batch, 1, tokens, dim)`` of the step that `update` has just seen; returns all."""
        if self.index_keys is None:
            self.index_keys = IndexKeys(idx_k, self.owner.max_length)
        return self.index_keys.write(idx_k, *self._last)

    def index_step(self) -> IndexStep:
        """The pages of the step that `update` and `update_index` have just seen."""
        assert self.index_keys is not None and self._step is not None
        arguments = self._step.arguments()
        blocks = -(-self.get_seq_length() // BLOCK_SIZE)
        keys = self.index_keys
        return IndexStep(keys.pages, keys.page_table[:, :blocks], arguments["seqused_k"], arguments.get("q_offset"))

    def _dense(self, pool: PagedKVCache, new: Tensor) -> tuple[Tensor, Tensor]:
        """K and V as ``(batch, heads, longest row, 128)`` for transformers' path.

        One row in the model's dtype: a view, since its pages follow each other in the pool. Otherwise a widened copy;
        where the step reads the pages itself no copy is made, and tensors without storage carry the shape.
        """
        longest = self.get_seq_length()
        if len(self.lengths) == 1 and pool.kv_format == _PLAIN.get(new.dtype):
            arguments = pool.arguments(self.owner.requests, layer=self.pool_layer)
            k, v = (arguments[name].transpose(1, 2).flatten(0, 1)[:longest].transpose(0, 1) for name in ("k", "v"))
            return k[None], v[None]
        shape = (len(self.lengths), new.shape[1], longest, new.shape[3])
        if self.owner.step_reads_pages:
            k, v = torch.empty((2, *shape), dtype=new.dtype, device="meta")
            return k, v
        k, v = torch.zeros((2, *shape), dtype=new.dtype, device=new.device)
        for row, request in enumerate(self.owner.requests):
            row_k, row_v = pool.read(request, layer=self.pool_layer, dtype=new.dtype)
            k[row, :, : len(row_k)] = row_k.transpose(0, 1)
            v[row, :, : len(row_v)] = row_v.transpose(0, 1)
        return k, v


def _real_tokens(new: Tensor, counts: list[int]) -> Tensor:
    """``(batch, heads, tokens, dim)`` to the real tokens of all rows, ``(total, heads, dim)``."""
    rows = new.transpose(1, 2)
    if min(counts) == rows.shape[1]:
        return rows.flatten(0, 1)
    return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])


class MSAPagedCache(Cache):  # type: ignore[misc]
    """A cache for MiniMax-M3 in transformers, given as ``past_key_values`` (or ``cache``, as 5.24 calls it).

    Args:
        config: the model's configuration (its text part is used).
        max_length: tokens that each row can hold. Memory for them is taken at the first step, when the batch is known.
        kv_dtype: what the sparse layers' pages hold: "bf16", "fp16", "fp8" or "nvfp4". Dense layers keep the model's
            dtype.
        k_global_scale, v_global_scale: for "fp8" and "nvfp4", as in `PagedKVCache`.

    Rows may have different lengths: with `enable`, a right-padded batch stores no padding.

    Raises:
        TypeError, ValueError: max_length below 1, an unknown kv_dtype, or scales that do not fit it.
    """

    def __init__(
        self,
        config: Any,
        max_length: int,
        *,
        kv_dtype: str = "bf16",
        k_global_scale: float = 1.0,
        v_global_scale: float = 1.0,
    ) -> None:
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        if kv_dtype not in [known.value for known in KVFormat]:
            raise ValueError(f"kv_dtype must be bf16, fp16, fp8 or nvfp4, got {kv_dtype!r}")
        for name, scale in (("k_global_scale", k_global_scale), ("v_global_scale", v_global_scale)):
            check_global_scale(name, scale, KVFormat(kv_dtype))
        self.max_length, self.kv_dtype = max_length, kv_dtype
        self._scales = {"k_global_scale": k_global_scale, "v_global_scale": v_global_scale}
        self.pool: PagedKVCache | None = None
        self.requests: tuple[int, ...] = ()
        self.step_reads_pages = False
        self._step: tuple[list[int], int] | None = None
        layers: list[_Layer] = []
        self._sparse_layers = 0
        for kind in config.get_text_config(decoder=True).layer_types:
            if kind == SPARSE_LAYER:
                layers.append(_SparseLayer(self, self._sparse_layers))
                self._sparse_layers += 1
            else:
                layers.append(_DenseLayer(self))
        super().__init__(layers=layers)

    def row_lengths(self, batch: int) -> list[int]:
        """Tokens held of each row; zeros before the first step, whose batch size is `batch`."""
        seen = [layer.lengths for layer in self.layers if layer.lengths]
        if any(lengths != seen[0] for lengths in seen) or (seen and len(seen) != len(self.layers)):
            raise ValueError(
                "the cache's layers hold different numbers of tokens, since an earlier forward pass failed on its way: "
                "call truncate with the length before it"
            )
        return list(seen[0]) if seen else [0] * batch

    def begin_step(self, counts: list[int], q_len: int, *, reads_pages: bool) -> list[int]:
        """Announce a forward pass of `q_len` tokens a row, `counts` of them real. Returns the rows' lengths before it.

        With `reads_pages` the sparse layers' attention reads the pages, and no dense K and V are handed out.
        """
        starts = self.row_lengths(len(counts))
        if len(starts) != len(counts):
            raise ValueError(
                f"the cache holds a batch of {len(starts)}, got {len(counts)} rows: make a new MSAPagedCache"
            )
        self.check_room(starts, counts)
        self._step, self.step_reads_pages = (counts, q_len), reads_pages
        return starts

    def step_counts(self, batch: int, q_len: int) -> list[int]:
        """Real tokens of each row in this step: as announced, or all."""
        if self._step is None or (len(self._step[0]), self._step[1]) != (batch, q_len):
            return [q_len] * batch
        return self._step[0]

    def check_room(self, starts: list[int], counts: list[int]) -> None:
        """Raise `ValueError` where a row would outgrow the cache."""
        longest = max(s + c for s, c in zip(starts, counts, strict=True))
        if longest > self.max_length:
            raise ValueError(
                f"max_length = {self.max_length} tokens a row are too few for {longest}: make a larger cache"
            )

    def grow_pool(self, new: Tensor, lengths: list[int], counts: list[int]) -> PagedKVCache:
        """The pages with room for `lengths` tokens; the first sparse layer of a step makes the room for all of them."""
        if self.pool is None:
            self._check_dtype(new.dtype)
            pages = -(-self.max_length // BLOCK_SIZE)
            self.pool = PagedKVCache(
                len(lengths) * pages,
                new.shape[1],
                kv_format=self.kv_dtype,
                layout="planar" if self.kv_dtype == "nvfp4" else "nhd",
                num_layers=self._sparse_layers,
                device=new.device,
                **self._scales,
            )
            self.requests = tuple(self.pool.add_request() for _ in lengths)
        if [self.pool.length(request) for request in self.requests] != lengths:
            self.pool.extend(self.requests, counts)
        return self.pool

    def _check_dtype(self, dtype: torch.dtype) -> None:
        """Raise `ValueError` where the model's dtype has no decode step, or none with a cache of this kind."""
        if dtype not in _PLAIN:
            raise ValueError(f"the model must be bfloat16 or float16, got {dtype}: call model.to(torch.bfloat16)")
        own = _PLAIN[dtype].value
        if self.kv_dtype in ("bf16", "fp16") and self.kv_dtype != own:
            raise ValueError(f"kv_dtype must be {own}, fp8 or nvfp4 for a model in {dtype}, got {self.kv_dtype!r}")

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` tokens of every row. No byte moves: a snapshot of a cache is its length."""
        if length < 0:
            raise ValueError(f"length must not be negative, got {length}")
        for layer in self.layers:
            layer.truncate([length] * len(layer.lengths))
        self._truncate_pool()

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self._truncate_pool()

    def reset(self) -> None:
        """Forget all tokens; memory and batch size stay."""
        super().reset()
        self._truncate_pool()

    def _truncate_pool(self) -> None:
        if self.pool is None:
            return
        sparse = next(layer for layer in self.layers if isinstance(layer, _SparseLayer))
        for request, length in zip(self.requests, sparse.lengths, strict=True):
            self.pool.truncate(request, min(length, self.pool.length(request)))
