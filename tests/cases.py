"""Random calls of `msa_sparse_decode_attention` in every form, with everything that a call does not use poisoned.

`Spec` says what a call looks like, `build` makes its tensors, and a `Case` runs it and asks the oracle. A K or V slot
counts as used if some token of its request attends it for that KV head; every other byte (slots past the length, slots
ahead of every token, blocks that nobody selected, pages of nobody, gaps between rows, padding of scales, tables and
ids) holds what `Spec.fill` says, NaN by default.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import nvfp4_bytes
from msa_ops import msa_sparse_decode_attention
from msa_ops.reference import decode_reference

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "nvfp4": torch.uint8}
DTYPE_PAIRS = [
    ("bf16", "bf16"), ("bf16", "fp8"), ("bf16", "nvfp4"),
    ("fp16", "fp16"), ("fp16", "fp8"), ("fp16", "nvfp4"),
    ("fp8", "bf16"), ("fp8", "fp8"), ("fp8", "nvfp4"),
]  # fmt: skip
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
FILLS = ("nan", "zero", "inf", "random")

_BITS = {
    "nan": {"bf16": 0x7FC0, "fp16": 0x7E00, "fp8": 0x7F, "nvfp4": 0xFF, "scale": 0x7F},
    "inf": {"bf16": 0x7F80, "fp16": 0x7C00, "fp8": 0x7E, "nvfp4": 0x77, "scale": 0xFE},
    "zero": {"bf16": 0, "fp16": 0, "fp8": 0, "nvfp4": 0, "scale": 0},
}


@dataclass(frozen=True)
class Form:
    """Where K and V lie: the shape of one allocation, and their views in it.

    `shape` takes (rows or pages, kv_heads, elements a row); `views` takes the allocation and the elements a row.
    """

    shape: Callable[[int, int, int], tuple[int, ...]]
    views: Callable[[Tensor, int], tuple[Tensor, Tensor]]


def _mixed(s: Tensor, d: int) -> tuple[Tensor, Tensor]:
    return s[0], s[1].view(s.shape[1], 128, s.shape[2], d).transpose(1, 2)


PAGED_FORMS = {
    "hnd": Form(lambda n, h, d: (2, n, h, 128, d), lambda s, d: (s[0], s[1])),
    "nhd": Form(lambda n, h, d: (2, n, 128, h, d), lambda s, d: (s[0].transpose(1, 2), s[1].transpose(1, 2))),
    "packed": Form(lambda n, h, d: (n, h, 128, 2 * d), lambda s, d: (s[..., :d], s[..., d:])),
    "packed_nhd": Form(
        lambda n, h, d: (n, 128, h, 2 * d), lambda s, d: (s[..., :d].transpose(1, 2), s[..., d:].transpose(1, 2))
    ),
    "kv_in_page": Form(lambda n, h, d: (n, 2, h, 128, d), lambda s, d: (s[:, 0], s[:, 1])),
    "pool_layer": Form(lambda n, h, d: (3, 2, n, h, 128, d), lambda s, d: (s[1, 0], s[1, 1])),
    "pool_layer_in_page": Form(lambda n, h, d: (n, 3, 2, h, 128, d), lambda s, d: (s[:, 1, 0], s[:, 1, 1])),
    "padded_rows": Form(lambda n, h, d: (2, n, h, 128, d + 16), lambda s, d: (s[0, ..., :d], s[1, ..., :d])),
    "heads_first": Form(lambda n, h, d: (2, h, n, 128, d), lambda s, d: (s[0].transpose(0, 1), s[1].transpose(0, 1))),
    "k_hnd_v_nhd": Form(lambda n, h, d: (2, n, h, 128, d), _mixed),
}
FLAT_FORMS = {
    "flat": Form(lambda n, h, d: (2, n, h, d), lambda s, d: (s[0], s[1])),
    "flat_packed": Form(lambda n, h, d: (n, h, 2 * d), lambda s, d: (s[..., :d], s[..., d:])),
    "flat_heads_first": Form(lambda n, h, d: (2, h, n, d), lambda s, d: (s[0].transpose(0, 1), s[1].transpose(0, 1))),
    "flat_fused": Form(
        lambda n, h, d: (n, 3 * h, d), lambda s, d: (s[:, : s.shape[1] // 3], s[:, -(s.shape[1] // 3) :])
    ),
    "flat_padded_rows": Form(lambda n, h, d: (2, n, h, d + 16), lambda s, d: (s[0, ..., :d], s[1, ..., :d])),
}
PLANAR_FORMS = ("planar", "planar_pool")
"""NVFP4 only: the planar page, alone or as one layer of a pool."""


@dataclass(frozen=True)
class Spec:
    """What a call looks like.

    `scale_start`: bytes from a 16-byte boundary to tiled block scales.
    `ids`: ``ascending`` (what `msa_topk_select` makes), ``mixed`` (any order, holes, duplicates, out of range), ``all``
    (every block, last first), ``none`` (junk alone).
    """

    q_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    form: str = "hnd"
    lengths: tuple[int, ...] = (300, 129, 64)
    seqlen_q: int = 1
    kv_heads: int = 2
    group: int = 4
    topk: int = 4
    ids: str = "mixed"
    ids_form: str = "plain"
    q_form: str = "dense"
    q_size: float = 1.0
    causal: bool = True
    softmax_scale: float | None = None
    k_global_scale: float | None = None
    v_global_scale: float | None = None
    global_scale_tensors: bool = False
    q_offset: int | tuple[int, ...] | None = None
    share_prefix: bool = False
    scale_rank: int = 1
    scale_start: int = 0
    scale_dtype: str = "uint8"
    fill: str = "nan"
    seed: int = 0

    @property
    def paged(self) -> bool:
        return self.form not in FLAT_FORMS

    @property
    def tokens(self) -> int:
        return len(self.lengths) * self.seqlen_q

    def first_position(self, request: int) -> int:
        if self.q_offset is None:
            return self.lengths[request] - self.seqlen_q
        return self.q_offset if isinstance(self.q_offset, int) else self.q_offset[request]


@dataclass
class Case:
    """One call. `keys` and `values` are the numbers that the cache holds, float64, NaN where unused.

    `oracle_kwargs` says where the oracle finds them, where that differs from the call (pages that a test moved).
    """

    spec: Spec
    args: tuple[Tensor, Tensor, Tensor, Tensor]
    kwargs: dict[str, Any]
    keys: Tensor
    values: Tensor
    oracle_kwargs: dict[str, Any] = field(default_factory=dict)

    def run(self, **changes: Any) -> tuple[Tensor, Tensor]:
        """Output and LSE of the call, on the case's device."""
        result = msa_sparse_decode_attention(*self.args, **{**self.kwargs, "return_softmax_lse": True, **changes})
        assert isinstance(result, tuple)
        return result

    def run_output(self, **changes: Any) -> Tensor:
        """The output of the call without an LSE."""
        result = msa_sparse_decode_attention(*self.args, **{**self.kwargs, **changes})
        assert isinstance(result, Tensor)
        return result

    def oracle(self, **changes: Any) -> tuple[Tensor, Tensor]:
        """The same in float64, not rounded, from `keys` and `values`: it does not depend on how the bytes are read."""
        kwargs = self._oracle_call(changes)
        return decode_reference(self.args[0], self.keys, self.values, self.args[3], round_output=False, **kwargs)

    def _oracle_call(self, changes: dict[str, Any]) -> dict[str, Any]:
        kwargs = {**self.kwargs, **self.oracle_kwargs, **changes}
        return {n: a for n, a in kwargs.items() if n not in ("k_scale", "v_scale")}

    def term_norms(self, **changes: Any) -> Tensor:
        """Per row, the root of the sum of squares of every ``p_i * v_i`` that the output adds up.

        Shape (tokens, num_qo_heads).
        ``p_i ** 2`` is a softmax at twice the scale, times ``exp(lse(2 s) - 2 lse(s))``, so the oracle can be asked.
        """
        kwargs = self._oracle_call(changes)
        scale = 128**-0.5 if kwargs.get("softmax_scale") is None else kwargs["softmax_scale"]
        v_global = 1.0 if kwargs.get("v_global_scale") is None else float(kwargs["v_global_scale"])
        twice = {**kwargs, "softmax_scale": 2 * scale, "v_global_scale": v_global**2}
        q, ids = self.args[0], self.args[3]
        squares, lse2 = decode_reference(q, self.keys, self.values**2, ids, round_output=False, **twice)
        lse = self.oracle(**changes)[1]
        factor = torch.exp(torch.where(lse.isfinite(), lse2 - 2 * lse, torch.full_like(lse, -math.inf)))
        return (squares.sum(-1) * factor).sqrt()


