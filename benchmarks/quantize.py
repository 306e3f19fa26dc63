#!/usr/bin/env python3
"""Time the kernels that quantise to NVFP4 and append to caches, beside a copy of the same input. Needs an NVIDIA GPU.

    PYTHONPATH=src python3 benchmarks/quantize.py [--json FILE] [--commit COMMIT]

64 MiB at a time, four buffers in turn, which no L2 holds: microseconds a call in a CUDA graph, and bytes read and written
over that time. Then one token a request: in a graph (the cache's lines then lie in L2), and the host time of an eager
write. It takes about ten seconds on an H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msa_ops import PagedKVCache, nvfp4_quantize
from msa_ops.bench import environment
from msa_ops.bench.measure import Bench
from msa_ops.bench.sizes import row_bytes
from msa_ops.contract import BLOCK_SIZE, HEAD_DIM, SCALES_PER_ROW, KVFormat
from msa_ops.engines.cuda import quantize

SIZE = 64 << 20
BUFFERS = 4
HEADS = 8
ROWS = SIZE // (2 * HEAD_DIM)
NVFP4_ROW = row_bytes(KVFormat.NVFP4)
FACTOR = 100.0
GLOBAL_SCALE = 0.013
LARGE = (("bf16", "hnd"), ("fp8", "hnd"), ("fp8", "nhd"), ("fp8", "packed"), ("nvfp4", "planar"), ("nvfp4", "tiled"))
SMALL = (("bf16", "nhd"), ("fp8", "nhd"), ("nvfp4", "planar"), ("nvfp4", "tiled"))
BATCHES = (1, 8, 64, 256)

Call = Callable[[], object]


class Timer:
    """Collects rows and prints each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bench = Bench(device, 1 << 20)
        self.rows: list[dict[str, Any]] = []
        self.copy = 0.0

    def graph_us(self, calls: Sequence[Call], replays: int = 12, rounds: int = 5) -> float:
        """us a call: all calls twice over in one graph, replayed."""
        prepared = self.bench.prepare(lambda call: call(), [*calls, *calls])
        for _ in range(3):
            prepared.replay()
        times = []
        for _ in range(rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(replays):
                prepared.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / (replays * prepared.calls))
        return statistics.median(times)

    def host_us(self, call: Call, warm: int = 20, count: int = 200) -> float:
        """us of host time a call."""
        for _ in range(warm):
            call()
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        took = (time.perf_counter() - begin) / count * 1e6
        torch.cuda.synchronize(self.device)
        return took

    def moved(self, name: str, us: float, nbytes: int) -> None:
        """A row with bytes; the first is the copy that the others are compared with."""
        rate = nbytes / us / 1e3
        row = {"name": name, "us": us, "bytes": nbytes, "GB/s": rate}
        self.copy = self.copy or rate
        self.note(row if not self.rows else {**row, "of_copy": rate / self.copy})

    def note(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print("  ".join(f"{n} {v:.2f}" if isinstance(v, float) else f"{v}" for n, v in row.items()), flush=True)


def time_rows(timer: Timer, xs: list[Tensor]) -> None:
    """A copy, then rows to NVFP4: the kernel alone, with what surrounds it, and of a view with three strides."""
    targets = [torch.empty_like(x) for x in xs]
    timer.moved(
        "torch copy, bf16", timer.graph_us([partial(y.copy_, x) for x, y in zip(xs, targets, strict=True)]), 2 * SIZE
    )
    del targets
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        nbytes = ROWS * (HEAD_DIM * dtype.itemsize + NVFP4_ROW)
        us = timer.graph_us(kernel_calls([x.to(dtype) for x in xs]))
        timer.moved(f"quantise kernel, {str(dtype).removeprefix('torch.')}", us, nbytes)
    nbytes = SIZE + ROWS * NVFP4_ROW
    whole = [partial(quantize.quantize_rows, x, FACTOR) for x in xs]
    timer.moved("with outputs and cleared faults, bf16", timer.graph_us(whole), nbytes)
    public = [partial(nvfp4_quantize, x, FACTOR) for x in xs]
    timer.moved("nvfp4_quantize, eager wall clock", wall_us(public), nbytes)
    timer.moved("the same without reading the faults", wall_us(whole), nbytes)
    views = [x.view(-1, BLOCK_SIZE, HEADS, HEAD_DIM).transpose(1, 2) for x in xs]
    us = timer.graph_us([partial(quantize.quantize_rows, x, FACTOR) for x in views])
    timer.moved("rows of an NHD view (three strides)", us, nbytes)


def kernel_calls(xs: list[Tensor]) -> list[Call]:
    """Launches of the kernel alone, into outputs of their own."""
    quantize.load(xs[0].device)
    faults = torch.zeros(2, dtype=torch.int32, device=xs[0].device)
    calls: list[Call] = []
    for x in xs:
        codes, scales = (
            torch.empty(ROWS, columns, dtype=torch.uint8, device=x.device)
            for columns in (HEAD_DIM // 2, SCALES_PER_ROW)
        )
        params = quantize.pack_rows(x, quantize.collapse(x), FACTOR, codes, scales, faults)
        # The block of parameters has addresses alone: the tensors live as long as the call.
        calls.append(partial(_launched, x, params, (codes, scales, faults)))
    return calls


def _launched(x: Tensor, params: bytes, _kept: tuple[Tensor, ...]) -> None:
    quantize._launch("quantize_nvfp4", x, params, ROWS // 64)


def wall_us(calls: Sequence[Call], count: int = 40) -> float:
    """us a call of wall-clock time, device included."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for i in range(count):
        calls[i % len(calls)]()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count * 1e6


def make_cache(kv: str, layout: str, pages: int, layers: int, device: torch.device) -> PagedKVCache:
    scales = {} if kv == "bf16" else {"k_global_scale": GLOBAL_SCALE, "v_global_scale": GLOBAL_SCALE}
    return PagedKVCache(pages, HEADS, kv_format=kv, layout=layout, num_layers=layers, device=device, **scales)


def time_appends(timer: Timer, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Many tokens of one request, into pages at random places."""
    tokens = pairs[0][0].shape[0]
    pages = tokens // BLOCK_SIZE * 2
    for kv, layout in LARGE:
        cache = make_cache(kv, layout, pages, BUFFERS, timer.device)
        cache._free = torch.randperm(pages).tolist()
        cache.extend([cache.add_request()], [tokens])
        us = timer.graph_us([partial(cache.write, layer, *pairs[layer]) for layer in range(BUFFERS)])
        timer.moved(f"append {tokens} tokens, {kv} {layout}", us, SIZE + ROWS * row_bytes(KVFormat(kv)))


def time_decode_appends(timer: Timer, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """One token of each request; at the end the whole call of `PagedKVCache.append`."""
    for kv, layout in SMALL:
        for batch in BATCHES:
            cache = make_cache(kv, layout, 2 * batch, BUFFERS, timer.device)
            cache.extend([cache.add_request() for _ in range(batch)], [1] * batch)
            new = [(k[:batch].contiguous(), v[:batch].contiguous()) for k, v in pairs]
            us = timer.graph_us([partial(cache.write, layer, *new[layer]) for layer in range(BUFFERS)])
            host = timer.host_us(partial(cache.write, 0, *new[0]))
            timer.note({"name": f"decode append B={batch} {kv} {layout}", "us": us, "host_us": host})
    cache = PagedKVCache(4096, HEADS, kv_format="nvfp4", device=timer.device)
    requests = [cache.add_request() for _ in range(64)]
    k, v = (x[:64].contiguous() for x in pairs[0])
    host = timer.host_us(partial(cache.append, requests, k, v, [1] * 64))
    timer.note({"name": "append B=64 nvfp4 planar, host", "us": host})


def measure(device: torch.device) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    timer = Timer(device)
    xs = [torch.randn(ROWS, HEAD_DIM, device=device).bfloat16() for _ in range(BUFFERS)]
    time_rows(timer, xs)
    pairs = [(k.view(-1, HEADS, HEAD_DIM), v.view(-1, HEADS, HEAD_DIM)) for k, v in (x.chunk(2) for x in xs)]
    time_appends(timer, pairs)
    time_decode_appends(timer, pairs)
    return timer.rows


def main(argv: list[str] | None = None) -> int:
    """0 when all was measured, 1 without a GPU, 2 (from the parser) for a bad command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--commit", help="recorded in the JSON where the source is no git checkout")
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: no CUDA device: use a machine with an NVIDIA GPU", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    facts = environment.short_facts(device, given.commit)
    print(f"{facts['card']}, torch {facts['torch']}, commit {facts['commit']}")
    rows = measure(device)
    if given.json:
        given.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
