"""Compile what all sides will need in several processes at once: peers compile for seconds a variant, one at a time.

Run as ``python -m msa_ops.bench.warm`` with its work as JSON on standard input; the results are the sides' own compile
caches on disk. A failure here is not reported: the measuring process meets it again and says it where it belongs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from .inputs import Call, Shape, make_calls, make_pool
from .options import Options
from .peers import Side, load_peers, ours
from .presets import Job
from .step_inputs import StepCall, StepPool, make_index, make_step_calls
from .step_sides import StepSide, load_step_peers, our_step

_PAGES = 64
_PATIENCE_S = 240.0


def compile_all(jobs: list[Job], options: Options) -> str:
    """Start the workers, wait for them, and say how it went."""
    work = list(dict.fromkeys((job.shape, job.preset == "step") for job in jobs))
    workers = min(options.workers, len(work), os.cpu_count() or 1)
    path = os.pathsep.join(p for p in sys.path if p)
    start = time.monotonic()
    patience = min(_PATIENCE_S, (options.time_budget or 2 * _PATIENCE_S) / 2)
    running = []
    for i in range(workers):
        spec = json.dumps(
            {
                "device": options.device,
                "peers": options.peers,
                "sweep": options.sweep,
                "shapes": [dataclasses.asdict(shape) for shape, step in work[i::workers] if not step],
                "steps": [dataclasses.asdict(shape) for shape, step in work[i::workers] if step],
            }
        )
        command = [sys.executable, "-m", "msa_ops.bench.warm"]
        worker = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(spec)
            worker.stdin.close()
        running.append(worker)
    failed = 0
    for worker in running:
        try:
            failed += worker.wait(max(1.0, patience - (time.monotonic() - start))) != 0
        except subprocess.TimeoutExpired:
            worker.kill()
            failed += 1
    trouble = f", {failed} of them without success" if failed else ""
    return f"compiled for {len(work)} shapes in {workers} processes, {time.monotonic() - start:.1f} s{trouble}"


def work(spec: dict[str, Any]) -> None:
    """Run every side once on every shape of `spec`, on a pool so small that filling it costs nothing."""
    generator = torch.Generator(torch.device(spec["device"])).manual_seed(0)
    peers = [side for side in load_peers(tuple(spec["peers"])) if isinstance(side, Side)]
    environments = spec["sweep"] or [{}]
    for shape in map(_shape, spec["shapes"]):
        pool = make_pool(shape.kv, _PAGES, shape.num_kv_heads, generator)
        call = make_calls(shape, pool, 1, generator)[0]
        for side in (*map(ours, environments), *peers):
            _run(side, side.run, call)
    steps = [side for environment in environments for side in our_step(environment)]
    steps += [side for side in load_step_peers(peers) if isinstance(side, StepSide)] if spec["steps"] else []
    for shape in map(_shape, spec["steps"]):
        pool = make_pool(shape.kv, _PAGES, shape.num_kv_heads, generator)
        step = make_step_calls(shape, StepPool(pool, make_index(shape.kv, _PAGES, generator)), 1, generator)[0]
        for step_side in steps:
            for run in step_side.parts.values():
                _run(step_side.side, run, step_side.call(step))


def _shape(fields: dict[str, Any]) -> Shape:
    plain: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()}
    return Shape(**plain)


def _run(side: Side, run: Callable[[Any], object], call: Call | StepCall) -> None:
    with contextlib.suppress(Exception, SystemExit), side.in_environment():
        run(call)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


if __name__ == "__main__":
    work(json.load(sys.stdin))
