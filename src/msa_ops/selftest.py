"""Self-tests of `msa-ops doctor`: every route of the attention call, and of the whole step, on small problems, held against
the oracle; one compilation.

A route here is a query dtype, a KV dtype and a layout. The problems are made by this module, take a fraction of a second
each, and hold what goes wrong first: permuted pages, holes and duplicates among the ids, a partly filled last block,
NaN in the slots behind it.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from .contract import _KV_FORMAT, _KV_FORMATS_OF_Q, _OUT_DTYPE, BLOCK_SIZE, HEAD_DIM, KVFormat, KVLayout, ScaleLayout
from .engines.cuda.plan import (
    CHOICES,
    CLUSTER_KINDS,
    Combine,
    DeviceFacts,
    LaunchPlan,
    Shape,
    Variant,
    choose_variant,
    choosing_variant,
    cluster_variants,
    dense_variants,
    plan_for,
    typical_room,
    wide_variant,
)

ROW_TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Largest ``norm(out - exact) / norm(exact)`` of an output row, by output dtype: one rounding of the weights and one of the
output to it (2.9e-3 and 3.2e-4 at most were seen)."""
LSE_TOLERANCE = 1e-4

_QUERY_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
_KV_DTYPES = {kv_format: dtype for dtype, kv_format in _KV_FORMAT.items()}
_GLOBAL_SF = 256.0
_TOPK = 20
"""More than the 16 blocks that the CPU engine takes at once, and enough to share among a cluster of 16."""


@dataclass(frozen=True, slots=True)
class Route:
    """One combination of dtypes and layout that a call can have."""

    q: str
    kv: KVFormat
    layout: KVLayout
    scales: ScaleLayout

    @property
    def layout_name(self) -> str:
        """``paged`` or ``flat``, for NVFP4 with the layout of its scales."""
        return {
            ScaleLayout.NONE: self.layout.value,
            ScaleLayout.TILED: f"{self.layout.value} tiled",
            ScaleLayout.PLANAR: f"{self.layout.value} planar",
        }[self.scales]


@dataclass(frozen=True, slots=True)
class NumericResult:
    """One call held against the oracle. `error`: worst row error; `lse_error`: worst absolute error of the LSE; both None
    where the call raised or gave NaN or inf."""

    device: str
    q: str
    kv: str
    layout: str
    way: str
    passed: bool
    error: float | None
    tolerance: float
    lse_error: float | None
    lse_tolerance: float
    message: str


@dataclass(frozen=True, slots=True)
class CompileResult:
    """One kernel compiled by NVRTC, the cache left aside."""

    target: str
    variant: str
    passed: bool
    cubin_bytes: int
    seconds: float
    message: str


def routes() -> list[Route]:
    """All routes of the contract."""
    found = []
    for name, dtype in _QUERY_DTYPES.items():
        for kv in _KV_FORMATS_OF_Q[dtype]:
            plain = ScaleLayout.TILED if kv is KVFormat.NVFP4 else ScaleLayout.NONE
            found += [Route(name, kv, layout, plain) for layout in KVLayout]
            if kv is KVFormat.NVFP4:
                found.append(Route(name, kv, KVLayout.PAGED, ScaleLayout.PLANAR))
    return found


def variants(route: Route, facts: DeviceFacts | None) -> tuple[str, ...]:
    """Names of the kernels that serve a route on a GPU; empty on the CPU (`facts` None)."""
    if facts is None:
        return ()
    found = (choose_variant(route.kv, facts), *_special(route, facts).values(), *_choosing(route, facts).values())
    return tuple(v.name for v in found)


