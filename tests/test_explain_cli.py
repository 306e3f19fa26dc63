"""`msa-ops explain`: plans, bytes and times of shapes, without a GPU."""

from __future__ import annotations

import functools
import json
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.testing

import msa_ops
from cases import Spec, build
from msa_ops.cli.explain import CallShape, Target, expect, explain_shape
from msa_ops.cli.main import build_app
from msa_ops.contract import KVFormat
from msa_ops.engines.cuda import plan

ROOT = Path(__file__).parents[1]
TABLE = json.loads((resources.files("msa_ops.cli") / "data" / "h200.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _no_forced_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MSA_OPS_COMBINE", "MSA_OPS_PLAN"):
        monkeypatch.delenv(name, raising=False)


def shape(batch: int = 16, kv: str = "fp8", **changes: Any) -> CallShape:
    fields = {"num_qo_heads": 64, "num_kv_heads": 4, "seqlen_q": 1, "topk": 16, "context": None, "force_fused": None}
    return CallShape(batch_size=batch, kv=kv, **{**fields, **changes})


def rows_of(kv: str) -> list[dict[str, Any]]:
    """The table's rows of 64/4 heads and one token a request."""
    return [r for r in TABLE["rows"] if (r["kv"], r["num_kv_heads"], r["seqlen_q"]) == (kv, 4, 1)]


def run(*arguments: str) -> Any:
    return typer.testing.CliRunner().invoke(build_app(), ["explain", *arguments])


# --- the plan ---


@pytest.mark.parametrize("capability", list(plan.SHARED_PER_BLOCK))
def test_the_plan_is_the_engines(capability: tuple[int, int]) -> None:
    facts = plan.DeviceFacts.of_capability(capability, 100)
    for kv in KVFormat:
        for batch in (1, 7, 22, 64):
            want = plan.plan_for(
                plan.Shape(kv, 2 * batch, 4, 16, 16), facts, functools.partial(plan.typical_room, facts)
            )
            arch = f"{capability[0]}.{capability[1]}"
            got = explain_shape(shape(batch, kv.value, seqlen_q=2), arch=arch, multiprocessors=100).plan
            assert (got.route, got.splits, got.blocks, got.why, got.variant) == (
                want.combine.name.lower(), want.splits, want.blocks, want.why, want.variant.name,
            )  # fmt: skip
            assert got.dynamic_shared_bytes == want.variant.dynamic_bytes(want.combine, want.splits)
            assert got.blocks_per_multiprocessor == plan.blocks_per_multiprocessor(want.variant, facts)
            assert got.block_slots == 100 * got.blocks_per_multiprocessor


def test_force_fused_and_the_environment_are_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explain_shape(shape(1, force_fused=True), arch="9.0").plan.route == "none"
    assert explain_shape(shape(64, force_fused=False), arch="9.0").plan.splits == 16
    monkeypatch.setenv("MSA_OPS_COMBINE", "scratch")
    forced = explain_shape(shape(64), arch="9.0").plan
    values, state = plan.scratch_elements(plan.Shape(KVFormat.FP8, 64, 4, 16, 16), forced.splits)
    assert forced.route == "scratch" and forced.merge_kernel and forced.scratch_bytes == 4 * (values + state)


def test_the_cpu_has_a_plan_for_every_kv_dtype() -> None:
    for kv in KVFormat:
        report = explain_shape(shape(kv=kv.value, topk=20), device="cpu")
        assert (report.target.engine, report.plan.route, report.plan.splits) == ("cpu", "segments", 2)
        assert report.floor_us is None and report.expected.us is None
    assert explain_shape(shape(), device="cpu", bandwidth=0.1).floor_us == (335.54, 335.54)


@pytest.mark.gpu
def test_on_a_gpu_it_says_what_python_says() -> None:
    q = torch.empty(16, 64, 128, dtype=torch.bfloat16, device="cuda")
    cache = torch.empty(1, 4, 128, 128, dtype=torch.float8_e4m3fn, device="cuda").expand(4096, 4, 128, 128)
    ids = torch.zeros(4, 16, 16, dtype=torch.int32, device="cuda")
    table = torch.zeros(16, 256, dtype=torch.int32, device="cuda")
    lengths = torch.full((16,), 32768, dtype=torch.int32, device="cuda")
    want = msa_ops.explain(q, cache, cache, ids, page_table=table, seqused_k=lengths)
    got = explain_shape(shape(), device="cuda")
    assert (got.plan.route, got.plan.splits, got.plan.blocks, got.plan.variant) == (
        want.route, want.splits, want.blocks, want.variant,
    )  # fmt: skip
    assert got.kv_bytes[1] == want.kv_bytes


# --- bytes and floor ---


@pytest.mark.parametrize("kv", ["bf16", "fp16", "fp8", "nvfp4"])
def test_bytes_are_those_of_the_python_call(kv: str) -> None:
    """For a table as wide as each context, and a cache that is large enough."""
    spec = Spec(
        kv_dtype=kv, q_dtype="fp16" if kv == "fp16" else "bf16", lengths=(1000, 1000), kv_heads=2, group=3, topk=5,
        seqlen_q=1,
    )  # fmt: skip
    case = build(spec)
    want = msa_ops.explain(*case.args, **case.kwargs).kv_bytes
    got = explain_shape(shape(2, kv, num_qo_heads=6, num_kv_heads=2, topk=5, context=1000), device="cpu").kv_bytes
    assert got == (want, want)


def test_bytes_are_bounded_by_the_context_and_by_shared_selections() -> None:
    block = 4 * 128 * 2 * 128  # KV heads, rows, K and V, bytes of an fp8 row
    assert explain_shape(shape(2, seqlen_q=3), device="cpu").kv_bytes == (2 * 16 * block, 2 * 48 * block)
    assert explain_shape(shape(2, seqlen_q=3, context=3000), device="cpu").kv_bytes == (2 * 16 * block, 2 * 24 * block)
    assert explain_shape(shape(2, context=129), device="cpu").kv_bytes == (2 * 2 * block,) * 2


def test_the_floor_needs_a_bandwidth() -> None:
    known = explain_shape(shape(), arch="9.0")
    rate = TABLE["ceiling_tb_s"]
    assert known.bandwidth_tb_s == rate and known.floor_us == (round(33.554432 / rate, 2),) * 2
    for other in ({"arch": "8.0"}, {"arch": "9.0", "multiprocessors": 78}):
        assert explain_shape(shape(), **other).floor_us is None
    assert explain_shape(shape(), arch="8.0", bandwidth=2.0).floor_us == (16.78, 16.78)


# --- the committed table ---


def test_the_table_is_of_the_committed_run() -> None:
    """``make figures`` writes it; tests/test_docs.py compares all of it."""
    run = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text(encoding="utf-8"))
    assert (TABLE["card"], TABLE["commit"], TABLE["driver"]) == (run["card"], run["commit"], run["driver"])
    grid = [row for row in run["rows"] if row["preset"] == "grid" and row["kv"] in ("fp8", "bf16")]
    assert len(grid) == len([row for row in TABLE["rows"] if row["kv"] in ("fp8", "bf16")]) > 0


