"""``msa-ops explain``: the plan of a call of a given shape, and why; bytes, floor, and the time to expect."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.sizes import parse_size, row_bytes, size, split_heads
from ..contract import BLOCK_SIZE, MAX_TOPK, KVFormat
from ..engines.cuda.plan import (
    MAX_GRID,
    Combine,
    DeviceFacts,
    LaunchPlan,
    Shape,
    blocks_per_multiprocessor,
    plan_for,
    scratch_elements,
    typical_room,
)

if TYPE_CHECKING:
    from .doctor import Page

app = typer.Typer(add_completion=False)
SCHEMA_VERSION = 1
_KV_FORMATS = tuple(kv.value for kv in KVFormat)


@dataclass(frozen=True, slots=True)
class CallShape:
    """The shape of a call. `context`: keys of each request; None: so many that every selected block exists and is full."""

    batch_size: int
    num_qo_heads: int
    num_kv_heads: int
    kv: str
    seqlen_q: int
    topk: int
    context: int | None
    force_fused: bool | None

    @property
    def blocks_of_a_request(self) -> int | None:
        return None if self.context is None else -(-self.context // BLOCK_SIZE)

    @property
    def blocks_read(self) -> tuple[int, int]:
        """Fewest and most distinct blocks that a request reads for one KV head: its tokens may select alike or not."""
        there = self.blocks_of_a_request
        least, most = self.topk, self.seqlen_q * self.topk
        return (least, most) if there is None else (min(least, there), min(most, there))

    def kv_bytes(self, blocks: int) -> int:
        """Bytes of K, V and their block scales for so many blocks of each request and KV head."""
        return self.batch_size * self.num_kv_heads * blocks * BLOCK_SIZE * 2 * row_bytes(KVFormat(self.kv))


@dataclass(frozen=True, slots=True)
class Target:
    """Where the call would run. `planned_from`: whether the driver answered how many clusters fit, or an estimate did."""

    engine: str
    name: str
    capability: str | None
    multiprocessors: int | None
    planned_from: str


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The launch. `dynamic_shared_bytes` is exact and `static_shared_bytes` an upper bound, both of one block."""

    route: str
    why: str
    items: int
    splits: int
    blocks: int
    merge_kernel: bool
    variant: str | None
    threads: int
    dynamic_shared_bytes: int
    static_shared_bytes: int
    blocks_per_multiprocessor: int
    block_slots: int
    scratch_bytes: int


@dataclass(frozen=True, slots=True)
class Expectation:
    """Time from the committed table. `us` is None where the table has nothing to say; `basis` says why or from which rows.

    `nearest`: the row of the table that is nearest, with what differs.
    """

    us: float | None
    basis: str
    nearest: dict[str, Any] | None
    differs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShapeReport:
    """All of it. `kv_bytes` is the least and the most; `floor_us` goes with them, None without a known bandwidth."""

    shape: CallShape
    target: Target
    plan: PlanReport
    kv_bytes: tuple[int, int]
    bandwidth_tb_s: float | None
    bandwidth_from: str
    floor_us: tuple[float, float] | None
    expected: Expectation

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}


@app.command("explain")
def explain_command(
    batch: Annotated[int, typer.Option(help="Requests.")] = 1,
    heads: Annotated[str, typer.Option(help="Query heads / KV heads.", metavar="HQ/HKV")] = "64/4",
    kv: Annotated[str, typer.Option(help="KV dtype: bf16, fp16, fp8 or nvfp4.")] = "bf16",
    seqlen_q: Annotated[int, typer.Option(help="Query tokens of each request.")] = 1,
    topk: Annotated[int, typer.Option(help="Blocks that each token selects.")] = 16,
    context: Annotated[
        str | None, typer.Option(help="Keys of each request, as 32768 or 32K. [as many as are selected]", metavar="N")
    ] = None,
    force_fused: Annotated[
        bool | None, typer.Option("--force-fused/--split", help="The call's force_fused=True or False. [None]")
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="Plan for a compute capability, as 9.0 or sm_90, without such a GPU.")
    ] = None,
    multiprocessors: Annotated[
        int | None, typer.Option(help="Multiprocessors of the GPU that --arch stands for. [132]")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Plan for a device of this machine: cuda:0 or cpu. [the GPU, else --arch 9.0]")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="TB/s that the device reads at, for the floor. [on an H200 as measured]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Plain text without colours, to be pasted.")] = False,
) -> None:
    """Say how a call of this shape would be served and why, what it reads, and how long that takes at the least.

    Nothing is run. With --device cuda:N the driver is asked what fits, and the kernel is compiled if no cache holds it.
    """
    try:
        keys = None if context is None else parse_size("--context", context)
        shape = CallShape(batch, *split_heads(heads), kv, seqlen_q, topk, keys, force_fused)
        check_shape(shape, bandwidth)
        report = explain_shape(shape, arch, multiprocessors, device, bandwidth)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except RuntimeError as error:
        raise SystemExit(f"msa-ops explain: {error}") from None
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
        return
    from .doctor import make_page

    render(report, make_page("explain", plain))