def build(spec: Spec, device: str = "cpu") -> Case:
    """Make the tensors of `spec` on `device`. ``spec.fill`` changes unused bytes alone."""
    g = torch.Generator().manual_seed(spec.seed)
    poison = torch.Generator().manual_seed(spec.seed + 1)
    ids = _selection(spec, g)
    if spec.paged:
        table, owned, pages = _page_table(spec, ids, g, poison)
        used = _used_slots(spec, ids, torch.zeros(pages, spec.kv_heads, 128, dtype=torch.bool), owned)
        place: dict[str, Tensor] = {"page_table": table, "seqused_k": torch.tensor(spec.lengths, dtype=torch.int32)}
    else:
        cu, total = _cumulative_lengths(spec)
        used = _used_slots(spec, ids, torch.zeros(total, spec.kv_heads, dtype=torch.bool), cu)
        place = {"cu_seqlens_k": torch.tensor(cu, dtype=torch.int32)}
    if not spec.lengths and spec.paged:
        place["page_table"] = torch.zeros(0, 2, dtype=torch.int32)
    k, v, scales, keys, values = _cache(spec, used, g, poison, device)
    q = _query(spec, g, poison, device)
    kwargs: dict[str, Any] = {n: _strided_table(t, spec, poison, device) for n, t in place.items()}
    kwargs.update(scales, seqlen_q=spec.seqlen_q, causal=spec.causal, softmax_scale=spec.softmax_scale)
    for name in ("k_global_scale", "v_global_scale"):
        value = getattr(spec, name)
        if value is not None and spec.global_scale_tensors:
            value = torch.tensor([value], dtype=torch.float32, device=device)
        kwargs[name] = value
    offset: Any = spec.q_offset
    if isinstance(offset, tuple):
        offset = torch.tensor(offset, dtype=torch.int32, device=device)
    kwargs["q_offset"] = offset
    return Case(spec, (q, k, v, _place_ids(ids, spec, poison, device)), kwargs, keys, values)