@pytest.mark.parametrize(
    "row", TABLE["rows"], ids=lambda r: f"{r['kv']}-{r['num_kv_heads']}-{r['seqlen_q']}-{r['batch_size']}"
)
def test_every_row_is_expected_as_measured(row: dict[str, Any]) -> None:
    names = ("num_qo_heads", "num_kv_heads", "seqlen_q", "topk", "context")
    report = explain_shape(shape(row["batch_size"], row["kv"], **{name: row[name] for name in names}), arch="9.0")
    assert report.expected.us == row["time_us"] and TABLE["commit"] in report.expected.basis
    assert report.expected.differs == ()
    least, most = report.kv_bytes
    assert least <= row["unique_bytes"] <= most and (least == most) == (row["seqlen_q"] == 1)
    assert report.floor_us is not None
    off = 0.01 + row["floor_us"] * 0.0005 / TABLE["ceiling_tb_s"]  # the table's ceiling has three decimals
    assert report.floor_us[0] - off <= row["floor_us"] <= report.floor_us[1] + off


def test_between_two_rows_the_time_is_on_their_line() -> None:
    expected = explain_shape(shape(48), arch="9.0").expected
    times = {row["batch_size"]: row["time_us"] for row in rows_of("fp8")}
    assert expected.us == pytest.approx((times[32] + times[64]) / 2, abs=0.01)
    assert "not measured: on the line between batch 32 and 64" in expected.basis
    assert expected.nearest is not None and expected.nearest["batch_size"] == 64
    assert expected.differs == ("batch_size 64 instead of 48",)


