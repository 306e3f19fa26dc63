"""A paged KV cache for `msa_sparse_decode_attention`: allocate, append, share a prefix, free, give the arguments.

`PagedKVCache` keeps the books (which pages a request owns, how many requests share one) on the host; `_Pool` holds the
bytes of all layers in one allocation and stores quantised tokens. Every form that the attention call reads in place
can be allocated. Paging and copy-on-write follow Kwon et al., 2023, arXiv:2309.06180.
"""

from __future__ import annotations

import itertools
import numbers
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import nvfp4
from .arguments import require_int
from .contract import BLOCK_SIZE, FP8, HEAD_DIM, SCALES_PER_ROW, KVFormat, _require_tensor

SUPPORTS_PACKED_KV = True
"""K and V may be the halves of one packed cache, wherever the package runs (see `supports_packed_kv`)."""

_DTYPE = {
    KVFormat.BF16: torch.bfloat16,
    KVFormat.FP16: torch.float16,
    KVFormat.FP8: FP8,
    KVFormat.NVFP4: torch.uint8,
}
_PLAIN_LAYOUTS = ("hnd", "nhd", "packed", "packed_nhd")
_NVFP4_LAYOUTS = ("planar", "tiled")


def supports_packed_kv(device: torch.device | str | int | None = None) -> bool:
    """Whether K and V may be views of one cache that packs them in a ``2 * 128`` content dim per token.

    Args:
        device: default the current CUDA device if there is one, else the CPU.

    Returns:
        True wherever the package runs: on CPUs, and on NVIDIA GPUs of compute capability 8.0 and up.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu"


def packed_kv_views(cache: Tensor, *, nhd: bool = False) -> tuple[Tensor, Tensor]:
    """K and V, ``(num_pages, num_kv_heads, 128, 128)`` each, as views of a packed cache.

    Args:
        cache: ``(num_pages, num_kv_heads, 128, 256)``, or with `nhd` ``(num_pages, 128, num_kv_heads, 256)``: K in the
            first half of the last dim, V in the second.
    """
    _require_tensor("cache", cache)
    token_dim = 1 if nhd else 2
    if cache.dim() != 4 or cache.shape[token_dim] != BLOCK_SIZE or cache.shape[3] != 2 * HEAD_DIM:
        want = "(num_pages, 128, num_kv_heads, 256)" if nhd else "(num_pages, num_kv_heads, 128, 256)"
        raise ValueError(f"cache must have shape {want}, got {tuple(cache.shape)}")
    if nhd:
        cache = cache.transpose(1, 2)
    return cache[..., :HEAD_DIM], cache[..., HEAD_DIM:]


class OutOfPagesError(RuntimeError):
    """The cache has too few free pages for an `PagedKVCache.extend` or `append`; nothing was changed."""


class PagedKVCache:
    """Pages of 128 tokens for one or more layers, and the requests that own them.

    Args:
        num_pages: pages in the pool; a page holds 128 tokens of all KV heads, in every layer.
        num_kv_heads: KV heads of a layer.
        kv_format: "bf16", "fp16", "fp8" or "nvfp4", or the torch dtype of the cache (uint8 for NVFP4).
        layout: "hnd" ``(pages, heads, tokens, 128)``, "nhd" ``(pages, tokens, heads, 128)``, "packed" and "packed_nhd"
            (K and V in the halves of a 256-wide last dim); for NVFP4 "planar" (each page is
            ``[K data | K scale | V data | V scale]``) or "tiled" (HND codes, 128x4 tiled scales). Default "hnd", for
            NVFP4 "planar".
        num_layers: layers served by the same pages and page table.
        device: where the pool lives.
        k_global_scale, v_global_scale: fp8 and NVFP4 only, 2^-126 to 2^126: the cache stores ``x / scale``, saturating
            at the format's largest value (448, or 448 * 6), and `arguments` hands the scales to the attention call.

    Requests are integers made by `add_request` and `fork`. Slots past a request's length hold arbitrary bytes.

    On a GPU work is queued on the current stream and nothing waits for it, so keep to one stream, or order those that you
    use. In fp8 and NVFP4 tokens are quantised and stored by one kernel a layer. An NVFP4 cache there does not refuse NaN
    and inf, as one on the CPU does: inf saturates, and a NaN makes its 16 elements read as NaN (in an fp8 cache it stays
    NaN itself). ``MSA_OPS_CHECK=1`` has the cache look and refuse, with a synchronisation. The books are the host's: inside
    a CUDA graph capture only `write` works, and its replays store to the same slots again.
    """

    def __init__(
        self,
        num_pages: int,
        num_kv_heads: int,
        *,
        kv_format: KVFormat | str | torch.dtype = "bf16",
        layout: str | None = None,
        num_layers: int = 1,
        device: torch.device | str | None = None,
        k_global_scale: float = 1.0,
        v_global_scale: float = 1.0,
    ) -> None:
        for name, value in (("num_pages", num_pages), ("num_kv_heads", num_kv_heads), ("num_layers", num_layers)):
            if require_int(name, value) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.kv_format = _parse_format(kv_format)
        self.k_global_scale = check_global_scale("k_global_scale", k_global_scale, self.kv_format)
        self.v_global_scale = check_global_scale("v_global_scale", v_global_scale, self.kv_format)
        self.layout = _parse_layout(self.kv_format, layout)
        self.num_pages, self.num_kv_heads, self.num_layers = num_pages, num_kv_heads, num_layers
        self._pool = _Pool(self.kv_format, self.layout, (num_layers, num_pages, num_kv_heads), device)
        self.device = self._pool.k.device
        self._requests: dict[int, _Request] = {}
        self._ids = itertools.count()
        self._references = [0] * num_pages
        self._free = list(reversed(range(num_pages)))
        self._pending: _Slots | None = None
        self._last_table: tuple[tuple[tuple[int, ...], int], Tensor, Tensor] | None = None

    @property
    def num_free_pages(self) -> int:
        """Pages that no request owns."""
        return len(self._free)

    def add_request(self) -> int:
        """A new, empty request."""
        request = next(self._ids)
        self._requests[request] = _Request()
        return request

    def length(self, request: int) -> int:
        """Tokens of a request."""
        return self._get(request).length

    def free(self, request: int) -> None:
        """Forget a request; pages that no other request shares become free."""
        self.truncate(request, 0)
        del self._requests[request]

    def truncate(self, request: int, length: int) -> None:
        """Drop the tokens of a request from position `length` on, e.g. rejected draft tokens."""
        state, length = self._get(request), require_int("length", length)
        if not 0 <= length <= state.length:
            raise ValueError(f"length must lie in 0..{state.length} (the request's tokens), got {length}")
        keep = _pages_for(length)
        for page in reversed(state.pages[keep:]):
            self._release(page)
        del state.pages[keep:]
        before, state.length = state.length, length
        self._last_table = None
        if self._pending is not None and length < before and request in self._pending.requests:
            self._pending = None

    def fork(self, request: int, tokens: int | None = None) -> int:
        """A new request that starts with the first `tokens` tokens of another (default all of them).

        No byte is copied: both share the pages. A partly filled last page is copied when one of them appends to it.
        """
        parent = self._get(request)
        tokens = parent.length if tokens is None else require_int("tokens", tokens)
        if not 0 <= tokens <= parent.length:
            raise ValueError(f"tokens must lie in 0..{parent.length} (the request's tokens), got {tokens}")
        child = self.add_request()
        self._requests[child] = _Request(tokens, parent.pages[: _pages_for(tokens)])
        for page in self._requests[child].pages:
            self._references[page] += 1
        return child

    def append(self, requests: Sequence[int], k: Tensor, v: Tensor, counts: Sequence[int]) -> None:
        """Append tokens to a batch of requests, quantising on the way; only the new slots are written.

        Args:
            requests: distinct requests.
            k, v: ``(tokens, num_kv_heads, 128)`` bfloat16, float16 or float32, one request's tokens after the other's;
                ``(num_layers, tokens, num_kv_heads, 128)`` for more than one layer.
            counts: tokens of each request.

        Raises:
            OutOfPagesError: too few free pages.
            TypeError, ValueError: bad arguments, or NaN or inf for an NVFP4 cache (on CUDA with ``MSA_OPS_CHECK=1``).
            RuntimeError: a CUDA graph is being captured, or a compiler package is missing. In all cases nothing was changed.
        """
        requests, counts = _ints("requests", requests), _ints("counts", counts)
        lead = () if self.num_layers == 1 else (self.num_layers,)
        encoded_k, encoded_v = self._encode(k, v, (*lead, sum(counts)))
        self.extend(requests, counts)
        for layer in range(self.num_layers):
            at = slice(None) if self.num_layers == 1 else layer
            self._store(layer, tuple(t[at] for t in encoded_k), tuple(t[at] for t in encoded_v))

    def extend(self, requests: Sequence[int], counts: Sequence[int]) -> None:
        """Make room for `counts` more tokens of each request; `write` then stores them, layer by layer.

        The requests' lengths grow at once. Raises as `append` does, changing nothing, and `ValueError` while `write` has
        not stored every layer of the tokens before: nothing could store them any more.
        """
        requests, counts = _ints("requests", requests), _ints("counts", counts)
        _check_not_capturing(self.device, "extend and append")
        self._check_all_written()
        need = self._pages_needed(requests, counts)
        if need > len(self._free):
            raise OutOfPagesError(
                f"appending {sum(counts)} tokens needs {need} pages, and {len(self._free)} of {self.num_pages} are "
                "free: free requests, or allocate the cache with more pages"
            )
        pages: list[int] = []
        tokens: list[int] = []
        copies: list[tuple[int, int]] = []
        for request, count in zip(requests, counts, strict=True):
            state = self._requests[request]
            if count and self._last_page_is_shared(state):
                copies.append((state.pages[-1], self._take()))
                self._release(state.pages[-1])
                state.pages[-1] = copies[-1][1]
            end = state.length + count
            state.pages.extend(self._take() for _ in range(_pages_for(end) - len(state.pages)))
            for block in range(state.length // BLOCK_SIZE, _pages_for(end)):
                first = max(state.length - block * BLOCK_SIZE, 0)
                last = min(end - block * BLOCK_SIZE, BLOCK_SIZE)
                tokens.extend(range(first, last))
                pages.extend(itertools.repeat(state.pages[block], max(last - first, 0)))
            state.length = end
        if copies:
            self._pool.copy_pages(*_upload(torch.tensor(copies, dtype=torch.int64).t(), self.device))
        self._last_table = None
        page, token = torch.tensor([pages, tokens], dtype=torch.int64)
        page, token, slot = _upload(torch.stack((page, token, page * BLOCK_SIZE + token)), self.device)
        unwritten = set(range(self.num_layers)) if tokens else set()
        self._pending = _Slots(frozenset(requests), page, token, slot, unwritten)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store one layer's K and V, ``(tokens, num_kv_heads, 128)``, of the tokens of the last `extend`."""
        self._check_layer(layer)
        if self._pending is None:
            raise ValueError("write needs tokens to store: call extend first (free and truncate cancel it)")
        self._store(layer, *self._encode(k, v, (self._pending.page.numel(),)))

    def arguments(self, requests: Sequence[int], *, layer: int = 0, max_pages: int | None = None) -> dict[str, Any]:
        """Keyword arguments of `msa_sparse_decode_attention` for a batch: views of the pool and a page table.

        Args:
            requests: the batch, in the order of the query rows.
            layer: whose K and V.
            max_pages: width of the page table, default the longest request's pages; unused entries are -1.

        Returns:
            ``k``, ``v``, ``page_table`` and ``seqused_k``; for fp8 and NVFP4 also ``k_global_scale`` and
            ``v_global_scale``; for NVFP4 also ``k_scale`` and ``v_scale``. Layers share one table: do not write to it.
        """
        self._check_layer(layer)
        page_table, seqused_k = self._table(_ints("requests", requests), max_pages)
        result: dict[str, Any] = {"page_table": page_table, "seqused_k": seqused_k}
        result.update(self._pool.layer(layer))
        if self.kv_format in (KVFormat.FP8, KVFormat.NVFP4):
            result.update(k_global_scale=self.k_global_scale, v_global_scale=self.v_global_scale)
        return result

    def read(self, request: int, *, layer: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """A dense copy of one request's K and V as the attention call sees them, ``(length, num_kv_heads, 128)``."""
        self._check_layer(layer)
        state = self._get(request)
        position = torch.arange(state.length, device=self.device)
        table = torch.tensor(state.pages, dtype=torch.int64, device=self.device)
        page, token = table[position // BLOCK_SIZE], position % BLOCK_SIZE
        k, v = self._pool.load(layer, page, token)
        return (k * self.k_global_scale).to(dtype), (v * self.v_global_scale).to(dtype)

    def _get(self, request: int) -> _Request:
        if require_int("request", request) not in self._requests:
            raise ValueError(f"request {request!r} is not in the cache: it was freed, or never added")
        return self._requests[request]

    def _check_all_written(self) -> None:
        if self._pending is not None and self._pending.unwritten:
            raise ValueError(
                f"the {self._pending.page.numel()} tokens of the last extend must be stored before more are added, got "
                f"no write for layers {sorted(self._pending.unwritten)}: write them, or truncate or free the requests"
            )

    def _check_layer(self, layer: int) -> None:
        if not 0 <= require_int("layer", layer) < self.num_layers:
            raise ValueError(f"layer must lie in 0..{self.num_layers - 1}, got {layer}")

    def _take(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)

    def _last_page_is_shared(self, state: _Request) -> bool:
        return state.length % BLOCK_SIZE != 0 and self._references[state.pages[-1]] > 1

    def _pages_needed(self, requests: list[int], counts: list[int]) -> int:
        if len(requests) != len(counts):
            raise ValueError(f"counts must have one entry per request: got {len(counts)} for {len(requests)} requests")
        if len(set(requests)) != len(requests):
            raise ValueError(f"requests must be distinct, got {requests}: add up the counts of a repeated one")
        need = 0
        copied: Counter[int] = Counter()
        for request, count in zip(requests, counts, strict=True):
            state = self._get(request)
            if count < 0:
                raise ValueError(f"counts must not be negative, got {count} for request {request}")
            need += _pages_for(state.length + count) - len(state.pages)
            if count and self._last_page_is_shared(state):
                # The last of those that share the page writes in place.
                page = state.pages[-1]
                if self._references[page] - copied[page] > 1:
                    copied[page] += 1
                    need += 1
        return need

    def _encode(self, k: Tensor, v: Tensor, lead: tuple[int, ...]) -> tuple[_Encoded, _Encoded]:
        want = (*lead, self.num_kv_heads, HEAD_DIM)
        encoded = []
        for name, x, scale in (("k", k, self.k_global_scale), ("v", v, self.v_global_scale)):
            nvfp4.check_rows(name, x)
            if tuple(x.shape) != want:
                raise ValueError(f"{name} must have shape {want}, got {tuple(x.shape)}")
            if x.device != self.device:
                raise ValueError(f"{name} must be on the cache's device {self.device}, got {x.device}")
            encoded.append(_encode(self.kv_format, name, x.detach(), scale))
        return encoded[0], encoded[1]

    def _store(self, layer: int, k: _Encoded, v: _Encoded) -> None:
        assert self._pending is not None
        if _is_quantized_on_cuda(self.kv_format, self.device):
            scales = self.k_global_scale, self.v_global_scale
            self._pool.quantize_and_store(layer, self._pending.slot, (k[0], v[0]), scales)
        else:
            self._pool.store(layer, self._pending.page, self._pending.token, k, v)
        self._pending.unwritten.discard(layer)

    def _table(self, requests: list[int], max_pages: int | None) -> tuple[Tensor, Tensor]:
        states = [self._get(request) for request in requests]
        longest = max((len(state.pages) for state in states), default=0)
        width = max(longest, 1) if max_pages is None else require_int("max_pages", max_pages)
        if width < longest:
            raise ValueError(f"max_pages must be at least {longest}, the pages of the longest request, got {max_pages}")
        key = (tuple(requests), width)
        if self._last_table is None or self._last_table[0] != key:
            _check_not_capturing(self.device, "arguments of a batch for the first time")
            table = torch.full((len(states), width), -1, dtype=torch.int32)
            for row, state in zip(table, states, strict=True):
                if state.pages:
                    row[: len(state.pages)] = torch.frombuffer(state.pages, dtype=torch.int32)
            lengths = torch.tensor([state.length for state in states], dtype=torch.int32)
            self._last_table = (key, _upload(table, self.device), _upload(lengths, self.device))
        return self._last_table[1], self._last_table[2]


@dataclass(slots=True)
class _Request:
    """Tokens of a request, and the ``ceil(length / 128)`` pages that hold them, in order (32-bit ints)."""

    length: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))