# --- selection and tables ---


def _blocks(length: int) -> int:
    return max(0, -(-length // 128))


def _selection(spec: Spec, g: torch.Generator) -> Tensor:
    """(kv_heads, tokens, topk) int32."""
    ids = torch.full((spec.kv_heads, spec.tokens, spec.topk), -1, dtype=torch.int32)
    for h in range(spec.kv_heads):
        for t in range(spec.tokens):
            n = _blocks(spec.lengths[t // spec.seqlen_q])
            ids[h, t] = torch.tensor(_row_of_ids(spec, n, g), dtype=torch.int32)
    return ids


def _row_of_ids(spec: Spec, blocks: int, g: torch.Generator) -> list[int]:
    topk = spec.topk
    junk = [-1, -73, INT32_MAX, INT32_MIN, blocks, blocks + 1, blocks + 7]

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=g))

    if spec.ids == "all":
        row = list(range(blocks))[::-1][:topk]
    elif spec.ids == "ascending":
        count = min(topk, blocks, 1 + draw(topk))
        row = sorted(torch.randperm(blocks, generator=g)[:count].tolist())
    elif spec.ids == "mixed":
        row = [draw(blocks) if blocks and draw(10) < 6 else junk[draw(len(junk))] for _ in range(topk)]
    else:
        assert spec.ids == "none"
        row = [junk[draw(len(junk))] for _ in range(topk)]
    return row + [-1] * (topk - len(row))


def _page_table(
    spec: Spec, ids: Tensor, g: torch.Generator, poison: torch.Generator
) -> tuple[Tensor, list[list[int]], int]:
    """The table with the entries of unselected blocks filled, the pages of each request, and the pages of the cache."""
    counts = [_blocks(n) for n in spec.lengths]
    pages = sum(counts) + 3
    order = torch.randperm(pages, generator=g).tolist()
    owned = [[order.pop() for _ in range(n)] for n in counts]
    if spec.share_prefix:
        for mine in owned[1:]:
            if mine and owned[0]:
                mine[0] = owned[0][0]
    table = _fill_ints((len(counts), max(counts, default=0) + 2), spec.fill, poison)
    for b, mine in enumerate(owned):
        for block in set(ids[:, b * spec.seqlen_q : (b + 1) * spec.seqlen_q].flatten().tolist()):
            if 0 <= block < len(mine):
                table[b, block] = mine[block]
    return table, owned, pages


def _cumulative_lengths(spec: Spec) -> tuple[list[int], int]:
    """Row starts, not from 0 on, and the number of rows, more than the requests own. No negative lengths."""
    cu = [5]
    for n in spec.lengths:
        assert n >= 0
        cu.append(cu[-1] + n)
    return cu, cu[-1] + 9


def _used_slots(spec: Spec, ids: Tensor, used: Tensor, where: list[Any]) -> Tensor:
    """Mark the slots that some token attends. `where`: pages of each request, or row starts."""
    for t in range(spec.tokens):
        b, i = divmod(t, spec.seqlen_q)
        length = spec.lengths[b]
        limit = min(length, spec.first_position(b) + i + 1) if spec.causal else length
        for h in range(spec.kv_heads):
            for block in set(ids[h, t].tolist()):
                count = min(128, limit - block * 128)
                if not 0 <= block < _blocks(length) or count <= 0:
                    continue
                if spec.paged:
                    used[where[b][block], h, :count] = True
                else:
                    used[where[b] + block * 128 : where[b] + block * 128 + count, h] = True
    return used


def _strided_table(t: Tensor, spec: Spec, poison: torch.Generator, device: str) -> Tensor:
    """A page table as a slice of a wider one; anything else as it is."""
    if t.dim() != 2:
        return t.to(device)
    wide = _fill_ints((t.shape[0], t.shape[1] + 3), spec.fill, poison)
    wide[:, : t.shape[1]] = t
    return wide.to(device)[:, : t.shape[1]]


def _place_ids(ids: Tensor, spec: Spec, poison: torch.Generator, device: str) -> Tensor:
    if spec.ids_form == "token_major":
        return ids.transpose(0, 1).contiguous().to(device).transpose(0, 1)
    if spec.ids_form == "padded":
        # Valid ids behind each row: reading past topk would change the result.
        wide = torch.randint(0, 3, (*ids.shape[:2], spec.topk + 5), generator=poison, dtype=torch.int32)
        wide[..., : spec.topk] = ids
        return wide.to(device)[..., : spec.topk]
    return ids.contiguous().to(device)


# --- contents ---


def _fill_ints(shape: tuple[int, ...], fill: str, poison: torch.Generator) -> Tensor:
    if fill == "random":
        return torch.randint(INT32_MIN, INT32_MAX, shape, generator=poison, dtype=torch.int32)
    return torch.full(shape, {"nan": INT32_MAX, "zero": 0, "inf": -1}[fill], dtype=torch.int32)


def _filled(shape: tuple[int, ...], kind: str, fill: str, poison: torch.Generator) -> Tensor:
    """Unused memory of raw elements (int16 or uint8) of a dtype, or of block scales."""
    dtype = torch.int16 if kind in ("bf16", "fp16") else torch.uint8
    if fill == "random":
        low, high = (-(2**15), 2**15) if dtype == torch.int16 else (0, 256)
        return torch.randint(low, high, shape, generator=poison, dtype=dtype)
    return torch.full(shape, _BITS[fill][kind], dtype=dtype)


def _random_raw(shape: tuple[int, ...], kind: str, g: torch.Generator) -> Tensor:
    """Finite raw elements: about N(0, 1), any NVFP4 codes, or block scales around 1 with signs, zeros, subnormals."""
    if kind == "nvfp4":
        return torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
    if kind == "scale":
        usual = torch.randint(0x28, 0x44, shape, generator=g, dtype=torch.uint8)
        small = torch.randint(0, 8, shape, generator=g, dtype=torch.uint8)
        pick = torch.rand(shape, generator=g)
        sign = (torch.rand(shape, generator=g) < 0.2).to(torch.uint8) << 7
        return torch.where(pick < 0.1, small, usual) | sign
    x = torch.randn(shape, generator=g).to(DTYPES[kind])
    return x.view(torch.int16 if kind in ("bf16", "fp16") else torch.uint8)


def _query(spec: Spec, g: torch.Generator, poison: torch.Generator, device: str) -> Tensor:
    t, heads = spec.tokens, spec.kv_heads * spec.group
    dtype = DTYPES[spec.q_dtype]
    raw = (torch.randn(t, heads, 128, generator=g) * spec.q_size).to(dtype)
    raw = raw.view(torch.int16 if spec.q_dtype in ("bf16", "fp16") else torch.uint8)
    shape, view = {
        "dense": ((t, heads, 128), lambda s: s),
        "fused_qkv": ((t, heads + 2 * spec.kv_heads, 128), lambda s: s[:, :heads]),
        "head_major": ((heads, t, 128), lambda s: s.transpose(0, 1)),
        "padded_rows": ((t, heads, 144), lambda s: s[..., :128]),
    }[spec.q_form]
    storage = _filled(shape, spec.q_dtype, spec.fill, poison)
    view(storage).copy_(raw)
    return view(storage.to(device).view(dtype))


def _cache(
    spec: Spec, used: Tensor, g: torch.Generator, poison: torch.Generator, device: str
) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor, Tensor]:
    """k, v, the block scales, and the numbers that K and V hold."""
    kind = spec.kv_dtype
    width = 64 if kind == "nvfp4" else 128
    shape = (*used.shape, width)
    raw = [
        torch.where(used[..., None], _random_raw(shape, kind, g), _filled(shape, kind, spec.fill, poison)) for _ in "kv"
    ]
    if kind != "nvfp4":
        numbers = [r.view(DTYPES[kind]).double() for r in raw]
    else:
        shape = (*used.shape, 8)
        scale = [
            torch.where(used[..., None], _random_raw(shape, "scale", g), _filled(shape, "scale", spec.fill, poison))
            for _ in "kv"
        ]
        numbers = [nvfp4_bytes.values(r, s) for r, s in zip(raw, scale, strict=True)]
    keys, values = (torch.where(used[..., None], x, torch.full_like(x, math.nan)) for x in numbers)
    if spec.form in PLANAR_FORMS:
        return (*_planar(spec, raw, scale, poison, device), keys, values)
    form = (PAGED_FORMS if spec.paged else FLAT_FORMS)[spec.form]
    storage = _filled(form.shape(used.shape[0], spec.kv_heads, width), kind, spec.fill, poison)
    for view, r in zip(form.views(storage, width), raw, strict=True):
        view.copy_(r)
    k, v = form.views(storage.to(device).view(DTYPES[kind]), width)
    scales = {}
    if kind == "nvfp4":
        for name, s in zip(("k_scale", "v_scale"), scale, strict=True):
            # Longer than need be: only a smaller tensor is an error.
            room = _filled(
                (spec.scale_start + nvfp4_bytes.tiled_size(used.numel()) + 1024,), "scale", spec.fill, poison
            )
            room[spec.scale_start :] = nvfp4_bytes.tile(s.flatten(0, -2), room[spec.scale_start :])
            tiled = room.to(device)[spec.scale_start :]
            tiled = tiled.view(-1, 8) if spec.scale_rank == 2 else tiled
            scales[name] = tiled.view(torch.float8_e4m3fn) if spec.scale_dtype == "fp8" else tiled
    return k, v, scales, keys, values


def _planar(
    spec: Spec, raw: list[Tensor], scale: list[Tensor], poison: torch.Generator, device: str
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    pages, heads = raw[0].shape[:2]
    size = nvfp4_bytes.planar_page_bytes(heads)
    layers, layer = (3, 1) if spec.form == "planar_pool" else (1, 0)
    storage = _filled((pages * layers * size,), "scale", spec.fill, poison)
    views = nvfp4_bytes.planar_views(storage, pages, heads, layers * size, layer * size)
    for view, source in zip(views, (raw[0], scale[0], raw[1], nvfp4_bytes.interleave_v_scales(scale[1])), strict=True):
        view.copy_(source)
    k, ks, v, vs = nvfp4_bytes.planar_views(storage.to(device), pages, heads, layers * size, layer * size)
    if spec.scale_dtype == "fp8":
        ks, vs = ks.view(torch.float8_e4m3fn), vs.view(torch.float8_e4m3fn)
    return k, v, {"k_scale": ks, "v_scale": vs}