def ways(route: Route, facts: DeviceFacts | None) -> tuple[str, ...]:
    """The ways in which a device can serve a route, each to be tested: how the blocks of an item meet, and on some GPUs
    the kernels for one whole item a multiprocessor (``wide``), for more than two (``dense-3``, ``dense-4``), and for clusters
    of few items (``whole``, ``tall``, ``deep``). Paged caches also serve a whole step: ``step``, and ``step-128`` and so on
    where the attention chooses among so many pages itself."""
    step = (_STEP,) if route.layout is KVLayout.PAGED else ()
    if facts is None:
        return ("segments", *step)
    found = ["none", "cluster", "scratch"] if facts.has_clusters else ["none", "scratch"]
    return (*found, *_special(route, facts), *step, *_choosing(route, facts))


_STEP = "step"


_FORCED = tuple(combine.name.lower() for combine in Combine)
"""Ways that MSA_OPS_COMBINE asks for; others are kernels that a call's size asks for."""


def _special(route: Route, facts: DeviceFacts) -> dict[str, Variant]:
    """The kernels beside the usual one, by the way that takes them."""
    wide = wide_variant(route.kv, facts)
    found = {} if wide is None else {"wide": wide}
    for way, variant in cluster_variants(route.kv, facts).items():
        if _plan(route, way, facts).variant == variant:  # a part of a GPU may have no room for such clusters
            found[way] = variant
    return found | {f"dense-{v.min_blocks}": v for v in dense_variants(route.kv, facts)}


def _choosing(route: Route, facts: DeviceFacts) -> dict[str, Variant]:
    """The usual kernel as one that chooses its blocks, by the way that takes it."""
    if route.layout is not KVLayout.PAGED:
        return {}
    usual = choose_variant(route.kv, facts)
    found = {f"{_STEP}-{pages}": choosing_variant(usual, facts, pages) for pages in CHOICES}
    return {way: variant for way, variant in found.items() if variant is not None}


def is_step(way: str) -> bool:
    """Whether a way is one of the whole step, not of the attention alone."""
    return way.partition("-")[0] == _STEP


def route_of(way: str) -> str:
    """What `explain` calls the route of a way."""
    if way in CLUSTER_KINDS:
        return "cluster"
    return way if way in _FORCED or way == "segments" else "none"


def _plan(route: Route, way: str, facts: DeviceFacts) -> LaunchPlan:
    """The plan of a way's problem by an estimate of how many clusters fit."""
    size = _size(way, facts)
    shape = Shape(route.kv, len(size.lengths) * size.seqlen_q, size.kv_heads, size.group, size.topk)
    return plan_for(shape, facts, partial(typical_room, facts))


# --- the problems ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Size:
    """Lengths of the requests, tokens of each, KV heads, and query heads of each KV head."""

    lengths: tuple[int, ...]
    seqlen_q: int
    kv_heads: int
    group: int
    topk: int = _TOPK


_SMALL = _Size((300, 70), 2, 2, 3)


_STEPS = _Size((1100, 70, 300), 1, 2, 3, topk=6)
"""Few items, and a top-k that is no size of a cluster: the usual kernel's."""


