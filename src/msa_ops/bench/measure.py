"""Timing: CUDA graphs of distinct calls, replayed in alternation with a cold L2; plain timing on the CPU.

A side's time is the median over replays of ``replay time / calls``. Before each replay a buffer much larger than L2 is
read (not written: dirty lines would be written back during the measurement), which also keeps the GPU busy while the
host enqueues the replay, so that no launch gap is measured.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

_FLUSH_BYTES = 512 << 20
_CEILING_BYTES = 4 << 30
_NODES = 32
_cuda: Any = torch.cuda  # its classes carry no types


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over `replays` replays."""

    median: float
    min: float
    max: float
    p25: float
    p75: float
    replays: int

    def as_dict(self) -> dict[str, float]:
        return {n: round(v, 4) if isinstance(v, float) else v for n, v in asdict(self).items()}


def timing_of(samples: Sequence[float]) -> Timing:
    """Summarise microseconds per call."""
    if len(samples) == 1:
        only = samples[0]
        return Timing(only, only, only, only, only, 1)
    p25, median, p75 = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, min(samples), max(samples), p25, p75, len(samples))


@dataclass(frozen=True)
class Prepared:
    """A side ready to be timed: `replay` runs its `calls` calls."""

    replay: Callable[[], Any]
    calls: int


class Bench:
    """The device under test: captures, flushes and times."""

    def __init__(self, device: torch.device, flush_bytes: int = _FLUSH_BYTES) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        if self.cuda:
            # Random, as any data that is timed; contents do not matter otherwise.
            self._flush = torch.empty(flush_bytes // 4, dtype=torch.int32, device=device).random_()
            self._stream = _cuda.Stream(device)
            self.sms = torch.cuda.get_device_properties(device).multi_processor_count
            self._sink = torch.zeros(16 * self.sms, dtype=torch.int32, device=device)
        self._triton = self._load_triton() if self.cuda else None

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def prepare(self, run: Callable[[Any], object], calls: Sequence[Any]) -> Prepared:
        """Run every call once eagerly (compilation, scratch), then capture them all into one graph."""
        if not self.cuda:
            return Prepared(lambda: [run(call) for call in calls], len(calls))
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for call in calls:
                run(call)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # torch.cuda.graph() would collect garbage and empty the allocator's cache at every capture.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in calls:
                    run(call)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error is the one to tell
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return Prepared(graph.replay, len(calls))

    def flush(self) -> None:
        """Fill L2 with lines that no call uses."""
        if self.cuda:
            self._read(self._flush)

    def time(self, sides: Mapping[str, Prepared], replays: int) -> dict[str, Timing]:
        """Time the sides in alternation, the order turning by one at every round; one untimed round goes before."""
        names = list(sides)
        samples: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(-1, replays):
            shift = turn % len(names) if names else 0
            events = {name: self._sample(sides[name]) for name in names[shift:] + names[:shift]}
            self.synchronize()
            if turn >= 0:
                for name, elapsed in events.items():
                    samples[name].append(elapsed() / sides[name].calls)
        return {name: timing_of(s) for name, s in samples.items()}

    def _sample(self, side: Prepared) -> Callable[[], float]:
        """Enqueue one replay; what is returned gives its microseconds after a synchronisation."""
        if not self.cuda:
            start = time.perf_counter()
            side.replay()
            elapsed = (time.perf_counter() - start) * 1e6
            return lambda: elapsed
        begin, end = (_cuda.Event(enable_timing=True) for _ in range(2))
        self.flush()
        begin.record()
        side.replay()
        end.record()
        return lambda: begin.elapsed_time(end) * 1e3

    # --- what this card can do ---

    def read_ceiling(self, replays: int = 7, nbytes: int = _CEILING_BYTES) -> tuple[float, str]:
        """Bytes per second of a read-only stream over `nbytes`, the best of a few kernels, and how it was measured."""
        if not self.cuda:
            return self._cpu_ceiling(replays, min(nbytes, 1 << 26))
        source = torch.empty(nbytes // 4, dtype=torch.int32, device=self.device).random_()
        readers: dict[str, Callable[[], object]] = {"torch.sum": lambda: source.sum(dtype=torch.int64)}
        if self._triton is not None:
            kernel = self._triton
            for config in kernel.CONFIGS:
                name = f"triton stream, {config[0]} words, {config[1]} warps, {config[2]} blocks an SM"
                readers[name] = functools.partial(kernel.read_stream, source, self._sink, config, self.sms)
        for read in readers.values():
            read()
        times = self.time({name: Prepared(read, 1) for name, read in readers.items()}, replays)
        best = min(times, key=lambda name: times[name].median)
        return nbytes / times[best].median * 1e6, best

    def _cpu_ceiling(self, replays: int, nbytes: int) -> tuple[float, str]:
        source = torch.empty(nbytes // 4, dtype=torch.int32).random_()
        times = self.time({"torch.sum": Prepared(source.sum, 1)}, replays)
        return nbytes / times["torch.sum"].median * 1e6, "torch.sum"

    def empty_node(self, replays: int = 7) -> float:
        """Microseconds of a graph node that does nothing, by the same method as a call; NaN on the CPU."""
        if not self.cuda:
            return math.nan
        kernel = self._triton

        def run(_: int) -> None:
            if kernel is None:
                self._sink[:1].add_(1)
            else:
                kernel.empty_node(self._sink)

        return self.time({"empty": self.prepare(run, range(_NODES))}, replays)["empty"].median

    def _load_triton(self) -> Any:
        """The Triton kernels, tried once; `None` where they do not import, compile or run."""
        try:
            from . import read_kernel

            read_kernel.read_stream(self._flush, self._sink, read_kernel.CONFIGS[0], self.sms)
            read_kernel.empty_node(self._sink)
            self.synchronize()
        except Exception:
            return None
        return read_kernel

    def _read(self, source: Tensor) -> None:
        if self._triton is not None:
            self._triton.read_stream(source, self._sink, self._triton.CONFIGS[0], self.sms)
        else:
            source.sum(dtype=torch.int64)


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean; NaN of nothing."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
