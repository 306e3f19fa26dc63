"""The committed results and what benchmarks/figures.py makes of them: every figure is traced to its run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from msa_ops.bench import records, report
from msa_ops.bench.options import arguments_of, parse
from msa_ops.bench.presets import jobs_of
from msa_ops.bench.step_sides import PARTS
from msa_ops.engines.cuda.plan import SHARED_PER_BLOCK

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RUNS = ("h200.json", "h200-step.json")


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


@pytest.fixture
def copied(figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with all results, which the script reads in the place of the committed one."""
    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    return tmp_path


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


# --- the runs themselves ---


@pytest.mark.parametrize("name", RUNS)
def test_a_floor_is_bytes_over_that_files_ceiling(name: str) -> None:
    run = records.load(RESULTS / name)
    assert run["rows"]
    for row in run["rows"]:
        floor = row["unique_bytes"] / run["read_ceiling_bytes_per_s"] * 1e6
        assert row["floor_us"] == pytest.approx(floor, abs=1e-3), records.row_name(row)


@pytest.mark.parametrize("name", RUNS)
def test_what_a_run_was_asked_for_is_measured_or_named(name: str) -> None:
    run = load(name)
    options = parse(arguments_of(run["options"]))
    assert options.commit == run["commit"]
    jobs = [
        job for preset in options.presets if preset != "host" for job in jobs_of(preset, options.axes, options.seed)
    ]
    measured = [job for job in jobs if f"{job.preset} {report.describe(job)}" not in run["not_measured"]]
    assert len(jobs) == len(measured) + sum(not text.startswith("host ") for text in run["not_measured"])
    wanted = [
        (job.preset, part, job.shape.kv, job.shape.heads, job.shape.batch, job.shape.seqlen_q, job.shape.context)
        for job in measured
        if job.preset != "accuracy"
        for part in (PARTS if job.preset == "step" else (job.label,))
    ]
    names = ("preset", "label", "kv", "heads", "batch", "seqlen_q", "context")
    assert [tuple(row[n] for n in names) for row in run["rows"]] == wanted
    sides = 1 + len(options.peers)
    assert len(run["accuracy"]) == 2 * sides * sum(job.preset == "accuracy" for job in measured)  # two kinds of queries
    if "host" in options.presets:
        assert list(run["host"]["eager"]) == list(options.axes.kvs)


# --- what is said of them ---


def test_both_runs_are_shown_each_with_its_own_facts(figures: ModuleType) -> None:
    text = figures.machine()
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert len(figures.runs()) == len(RUNS) and "one run" not in " ".join(page.split())
    for name in RUNS:
        run = load(name)
        where = figures._from(name)
        for part in (
            name,
            run["commit"],
            f"{run['time'][11:16]} UTC",
            f"{run['read_ceiling_bytes_per_s'] / 1e12:.3f} TB/s",
        ):
            assert part in text and part in where, part
    assert text.count("the version of vllm was given by hand") == 2
    assert figures._from(RUNS[0]) != figures._from(RUNS[1])


def test_every_block_of_a_run_says_which(figures: ModuleType) -> None:
    for block in ("headline", "verdicts", "tables", "host", "eager", "accuracy"):
        text = figures.BLOCKS[block]()
        for name in RUNS[: 2 if block in ("headline", "verdicts", "tables") else 1]:
            run = load(name)
            assert f"`{name}`" in text and run["commit"] in text and f"{run['time'][11:16]} UTC" in text, block
        assert "benchmarks.md#the-runs" in text or "](#the-runs)" in text, block
    for block, name in (("quantize", "h200-quantize.json"), ("selection", "h200-select.json")):
        assert name in figures.BLOCKS[block]() and load(name)["commit"] in figures.BLOCKS[block]()
    assert "`cpu.json`" in figures.cpu()


def test_the_commands_are_the_runs_own(figures: ModuleType) -> None:
    lines = [shlex.split(line) for line in figures.commands().splitlines() if line.startswith("python3 ")]
    assert [line[-1] for line in lines] == [f"benchmarks/results/{name}" for name in (*RUNS, "accuracy-cpu.json")]
    for name, line in zip((*RUNS, "accuracy-cpu.json"), lines, strict=True):
        options = load(name)["options"]
        parsed = parse(line[2:])
        assert list(parsed.presets) == options["presets"] and parsed.commit == options["commit"]
        assert list(parsed.axes.kvs) == options["axes"]["kvs"] and parsed.time_budget == options["time_budget"]


