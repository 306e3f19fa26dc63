"""One run: pools, the correctness gate, alternating measurement, rows."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import environment, goals, host, warm
from .exact import error_against_rounding, exact_output, relative_error
from .inputs import Call, Pool, Shape, make_calls, make_pool
from .measure import Bench, Prepared
from .options import Options
from .peers import UNKNOWN, Absent, Refused, Side, load_peers, ours
from .presets import Job, jobs_of, separate_requests
from .report import accuracy_line, describe, first_line, host_words, is_ours, progress_line
from .step import StepRunner

WRONG_ABOVE = 0.01
"""Row error (2-norm) that makes a side wrong: about five roundings to bf16; one dropped key of 2,048 gives 0.013."""
_SAMPLED_TOKENS = 24
GRAPH_TARGET_US = 400.0
POOL_BYTES = 2 << 30
_CHECKPOINT_S = 15.0


class DeviceLost(RuntimeError):
    """The CUDA context is unusable after a fault; nothing more can be measured in this process."""


def _bytes(tensor: Tensor) -> Tensor:
    # A copy: a dimension of one element may have any stride, which a view of bytes refuses.
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@dataclass(frozen=True)
class Contestant:
    """A side on given calls; `label` names it in the row."""

    label: str
    side: Side
    calls: Sequence[Call]


@dataclass(frozen=True)
class Checked(Prepared):
    """A side that passed the gate, with its largest row error."""

    error: float = 0.0


class Runner:
    """Measures jobs on one device and collects rows. `say` prints progress, one line a call."""

    def __init__(
        self, options: Options, say: Callable[[str], None], sides: Sequence[Side | Absent] | None = None
    ) -> None:
        """`sides` replaces the peers found by name (for tests, with fakes)."""
        self.options = options
        self.say = say
        self.started = time.monotonic()
        self.device = torch.device(options.device)
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise RuntimeError("no CUDA device: use a machine with an NVIDIA GPU, or pass --device cpu --smoke")
            self.device = torch.device("cuda", self.device.index or 0)
            torch.cuda.set_device(self.device)
        self.generator = torch.Generator(self.device).manual_seed(options.seed)
        self.mine = [ours(env) for env in options.sweep] or [ours()]
        found = list(load_peers(options.peers)) if sides is None else list(sides)
        given = dict(options.versions)
        self.peers = [
            replace(s, version=given.get(s.name, s.version)) if s.version == UNKNOWN else s
            for s in found
            if isinstance(s, Side)
        ]
        self.absent = [s for s in found if isinstance(s, Absent)]
        self.rows: list[dict[str, Any]] = []
        self.accuracy: list[dict[str, Any]] = []
        self.host: dict[str, Any] = {}
        self.not_measured: list[str] = []
        self._pool: tuple[tuple[str, int], Pool] | None = None
        self.steps = StepRunner(self)
        self._slowest = 0.0
        self.checkpoint: Callable[[dict[str, Any]], None] = lambda report: None
        """Called with the report so far every 15 seconds, so that a run that is killed loses little."""
        self.progress: Callable[[int, int, str], None] = lambda done, total, name: None
        """Called before each shape, and once after the last, with how many are done and what comes next."""
        self._saved = self.started

    # --- the whole run ---

    def run(self) -> dict[str, Any]:
        """Measure everything asked for and return the report; on a lost device or a spent budget, what there is."""
        o = self.options
        jobs = [job for preset in o.presets if preset != "host" for job in jobs_of(preset, o.axes, o.seed)]
        for absent in self.absent:
            self.say(f"{absent.name} is not here: {absent.reason}")
        if o.workers and self.device.type == "cuda":
            self.say(warm.compile_all(jobs, o))
        self.bench = Bench(self.device) if not o.smoke else Bench(self.device, 1 << 20)
        ceiling, method = self.bench.read_ceiling(nbytes=(1 << 24) if o.smoke else 4 << 30)
        self.facts = environment.facts(self.device, o.commit)
        self.facts |= {"read_ceiling_bytes_per_s": round(ceiling), "read_ceiling_method": method}
        node = self.bench.empty_node()
        self.facts["empty_graph_node_us"] = None if math.isnan(node) else round(node, 3)
        self.ceiling = ceiling
        self.goal_ceiling = goals.goal_ceiling(self.facts["card"], ceiling)
        self.say(f"{self.facts['card']}: reads {ceiling / 1e12:.3f} TB/s ({method}); empty graph node {node:.2f} us")
        try:
            self._jobs(jobs)
            if "host" in o.presets:
                self._host()
        except DeviceLost as error:
            self.say(f"STOPPED: {error}")
            self.not_measured.append(f"everything after a fault: {error}")
        except BaseException:  # an interrupt, or a reader of the output that is gone: what was measured is kept
            if self.rows or self.accuracy or self.host:
                self.checkpoint(self.report(finished=False))
            raise
        return self.report()

    def _jobs(self, jobs: list[Job]) -> None:
        self._jobs_of_run = jobs
        for done, job in enumerate(jobs):
            self.progress(done, len(jobs), f"{job.preset} {describe(job)}")
            if self._out_of_time(self._slowest):
                self.not_measured.append(f"{job.preset} {describe(job)}")
                continue
            begin = time.monotonic()
            try:
                self._job(job, jobs)
            except Exception as error:
                self.not_measured += [f"{left.preset} {describe(left)}" for left in jobs[done:]]
                if not isinstance(error, DeviceLost):  # a fault may show itself at any later call
                    self._raise_if_lost(f"{job.preset} {describe(job)}", error)
                raise
            now = time.monotonic()
            self._slowest = max(self._slowest, now - begin)
            if now - self._saved > _CHECKPOINT_S:
                self._saved = now
                self.checkpoint(self.report(finished=False))
        if jobs:
            self.progress(len(jobs), len(jobs), "")
        if self.not_measured:
            self.say(f"time budget spent; not measured: {len(self.not_measured)} of {len(jobs)} shapes")

    def _job(self, job: Job, jobs: Sequence[Job]) -> None:
        if job.preset == "accuracy":
            self._accuracy(job)
            return
        rows = self.steps.rows(job, jobs) if job.preset == "step" else [self.measure(job)]
        self.rows += rows
        for row in rows:
            self.say(progress_line(row))

    def _out_of_time(self, needed: float) -> bool:
        budget = self.options.time_budget
        return budget is not None and time.monotonic() - self.started + needed > budget

    def report(self, finished: bool = True) -> dict[str, Any]:
        """All that was measured so far, ready for JSON. `finished` is false in what is saved while the run goes on."""
        return {
            **self.facts,
            "kind": "bench",
            "finished": finished,
            "goal_ceiling_bytes_per_s": round(self.goal_ceiling),
            "sides": {s.name: s.version for s in (*self.mine, *self.peers)},
            "absent": {a.name: a.reason for a in self.absent},
            "options": dataclasses.asdict(self.options) | {"json": None, "markdown": None},
            "seconds": round(time.monotonic() - self.started, 1),
            "rows": self.rows,
            "accuracy": self.accuracy,
            "host": self.host,
            "summary": goals.summarise(self.rows),
            "not_measured": self.not_measured,
        }

    # --- pools and calls ---

    def pool(self, shape: Shape, jobs: Sequence[Job]) -> Pool:
        """The pool of this KV format and head count, big enough for every job that shares it."""
        key = (shape.kv, shape.num_kv_heads)
        if self._pool is None or self._pool[0] != key:
            self.release_pool()
            self.steps.release_pool()
            shapes = [j.shape for j in jobs if (j.shape.kv, j.shape.num_kv_heads) == key]
            shapes += [b for j in jobs if (b := j.baseline_shape) and (b.kv, b.num_kv_heads) == key]
            pages = max(s.used_pages for s in (*shapes, shape))
            timed = any(j.preset != "accuracy" for j in jobs)
            if timed and not self.options.smoke:
                pages = max(pages, -(-POOL_BYTES // shape.page_bytes))
            pages = self.pages_that_fit(pages, shape.page_bytes)
            self._pool = key, make_pool(shape.kv, pages, shape.num_kv_heads, self.generator)
        return self._pool[1]

    def pages_that_fit(self, pages: int, page_bytes: int) -> int:
        """`pages`, or as many as the device's memory has room for: a smaller pool repeats some in the page tables."""
        room = math.floor(min(0.6 * environment.free_bytes(self.device), 2**60) / page_bytes)
        return max(1, min(pages, room))

    def release_pool(self) -> None:
        self._pool = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def calls(self, shape: Shape, pool: Pool) -> list[Call]:
        """Enough distinct calls for one graph: about 0.4 ms of work, 6 to 24 calls."""
        count = self.options.calls
        if count is None:
            blocks = shape.tokens * shape.num_kv_heads * shape.topk
            estimate = 5 + blocks * 256 * shape.row_bytes / self.ceiling * 1e6
            count = max(6, min(24, round(GRAPH_TARGET_US / estimate)))
        return make_calls(shape, pool, count, self.generator)

    # --- one row ---

    def measure(self, job: Job) -> dict[str, Any]:
        """Check and time every side on one job."""
        pool = self.pool(job.shape, self._jobs_of_run)
        calls = self.calls(job.shape, pool)
        contestants = [Contestant(side.name, side, calls) for side in self.mine]
        if job.baseline:
            shape = job.baseline_shape
            other = [separate_requests(call) for call in calls] if shape is None else self.calls(shape, pool)
            contestants += [Contestant(f"{side.name} {job.baseline}", side, other) for side in self.mine]
        contestants += [Contestant(side.name, side, calls) for side in self.peers]
        sides, ready = self._gate(contestants)
        self.time(ready, sides)
        nbytes = sum(call.unique_bytes for call in calls) / len(calls)
        row = self.row(job, nbytes, len(calls), sides, pool.pages)
        return self._judge(row, job, nbytes)

    def _gate(self, contestants: Sequence[Contestant]) -> tuple[dict[str, dict[str, Any]], dict[str, Prepared]]:
        """Capture and check each side; only those that are right are handed on to be timed."""
        expected: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        sides: dict[str, dict[str, Any]] = {}
        ready: dict[str, Prepared] = {}
        for c in contestants:
            if id(c.calls) not in expected:
                expected[id(c.calls)] = self._expected(c.calls)
            result = self._checked(c, expected[id(c.calls)])
            if isinstance(result, Checked):
                ready[c.label] = result
                sides[c.label] = {"status": "ok", "error": float(f"{result.error:.3g}")}
            else:
                sides[c.label] = result
        return sides, ready

    def time(self, ready: Mapping[str, Prepared], sides: dict[str, dict[str, Any]]) -> None:
        """Time the sides that are ready and write the times into `sides`.

        They share a timing, so an error in it is an error of each. Raises `DeviceLost` where it broke the context.
        """
        try:
            timings = self.bench.time(ready, self.options.replays)
        except (Exception, SystemExit) as error:
            self._raise_if_lost(f"timing {', '.join(ready)}", error)
            reason = f"while {', '.join(ready)} were timed: {type(error).__name__}: {first_line(error)}"
            sides.update({label: {"status": "error", "reason": reason} for label in ready})
            return
        for label, timing in timings.items():
            sides[label]["time_us"] = timing.as_dict()

    def replayed(
        self,
        label: str,
        side: Side,
        run: Callable[[Any], object],
        calls: Sequence[Any],
        poison: Callable[[], None],
    ) -> Prepared | dict[str, Any]:
        """Capture `run` on `calls` in the side's environment, poison the results and replay once; or the status and the
        reason where that cannot be done, or where it changed the inputs; these are put back."""
        before = [(tensor, tensor.clone()) for call in calls for tensor in call.inputs()]
        result = self._replayed(label, side, run, calls, poison)
        changed = [(tensor, saved) for tensor, saved in before if not torch.equal(_bytes(tensor), _bytes(saved))]
        for tensor, saved in changed:
            tensor.copy_(saved)
        if changed and not isinstance(result, dict):
            return {"status": "wrong", "reason": "it changed its inputs"}
        return result

    def _replayed(
        self,
        label: str,
        side: Side,
        run: Callable[[Any], object],
        calls: Sequence[Any],
        poison: Callable[[], None],
    ) -> Prepared | dict[str, Any]:
        try:
            with side.in_environment():
                prepared = self.bench.prepare(run, calls)
            poison()
            prepared.replay()
            self.bench.synchronize()
        except Refused as refusal:
            return {"status": "refused", "reason": str(refusal)}
        except (Exception, SystemExit) as error:
            self._raise_if_lost(label, error)
            # Of what it says it can do this package may refuse nothing, but for what a sweep's variable forces on it.
            may_refuse = bool(side.environment) or not is_ours(side.name)
            refuses = may_refuse and isinstance(error, (NotImplementedError, ValueError))
            status = "refused" if refuses else "error"
            return {"status": status, "reason": f"{type(error).__name__}: {first_line(error)}"}
        return prepared

    def _checked(self, c: Contestant, expected: list[tuple[int, Tensor, Tensor]]) -> Checked | dict[str, Any]:
        def poison() -> None:
            for call in c.calls:
                call.out.fill_(torch.nan)

        prepared = self.replayed(c.label, c.side, c.side.run, c.calls, poison)
        if isinstance(prepared, dict):
            return prepared
        worst = max((relative_error(c.calls[i].out[tokens], exact) for i, tokens, exact in expected), default=0.0)
        unwritten = sum(int(call.out.isnan().sum()) for call in c.calls)
        if unwritten:
            return {"status": "wrong", "reason": f"{unwritten} elements are NaN or unwritten"}
        if not worst <= WRONG_ABOVE:
            return {"status": "wrong", "reason": f"row error {worst:.3g} over {WRONG_ABOVE}"}
        return Checked(prepared.replay, prepared.calls, worst)

    def _raise_if_lost(self, label: str, error: BaseException) -> None:
        """A kernel's fault leaves the CUDA context unusable: tell it from an error that does not."""
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
            torch.zeros(1, device=self.device).item()
        except Exception as fatal:
            raise DeviceLost(f"{label} broke the CUDA context: {first_line(error)}") from fatal

    def _expected(self, calls: Sequence[Call]) -> list[tuple[int, Tensor, Tensor]]:
        """Exact outputs of a sample of tokens, first and last among them, in the first, middle and last call."""
        count = calls[0].shape.tokens
        expected = []
        for i in sorted({0, len(calls) // 2, len(calls) - 1}):
            drawn = torch.randperm(count, device=self.device, generator=self.generator)[:_SAMPLED_TOKENS]
            tokens = torch.cat((drawn.new_tensor([0, count - 1]), drawn))
            tokens = torch.tensor(sorted(set(tokens.tolist())), device=self.device)
            expected.append((i, tokens, exact_output(calls[i], tokens)))
        return expected

    def row(
        self, job: Job, nbytes: float, calls: int, sides: dict[str, dict[str, Any]], pool_pages: int
    ) -> dict[str, Any]:
        """A row of `job` as it was measured; nothing is judged yet."""
        s = job.shape
        times = {label: side["time_us"]["median"] for label, side in sides.items() if side["status"] == "ok"}
        mine = [side.name for side in self.mine if side.name in times]
        best = min(mine, key=lambda label: times[label]) if mine else None
        return {
            "preset": job.preset, "label": job.label, "kv": s.kv, "batch": s.batch, "heads": s.heads,
            "num_qo_heads": s.num_qo_heads, "num_kv_heads": s.num_kv_heads, "seqlen_q": s.seqlen_q,
            "context": s.context, "topk": s.topk, "overlap": s.overlap, "in_grid": job.in_grid, "calls": calls,
            "unique_bytes": round(nbytes), "page_uses": round(max(1.0, s.used_pages / pool_pages), 2),
            "floor_us": round(nbytes / self.ceiling * 1e6, 3), "best": best, "sides": sides, "speed_goal": None,
            "peer_goal": None, "work_goal": None, "tp": job.tp or None, "layers": job.layers or None, "step_us": None,
        }  # fmt: skip

    def _judge(self, row: dict[str, Any], job: Job, nbytes: float) -> dict[str, Any]:
        """Add the bars, where we have a time."""
        best = row["best"]
        if best is None:
            return row
        times = {label: side["time_us"]["median"] for label, side in row["sides"].items() if side["status"] == "ok"}
        if job.layers:
            row["step_us"] = round(times[best] * job.layers, 3)
        if job.preset == "grid" and self.bench.cuda:  # the goals are a GPU's
            row["speed_goal"] = goals.speed_goal(row["kv"], nbytes, times[best], self.goal_ceiling)
            row["peer_goal"] = goals.peer_goal(row["kv"], times, times[best], nbytes / self.goal_ceiling * 1e6)
        other = times.get(f"{best} {job.baseline}")
        if job.baseline and other:
            ratio = times[best] / other
            row["work_goal"] = {
                "baseline": job.baseline, "ratio": round(ratio, 4), "limit": job.limit, "met": ratio <= job.limit
            }  # fmt: skip
        return row

    # --- accuracy and host ---

    def _accuracy(self, job: Job) -> None:
        """Errors of all sides, as multiples of those of the exact result rounded once."""
        pool = self.pool(job.shape, self._jobs_of_run)
        for q_scale in (1.0, 6.0):  # flat and peaked attention
            calls = make_calls(job.shape, pool, 2, self.generator, q_scale=q_scale)
            tokens = torch.arange(min(job.shape.tokens, 64), device=self.device)
            exact = torch.cat([exact_output(call, tokens) for call in calls])
            for side in (*self.mine, *self.peers):
                row = {"kv": job.shape.kv, "batch": job.shape.batch, "heads": job.shape.heads, "q_scale": q_scale}
                row |= {"seqlen_q": job.shape.seqlen_q, "side": side.name}
                result = self._checked(Contestant(side.name, side, calls), [])
                if isinstance(result, dict):
                    row |= result
                else:
                    out = torch.cat([call.out[tokens] for call in calls])
                    row |= {"status": "ok", **{n: round(e, 4) for n, e in error_against_rounding(out, exact).items()}}
                self.accuracy.append(row)
                self.say(accuracy_line(row))

    def _eager(self, side: Side, call: Call) -> dict[str, Any]:
        result = self._checked(Contestant(side.name, side, [call]), [])
        if isinstance(result, dict):
            return result
        try:
            with side.in_environment():
                return host.eager_cost(side, call, *((3, 2) if self.options.smoke else (21, 40)))
        except (Exception, SystemExit) as error:
            self._raise_if_lost(side.name, error)
            return {"status": "error", "reason": f"{type(error).__name__}: {first_line(error)}"}

    def _host(self) -> None:
        kvs = self.options.axes.kvs
        for done, kv in enumerate(kvs):
            self.progress(done, len(kvs) + 2, f"host {kv}")
            if self._out_of_time(5):
                self.not_measured.append(f"host {kv}")
                continue
            heads = (4, 2) if self.options.smoke else (64, 4)
            shape = Shape(kv, 1, *heads, context=self.options.axes.context)
            call = make_calls(shape, self.pool(shape, []), 1, self.generator)[0]
            sides = {}
            for side in (*self.mine, *self.peers):
                sides[side.name] = self._eager(side, call)
            self.host.setdefault("eager", {})[kv] = sides
            self.say(f"host {kv}: " + ", ".join(f"{n} {host_words(s)}" for n, s in sides.items()))
        costs: dict[str, Callable[[], dict[str, Any]]] = {
            "import": lambda: host.import_cost(1 if self.options.smoke else 5),
            "first_call": lambda: host.first_call_cost(self.device, self.options.axes.kvs[0]),
        }
        for done, (name, cost) in enumerate(costs.items(), len(kvs)):
            self.progress(done, len(kvs) + 2, f"host {name.replace('_', ' ')}")
            if self._out_of_time(30):
                self.not_measured.append(f"host {name}")
                continue
            try:
                self.host[name] = cost()
            except Exception as error:
                self.host[name] = {"status": "error", "reason": first_line(error)}
            self.say(f"host {name}: {self.host[name]}")
        self.progress(len(kvs) + 2, len(kvs) + 2, "")