@pytest.mark.parametrize(
    "asked, where, why",
    [
        (shape(100000), {"arch": "9.0"}, "no rows of such calls"),
        (shape(16, "fp16"), {"arch": "9.0"}, "no rows of such calls"),
        (shape(16, topk=8), {"arch": "9.0"}, "no rows of such calls"),
        (shape(16, context=1024), {"arch": "9.0"}, "fewer blocks than are selected"),
        (shape(16, context=1 << 20), {"arch": "9.0"}, "measured at 32K keys a request alone"),
        (shape(48, context=8192), {"arch": "9.0"}, "measured at 32K keys a request alone"),
        (shape(16, force_fused=True), {"arch": "9.0"}, "not forced"),
        (shape(16, force_fused=False), {"arch": "9.0"}, "not forced, and here force_fused=False forces one"),
        (shape(16), {"arch": "10.0"}, "on an NVIDIA H200 alone"),
        (shape(16), {"device": "cpu"}, "on an NVIDIA H200 alone"),
    ],
)
def test_where_the_table_says_nothing_the_nearest_row_is_named(
    asked: CallShape, where: dict[str, str], why: str
) -> None:
    expected = explain_shape(asked, **where).expected
    assert expected.us is None and why in expected.basis
    assert expected.nearest in TABLE["rows"]


def test_another_context_than_the_tables_is_among_what_differs() -> None:
    """A time at 32K is none at 1M, though the same bytes are read."""
    done = run("--batch", "16", "--kv", "fp8", "--context", "1M", "--arch", "9.0", "--json")
    expected = json.loads(done.stdout)["expected"]
    assert expected["us"] is None and expected["differs"] == ["context 32K instead of 1M"]
    assert expected["nearest"]["batch_size"] == 16 and expected["nearest"]["context"] == 32768
    done = run("--batch", "16", "--kv", "fp8", "--context", "1M", "--arch", "9.0", "--plain")
    text = " ".join(done.stdout.split())
    assert "expected time none (the table was measured at 32K keys a request alone)" in text
    assert "with context 32K instead of 1M" in text


