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
from typing import Any

import torch

from .inputs import Shape, make_calls, make_pool
from .options import Options
from .peers import Side, load_peers, ours
from .presets import Job

_PAGES = 64
_PATIENCE_S = 240.0


def compile_all(jobs: list[Job], options: Options) -> str:
    """Start the workers, wait for them, and say how it went."""
    shapes = list(dict.fromkeys(job.shape for job in jobs))
    workers = min(options.workers, len(shapes), os.cpu_count() or 1)
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
                "shapes": [dataclasses.asdict(s) for s in shapes[i::workers]],
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
    return f"compiled for {len(shapes)} shapes in {workers} processes, {time.monotonic() - start:.1f} s{trouble}"


def work(spec: dict[str, Any]) -> None:
    """Run every side once on every shape of `spec`, on a pool so small that filling it costs nothing."""
    device = torch.device(spec["device"])
    generator = torch.Generator(device).manual_seed(0)
    sides = [ours(environment) for environment in spec["sweep"]] or [ours()]
    sides += [side for side in load_peers(tuple(spec["peers"])) if isinstance(side, Side)]
    for fields in spec["shapes"]:
        plain: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()}
        shape = Shape(**plain)
        pool = make_pool(shape.kv, _PAGES, shape.num_kv_heads, generator)
        call = make_calls(shape, pool, 1, generator)[0]
        for side in sides:
            with contextlib.suppress(Exception), side.in_environment():
                side.run(call)
                if device.type == "cuda":
                    torch.cuda.synchronize()


if __name__ == "__main__":
    work(json.load(sys.stdin))