def test_a_file_may_be_missing_but_no_preset_may_be_in_two(figures: ModuleType, copied: Path) -> None:
    (copied / RUNS[1]).write_bytes((copied / RUNS[0]).read_bytes())
    with pytest.raises(ValueError, match=r"preset grid is in both h200\.json and h200-step\.json"):
        figures.tables()
    (copied / RUNS[1]).unlink()
    assert list(figures.runs()) == ["h200.json"] and "whole step" not in figures.headline()
    assert figures.run_of("step") == "h200.json"


def test_figures_are_made_of_finished_runs_alone(figures: ModuleType, copied: Path) -> None:
    change(copied / RUNS[1], finished=True)
    assert figures.verdicts()
    change(copied / RUNS[1], finished=False)
    with pytest.raises(ValueError, match=r"h200-step\.json was saved while its run went on"):
        figures.verdicts()


@pytest.mark.parametrize("status, word", [("wrong", "is WRONG"), ("error", "FAILED")])
@pytest.mark.parametrize("name", RUNS)
def test_a_side_that_fails_is_in_the_readme_and_among_the_verdicts(
    figures: ModuleType, copied: Path, name: str, status: str, word: str
) -> None:
    rows = load(name)["rows"]
    side = next(row["sides"]["vllm"] for row in rows if row["sides"].get("vllm", {}).get("status") == "ok")
    side |= {"status": status, "reason": "a reason of its own"}
    change(copied / name, rows=rows)
    for text in (figures.headline(), figures.verdicts()):
        assert re.search(rf"\w+: vllm {word} at 1 of \d+ results: a reason of its own", " ".join(text.split()))


def test_every_side_that_failed_in_the_runs_is_told(figures: ModuleType) -> None:
    texts = [" ".join(text.split()) for text in (figures.headline(), figures.verdicts())]
    for row in (row for name in RUNS for row in load(name)["rows"]):
        for label, side in row["sides"].items():
            if side["status"] in ("wrong", "error"):
                word = {"wrong": "is WRONG", "error": "FAILED"}[side["status"]]
                for text in texts:
                    told = rf"{row['preset']}: {label} {word} at \d+ of \d+ results: {re.escape(side['reason'])}"
                    assert re.search(told, text), label


def test_bars_and_floors_name_their_bandwidths(figures: ModuleType) -> None:
    pages = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "commands.md")
    for page in pages:
        assert "4.46 TB/s" in page.read_text(encoding="utf-8"), page.name
    text = " ".join(figures.headline().split())
    measured = load(RUNS[0])["read_ceiling_bytes_per_s"] / 1e12
    assert "of 4.46 TB/s" in text and f"read ceiling ({measured:.2f} TB/s, as measured in this run)" in text
    assert "which `floor` counts with; bars count with 4.46 TB/s" in " ".join(figures.machine().split())


def test_host_time_is_the_files(figures: ModuleType) -> None:
    times = [sides["ours"]["host_us"]["median"] for sides in load(RUNS[0])["host"]["eager"].values()]
    assert f"takes {min(times):.1f} to {max(times):.1f} us of host time" in " ".join(figures.eager().split())


# --- accuracy ---


def test_accuracy_is_labelled_and_keeps_what_is_not_ok(figures: ModuleType) -> None:
    rows = [line.strip("| ").split(" | ") for line in figures.accuracy().splitlines() if line.startswith("| ")][1:]
    for where, name in (("CPU", "accuracy-cpu.json"), ("H200", RUNS[0])):
        run = load(name)
        mine = [row for row in rows if row[0] == where]
        context = report.size(run["options"]["axes"]["context"])
        batches = ", ".join(str(b) for b in dict.fromkeys(r["batch"] for r in run["accuracy"]))
        assert {(row[1], row[2]) for row in mine} == {(context, batches)}
        asked = {(r["side"].replace("ours", "msa_ops"), r["kv"], r["status"]) for r in run["accuracy"]}
        assert {(row[3], row[4], "refused" if "refused" in row[5] else "ok") for row in mine} == asked


