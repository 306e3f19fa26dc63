"""The CPU engine against torch's attention on keys that are gathered and widened already.

Ours gets a paged cache and selected block ids. The other side is `scaled_dot_product_attention` on the very keys those
ids select, gathered and widened to float32 beforehand, with the query heads of a KV head as query rows: what a decode
step would cost if finding, gathering and widening were free. Both results are compared before anything is timed; the
two sides take turns of five calls. Ours uses several sets of distinct random ids in rotation over a cache in which no
page is shared; the other side gets the gathered keys of the last set in every call, so that what the caches of the CPU
can hold of them stays there, in its favour. Times are medians of single calls. Peak extra memory is the growth of the
resident set during the first full call (Linux only). Each form runs in a process of its own.

``msa-ops bench cpu`` and ``benchmarks/cpu.py`` are its two command lines; the latter needs neither typer nor rich.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .. import msa_sparse_decode_attention
from ..contract import BLOCK_SIZE, HEAD_DIM
from ..nvfp4 import (
    nvfp4_dequantize,
    nvfp4_planar_pages,
    nvfp4_planar_views,
    nvfp4_quantize,
    nvfp4_scales_from_tiled,
    nvfp4_scales_to_planar_v,
)
from . import environment
from .cpu_report import HEADING, line
from .report import check_destination

BARS = {"bf16": 1.3, "fp16": 1.3, "fp8": 1.3, "nvfp4_tiled": 3.0, "nvfp4_planar": 3.0}
"""KV forms, and the ratio to the other side that each may have."""
MEMORY_BAR_MIB = 64
TURN = 5
"""Calls of one side before it is the other's turn."""
RANDOM_PAGES = 251
"""Pages with contents of their own; the cache repeats them (a prime, so that ids do not meet them in step)."""
SMOKE = {"threads": 1, "batch": 1, "heads": 4, "kv_heads": 2, "context": 2048, "topk": 4, "rounds": 5}


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    context: int
    topk: int
    threads: int
    rounds: int
    id_sets: int = 4

    @property
    def cache_bytes(self) -> int:
        """Of a bf16 cache, the largest."""
        return self.batch * self.context * self.kv_heads * 2 * HEAD_DIM * 2

    def check(self) -> None:
        """Raise `ValueError`, naming the option, for what cannot be measured."""
        for name, least in (("threads", 1), ("batch", 1), ("kv_heads", 1), ("heads", 1), ("topk", 1), ("rounds", 2)):
            if getattr(self, name) < least:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} must be at least {least}, got {getattr(self, name)}")
        need, memory = self.cache_bytes, environment.memory_bytes()
        if need > memory:
            raise ValueError(
                f"--batch, --heads and --context must make a cache that memory holds: it has {need / 2**30:.0f} GiB, the "
                f"machine {memory / 2**30:.0f}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"--heads must be a multiple of the KV heads, got {self.heads} and {self.kv_heads}")
        if self.context % BLOCK_SIZE or self.topk > self.context // BLOCK_SIZE:
            raise ValueError(
                f"--context must be a multiple of {BLOCK_SIZE} that holds --topk blocks, got {self.context} and top-k "
                f"{self.topk}"
            )


@dataclass
class Form:
    """A cache: the call's K, V and scale arguments, and float32 values of its `RANDOM_PAGES` distinct pages."""

    k: Tensor
    v: Tensor
    kwargs: dict[str, Any]
    k_values: Tensor
    v_values: Tensor


def _repeat(pages: Tensor, count: int) -> Tensor:
    return pages[torch.arange(count) % RANDOM_PAGES]


def make_form(name: str, shape: Shape, pages: int) -> Form:
    """A cache of `pages` pages in the form `name`, with random normal contents."""
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(RANDOM_PAGES, shape.kv_heads, BLOCK_SIZE, 128, generator=generator) for _ in range(2))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}.get(name)
    if dtype is not None:
        k, v = k.to(dtype), v.to(dtype)
        if name == "fp8":
            whole = [_repeat(t.view(torch.uint8), pages).view(dtype) for t in (k, v)]
        else:
            whole = [_repeat(t, pages) for t in (k, v)]
        return Form(whole[0], whole[1], {}, k.float(), v.float())
    global_sf = 448 * 6 / float(torch.maximum(k.abs().max(), v.abs().max()))
    (k_codes, k_scale), (v_codes, v_scale) = nvfp4_quantize(k, global_sf), nvfp4_quantize(v, global_sf)
    k_values = nvfp4_dequantize(k_codes, k_scale, 1 / global_sf)
    v_values = nvfp4_dequantize(v_codes, v_scale, 1 / global_sf)
    kwargs: dict[str, Any] = {"k_global_scale": 1 / global_sf, "v_global_scale": 1 / global_sf}
    if name == "nvfp4_tiled":
        # A page's rows are whole tiles, so its scales are contiguous bytes and repeat with it.
        scales = [_repeat(t.view(RANDOM_PAGES, -1), pages).view(-1, 8) for t in (k_scale, v_scale)]
        kwargs.update(k_scale=scales[0], v_scale=scales[1])
        return Form(_repeat(k_codes, pages), _repeat(v_codes, pages), kwargs, k_values, v_values)
    base = nvfp4_planar_pages(RANDOM_PAGES, shape.kv_heads)
    views = nvfp4_planar_views(base, shape.kv_heads)
    rows = RANDOM_PAGES * shape.kv_heads * BLOCK_SIZE
    views.k.copy_(k_codes)
    views.v.copy_(v_codes)
    views.k_scale.copy_(nvfp4_scales_from_tiled(k_scale, rows).view(views.k_scale.shape))
    views.v_scale.copy_(nvfp4_scales_to_planar_v(nvfp4_scales_from_tiled(v_scale, rows).view(views.v_scale.shape)))
    whole_views = nvfp4_planar_views(_repeat(base, pages), shape.kv_heads)
    kwargs.update(k_scale=whole_views.k_scale, v_scale=whole_views.v_scale)
    return Form(whole_views.k, whole_views.v, kwargs, k_values, v_values)