@dataclass(frozen=True, slots=True)
class _Slots:
    """Where the tokens of the last `extend` go, int64 ``(tokens,)`` each on the cache's device; layers without them.

    `slot` is ``page * 128 + token``.
    """

    requests: frozenset[int]
    page: Tensor
    token: Tensor
    slot: Tensor
    unwritten: set[int]


_Encoded = tuple[Tensor, ...]
"""What is stored of K or V: the values, or NVFP4 codes and row-linear scales; on CUDA what a kernel quantises as it stores."""


def _upload(x: Tensor, device: torch.device) -> Tensor:
    """To the device, in the order of its current stream and without waiting for it: from pinned memory."""
    if device.type != "cuda" or x.numel() == 0:
        return x.to(device)
    return x.contiguous().pin_memory().to(device, non_blocking=True)


def _check_not_capturing(device: torch.device, what: str) -> None:
    if device.type == "cuda" and nvfp4.is_capturing(device):
        raise RuntimeError(
            f"{what} cannot be captured in a CUDA graph, which would not keep the cache's books when it is replayed: call "
            "extend and arguments before the capture, and capture write and the attention calls"
        )


def _pages_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def _ints(name: str, values: Iterable[int]) -> list[int]:
    """`values` as ints, read once: an iterator would be empty the second time."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of ints, got {type(values).__name__}")
    return [require_int(f"{name}[{i}]", value) for i, value in enumerate(values)]


def check_global_scale(name: str, scale: float, kv_format: KVFormat) -> float:
    """The scale as a float. Raises `TypeError` or `ValueError` for one that a cache of this format cannot have.

    Writers multiply by the reciprocal or divide in float32, so both must be normal numbers there.
    """
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"{name} must be a float, got {type(scale).__name__}")
    if not 2.0**-126 <= scale <= 2.0**126:
        raise ValueError(f"{name} must be in 2^-126..2^126, normal in float32 like its reciprocal, got {scale}")
    if scale != 1.0 and kv_format not in (KVFormat.FP8, KVFormat.NVFP4):
        raise ValueError(f"{name} belongs to an fp8 or nvfp4 cache, got {scale} for {kv_format.value}")
    return float(scale)


def _parse_format(kv_format: KVFormat | str | torch.dtype) -> KVFormat:
    if isinstance(kv_format, torch.dtype):
        for known, dtype in _DTYPE.items():
            if dtype == kv_format:
                return known
    elif isinstance(kv_format, KVFormat):
        return kv_format
    elif kv_format in [known.value for known in KVFormat]:
        return KVFormat(kv_format)
    raise ValueError(f"kv_format must be bf16, fp16, fp8 or nvfp4, or the torch dtype of one, got {kv_format!r}")


def _parse_layout(kv_format: KVFormat, layout: str | None) -> str:
    known = _NVFP4_LAYOUTS if kv_format == KVFormat.NVFP4 else _PLAIN_LAYOUTS
    if layout is None:
        return known[0]
    if layout not in known:
        raise ValueError(f"layout must be one of {', '.join(known)} for {kv_format.value}, got {layout!r}")
    return layout


def _is_quantized_on_cuda(kv_format: KVFormat, device: torch.device) -> bool:
    return device.type == "cuda" and kv_format in (KVFormat.FP8, KVFormat.NVFP4)


def _encode(kv_format: KVFormat, name: str, x: Tensor, scale: float) -> _Encoded:
    """What the cache stores for `x`, ``x / scale`` in its format, or `x` where a kernel does that as it stores."""
    if kv_format == KVFormat.NVFP4 and nvfp4.reads_values(x):
        nvfp4.check_finite(name, x)
    if _is_quantized_on_cuda(kv_format, x.device):
        from .engines.cuda import quantize

        quantize.load(x.device)  # here, where nothing has been changed yet
        return (x,)
    if kv_format == KVFormat.NVFP4:
        return nvfp4.quantize_rows(x, nvfp4.check_global_sf(1.0 / scale, x, "1 / global scale"))
    if kv_format == KVFormat.FP8:
        divisor = torch.full((), scale, dtype=torch.float32, device=x.device)
        return ((x.float() / divisor).clamp(-nvfp4.E4M3_MAX, nvfp4.E4M3_MAX).to(FP8),)
    return (x.to(_DTYPE[kv_format]),)


class _Pool:
    """The bytes of all pages of all layers in one allocation (two for tiled NVFP4: codes and scales).

    `k`, `v`: ``(layers, pages, heads, 128, 128 or 64)``. `k_scale`, `v_scale`: for the planar layout
    ``(layers, pages, heads, 128, 8)``, for the tiled one ``(layers, pages * heads * 128, 8)``.
    """

    def __init__(
        self, kv_format: KVFormat, layout: str, size: tuple[int, int, int], device: torch.device | str | None
    ) -> None:
        layers, pages, heads = size
        self.layout = layout
        self.k_scale: Tensor | None = None
        self.v_scale: Tensor | None = None
        dtype = _DTYPE[kv_format]
        if layout == "planar":
            planes = torch.empty(layers, pages, heads * nvfp4.PLANAR_BYTES_PER_HEAD, dtype=dtype, device=device)
            regions = nvfp4.nvfp4_planar_views(planes.flatten(0, 1), heads)
            self.k, self.k_scale, self.v, self.v_scale = (torch.unflatten(r, 0, (layers, pages)) for r in regions)
            self._pages = [planes.transpose(0, 1)]
        elif layout in ("packed", "packed_nhd"):
            nhd = layout == "packed_nhd"
            inner = (BLOCK_SIZE, heads) if nhd else (heads, BLOCK_SIZE)
            data = torch.empty(layers, pages, *inner, 2 * HEAD_DIM, dtype=dtype, device=device)
            self.k, self.v = (
                torch.unflatten(x, 0, (layers, pages)) for x in packed_kv_views(data.flatten(0, 1), nhd=nhd)
            )
            self._pages = [data.transpose(0, 1)]
        else:
            inner = (BLOCK_SIZE, heads) if layout == "nhd" else (heads, BLOCK_SIZE)
            row = nvfp4.CODE_BYTES if layout == "tiled" else HEAD_DIM
            data = torch.empty(2, layers, pages, *inner, row, dtype=dtype, device=device)
            self.k, self.v = data.transpose(3, 4) if layout == "nhd" else data
            self._pages = [data.movedim(2, 0)]
        if layout == "tiled":
            scales = torch.empty(
                2, layers, pages * heads * BLOCK_SIZE, SCALES_PER_ROW, dtype=torch.uint8, device=device
            )
            self.k_scale, self.v_scale = scales
            # heads * 128 rows are whole tiles, so that a page's scales are a contiguous run.
            self._pages.append(torch.unflatten(scales, 2, (pages, heads * BLOCK_SIZE)).movedim(2, 0))
        self._pages = [_as_bytes(page) for page in self._pages]

    def layer(self, layer: int) -> dict[str, Tensor]:
        views = {"k": self.k[layer], "v": self.v[layer]}
        if self.k_scale is not None and self.v_scale is not None:
            views.update(k_scale=self.k_scale[layer], v_scale=self.v_scale[layer])
        return views

    def copy_pages(self, source: Tensor, destination: Tensor) -> None:
        for pages in self._pages:
            pages[destination] = pages[source]

    def store(self, layer: int, page: Tensor, token: Tensor, k: _Encoded, v: _Encoded) -> None:
        """Write encoded tokens ``(tokens, heads, ...)`` to slots (page, token)."""
        _as_bytes(self.k[layer])[page, :, token] = _as_bytes(k[0])
        _as_bytes(self.v[layer])[page, :, token] = _as_bytes(v[0])
        if self.k_scale is None or self.v_scale is None:
            return
        if self.layout == "planar":
            self.k_scale[layer][page, :, token] = k[1]
            nvfp4.planar_v_groups(self.v_scale[layer])[page, :, token // 4, :, token % 4] = v[1]
        else:
            at = self._tiled_offsets(page, token)
            self.k_scale[layer].view(-1)[at] = k[1]
            self.v_scale[layer].view(-1)[at] = v[1]

    def quantize_and_store(
        self, layer: int, slot: Tensor, tokens: tuple[Tensor, Tensor], scales: tuple[float, float]
    ) -> None:
        """What `_encode` and `store` do, in one CUDA kernel: K and V ``(tokens, heads, 128)``, their global scales."""
        from .engines.cuda import quantize

        k, v = self.k[layer], self.v[layer]
        if self.k_scale is None or self.v_scale is None:
            quantize.write_fp8(slot, (tokens[0], scales[0], k), (tokens[1], scales[1], v))
            return
        k_scale, v_scale = self.k_scale[layer], self.v_scale[layer]
        if self.layout == "planar":
            places = (
                quantize.planar_scales(k_scale, quantize.LINEAR),
                quantize.planar_scales(v_scale, quantize.PLANAR_V),
            )
        else:
            places = quantize.tiled_scales(k_scale, k.shape[1]), quantize.tiled_scales(v_scale, k.shape[1])
        quantize.write_nvfp4(slot, (tokens[0], 1 / scales[0], k, places[0]), (tokens[1], 1 / scales[1], v, places[1]))

    def load(self, layer: int, page: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """The float32 values of slots (page, token), without global scales: ``(tokens, heads, 128)`` each."""
        k, v = (x[layer] for x in (self.k, self.v))
        if self.k_scale is None or self.v_scale is None:
            k, v = (_as_bytes(x)[page, :, token] for x in (k, v))
            return (
                (k.float(), v.float()) if self.k.dtype != FP8 else (nvfp4.e4m3_to_float32(k), nvfp4.e4m3_to_float32(v))
            )
        if self.layout == "planar":
            k_scale = self.k_scale[layer][page, :, token]
            v_scale = nvfp4.planar_v_groups(self.v_scale[layer])[page, :, token // 4, :, token % 4]
        else:
            at = self._tiled_offsets(page, token)
            k_scale, v_scale = self.k_scale[layer].view(-1)[at], self.v_scale[layer].view(-1)[at]
        k, v = k[page, :, token], v[page, :, token]
        return nvfp4.dequantize_rows(k, k_scale), nvfp4.dequantize_rows(v, v_scale)

    def _tiled_offsets(self, page: Tensor, token: Tensor) -> Tensor:
        head = torch.arange(self.k.shape[2], device=page.device)
        rows = (page.unsqueeze(-1) * self.k.shape[2] + head) * BLOCK_SIZE + token.unsqueeze(-1)
        return nvfp4.tiled_scale_offsets(rows)


def _as_bytes(x: Tensor) -> Tensor:
    """fp8 as uint8: torch lacks some indexing for fp8. Other dtypes as they are."""
    return x.view(torch.uint8) if x.dtype == FP8 else x
