"""A run of the benchmark as a whole: faults, failing sides, exit statuses, unfinished reports, and its command line."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import fake_peers
from msa_ops.bench import host, main, measure, plots, records, report, runner
from msa_ops.bench.inputs import KV_KINDS, Shape
from msa_ops.bench.options import arguments_of, command_of, parse
from msa_ops.bench.peers import Side
from msa_ops.bench.presets import Job, jobs_of
from msa_ops.bench.sizes import numbers, parse_size, parse_sizes, row_bytes, size, split_heads
from msa_ops.contract import KVFormat
from test_bench_cli import ONE_SHAPE, decode, run, words

SMALL = ("--device", "cpu", "--smoke", "--kv", "bf16", "--batch", "1,2", "--heads", "4/2", "--seqlen-q", "1")


def recorded(options: Any) -> dict[str, Any]:
    """Options as a report holds them."""
    fields: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(options) | {"json": None, "markdown": None}))
    return fields


# --- the command line of a run ---


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--preset grid --preset host --against flashinfer,vllm --time-budget 135 --commit abc --peer-version vllm=1",
        "--preset step --kv fp8,bf16,nvfp4-planar --batch 1,16 --context 8K,1M --seqlen-q 2 --replays 9 --calls 3",
        "--preset accuracy --device cpu --batch 1,16 --context 8K --against sdpa --seed 4 --workers 2 --topk 8",
        "--preset model --tp 1,8 --against none --context 32K",
        "--heads 32/2,8/1 --overlap --extra --time-budget 0.5",
        "--smoke --device cpu",
        "--smoke --device cpu --batch 1,2 --heads 4/2 --context 512 --replays 4 --calls 1 --preset ragged",
        "--sweep 'A=1,2,' --sweep 'B=1,2;3,4'",
    ],
)
def test_the_command_of_a_report_makes_the_same_options(line: str) -> None:
    options = parse(shlex.split(line))
    assert parse(arguments_of(recorded(options))) == options
    command = shlex.split(command_of(recorded(options), "a b.json"))
    assert command[:2] == ["python3", "benchmarks/decode.py"]
    assert parse(command[2:]) == dataclasses.replace(options, json="a b.json")


# --- faults ---


def failing_at(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """The timing of the nth shape raises what a fault on a GPU would."""
    whole, calls = measure.Bench.time, [0]

    def time(self: measure.Bench, sides: Any, replays: int) -> Any:
        if "ours" in sides:
            calls[0] += 1
            if calls[0] == nth:
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        return whole(self, sides, replays)

    monkeypatch.setattr(measure.Bench, "time", time)


@pytest.mark.parametrize("preset", ["grid", "step"])
def test_a_fault_while_sides_are_timed_ends_the_run_with_what_there_is(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: runner.Runner, label: str, error: Exception) -> None:
        raise runner.DeviceLost(f"{label} broke the CUDA context: {report.first_line(error)}")

    monkeypatch.setattr(runner.Runner, "_raise_if_lost", lost)
    failing_at(monkeypatch, 2 if preset == "grid" else 1)
    options = parse([*SMALL, "--preset", preset, "--against", "none", "--context", "512"])
    said: list[str] = []
    result = runner.Runner(options, said.append, []).run()
    assert len(result["rows"]) == (1 if preset == "grid" else 0)
    left = [f"{preset} {report.describe(job)}" for job in jobs_of(preset, options.axes, 0)][len(result["rows"]) :]
    assert result["not_measured"][:-1] == left and len(left) == (1 if preset == "grid" else 2)
    assert "after a fault: timing ours" in result["not_measured"][-1] and "illegal memory" in result["not_measured"][-1]
    assert any(line.startswith("STOPPED") for line in said) and main.exit_status(result, said.append) == 3


def test_an_error_of_the_timing_that_breaks_nothing_is_every_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_at(monkeypatch, 1)
    result = runner.Runner(parse([*SMALL, "--against", "none"]), lambda line: None, []).run()
    first, second = (row["sides"]["ours"] for row in result["rows"])
    assert first["status"] == "error" and "while ours were timed: RuntimeError: CUDA error" in first["reason"]
    assert "time_us" not in first and second["status"] == "ok" and result["rows"][0]["best"] is None
    assert main.exit_status(result, lambda line: None) == 1


def test_a_fault_that_shows_itself_outside_of_a_side_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    running = runner.Runner(parse([*SMALL, "--against", "none"]), lambda line: None, [])

    def broken(self: runner.Runner, job: Job) -> Any:
        self.device = torch.device("cuda")
        raise RuntimeError("CUDA error: unspecified launch failure")

    def synchronize(device: Any = None) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(runner.Runner, "measure", broken)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    result = running.run()
    assert result["rows"] == [] and len(result["not_measured"]) == 3
    assert "grid bf16 4/2 seqlen_q 1 B 1 broke the CUDA context: CUDA error" in result["not_measured"][-1]


def test_an_error_that_is_no_fault_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: runner.Runner, job: Job) -> Any:
        raise KeyError("a mistake in the benchmark")

    monkeypatch.setattr(runner.Runner, "measure", broken)
    with pytest.raises(KeyError, match="a mistake"):
        runner.Runner(parse([*SMALL, "--against", "none"]), lambda line: None, []).run()


# --- wrong and failing sides ---


def test_a_failing_peer_has_a_line_in_every_form_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named 'cutlass'")

    fake_peers.install(monkeypatch, fake_peers.FLASHINFER, msa_sparse_decode_attention=failing)
    line = "grid: flashinfer FAILED at 2 of 2 results: ModuleNotFoundError: No module named 'cutlass'"
    outcome = run("decode", *ONE_SHAPE, "--against", "flashinfer", "--no-plots", "--out", str(tmp_path))
    assert outcome.exit_code == 0 and line in words(outcome)  # it is the peer's, not ours
    assert f"- {line}" in (tmp_path / "decode.md").read_text()
    said: list[str] = []
    main.run(parse([*SMALL, "--against", "flashinfer"]), said.append)
    assert line in said


def test_troubles_are_counted_by_preset_side_and_words() -> None:
    def row(preset: str, **sides: tuple[str, str]) -> dict[str, Any]:
        return {"preset": preset, "sides": {n: {"status": s, "reason": r} for n, (s, r) in sides.items()}}

    rows = [
        row("grid", ours=("ok", ""), vllm=("wrong", "row error 0.5")), row("grid", ours=("ok", ""), vllm=("ok", "")),
        row("step", ours=("ok", ""), vllm=("error", "no cutlass"), flashinfer=("refused", "no route")),
    ]  # fmt: skip
    accuracy = [{"side": "vllm", "status": "error", "reason": "gone"}, {"side": "ours", "status": "ok"}]
    eager = {"fp8": {"ours": {"status": "error", "reason": "late"}, "vllm": {"status": "ok"}}}
    found = {"rows": rows, "accuracy": accuracy, "host": {"eager": eager, "import": {"median_ms": 1.0}}}
    assert report.trouble_lines(found) == [
        "grid: vllm is WRONG at 1 of 2 results: row error 0.5",
        "step: vllm FAILED at 1 of 1 results: no cutlass",
        "accuracy: vllm FAILED at 1 of 1 results: gone",
        "host: ours FAILED at 1 of 2 results: late",
    ]
    assert report.our_failures(found) == (1, 6)


@pytest.mark.parametrize("what", ["eager_cost", "import_cost", "first_call_cost"])
def test_a_host_failure_of_ours_is_an_exit_status(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("no such thing")

    for name in ("import_cost", "first_call_cost"):  # processes of their own: not started here
        monkeypatch.setattr(host, name, lambda *_: {"median_ms": 1.0})
    monkeypatch.setattr(host, what, failing)
    outcome = run("host", "--smoke", "--kv", "bf16", "--against", "none", "--no-plots", "--out", str(tmp_path))
    assert outcome.exit_code == 1 and "host: ours FAILED at 1 of 3 results" in words(outcome)


def test_the_script_says_by_its_status_that_ours_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*SMALL, "--against", "none"]
    assert main.main(argv) == 0
    monkeypatch.setattr(runner, "WRONG_ABOVE", -1.0)
    assert main.main(argv) == 1 and "wrong or fails at 2 of 2 results" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("no"), NotImplementedError("no")])
def test_what_ours_refuses_without_a_sweep_is_a_failure(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(call: Any) -> None:
        raise error

    monkeypatch.setattr(runner, "ours", lambda environment=None: Side("ours", refuse, "1"))
    assert main.main([*SMALL, "--against", "none"]) == 1


# --- unfinished reports ---


def test_an_unfinished_report_says_so_everywhere(tmp_path: Path) -> None:
    whole = decode(tmp_path, "--against", "none", "--no-plots")
    part = {**whole, "finished": False}
    assert report.UNFINISHED in report.markdown(part) and report.UNFINISHED not in report.markdown(whole)
    file = tmp_path / "part.json"
    file.write_text(json.dumps(part))
    outcome = run("diff", str(tmp_path / "decode.json"), str(file))
    assert "the second report is of an unfinished run" in words(outcome)
    assert "the first report" not in words(outcome)
    before = {name: value for name, value in whole.items() if name != "finished"}
    assert report.is_finished(before) and not report.is_finished(part)
    pytest.importorskip("matplotlib")
    assert plots._commit(part).partition("; ")[2].startswith("an unfinished run")
    assert "unfinished" not in plots._commit(whole)


def test_a_saved_part_is_marked_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_CHECKPOINT_S", 0.0)
    file = tmp_path / "r.json"

    def stopped(self: runner.Runner, job: Job) -> Any:
        if len(self.rows):
            raise KeyboardInterrupt
        return whole(self, job)

    whole = runner.Runner.measure
    monkeypatch.setattr(runner.Runner, "measure", stopped)
    assert main.main([*SMALL, "--against", "none", "--json", str(file)]) == 130
    found = records.load(file)
    assert found["finished"] is False and len(found["rows"]) == 1


# --- pools, sizes, rounding ---


def test_a_pool_is_of_its_own_jobs_and_their_baselines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    running = runner.Runner(parse([*SMALL, "--against", "none"]), lambda line: None, [])
    shape = Shape("bf16", 1, 4, 2, context=512)
    longer, other = (dataclasses.replace(shape, context=2048), Shape("fp8", 1, 4, 2, context=8192))
    jobs = [Job("ragged", shape, "", "even", longer), Job("ragged", other, "", "even", other)]
    assert running.pool(shape, jobs).pages == longer.used_pages


def test_one_ratio_is_one_figure_in_a_row() -> None:
    """1.0784996 is 1.078, though rounded to four digits first it would be 1.079."""
    time = {"min": 1.0, "max": 1.0}
    sides = {
        "ours": {"status": "ok", "time_us": {"median": 100.0, **time}},
        "vllm": {"status": "ok", "time_us": {"median": 107.84996, **time}},
        "ours even": {"status": "ok", "time_us": {"median": 92.72123, **time}},
    }
    goal = {"peer": "vllm", "ratio": 1.0785, "bar": 1.08, "met": False}
    work = {"baseline": "even", "ratio": 1.0785, "limit": 1.0, "met": False}
    row = {"best": "ours", "sides": sides, "speed_goal": None, "peer_goal": goal, "work_goal": work}
    assert report._cell(row, "vllm", {}).endswith("1.078")
    assert report._bars(row) == "✗ vllm 1.078 < 1.080, ✗ 1.079 of even (limit 1.0)"


def test_sizes_are_read_and_written_alike() -> None:
    assert parse_sizes("--context", "8K,1m, 100") == (8192, 1 << 20, 100)
    assert [size(n) for n in (8192, 1 << 20, 100)] == ["8K", "1M", "100"]
    assert parse_size("--context", "2K") == 2048 and numbers("--batch", "1,2") == (1, 2)
    assert split_heads(" 64/4 ") == (64, 4)
    for text in ("", "0", "2G", "-1", "2048M", "9" * 5000, "²"):
        with pytest.raises(ValueError, match="--context takes positive numbers"):
            parse_size("--context", text)
    for text in ("64", "6/4", "0/1", "4/0", "a/b", "9" * 5000 + "/1"):
        with pytest.raises(ValueError, match="--heads takes QUERY/KV"):
            split_heads(text)
    with pytest.raises(ValueError, match="takes positive numbers separated"):
        numbers("--batch", "9" * 5000)


def test_bytes_of_a_row_are_in_one_place() -> None:
    assert {kv: Shape(kv, 1, 4, 2).row_bytes for kv in KV_KINDS} == {
        "fp8": 128, "bf16": 256, "nvfp4-planar": 72, "nvfp4-tiled": 72,
    }  # fmt: skip
    assert [row_bytes(kv) for kv in KVFormat] == [{"nvfp4": 72, "fp8": 128}.get(kv.value, 256) for kv in KVFormat]