def _size(way: str, facts: DeviceFacts | None) -> _Size:
    if is_step(way):
        return _STEPS
    if way == "whole":
        return _Size((300,), 1, 1, 3, topk=16)
    if way == "deep":
        assert facts is not None
        return _Size(tuple(1 + 7 * b % 300 for b in range(facts.multiprocessors // 4)), 1, 1, 3, topk=16)
    if way != "wide" and not way.startswith("dense-"):
        return _SMALL
    assert facts is not None
    requests = int(way.partition("-")[2] or 1)  # a multiprocessor
    return _Size(tuple(1 + 7 * b % 40 for b in range(requests * facts.multiprocessors)), 1, 1, 16)


def _arguments(route: Route, size: _Size, device: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Positional and keyword arguments of the call, the same values on every device."""
    g = torch.Generator().manual_seed(5)
    counts = [-(-length // BLOCK_SIZE) for length in size.lengths]
    q = torch.randn(len(size.lengths) * size.seqlen_q, size.kv_heads * size.group, HEAD_DIM, generator=g)
    pages = sum(counts) + 2
    k, v = (torch.randn(pages, size.kv_heads, BLOCK_SIZE, HEAD_DIM, generator=g) for _ in "kv")
    order = torch.randperm(pages, generator=g).to(torch.int32)
    table = torch.full((len(counts), max(counts) + 1), pages, dtype=torch.int32)  # no such page
    for b, owned in enumerate(torch.split(order[: sum(counts)], counts)):
        table[b, : counts[b]] = owned
        tail = size.lengths[b] - (counts[b] - 1) * BLOCK_SIZE
        if route.kv is not KVFormat.NVFP4:  # NVFP4 codes have no NaN
            for t in (k, v):
                t[int(owned[-1]), :, tail:] = torch.nan
    kwargs: dict[str, Any] = {"seqlen_q": size.seqlen_q, "return_softmax_lse": True}
    if route.layout is KVLayout.PAGED:
        kwargs["page_table"] = table.to(device)
        kwargs["seqused_k"] = torch.tensor(size.lengths, dtype=torch.int32, device=device)
    else:
        k, v = (_flat(t, table, size.lengths) for t in (k, v))
        starts = [0, *torch.tensor(size.lengths).cumsum(0).tolist()]
        kwargs["cu_seqlens_k"] = torch.tensor(starts, dtype=torch.int32, device=device)
    keys, values, scales = _cache(route, k, v, device)
    query = q.to(_QUERY_DTYPES[route.q]).to(device)
    return (query, keys, values, _ids(size, counts).to(device)), {**kwargs, **scales}


def _flat(t: Tensor, table: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The rows of a paged cache, one request after the other."""
    rows = [t[table[b, : -(-n // BLOCK_SIZE)].long()].transpose(1, 2).flatten(0, 1)[:n] for b, n in enumerate(lengths)]
    return torch.cat(rows)


def _ids(size: _Size, counts: list[int]) -> Tensor:
    """Per token: its last block, block 0 twice, a block that no request has; -1 elsewhere. (KV heads, tokens, top-k)."""
    ids = torch.full((size.kv_heads, len(counts) * size.seqlen_q, size.topk), -1, dtype=torch.int32)
    places = (0, 5, size.topk - 3, size.topk - 2)  # in both of the CPU engine's runs
    for t in range(ids.shape[1]):
        last = counts[t // size.seqlen_q] - 1
        ids[:, t, places] = torch.tensor((last, 0, 0, 1000), dtype=torch.int32)
    ids[-1, :, places[0]] = 0  # heads choose for themselves
    return ids


def _cache(route: Route, k: Tensor, v: Tensor, device: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """K, V and their scales on the device, from float32 values."""
    if route.kv is not KVFormat.NVFP4:
        keys, values = (t.to(_KV_DTYPES[route.kv]).to(device) for t in (k, v))
        return keys, values, {}
    from . import nvfp4

    factors = {"k_global_scale": 1 / _GLOBAL_SF, "v_global_scale": 1 / _GLOBAL_SF}
    if route.scales is ScaleLayout.TILED:
        (keys, k_scale), (values, v_scale) = (nvfp4.nvfp4_quantize(t, _GLOBAL_SF) for t in (k, v))
        scales = {"k_scale": k_scale.to(device), "v_scale": v_scale.to(device)}
        return keys.to(device), values.to(device), {**scales, **factors}
    pages = nvfp4.nvfp4_planar_pages(k.shape[0], k.shape[1])
    rows = [t.transpose(1, 2).flatten(0, 1) for t in (k, v)]
    slots = torch.arange(rows[0].shape[0])
    nvfp4.nvfp4_planar_write(pages, slots, *rows, k_global_sf=_GLOBAL_SF, v_global_sf=_GLOBAL_SF)
    views = nvfp4.nvfp4_planar_views(pages.to(device), k.shape[1])
    return views.k, views.v, {"k_scale": views.k_scale, "v_scale": views.v_scale, **factors}


def _index(route: Route, size: _Size, table: Tensor) -> tuple[Tensor, Tensor]:
    """Index queries and the index cache of a step, on the CPU: whole numbers, so that scores are exact in any order, and many
    equal; NaN behind a request's last key."""
    g = torch.Generator().manual_seed(6)
    dtype = torch.float8_e4m3fn if route.kv in (KVFormat.FP8, KVFormat.NVFP4) else _QUERY_DTYPES[route.q]
    queries = torch.randint(-2, 3, (len(size.lengths) * size.seqlen_q, size.kv_heads, HEAD_DIM), generator=g)
    keys = torch.randint(-2, 3, (int(table.max()), 1, BLOCK_SIZE, HEAD_DIM), generator=g).float()
    for b, length in enumerate(size.lengths):
        last = -(-length // BLOCK_SIZE) - 1
        keys[int(table[b, last]), :, length - last * BLOCK_SIZE :] = torch.nan
    return queries.float().to(dtype), keys.to(dtype)


def _best(size: _Size, table: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """The ids that a step chooses, by the rule: a token's own block, then others by their largest score, the lower block where
    scores are equal. (tokens, KV heads, top-k)."""
    ids = torch.full((queries.shape[0], size.kv_heads, size.topk), -1, dtype=torch.int32)
    for t in range(queries.shape[0]):
        b, place = divmod(t, size.seqlen_q)
        seen = size.lengths[b] - size.seqlen_q + place + 1
        own = (seen - 1) // BLOCK_SIZE
        rows = keys[table[b, : own + 1].long(), 0].flatten(0, 1)[:seen].double()
        for head in range(size.kv_heads):
            products = rows @ queries[t, head].double()
            scores = torch.stack([part.max() for part in torch.split(products, BLOCK_SIZE)])
            order = scores[:own].sort(descending=True, stable=True).indices
            chosen = sorted([own, *order[: size.topk - 1].tolist()])
            ids[t, head, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return ids


@lru_cache(maxsize=64)
def _expected(route: Route, size: _Size) -> tuple[Tensor, Tensor]:
    from .reference import decode_reference

    with _one_thread():
        args, kwargs = _arguments(route, size, "cpu")
        if size is _STEPS:
            args = (
                *args[:3],
                _best(size, kwargs["page_table"], *_index(route, size, kwargs["page_table"])).transpose(0, 1),
            )
        return decode_reference(*args, round_output=False, **kwargs)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """For thousands of small operations, in which threads would only wait for each other. Calls under test have all."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- running them ------------------------------------------------------------------------------------------------------


def numeric(device: str, route: Route, way: str, facts: DeviceFacts | None) -> NumericResult:
    """Run one route in one way on a device and hold it against the oracle. What a call raises is a failure too."""
    tolerance = ROW_TOLERANCE[_OUT_DTYPE[_QUERY_DTYPES[route.q]]]
    error = lse_error = None
    try:
        size = _size(way, facts)
        result = _step(device, route, way) if is_step(way) else _call(device, route, way, size)
        error, lse_error = _errors(result, _expected(route, size))
        passed = error <= tolerance and lse_error <= LSE_TOLERANCE  # False for NaN
        message = "" if passed else f"row error {error:.2e} of {tolerance:.0e}, LSE error {lse_error:.2e}"
    except Exception as raised:  # a report is worth more than a traceback
        passed, message = False, f"{type(raised).__name__}: {raised}"
    error, lse_error = (e if e is not None and math.isfinite(e) else None for e in (error, lse_error))
    return NumericResult(
        device, route.q, route.kv.value, route.layout_name, way, passed, error, tolerance, lse_error, LSE_TOLERANCE, message
    )  # fmt: skip


def _call(device: str, route: Route, way: str, size: _Size) -> tuple[Tensor, Tensor]:
    """Output and LSE. Raises `RuntimeError` where the call would be served in another way than the one asked for."""
    from .decode import msa_sparse_decode_attention
    from .runtime import explain

    with _one_thread():
        args, kwargs = _arguments(route, size, device)
    forced = way in _FORCED
    with _forced(way if forced else None):
        how = explain(*args, **kwargs)
        result = msa_sparse_decode_attention(*args, **kwargs)
    special = not forced and way != "segments"
    if how.route != route_of(way):
        raise RuntimeError(f"the call took the route {how.route}, not {route_of(way)}: {how.why}")
    if special and how.variant not in _special_variants(route, way, device):
        raise RuntimeError(f"the call took the kernel {how.variant}, not the {way} one")
    assert isinstance(result, tuple)
    return result


def _step(device: str, route: Route, way: str) -> tuple[Tensor, Tensor]:
    """Output and LSE of a whole step. Raises `RuntimeError` where it chooses other blocks than the rule does, or not in the
    kernel that was asked for."""
    from .engines.cuda import topk
    from .step import msa_decode_step

    size = _STEPS
    with _one_thread():
        (q, k, v, _), kwargs = _arguments(route, size, device)
        narrow = kwargs["page_table"].cpu()
        index_q, index_k = _index(route, size, narrow)
        want = _best(size, narrow, index_q, index_k)
    # As wide as the way wants it; behind the request's own pages there are none.
    width = int(way.partition("-")[2] or CHOICES[-1] + 1)
    table = torch.full((narrow.shape[0], width), int(narrow.max()), dtype=torch.int32)
    table[:, : narrow.shape[1]] = narrow
    kwargs["page_table"] = table.to(device)
    ids = torch.full(want.shape, -7, dtype=torch.int32, device=device)
    selections = topk.calls.total()
    with _forced(None):
        result = msa_decode_step(
            q, k, v, index_q.to(device), index_k.to(device), topk=size.topk, q2k_out=ids, **kwargs
        )  # fmt: skip
    if not torch.equal(ids.cpu(), want):
        raise RuntimeError("the step chose other blocks than the rule does")
    if device != "cpu" and (topk.calls.total() > selections) == (way != _STEP):
        raise RuntimeError(f"the blocks were {'not ' if way != _STEP else ''}chosen by the attention")
    assert isinstance(result, tuple)
    return result


def _special_variants(route: Route, way: str, device: str) -> set[str]:
    """Names of the kernels that serve a route in this way on a CUDA device."""
    from .engines.cuda import launch

    special = _special(route, launch.device_facts(torch.device(device).index))
    # Where the driver finds more room than `typical_room`, as many items are served by clusters of four.
    kinds = (way, "tall") if way == "deep" else (way,)
    return {special[kind].name for kind in kinds if kind in special}


@contextlib.contextmanager
def _forced(combine: str | None) -> Iterator[None]:
    """MSA_OPS_COMBINE as asked for, no MSA_OPS_PLAN and no MSA_OPS_CHECK, for the time of a call."""
    names = ("MSA_OPS_COMBINE", "MSA_OPS_PLAN", "MSA_OPS_CHECK")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        if combine is not None:
            os.environ[names[0]] = combine
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


def _errors(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Worst row error of the output, relative, and worst error of the LSE, absolute; NaN where either has one."""
    (out, lse), (exact, exact_lse) = result, expected
    error = (out.cpu().double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    lse_error = (lse.cpu().double() - exact_lse).abs()
    return tuple(float(e.max()) for e in (error, lse_error))  # type: ignore[return-value]


def compile_one(target: str, facts: DeviceFacts) -> CompileResult:
    """Compile the fp8 kernel that most calls on such a device take."""
    from .engines.cuda import compile as compiler

    variant = choose_variant(KVFormat.FP8, facts)
    start = time.perf_counter()
    try:
        cubin, _ = compiler.compile_program(variant, target)
        size, message = len(cubin), ""
    except Exception as raised:  # a report is worth more than a traceback
        size, message = 0, f"{type(raised).__name__}: {raised}"
    return CompileResult(target, variant.name, not message, size, round(time.perf_counter() - start, 2), message)