@pytest.mark.parametrize(
    "name, value",
    [
        ("MSA_OPS_COMBINE", "cluster"), ("MSA_OPS_COMBINE", "scratch"), ("MSA_OPS_COMBINE", "none"),
        ("MSA_OPS_PLAN", "1,4,128,3,2,1,0"),
    ],
)  # fmt: skip
def test_a_time_under_a_forced_plan_was_not_measured(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert explain_shape(shape(16), arch="9.0").expected.us is not None
    monkeypatch.setenv(name, value)
    for batch in (16, 48):  # a row, and between two
        expected = explain_shape(shape(batch), arch="9.0").expected
        assert expected.us is None and f"not forced, and here {name}={value} forces one" in expected.basis
    both = explain_shape(shape(16, force_fused=True), arch="9.0").expected
    assert f"here force_fused=True with {name}={value} forces one" in both.basis
    done = run("--batch", "16", "--kv", "fp8", "--arch", "9.0", "--plain")
    assert "expected time      none (the table holds plans" in done.stdout


def test_a_part_of_the_tables_card_is_another_card() -> None:
    """Some ways of sharing a GPU keep its name and give a process fewer multiprocessors."""
    for multiprocessors, measured in ((132, True), (66, False)):
        target = Target("cuda", TABLE["card"], "9.0", multiprocessors, "driver")
        assert (expect(shape(16), target).us is not None) is measured
    assert expect(shape(16), Target("cuda", "NVIDIA H100 80GB HBM3", "9.0", 132, "driver")).us is None


def test_several_tokens_were_measured_selecting_apart() -> None:
    assert "whose tokens select apart" in explain_shape(shape(16, seqlen_q=4), arch="9.0").expected.basis
    assert "tokens" not in explain_shape(shape(16), arch="9.0").expected.basis


# --- the command ---


@pytest.mark.parametrize("arguments, code", [(("--json",), 0), (("--plain",), 0), ((), 1)])
def test_without_rich_it_is_plain_or_says_what_is_missing(
    arguments: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    done = run("--arch", "9.0", *arguments)
    assert done.exit_code == code and isinstance(done.exception, SystemExit | None), done.output
    if arguments == ("--json",):
        assert json.loads(done.stdout)["plan"]["route"] == "cluster"
    elif arguments:
        assert "  route              cluster\n" in done.stdout
    else:
        assert "msa-ops explain needs the package rich" in done.output


def test_the_text_holds_what_is_asked() -> None:
    done = run("--batch", "16", "--heads", "64/4", "--kv", "fp8", "--seqlen-q", "1", "--topk", "16", "--arch", "9.0")
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    (row,) = [row for row in rows_of("fp8") if row["batch_size"] == 16]
    rate = TABLE["ceiling_tb_s"]
    for part in (
        "route cluster", "64 items on 132 multiprocessors", "128 for 64 items, each shared by 2 blocks",
        "fp8-g2w4t128s5b1, 288 threads", "192 KiB a block", "1 blocks a multiprocessor, 132 slots, 97%", "33,554,432",
        f"{33.554432 / rate:.2f} us at {rate:g} TB/s (measured on an NVIDIA H200)",
        f"{row['time_us']:.2f} us (measured on an NVIDIA H200 at 32K keys a request, commit {TABLE['commit']})",
    ):  # fmt: skip
        assert part in text, part


def test_the_json_keeps_its_schema() -> None:
    done = run("--kv", "bf16", "--batch", "24", "--context", "32K", "--arch", "sm_90", "--json")
    found = json.loads(done.stdout)
    assert found["schema_version"] == 1
    assert set(found) == {
        "schema_version", "shape", "target", "plan", "kv_bytes", "bandwidth_tb_s", "bandwidth_from", "floor_us", "expected",
    }  # fmt: skip
    assert found["shape"]["context"] == 32768 and found["target"]["planned_from"] == "estimate"
    assert set(found["plan"]) == {
        "route", "why", "items", "splits", "blocks", "merge_kernel", "variant", "threads", "dynamic_shared_bytes",
        "static_shared_bytes", "blocks_per_multiprocessor", "block_slots", "scratch_bytes",
    }  # fmt: skip
    assert set(found["expected"]) == {"us", "basis", "nearest", "differs"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--heads", "64"), "--heads takes QUERY/KV"),
        (("--heads", "6/4"), "QUERY a multiple of KV"),
        (("--heads", "0/4"), "--heads takes QUERY/KV"),
        (("--kv", "int8"), "--kv must be one of bf16, fp16, fp8, nvfp4"),
        (("--topk", "0"), "--topk must lie in 1 to 4096"),
        (("--topk", "5000"), "--topk must lie in 1 to 4096"),
        (("--batch", "0"), "--batch must be at least 1"),
        (("--seqlen-q", "0"), "--seqlen-q must be at least 1"),
        (("--context", "long"), "--context takes positive numbers such as 8192, 8K or 1M"),
        (("--context", "4096M"), "below 2^31"),
        (("--context", "8K,16K"), "--context takes one length"),
        (("--bandwidth", "0"), "--bandwidth must be TB/s above 0"),
        (("--bandwidth", "nan"), "--bandwidth must be TB/s above 0"),
        (("--arch", "7.5"), "--arch must be of"),
        (("--arch", "8.0,9.0"), "one architecture"),
        (("--arch", "9.0", "--device", "cpu"), "pass one of the two"),
        (("--device", "cpu", "--multiprocessors", "9"), "--multiprocessors goes with --arch"),
        (("--arch", "9.0", "--multiprocessors", "0"), "--multiprocessors must be at least 1"),
        (("--device", "tpu"), "device must name a cpu or cuda device"),
        (("--arch", "9.0", "--batch", "1000000000"), "more than one launch can serve"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where torch sees no GPU")
def test_without_a_gpu_the_default_is_an_architecture() -> None:
    assert explain_shape(shape()).target.capability == "9.0"
    assert run("--device", "cuda:0").exit_code == 1


def test_the_documented_output_is_the_commands() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    found = re.search(r"```sh\nmsa-ops explain ([^\n]*)\n```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert found is not None
    done = run(*found[1].split())
    assert [line.rstrip() for line in done.stdout.splitlines()] == found[2].splitlines()