@dataclass
class Inputs:
    q: Tensor
    ids: list[Tensor]
    table: Tensor
    lengths: Tensor


def make_inputs(name: str, shape: Shape, pages: int) -> Inputs:
    generator = torch.Generator().manual_seed(2)
    blocks = shape.context // BLOCK_SIZE
    q = torch.randn(shape.batch, shape.heads, 128, generator=generator)
    q = q.to(torch.float16 if name == "fp16" else torch.bfloat16)
    rows = shape.kv_heads * shape.batch
    sets = []
    for _ in range(shape.id_sets):
        ids = torch.stack([torch.randperm(blocks, generator=generator)[: shape.topk] for _ in range(rows)])
        sets.append(ids.sort(-1).values.int().view(shape.kv_heads, shape.batch, shape.topk))
    table = torch.randperm(pages, generator=generator).int().view(shape.batch, blocks)
    return Inputs(q, sets, table, torch.full((shape.batch,), shape.context, dtype=torch.int32))


def gathered(form: Form, inputs: Inputs, ids: Tensor) -> tuple[Tensor, Tensor]:
    """float32 ``(batch, kv_heads, topk * 128, 128)`` K and V that `ids` select."""
    kv_heads, batch, _ = ids.shape
    page = torch.stack([inputs.table[b][ids[:, b].long()] for b in range(batch)]).long() % RANDOM_PAGES
    head = torch.arange(kv_heads).view(1, kv_heads, 1)
    return form.k_values[page, head].flatten(2, 3), form.v_values[page, head].flatten(2, 3)


