"""``msa-ops bench cpu`` and ``benchmarks/cpu.py``: one measurement, in the package, with its bars."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fake_peers
from msa_ops.bench import cpu, records
from test_bench_cli import pictures, run, words

SOURCES = Path(__file__).parents[1] / "src"


def test_cpu_measures_and_keeps_its_figures(tmp_path: Path) -> None:
    outcome = run("cpu", "--smoke", "--forms", "bf16", "--out", str(tmp_path))
    assert outcome.exit_code == 0, outcome.output
    report = json.loads((tmp_path / "cpu.json").read_text())
    (result,) = report["results"]
    assert report["kind"] == "cpu" and report["schema_version"] == 1 and {"commit", "time"} <= report.keys()
    peak = result["peak_extra_mib"]
    within = result["ratio"] <= result["bar"] and peak is not None and peak <= cpu.MEMORY_BAR_MIB
    assert report["bars_held"] is within
    assert result["form"] == "bf16" and result["ours_ms"] > 0 and result["sdpa_ms"] > 0
    assert "1/1" in words(outcome) and "| bf16 |" in (tmp_path / "cpu.md").read_text()
    pictures(tmp_path, "cpu-ratio")
    again = tmp_path / "again"
    assert run("plot", str(tmp_path / "cpu.json"), "--out", str(again)).exit_code == 0
    pictures(again, "cpu-ratio")
    chosen = run("plot", str(tmp_path / "cpu.json"), "--out", str(again), "--kv", "bf16")
    assert chosen.exit_code == 2 and "has no rows to choose from" in words(chosen)


def test_cpu_runs_from_an_installed_wheel(tmp_path: Path) -> None:
    """The package's files alone, without the checkout around them."""
    shutil.copytree(SOURCES / "msa_ops", tmp_path / "site" / "msa_ops", ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "msa_ops",
        "bench",
        "cpu",
        "--smoke",
        "--forms",
        "fp8",
        "--no-plots",
        "--out",
        "out",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "cpu.json").read_text())["results"][0]["form"] == "fp8"


def test_the_cpu_script_is_the_same_measurement(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "cpu.py"
    shape = ("--batch", "1", "--heads", "2", "--kv-heads", "1", "--context", "1024", "--topk", "2", "--rounds", "2")
    command = [
        sys.executable,
        str(script),
        *shape,
        "--threads",
        "1",
        "--forms",
        "bf16",
        "--commit",
        "abc",
        "--json",
        "c.json",
    ]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and "SDPA ms" in done.stdout, done.stderr
    report = records.load(tmp_path / "c.json")
    assert report["commit"] == "abc" and [r["form"] for r in report["results"]] == ["bf16"]
    assert done.returncode == int(not report["bars_held"])


def test_a_cpu_form_past_its_bar_is_an_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"form": "bf16", "ours_ms": 9.0, "sdpa_ms": 3.0, "ratio": 3.0, "bar": 1.3, "row_error": 1e-3}
    report = {"cpu": "some", "torch": "2", "commit": None, "time": "", "shape": {}, "results": [result]}
    monkeypatch.setattr(cpu, "measure", lambda *_: {**report, "kind": "cpu", "bars_held": False})
    outcome = run("cpu", "--out", str(tmp_path), "--no-plots")
    assert outcome.exit_code == 1 and "3.00" in outcome.output and "**3.00**" in (tmp_path / "cpu.md").read_text()


def test_bars_and_memory_decide_whether_a_cpu_run_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = cpu.Shape(**cpu.SMOKE)
    for ratio, peak, held in ((1.3, 64.0, True), (1.31, 1.0, False), (1.0, 64.1, False), (1.0, None, False)):
        result = {
            "form": "bf16", "ours_ms": 1.0, "sdpa_ms": 1.0, "ratio": ratio, "bar": 1.3, "ours_fast_ms": 1.0,
            "sdpa_fast_ms": 1.0, "ratio_fast": 1.0, "peak_extra_mib": peak, "row_error": 1e-3,
        }  # fmt: skip
        monkeypatch.setattr(cpu, "_in_new_process", lambda form, shape, found=result: found)
        said: list[str] = []
        assert cpu.measure(shape, ["bf16"], said.append)["bars_held"] is held
        assert any("peak memory is unknown for bf16" in line for line in said) == (peak is None)


@pytest.mark.parametrize("rounds", [2, 7])
def test_as_many_calls_are_timed_as_rounds_are_asked_for(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    median = cpu.statistics.median
    monkeypatch.setattr(cpu.statistics, "median", lambda times: lengths.append(len(times)) or median(times))
    cpu.measure_form("bf16", cpu.Shape(**{**cpu.SMOKE, "rounds": rounds}))
    assert lengths == [rounds, rounds]


def test_a_report_from_before_the_schema_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Reports of the CPU once held neither commit nor time."""
    file = tmp_path / "old.json"
    file.write_text(json.dumps({"cpu": "some", "torch": "2", "shape": {}, "results": []}))
    outcome = run("plot", str(file), "--out", str(tmp_path))
    assert outcome.exit_code == 2
    assert "has no schema_version: it was written by an older version" in words(outcome)
    assert "Measure anew with msa-ops bench cpu" in words(outcome)


def test_a_cpu_form_that_is_wrong_or_dies_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(form: str, shape: cpu.Shape) -> Any:
        raise RuntimeError(f"{form}: row error 0.5 is past 0.004: a wrong result is not timed")

    monkeypatch.setattr(cpu, "_in_new_process", dying)
    outcome = run("cpu", "--smoke", "--forms", "bf16", "--out", str(tmp_path))
    assert outcome.exit_code == 1 and "a wrong result is not timed" in str(outcome.exception)
    monkeypatch.undo()
    monkeypatch.setattr(cpu, "measure_form", fake_peers.die)
    with pytest.raises(RuntimeError, match="ended by itself"):
        cpu._in_new_process("bf16", cpu.Shape(**cpu.SMOKE))
