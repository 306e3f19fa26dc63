"""The CPU engine against torch's attention on keys that are gathered and widened already.

    python benchmarks/cpu.py [--threads 2] [--forms bf16 fp8 ...] [--json FILE]

Ours gets a paged cache and selected block ids. The other side is `scaled_dot_product_attention` on the very keys those
ids select, gathered and widened to float32 beforehand, with the query heads of a KV head as query rows: what a decode
step would cost if finding, gathering and widening were free. Both results are compared before anything is timed; the
two sides take turns of five calls; several sets of distinct random ids are used in rotation over a cache in which no
page is shared. Times are medians of single calls. Peak extra memory is the growth of the resident set during the
first full call (Linux only).

Each form runs in a process of its own. The exit status is 1 if a ratio or a peak is past its bar.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import multiprocessing
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from msa_ops import msa_sparse_decode_attention
from msa_ops.nvfp4 import (
    nvfp4_dequantize,
    nvfp4_planar_pages,
    nvfp4_planar_views,
    nvfp4_quantize,
    nvfp4_scales_from_tiled,
    nvfp4_scales_to_planar_v,
)

BLOCK = 128
BARS = {"bf16": 1.3, "fp16": 1.3, "fp8": 1.3, "nvfp4_tiled": 3.0, "nvfp4_planar": 3.0}
MEMORY_BAR_MIB = 64
TURN = 5
"""Calls of one side before it is the other's turn."""
RANDOM_PAGES = 251
"""Pages with contents of their own; the cache repeats them (a prime, so that ids do not meet them in step)."""


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    context: int
    topk: int
    threads: int
    rounds: int
    id_sets: int


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
    k, v = (torch.randn(RANDOM_PAGES, shape.kv_heads, BLOCK, 128, generator=generator) for _ in range(2))
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
    rows = RANDOM_PAGES * shape.kv_heads * BLOCK
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
    blocks = shape.context // BLOCK
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


def measure(name: str, shape: Shape) -> dict[str, Any]:
    """One form: check, then time both sides in turns."""
    torch.set_num_threads(shape.threads)
    pages = shape.batch * (shape.context // BLOCK)
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
            for j in range(i, i + TURN):
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


def _cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--forms", nargs="+", choices=list(BARS), default=list(BARS), help="KV forms to run")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--batch", type=int, default=8, help="requests")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=4, help="KV heads")
    parser.add_argument("--context", type=int, default=131072, help="keys of each request, a multiple of 128")
    parser.add_argument("--topk", type=int, default=16, help="blocks each token selects")
    parser.add_argument("--rounds", type=int, default=101, help="timed calls of each side")
    parser.add_argument("--json", type=pathlib.Path, help="write the result there")
    args = parser.parse_args()
    if args.context % BLOCK or not 0 < args.topk <= args.context // BLOCK:
        parser.error("--context must be a multiple of 128 that holds --topk blocks")
    if min(args.threads, args.batch, args.kv_heads, args.rounds - 1) < 1 or args.heads % args.kv_heads:
        parser.error("--threads, --batch and --kv-heads must be positive, --rounds 2 or more, --heads whole groups")
    shape = Shape(args.batch, args.heads, args.kv_heads, args.context, args.topk, args.threads, args.rounds, id_sets=4)
    print(f"{_cpu_name()}, {shape.threads} threads, torch {torch.__version__}; {shape}")
    print(
        f"{'KV':<14}{'ours ms':>9}{'SDPA ms':>9}{'ratio':>7}{'bar':>6}{'fast decile':>17}{'peak MiB':>10}{'error':>10}"
    )
    results = []
    for name in args.forms:
        # A new process each: what one form leaves in the allocator is not to be taken for another's thrift.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            r = pool.apply(measure, (name, shape))
        results.append(r)
        peak = "unknown" if r["peak_extra_mib"] is None else f"{r['peak_extra_mib']:.1f}"
        fast = f"{r['ours_fast_ms']:.2f}/{r['sdpa_fast_ms']:.2f}={r['ratio_fast']:.2f}"
        print(
            f"{name:<14}{r['ours_ms']:>9.2f}{r['sdpa_ms']:>9.2f}{r['ratio']:>7.2f}{r['bar']:>6.1f}{fast:>17}"
            f"{peak:>10}{r['row_error']:>10.1e}",
            flush=True,
        )
    if args.json:
        record = {"cpu": _cpu_name(), "torch": torch.__version__, "shape": asdict(shape), "results": results}
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return int(any(r["ratio"] > r["bar"] or (r["peak_extra_mib"] or -math.inf) > MEMORY_BAR_MIB for r in results))


if __name__ == "__main__":
    sys.exit(main())
