"""Host costs: one eager call, the import, and the first call with a cold and with a warm compile cache."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from .inputs import Call
from .measure import timing_of
from .peers import Side

_IMPORT = """
import time, torch
start = time.perf_counter()
import msa_ops
print((time.perf_counter() - start) * 1e3)
"""
# Context creation and the inputs are not the package's cost; its own import is measured above; whatever the first call
# imports is part of that call.
_FIRST_CALL = """
import sys, time, torch, msa_ops
from msa_ops.bench.inputs import Shape, make_calls, make_pool
device = torch.device(sys.argv[1])
generator = torch.Generator(device).manual_seed(0)
shape = Shape(sys.argv[2], 1, 64, 4, context=2048)
call = make_calls(shape, make_pool(shape.kv, 16, 4, generator), 1, generator)[0]
from msa_ops.bench.peers import ours
run = ours().run
sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
sync()
for _ in range(2):
    start = time.perf_counter()
    run(call)
    sync()
    print((time.perf_counter() - start) * 1e3)
"""


def eager_cost(side: Side, call: Call, chunks: int = 21, per_chunk: int = 40) -> dict[str, Any]:
    """Microseconds of host time of one eager call with ``out=``, and the device allocations that it makes."""
    cuda = call.q.is_cuda
    for _ in range(5):
        side.run(call)
    before = _allocations(cuda)
    side.run(call)
    allocations = _allocations(cuda) - before
    samples = []
    for _ in range(chunks):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(per_chunk):
            side.run(call)
        samples.append((time.perf_counter() - start) / per_chunk * 1e6)
    if cuda:
        torch.cuda.synchronize()
    return {"status": "ok", "host_us": timing_of(samples).as_dict(), "allocations_per_call": allocations}


def _allocations(cuda: bool) -> int:
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0)) if cuda else 0


def import_cost(runs: int = 5) -> dict[str, Any]:
    """Milliseconds that importing the package adds to torch's own import, in fresh processes."""
    samples = [float(_python(_IMPORT).split()[-1]) for _ in range(runs + 1)][1:]  # the first fills the file cache
    return {"median_ms": round(statistics.median(samples), 2), "max_ms": round(max(samples), 2), "runs": runs}


def first_call_cost(device: torch.device, kv: str) -> dict[str, Any]:
    """Milliseconds of the first call in a fresh process: with an empty compile cache, then with the filled one."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {"MSA_OPS_CACHE_DIR": cache}
        runs = [[float(x) for x in _python(_FIRST_CALL, str(device), kv, **environment).split()[-2:]] for _ in range(2)]
    (cold, _), (warm, second) = runs
    return {"kv": kv, "cold_ms": round(cold, 2), "warm_ms": round(warm, 2), "second_call_ms": round(second, 3)}


def _python(code: str, *argv: str, **environment: str) -> str:
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    return done.stdout