# --- arguments ---------------------------------------------------------------------------------------------------------


def check_shape(shape: CallShape, bandwidth: float | None) -> None:
    """Raise `ValueError` for what no call can have."""
    if shape.kv not in _KV_FORMATS:
        raise ValueError(f"--kv must be one of {', '.join(_KV_FORMATS)}, got {shape.kv!r}")
    if not 1 <= shape.topk <= MAX_TOPK:
        raise ValueError(f"--topk must lie in 1 to {MAX_TOPK}, got {shape.topk}")
    for name, value in (("--batch", shape.batch_size), ("--seqlen-q", shape.seqlen_q)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if bandwidth is not None and not (math.isfinite(bandwidth) and bandwidth > 0):
        raise ValueError(f"--bandwidth must be TB/s above 0, got {bandwidth}")


# --- the report --------------------------------------------------------------------------------------------------------


def explain_shape(
    shape: CallShape,
    arch: str | None = None,
    multiprocessors: int | None = None,
    device: str | None = None,
    bandwidth: float | None = None,
) -> ShapeReport:
    """The report for a compute capability or a device; with neither for the GPU at hand, and without one for 9.0.

    Raises `ValueError` for arguments that do not go together, `RuntimeError` where a device is missing.
    """
    import torch

    if arch is not None and device is not None:
        raise ValueError("--arch plans for a GPU that is not here and --device for one that is: pass one of the two")
    if arch is None and device is None:
        arch, device = (None, "cuda") if torch.cuda.is_available() else ("9.0", None)
    if arch is None and multiprocessors is not None:
        raise ValueError("--multiprocessors goes with --arch: a device says itself how many it has")
    if arch is not None:
        target, plan = _plan_for_architecture(shape, arch, 132 if multiprocessors is None else multiprocessors)
    else:
        assert device is not None
        target, plan = _plan_for_device(shape, device)
    least, most = (shape.kv_bytes(blocks) for blocks in shape.blocks_read)
    rate, source = _bandwidth(target, bandwidth)
    floor = None if rate is None else (round(least / rate / 1e6, 2), round(most / rate / 1e6, 2))
    return ShapeReport(shape, target, plan, (least, most), rate, source, floor, expect(shape, target))


def _plan_for_architecture(shape: CallShape, arch: str, multiprocessors: int) -> tuple[Target, PlanReport]:
    from .compile import parse_architectures

    capabilities = parse_architectures([arch])
    if len(capabilities) != 1:
        raise ValueError(f"--arch must be one architecture, got {arch!r}")
    if multiprocessors < 1:
        raise ValueError(f"--multiprocessors must be at least 1, got {multiprocessors}")
    facts = DeviceFacts.of_capability(capabilities[0], multiprocessors)
    wanted = _cuda_shape(shape)
    dotted = f"{facts.capability[0]}.{facts.capability[1]}"
    target = Target("cuda", f"a GPU of compute capability {dotted}", dotted, multiprocessors, "estimate")
    return target, _plan_report(wanted, facts, plan_for(wanted, facts, partial(typical_room, facts)))


def _plan_for_device(shape: CallShape, device: str) -> tuple[Target, PlanReport]:
    import torch

    from ..runtime import _device

    where = _device(device)
    if where.type == "cpu":
        return Target("cpu", "the CPU", None, None, "shape"), _cpu_plan(shape)
    from ..engines.cuda import launch

    wanted = _cuda_shape(shape)
    with launch.on_device(where.index):
        facts = launch.device_facts(where.index)
        plan = plan_for(wanted, facts, partial(launch.cluster_room, device=where.index))
    dotted = f"{facts.capability[0]}.{facts.capability[1]}"
    target = Target("cuda", torch.cuda.get_device_name(where), dotted, facts.multiprocessors, "driver")
    return target, _plan_report(wanted, facts, plan)


def _cuda_shape(shape: CallShape) -> Shape:
    from ..engines.cuda import launch

    return Shape(
        KVFormat(shape.kv),
        shape.batch_size * shape.seqlen_q,
        shape.num_kv_heads,
        shape.num_qo_heads // shape.num_kv_heads,
        shape.topk,
        shape.force_fused,
        launch._forced_combine(),
        launch._forced_plan(),
    )


def _plan_report(shape: Shape, facts: DeviceFacts, plan: LaunchPlan) -> PlanReport:
    if shape.items > MAX_GRID:
        raise ValueError(
            f"--batch: {shape.items} (token, KV head) items are more than one launch can serve ({MAX_GRID})"
        )
    scratch = plan.combine is Combine.SCRATCH
    at_once = blocks_per_multiprocessor(plan.variant, facts)
    return PlanReport(
        route=plan.combine.name.lower(),
        why=plan.why,
        items=shape.items,
        splits=plan.splits,
        blocks=plan.blocks,
        merge_kernel=scratch,
        variant=plan.variant.name,
        threads=plan.variant.threads,
        dynamic_shared_bytes=plan.variant.dynamic_bytes(plan.combine, plan.splits),
        static_shared_bytes=plan.variant.static_shared_bytes,
        blocks_per_multiprocessor=at_once,
        block_slots=at_once * facts.multiprocessors,
        scratch_bytes=4 * sum(scratch_elements(shape, plan.splits)) if scratch else 0,
    )


def _cpu_plan(shape: CallShape) -> PlanReport:
    from ..engines.cpu.plan import SEGMENT_BLOCKS

    return PlanReport(
        route="segments",
        why=f"topk = {shape.topk} in runs of {SEGMENT_BLOCKS} blocks, merged by their log-sum-exp",
        items=shape.batch_size * shape.seqlen_q * shape.num_kv_heads,
        splits=-(-shape.topk // SEGMENT_BLOCKS),
        blocks=0,
        merge_kernel=False,
        variant=None,
        threads=0,
        dynamic_shared_bytes=0,
        static_shared_bytes=0,
        blocks_per_multiprocessor=0,
        block_slots=0,
        scratch_bytes=0,
    )


# --- the committed table -----------------------------------------------------------------------------------------------


def committed_table() -> dict[str, Any]:
    """The measured times that come with the package; ``make figures`` writes them from benchmarks/results/h200.json."""
    text = (resources.files("msa_ops.cli") / "data" / "h200.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def _is_tables_card(target: Target) -> bool:
    """Whether the table's card is meant, whole: by its name, or for --arch by its capability, and by its multiprocessors."""
    if target.planned_from == "driver" and target.name != committed_table()["card"]:
        return False
    return target.capability == "9.0" and target.multiprocessors == 132


def _bandwidth(target: Target, given: float | None) -> tuple[float | None, str]:
    """TB/s, and where the number is from."""
    if given is not None:
        return given, "given"
    table = committed_table()
    if _is_tables_card(target):
        return table["ceiling_tb_s"], f"measured on an {table['card']}"
    return None, "unknown for this device: pass --bandwidth"


_FORCING = ("MSA_OPS_COMBINE", "MSA_OPS_PLAN")
_KEYS = ("kv", "num_qo_heads", "num_kv_heads", "topk", "seqlen_q", "context", "batch_size")


def expect(shape: CallShape, target: Target) -> Expectation:
    """The time to expect by the committed table: a row of it, or between two rows that differ in their batch alone."""
    table = committed_table()
    rows = table["rows"]
    # Without --context any will do that holds what is selected: then it is nothing that could differ.
    wanted = {key: value for key in _KEYS if (value := getattr(shape, key)) is not None}
    nearest = min(rows, key=lambda row: _distance(row, wanted))
    differs = tuple(
        f"{key} {_words(key, nearest[key])} instead of {_words(key, value)}"
        for key, value in wanted.items()
        if nearest[key] != value
    )
    if not _is_tables_card(target):
        return Expectation(None, f"the table was measured on an {table['card']} alone", nearest, differs)
    if shape.blocks_read[0] < shape.topk:
        return Expectation(None, f"context {shape.context} has fewer blocks than are selected", nearest, differs)
    if forced := _forced_by(shape):
        return Expectation(
            None, f"the table holds plans that were not forced, and here {forced} forces one", nearest, differs
        )
    contexts = sorted({row["context"] for row in rows})
    keys = f"{' and '.join(map(size, contexts))} keys a request"
    if shape.context is not None and shape.context not in contexts:
        return Expectation(None, f"the table was measured at {keys} alone", nearest, differs)
    if not differs:
        keys = f"{size(nearest['context'])} keys a request"
        if shape.seqlen_q > 1:
            keys += ", whose tokens select apart"
        basis = f"measured on an {table['card']} at {keys}, commit {table['commit']}"
        return Expectation(nearest["time_us"], basis, nearest, ())
    same = [key for key in wanted if key != "batch_size"]
    alike = sorted((row for row in rows if all(row[key] == wanted[key] for key in same)), key=lambda r: r["batch_size"])
    below = [row for row in alike if row["batch_size"] < shape.batch_size]
    above = [row for row in alike if row["batch_size"] > shape.batch_size]
    if not below or not above:
        return Expectation(None, "no rows of such calls on both sides of this batch", nearest, differs)
    low, high = below[-1], above[0]
    part = (shape.batch_size - low["batch_size"]) / (high["batch_size"] - low["batch_size"])
    us = round(low["time_us"] + part * (high["time_us"] - low["time_us"]), 2)
    basis = f"not measured: on the line between batch {low['batch_size']} and {high['batch_size']}"
    return Expectation(us, basis, nearest, differs)


def _forced_by(shape: CallShape) -> str:
    """What asks for another plan than the one that the planner chooses by itself; empty where nothing does.

    The planner's reason does not tell: a forced cluster reads like one that was chosen.
    """
    hint = [] if shape.force_fused is None else [f"force_fused={shape.force_fused}"]
    variables = [f"{name}={value}" for name in _FORCING if (value := os.environ.get(name))]
    return " with ".join([*hint, *variables])


def _distance(row: dict[str, Any], wanted: dict[str, Any]) -> tuple[bool, float]:
    """How far a row is from the call: another KV dtype counts most, then ratios of the sizes."""
    sizes = sum(abs(math.log(row[key] / value)) for key, value in wanted.items() if key != "kv")
    return row["kv"] != wanted["kv"], sizes


def _words(key: str, value: Any) -> str:
    return size(value) if key == "context" else str(value)


# --- printing ----------------------------------------------------------------------------------------------------------


def render(report: ShapeReport, page: Page) -> None:
    """Print the report."""
    s, t = report.shape, report.target
    page.line(
        f"{s.kv} KV, {s.num_qo_heads} query heads, {s.num_kv_heads} KV heads, batch {s.batch_size}, "
        f"seqlen_q {s.seqlen_q}, top-k {s.topk}{'' if s.context is None else f', context {size(s.context)}'}",
        "bold",
    )
    where = t.name if t.multiprocessors is None else f"{t.name}, {t.multiprocessors} multiprocessors"
    if t.planned_from == "estimate":
        where += " (not asked: how many clusters fit is an estimate)"
    page.pairs([("on", where), *_plan_rows(report), *_time_rows(report)])


def _plan_rows(report: ShapeReport) -> list[tuple[str, str]]:
    plan = report.plan
    rows = [("route", plan.route), ("why", plan.why)]
    if plan.variant is None:
        return [*rows, ("splits", f"{plan.splits} a (token, KV head)")]
    share = plan.blocks / plan.block_slots
    shared = "each in one block" if plan.splits == 1 else f"each shared by {plan.splits} blocks"
    merge = ", then a merge kernel" if plan.merge_kernel else ""
    rows += [
        ("blocks", f"{plan.blocks} for {plan.items} items, {shared}{merge}"),
        ("kernel", f"{plan.variant}, {plan.threads} threads a block"),
        (
            "shared memory",
            f"{plan.dynamic_shared_bytes / 1024:g} KiB a block, and up to {plan.static_shared_bytes / 1024:g} KiB static",
        ),
        (
            "occupancy",
            f"{plan.blocks_per_multiprocessor} blocks a multiprocessor, {plan.block_slots} slots, {share:.0%} of them used",
        ),
    ]
    return [*rows, ("scratch", f"{plan.scratch_bytes:,} bytes in float32")] if plan.scratch_bytes else rows


def _time_rows(report: ShapeReport) -> list[tuple[str, str]]:
    least, most = report.kv_bytes
    among = "" if least == most else f" to {most:,}, as the tokens of a request select alike or apart"
    rows = [("unique KV bytes", f"{least:,}{among}")]
    if report.floor_us is None:
        rows.append(("floor", report.bandwidth_from))
    else:
        low, high = report.floor_us
        times = f"{low:.2f} us" if low == high else f"{low:.2f} to {high:.2f} us"
        rows.append(("floor", f"{times} at {report.bandwidth_tb_s:g} TB/s ({report.bandwidth_from})"))
    expected, row = report.expected, report.expected.nearest
    time = "none" if expected.us is None else f"{expected.us:.2f} us"
    rows.append(("expected time", f"{time} ({expected.basis})"))
    if row is not None and expected.differs:
        rows.append(("nearest row", f"{row['time_us']:.2f} us, with {', '.join(expected.differs)}"))
    return rows