def sdpa(inputs: Inputs, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    batch, heads, _ = inputs.q.shape
    q = inputs.q.float().view(batch, k.shape[1], heads // k.shape[1], 128)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)


def check(name: str, out: Tensor, expected: Tensor) -> float:
    """Largest row error relative to the row's norm; raises if it is past one output rounding."""
    expected = expected.reshape(out.shape).double()
    error = float(((out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    # One rounding of the output, half a unit in the last place at most, plus float32's own noise.
    bound = (2**-11 if out.dtype == torch.float16 else 2**-8) + 2e-5
    if not error <= bound:
        raise RuntimeError(f"{name}: row error {error:.3g} is past {bound:.3g}: a wrong result is not timed")
    return error


def peak_extra_mib(call: Callable[[], object]) -> float | None:
    """Growth of the resident set during `call`, in MiB; None where Linux's /proc is not there."""
    status = pathlib.Path("/proc/self/status")
    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that the allocator kept would hide what the call takes
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to the present size
    except (AttributeError, OSError, TypeError):
        return None

    def kib(field: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field + ":"))

    before = kib("VmRSS")
    call()
    return (kib("VmHWM") - before) / 1024


def measure_form(name: str, shape: Shape) -> dict[str, Any]:
    """One form: check, then time both sides in turns."""
    torch.set_num_threads(shape.threads)
    pages = shape.batch * (shape.context // BLOCK_SIZE)
    form, inputs = make_form(name, shape, pages), make_inputs(name, shape, pages)
    out = torch.empty_like(inputs.q)
    common = {"page_table": inputs.table, "seqused_k": inputs.lengths, "out": out, **form.kwargs}

    def ours(i: int) -> Tensor:
        result = msa_sparse_decode_attention(inputs.q, form.k, form.v, inputs.ids[i % shape.id_sets], **common)
        assert isinstance(result, Tensor)
        return result

    # A first small call starts the thread pool and torch's libraries, which are no memory of the call.
    one = {**common, "page_table": inputs.table[:1], "seqused_k": inputs.lengths[:1], "out": out[:1]}
    msa_sparse_decode_attention(inputs.q[:1], form.k, form.v, inputs.ids[0][:, :1, :1], **one)
    peak = peak_extra_mib(lambda: ours(0))
    errors = []
    for i in range(shape.id_sets):
        k, v = gathered(form, inputs, inputs.ids[i])
        theirs = sdpa(inputs, k, v)
        errors.append(check(name, ours(i), theirs()))
    times: dict[str, list[float]] = {"ours": [], "sdpa": []}
    for i in range(0, shape.rounds, TURN):
        for side in ("sdpa", "ours"):
            for j in range(i, min(i + TURN, shape.rounds)):
                begin = time.perf_counter()
                if side == "ours":
                    ours(j)
                else:
                    theirs()
                times[side].append((time.perf_counter() - begin) * 1e3)
    median = {side: statistics.median(t) for side, t in times.items()}
    fast = {side: statistics.quantiles(t, n=10)[0] for side, t in times.items()}
    return {
        "form": name,
        "ours_ms": median["ours"],
        "sdpa_ms": median["sdpa"],
        "ratio": median["ours"] / median["sdpa"],
        "ours_fast_ms": fast["ours"],
        "sdpa_fast_ms": fast["sdpa"],
        "ratio_fast": fast["ours"] / fast["sdpa"],
        "bar": BARS[name],
        "peak_extra_mib": peak,
        "row_error": max(errors),
    }


def measure(
    shape: Shape,
    forms: Sequence[str] = tuple(BARS),
    say: Callable[[str], None] = print,
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
    commit: str | None = None,
) -> dict[str, Any]:
    """Measure `forms` and return the record with the machine's facts; ``bars_held``: every ratio and peak is within
    its bar. A peak that the system does not tell is not.

    Raises `ValueError` for a bad shape or form, `RuntimeError` where a form is wrong or its process ends.
    """
    forms = checked(shape, forms)
    name = _cpu_name()
    say(f"{name}, {shape.threads} threads, torch {torch.__version__}; {shape}")
    say(HEADING)
    results: list[dict[str, Any]] = []
    for done, form in enumerate(forms):
        progress(done, len(forms), form)
        results.append(_in_new_process(form, shape))
        say(line(results[-1]))
    progress(len(forms), len(forms), "")
    held = all(
        r["ratio"] <= r["bar"] and r["peak_extra_mib"] is not None and r["peak_extra_mib"] <= MEMORY_BAR_MIB
        for r in results
    )
    if unknown := [r["form"] for r in results if r["peak_extra_mib"] is None]:
        say(f"peak memory is unknown for {', '.join(unknown)}: that bar does not count as held")
    facts = environment.facts(torch.device("cpu"), commit)
    return {**facts, "kind": "cpu", "cpu": name, "shape": asdict(shape), "results": results, "bars_held": held}


def checked(shape: Shape, forms: Sequence[str]) -> Sequence[str]:
    """`forms`, if they and `shape` can be measured. Raises `ValueError`, naming the option."""
    shape.check()
    if unknown := [form for form in forms if form not in BARS]:
        raise ValueError(f"--forms takes {', '.join(BARS)}, got {unknown[0]!r}")
    return forms


def _in_new_process(form: str, shape: Shape) -> dict[str, Any]:
    """What one form leaves in the allocator is not to be taken for another's thrift."""
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(measure_form, form, shape).result()
    except BrokenProcessPool:
        raise RuntimeError(f"the process that measured {form} ended by itself: is there enough memory?") from None


def _cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")), "unknown")


def main(argv: list[str] | None = None) -> int:
    """0 when every bar held, 1 when a ratio or a peak is past its bar or a peak unknown, 2 (from the parser) for a bad
    command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--forms", nargs="+", choices=list(BARS), default=list(BARS), help="KV forms to run")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--batch", type=int, default=8, help="requests")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=4, help="KV heads")
    parser.add_argument("--context", type=int, default=131072, help="keys of each request, a multiple of 128")
    parser.add_argument("--topk", type=int, default=16, help="blocks each token selects")
    parser.add_argument("--rounds", type=int, default=101, help="timed calls of each side")
    parser.add_argument("--commit", help="recorded in the JSON where the source is no git checkout")
    parser.add_argument("--json", type=pathlib.Path, help="write the result there")
    given = vars(parser.parse_args(argv))
    forms, file, commit = given.pop("forms"), given.pop("json"), given.pop("commit")
    try:
        check_destination("--json", file and str(file))
        report = measure(Shape(**given), forms, lambda text: print(text, flush=True), commit=commit)
    except ValueError as error:
        parser.error(str(error))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if file:
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(not report["bars_held"])