def test_a_side_that_is_ok_at_some_batches_alone_has_two_rows(figures: ModuleType, copied: Path) -> None:
    accuracy = load(RUNS[0])["accuracy"]
    for row in accuracy:
        if (row["side"], row["kv"], row["batch"]) == ("vllm", "fp8", 16):
            row |= {"status": "wrong", "reason": "row error 0.5"}
    change(copied / RUNS[0], accuracy=accuracy)
    text = figures.accuracy()
    assert "| H200 | 32K | 1, 256 | vllm | fp8 | 1." in text and "| H200 | 32K | 16 | vllm | fp8 | wrong [" in text
    assert "] row error 0.5" in text


# --- the scripts' results ---


def test_rows_of_the_scripts_are_all_shown(figures: ModuleType) -> None:
    text, run = figures.quantize(), load("h200-quantize.json")
    for row in run["rows"]:
        if "GB/s" in row:
            assert f"| {row['name'].strip()} | {row['us']:.1f} | {row['GB/s']:,.0f} |" in text
        elif "host_us" in row:
            assert f"{row['us']:.2f} ({row['host_us']:.0f})" in text
        else:
            assert f"{row['name']}: {row['us']:.0f} us" in " ".join(text.split())
    text, run = figures.selection(), load("h200-select.json")
    chosen = [row for row in run["records"] if row["part"] == "select"]
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| B ")]
    assert sum(len(re.findall(r"\d+\.\d\d", line)) for line in lines) == len(chosen)
    assert len(re.findall(r" ✗ \d", text)) == sum(row["goal"].startswith("OVER") for row in chosen)


def test_a_goal_of_the_selection_that_is_missed_is_marked(figures: ModuleType, copied: Path) -> None:
    records_ = load("h200-select.json")["records"]
    missed = next(r for r in records_ if (r["part"], r["blocks"], r["batch"]) == ("select", 256, 1))
    missed |= {"us": 3.25, "goal": "OVER 3.0"}
    change(copied / "h200-select.json", records=records_)
    assert "3.25 ✗ 3.0" in figures.selection()


def test_scores_with_the_selection_behind_them(figures: ModuleType, copied: Path) -> None:
    records_ = [r for r in load("h200-select.json")["records"] if r["part"] != "scores"]
    without = figures.selection()
    timed = {"part": "scores", "least": 1.0, "most": 9.0, "score": 3.14, "floor": 0.24, "ragged": False}
    rows = [
        timed | {"keys": "fp8", "batch": 1, "context": 8192, "both": 4.2, "bar": 4.75, "held": True},
        timed
        | {"keys": "fp8", "batch": 64, "context": 32768, "ragged": True, "both": 40.25, "bar": 37.5, "held": False},
        timed | {"keys": "bf16", "batch": 1, "context": 8192, "both": 5.5, "bar": 5.0, "held": False},
    ]
    change(copied / "h200-select.json", records=records_ + rows)
    text = figures.selection()
    assert "| B 1, 8K | 3.14 | 4.20 (4.75) | 3.14 | 5.50 (5.00) ✗ |" in text
    assert "| B 64, up to 32K | 3.14 | 40.25 (37.50) ✗ |  |  |" in text
    change(copied / "h200-select.json", records=records_)
    assert "B 1, 8K" not in figures.selection() and figures.selection() in without


def test_a_file_of_another_schema_is_refused(figures: ModuleType, copied: Path) -> None:
    change(copied / "h200-select.json", schema_version=2)
    with pytest.raises(ValueError, match="has schema version 2; this reads 1"):
        figures.selection()


# --- what is said of devices ---


def test_what_the_readme_calls_compiled_is_compiled_by_the_tests() -> None:
    """The spread of the attention kernel's compile tests has every capability of the table."""
    pytest.importorskip("cuda.bindings")
    test_cuda_compile = pytest.importorskip("test_cuda_compile", exc_type=ImportError)
    assert {capability for capability, _ in test_cuda_compile.SPREAD} == set(SHARED_PER_BLOCK)
