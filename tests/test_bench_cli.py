"""``msa-ops bench``: every command on the CPU, the gate with faked peers, the files, and comparing runs."""

from __future__ import annotations

import json
import re
import struct
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

import fake_peers

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from click.testing import Result
from typer.main import get_command
from typer.testing import CliRunner

from msa_ops.bench import records, runner
from msa_ops.bench.options import from_values
from msa_ops.bench.peers import Side
from msa_ops.bench.presets import MODEL_CONTEXTS, jobs_of, model_heads
from msa_ops.cli import bench as command

ONE_SHAPE = ("--smoke", "--device", "cpu", "--kv", "bf16", "--batch", "2", "--heads", "4/2")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command.app, list(arguments))  # type: ignore[return-value]


def words(outcome: Result) -> str:
    """Output with boxes and line breaks taken out."""
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", outcome.output).split())


def decode(out: Path, *arguments: str) -> dict[str, Any]:
    outcome = run("decode", *ONE_SHAPE, "--seqlen-q", "1", "--out", str(out), *arguments)
    assert outcome.exit_code == 0, outcome.output
    report: dict[str, Any] = json.loads((out / "decode.json").read_text())
    return report


def assert_picture(path: Path) -> None:
    """A PNG of some size that is not of one colour, or an SVG that draws lines."""
    data = path.read_bytes()
    if path.suffix == ".svg":
        assert len(list(ET.fromstring(data).iter("{http://www.w3.org/2000/svg}path"))) > 20
        return
    from matplotlib.image import imread

    width, height = struct.unpack(">II", data[16:24])
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and width > 500 and height > 300
    pixels = torch.from_numpy(imread(path)[..., :3].reshape(-1, 3).copy())
    assert len((pixels * 255).to(torch.uint8).unique(dim=0)) > 20


def pictures(out: Path, *names: str) -> None:
    """`out` holds these pictures as PNG and SVG, and no others."""
    found = {path.name for path in out.iterdir() if path.suffix in (".png", ".svg")}
    assert found == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    for name in found:
        assert_picture(out / name)


# --- each command ---


def test_decode_writes_tables_json_and_pictures(tmp_path: Path) -> None:
    """sdpa serves the one-token rows of whole blocks, in which all three pictures have something to show."""
    arguments = (*ONE_SHAPE, "--context", "2K", "--against", "sdpa", "--out", str(tmp_path))
    outcome = run("decode", *arguments)
    assert outcome.exit_code == 0, outcome.output
    text = words(outcome)
    assert "grid on CPU" in text and re.search(r"refused \[1\]", text) and "[1] the gathered keys are dense" in text
    assert re.search(r"x\d+\.\d\d", text) and "2/2" in text
    report = json.loads((tmp_path / "decode.json").read_text())
    assert [row["seqlen_q"] for row in report["rows"]] == [1, 4] and report["rows"][0]["context"] == 2048
    pictures(tmp_path, "decode-time", "decode-share", "decode-speedup")
    page = (tmp_path / "decode.md").read_text()
    assert "![decode-time](decode-time.png)" in page and "svg" not in page
    assert "A smoke run" in page and "runs on the CPU" in page and "graph replays" not in page


@pytest.mark.parametrize("name", ["ragged", "spec"])
def test_presets_with_a_baseline_measure_it_beside_ours(name: str, tmp_path: Path) -> None:
    outcome = run(name, *ONE_SHAPE, "--against", "none", "--out", str(tmp_path))
    assert outcome.exit_code == 0, outcome.output
    report = json.loads((tmp_path / f"{name}.json").read_text())
    baseline = {"ragged": "ours even", "spec": "ours separate"}[name]
    assert all(row["sides"][baseline]["status"] == "ok" for row in report["rows"]) and report["rows"]
    assert "(limit" in words(outcome)
    pictures(tmp_path, f"{name}-time", f"{name}-share")


def test_model_gives_the_cost_of_a_step_at_each_size(tmp_path: Path) -> None:
    arguments = ("--smoke", "--device", "cpu", "--kv", "bf16", "--batch", "1", "--context", "256,1K", "--tp", "1,8")
    outcome = run("model", *arguments, "--against", "none", "--out", str(tmp_path))
    assert outcome.exit_code == 0, outcome.output
    rows = json.loads((tmp_path / "model.json").read_text())["rows"]
    assert [(row["tp"], row["context"], row["heads"]) for row in rows] == [
        (1, 256, "64/4"), (1, 1024, "64/4"), (8, 256, "8/1"), (8, 1024, "8/1"),
    ]  # fmt: skip
    for row in rows:
        assert row["layers"] == 57
        assert row["step_us"] == pytest.approx(57 * row["sides"]["ours"]["time_us"]["median"], rel=1e-3)
    assert "ms a step" in words(outcome) and "| TP | context |" in (tmp_path / "model.md").read_text()
    pictures(tmp_path, "model-time", "model-share")


def test_model_divides_the_heads_and_copies_a_kv_head_where_they_run_out() -> None:
    assert [model_heads(tp) for tp in (1, 2, 4, 8)] == [(64, 4), (32, 2), (16, 1), (8, 1)]
    jobs = jobs_of("model", from_values(preset=["model"], kv="fp8").axes, 0)
    assert {job.shape.context for job in jobs} == set(MODEL_CONTEXTS) and min(MODEL_CONTEXTS) == 8192
    assert max(MODEL_CONTEXTS) == 1 << 20 and {job.tp for job in jobs} == {1, 2, 4, 8}
    pools = [job.shape.num_kv_heads for job in jobs]
    assert pools == sorted(pools, reverse=True)  # a pool is filled once


def test_host_measures_calls_and_fresh_processes(tmp_path: Path) -> None:
    arguments = ("--smoke", "--device", "cpu", "--kv", "bf16", "--against", "none", "--out", str(tmp_path))
    outcome = run("host", *arguments)
    assert outcome.exit_code == 0, outcome.output
    measured = json.loads((tmp_path / "host.json").read_text())["host"]
    assert measured["eager"]["bf16"]["ours"]["status"] == "ok" and measured["import"]["median_ms"] > 0
    assert measured["first_call"]["cold_ms"] > 0 and "3/3" in words(outcome)
    pictures(tmp_path, "host-eager")


def test_step_gives_every_part_and_the_whole(tmp_path: Path) -> None:
    arguments = (
        "--smoke",
        "--device",
        "cpu",
        "--kv",
        "bf16",
        "--batch",
        "1,2",
        "--heads",
        "4/2",
        "--context",
        "512,1K",
    )
    outcome = run("step", *arguments, "--topk", "2", "--against", "none", "--out", str(tmp_path))
    assert outcome.exit_code == 0, outcome.output
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    parts = ["score", "select", "score+select", "attend", "step"]
    assert [(r["batch"], r["context"], r["label"]) for r in rows] == [
        (b, c, p) for b in (1, 2) for c in (512, 1024) for p in parts
    ]  # fmt: skip
    page = (tmp_path / "step.md").read_text()
    assert "| context | part |" in page and "| 1K | score+select |" in page and "ours in three calls" in words(outcome)
    assert "step bf16 ours in three calls" in words(outcome) and "4/4" in words(outcome)
    pictures(tmp_path, "step-time", "step-share")


def test_the_step_picture_shows_the_whole_its_parts_and_the_floor(tmp_path: Path) -> None:
    from msa_ops.bench import plots

    arguments = ("--smoke", "--device", "cpu", "--kv", "bf16", "--batch", "2", "--heads", "4/2", "--context", "512,1K")
    assert run("step", *arguments, "--against", "none", "--no-plots", "--out", str(tmp_path)).exit_code == 0
    report = records.load(tmp_path / "step.json")
    (axis,) = plots.figures(report, "x")["x-time"].axes
    lines = {line.get_label(): list(line.get_xdata()) for line in axis.lines}
    assert lines.keys() == {
        "ours", "ours in three calls", "floor", *(f"ours, {part} alone" for part in ("score", "select", "attend"))
    }  # fmt: skip
    assert set(map(tuple, lines.values())) == {(512, 1024)}
    whole = [row["sides"]["ours"]["time_us"]["median"] for row in report["rows"] if row["label"] == "step"]
    assert next(list(line.get_ydata()) for line in axis.lines if line.get_label() == "ours") == whole


def test_accuracy_gives_the_errors_of_every_side(tmp_path: Path) -> None:
    outcome = run("accuracy", *ONE_SHAPE, "--context", "2K", "--against", "sdpa", "--out", str(tmp_path))
    assert outcome.exit_code == 0, outcome.output
    report = json.loads((tmp_path / "accuracy.json").read_text())
    assert [(r["side"], r["q_scale"]) for r in report["accuracy"]] == [
        ("ours", 1.0), ("sdpa", 1.0), ("ours", 6.0), ("sdpa", 6.0)
    ]  # fmt: skip
    assert all(0.9 < r["rms"] <= r["max"] * 1.6 for r in report["accuracy"]) and report["rows"] == []
    assert "multiples of those of one rounding" in words(outcome) and "1.000" in words(outcome)
    assert "| bf16 | 4/2 | 2 | 1 | 6.0 | sdpa |" in (tmp_path / "accuracy.md").read_text()
    pictures(tmp_path)


def test_an_accuracy_run_in_which_ours_fails_is_an_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(call: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(runner, "ours", lambda environment=None: Side("ours", failing, "1"))
    outcome = run("accuracy", *ONE_SHAPE, "--against", "none", "--out", str(tmp_path))
    assert outcome.exit_code == 1 and "msa_ops itself is wrong or fails at 2 of 2 results" in words(outcome)


def test_a_sweep_shows_every_value_and_takes_no_peers_of_itself(tmp_path: Path) -> None:
    report = decode(tmp_path, "--sweep", "MSA_OPS_SWEPT=,1", "--no-plots")
    (row,) = report["rows"]
    assert list(row["sides"]) == ["ours[MSA_OPS_SWEPT=unset]", "ours[MSA_OPS_SWEPT=1]"] and report["absent"] == {}
    report = decode(tmp_path, "--sweep", "A=1,2", "--sweep", "B=x;y,z", "--against", "sdpa", "--no-plots")
    assert list(report["rows"][0]["sides"])[1:3] == ["ours[A=1,B=y,z]", "ours[A=2,B=x]"]
    assert list(report["rows"][0]["sides"])[-1] == "sdpa"


def test_every_sub_command_explains_itself() -> None:
    group: Any = get_command(command.app)
    assert set(group.commands) == {
        "decode", "ragged", "spec", "step", "model", "accuracy", "host", "cpu", "plot", "diff",
    }  # fmt: skip
    for name in group.commands:
        outcome = run(name, "--help")
        assert outcome.exit_code == 0 and ("--out" in words(outcome) or name == "diff")


# --- the gate, with faked peers ---


def test_a_wrong_peer_is_reported_and_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peers.wrong(monkeypatch)
    report = decode(tmp_path, "--against", "flashinfer")
    (row,) = report["rows"]
    assert row["sides"]["flashinfer"]["status"] == "wrong" and "time_us" not in row["sides"]["flashinfer"]
    assert row["sides"]["ours"]["status"] == "ok"
    pictures(tmp_path, "decode-time", "decode-share")  # nothing to be faster than
    assert "wrong [1]" in (tmp_path / "decode.md").read_text()


def test_a_wrong_peer_is_shown_so_on_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peers.wrong(monkeypatch)
    outcome = run("decode", *ONE_SHAPE, "--against", "flashinfer", "--no-plots", "--out", str(tmp_path))
    assert outcome.exit_code == 0 and re.search(r"wrong \[1\].*\[1\] row error 0\.\d+ over 0\.01", words(outcome))


def test_a_refusing_peer_is_shown_with_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peers.right(monkeypatch)
    fake_peers.refusing(monkeypatch, "only on Tuesdays")
    outcome = run("decode", *ONE_SHAPE, "--against", "flashinfer,vllm", "--seqlen-q", "1", "--out", str(tmp_path))
    assert outcome.exit_code == 0, outcome.output
    assert "refused [1]" in words(outcome) and "[1] NotImplementedError: only on Tuesdays" in words(outcome)
    (row,) = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert row["sides"]["vllm"] == {"status": "refused", "reason": "NotImplementedError: only on Tuesdays"}
    assert row["sides"]["flashinfer"]["time_us"]["median"] > 0
    pictures(tmp_path, "decode-time", "decode-share", "decode-speedup")


def test_a_wrong_result_of_ours_is_an_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "WRONG_ABOVE", -1.0)
    outcome = run("decode", *ONE_SHAPE, "--against", "none", "--out", str(tmp_path))
    assert outcome.exit_code == 1 and "msa_ops itself is wrong or fails at 2 of 2 results" in words(outcome)
    assert json.loads((tmp_path / "decode.json").read_text())["rows"][0]["best"] is None


def test_only_in_a_sweep_may_ours_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(call: Any) -> None:
        raise ValueError("MSA_OPS_COMBINE=cluster needs compute capability 9.0")

    def ours(environment: dict[str, str | None] | None = None) -> Side:
        return Side("ours[swept]" if environment else "ours", refuse, "1", environment or {})

    monkeypatch.setattr(runner, "ours", ours)
    fake_peers.right(monkeypatch)
    common = (*ONE_SHAPE, "--against", "flashinfer", "--no-plots", "--out", str(tmp_path))
    outcome = run("decode", *common, "--sweep", "MSA_OPS_COMBINE=cluster")
    assert outcome.exit_code == 0 and "[1] ValueError: MSA_OPS_COMBINE=cluster needs" in words(outcome)
    assert "refused [1]" in (tmp_path / "decode.md").read_text()
    outcome = run("decode", *common)
    assert outcome.exit_code == 1 and "grid: ours FAILED at 2 of 2 results: ValueError: MSA_OPS" in words(outcome)
    assert "error [1]" in (tmp_path / "decode.md").read_text()


def test_the_pool_leaves_the_machine_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    options = from_values(device="cpu", smoke=True, kv="bf16", batch="64", heads="4/2", against="none")
    running = runner.Runner(options, lambda line: None, [])
    (shape,) = [job.shape for job in jobs_of("grid", options.axes, 0) if job.shape.seqlen_q == 1]
    monkeypatch.setattr(runner.environment, "free_bytes", lambda _: 100 * shape.page_bytes)
    assert shape.used_pages == 256 and running.pool(shape, []).pages == 60


def test_an_absent_peer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, fake_peers.VLLM, None)
    report = decode(tmp_path, "--against", "vllm", "--no-plots")
    assert list(report["absent"]) == ["vllm"] and "was not measured" in (tmp_path / "decode.md").read_text()


# --- options and missing parts ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode", "--kv", "int8"), "--kv takes fp8"),
        (("decode", "--against", "torch"), "--against takes flashinfer"),
        (("decode", "--replays", "3"), "--replays must be at least 7"),
        (("decode", "--context", "32X"), "--context takes positive numbers such as 8192, 8K or 1M"),
        (("decode", "--context", "8K,16K"), "--context takes one length, several for presets model and step alone"),
        (("decode", "--sweep", "NAME"), "--sweep takes NAME=V1"),
        (("decode", "--peer-version", "vllm"), "--peer-version takes PEER=VERSION"),
        (("step", "--context", "1000"), "--context must be a multiple of 128 in preset step"),
        (("cpu", "--context", "100"), "--context must be a multiple of 128"),
        (("cpu", "--topk", "0"), "--topk must be at least 1"),
        (("decode", "--topk", "0"), "--topk must be at least 1"),
        (("decode", "--device", "gpu"), "--device must be auto, cpu or cuda"),
        (("spec", "--time-budget", "0"), "--time-budget must be more than 0"),
        (("model", "--tp", "3"), "--tp takes 1, 2, 4, 8, got 3"),
        (("cpu", "--forms", "int8"), "--forms takes bf16"),
        (("cpu", "--heads", "5/2"), "QUERY a multiple of KV"),
        (("diff", "nowhere.json", "nowhere.json"), "nowhere.json cannot be read as JSON"),
        (("plot", "nowhere.json"), "nowhere.json cannot be read as JSON"),
    ],
)
def test_wrong_options_are_named_before_anything_runs(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run(*arguments)
    assert outcome.exit_code == 2 and message in words(outcome)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "option"), [("model", "--heads"), ("decode", "--tp"), ("host", "--batch")])
def test_an_option_that_would_have_no_effect_is_refused(name: str, option: str) -> None:
    outcome = run(name, option, "1")
    assert outcome.exit_code == 2 and "No such option" in words(outcome)


def test_the_program_refuses_options_of_another_preset() -> None:
    with pytest.raises(ValueError, match="--heads is not for preset model"):
        from_values(preset=["model"], heads="64/4")
    with pytest.raises(ValueError, match="--tp is for preset model"):
        from_values(tp="2")
    with pytest.raises(TypeError, match="no option is called 'head'"):
        from_values(head="64/4")


def test_a_missing_gpu_is_said_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = run("decode", "--against", "none", "--out", str(tmp_path))
    assert outcome.exit_code == 1 and "pass --device cpu --smoke" in str(outcome.exception)


def test_a_missing_matplotlib_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import msa_ops.bench

    monkeypatch.delitem(sys.modules, "msa_ops.bench.plots", raising=False)
    monkeypatch.delattr(msa_ops.bench, "plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = run("decode", *ONE_SHAPE, "--out", str(tmp_path))
    assert outcome.exit_code == 1 and "--no-plots" in str(outcome.exception) and not list(tmp_path.iterdir())


def test_a_spent_budget_is_an_exit_status_and_is_named(tmp_path: Path) -> None:
    arguments = (*ONE_SHAPE, "--against", "none", "--time-budget", "0.000001", "--out", str(tmp_path))
    outcome = run("decode", *arguments)
    assert outcome.exit_code == 3 and "not measured: grid bf16 4/2" in words(outcome)
    pictures(tmp_path)


# --- reports: schema, plot, diff ---


def test_the_schema_of_the_report_is_stable(tmp_path: Path) -> None:
    """Whoever removes or renames a field raises `SCHEMA_VERSION`; a new field is added here."""
    report = decode(tmp_path, "--against", "sdpa", "--no-plots")
    assert report["schema_version"] == 1 and report["kind"] == "bench" and report["finished"] is True
    assert set(report) == {
        "schema_version", "kind", "time", "commit", "python", "torch", "cuda", "triton", "msa_ops", "driver", "card",
        "compute_capability", "sms", "l2_bytes", "read_ceiling_bytes_per_s", "read_ceiling_method",
        "empty_graph_node_us", "goal_ceiling_bytes_per_s", "sides", "absent", "options", "seconds", "rows", "accuracy",
        "host", "summary", "not_measured", "finished",
    }  # fmt: skip
    (row,) = report["rows"]
    assert set(row) == {
        "preset", "label", "kv", "batch", "heads", "num_qo_heads", "num_kv_heads", "seqlen_q", "context", "topk",
        "overlap", "in_grid", "calls", "unique_bytes", "page_uses", "floor_us", "best", "sides", "speed_goal", "peer_goal",
        "work_goal", "tp", "layers", "step_us",
    }  # fmt: skip
    assert set(row["sides"]["ours"]) == {"status", "error", "time_us"}
    assert set(row["sides"]["ours"]["time_us"]) == {"median", "min", "max", "p25", "p75", "replays"}
    assert set(row["sides"]["sdpa"]) == {"status", "reason"}
    assert set(report["summary"]) == {"speed", "peers", "nvfp4_over_bf16", "nvfp4_layouts", "work", "step"}


@pytest.fixture
def two_runs(tmp_path: Path) -> tuple[Path, Path, dict[str, Any]]:
    """A report and a copy of it, to be changed by the test."""
    report = decode(tmp_path, "--against", "none", "--no-plots", "--batch", "1,2")
    for batch, row in zip((1, 2), report["rows"], strict=True):
        row["sides"]["ours"]["time_us"] = dict.fromkeys(("median", "min", "max", "p25", "p75"), 10.0 * batch)
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    for path in (before, after):
        path.write_text(json.dumps(report))
    return before, after, report


def test_diff_of_equal_runs_finds_nothing(two_runs: tuple[Path, Path, dict[str, Any]]) -> None:
    before, after, _ = two_runs
    outcome = run("diff", str(before), str(after), "--tolerance", "0")
    assert outcome.exit_code == 0 and "0 slower, 0 faster, 2 within 0%" in words(outcome)


def test_diff_says_what_got_slower(two_runs: tuple[Path, Path, dict[str, Any]]) -> None:
    before, after, report = two_runs
    report["rows"][0]["sides"]["ours"]["time_us"]["median"] = 10.5
    report["rows"][1]["sides"]["ours"]["time_us"]["median"] = 10.0
    report["card"] = "another"
    after.write_text(json.dumps(report))
    outcome = run("diff", str(before), str(after))
    text = words(outcome)
    assert outcome.exit_code == 1 and "1 slower, 1 faster, 0 within 3%" in text
    assert "grid bf16 4/2 seqlen_q 1 B 1 context 512 10.00 us 10.50 us 1.050" in text
    assert "B 2 context 512 20.00 us 10.00 us 0.500" in text and "card differs" in text
    assert run("diff", str(before), str(after), "--tolerance", "0.05").exit_code == 0
    assert run("diff", str(after), str(before), "--tolerance", "0.6").exit_code == 1  # twice as slow the other way


def test_a_shape_that_is_wrong_now_is_slower_than_any_tolerance(two_runs: tuple[Path, Path, dict[str, Any]]) -> None:
    before, after, report = two_runs
    report["rows"][0] |= {"best": None, "sides": {"ours": {"status": "wrong", "reason": "row error 0.3"}}}
    del report["rows"][1]
    after.write_text(json.dumps(report))
    outcome = run("diff", str(before), str(after), "--tolerance", "9")
    assert outcome.exit_code == 1 and "row error 0.3" in words(outcome)
    assert "only in the first report: 1 (grid bf16 4/2 seqlen_q 1 B 2 context 512)" in words(outcome)


def test_diff_compares_host_and_cpu_figures() -> None:
    host: dict[str, Any] = {
        "eager": {"fp8": {"ours": {"status": "ok", "host_us": {"median": 18.0}}, "vllm": {"status": "ok"}}},
        "import": {"median_ms": 30.0}, "first_call": {"cold_ms": 900.0, "warm_ms": 60.0},
    }  # fmt: skip
    before = {"rows": [], "host": host}
    assert set(records.quantities(before)) == {
        "host eager call fp8 ours", "host import median", "host first call cold", "host first call warm",
    }  # fmt: skip
    after = {"rows": [], "host": {**host, "first_call": {"status": "error", "reason": "no nvrtc"}}}
    found = records.diff(before, after, 0.03)
    assert [(c.name, c.reason) for c in found.slower] == [
        ("host first call cold", "no nvrtc"), ("host first call warm", "no nvrtc"),
    ]  # fmt: skip
    times = [{"kind": "cpu", "results": [{"form": "fp8", "ours_ms": ms}]} for ms in (4.0, 5.0)]
    assert [c.ratio for c in records.diff(*times, 0.03).slower] == [1.25]


def test_reports_with_nothing_in_common_or_a_bad_tolerance_are_refused(
    two_runs: tuple[Path, Path, dict[str, Any]],
) -> None:
    before, after, report = two_runs
    assert "tolerance must be 0 or more" in words(run("diff", str(before), str(after), "--tolerance", "-1"))
    for row in report["rows"]:
        row["context"] = 1024
    after.write_text(json.dumps(report))
    outcome = run("diff", str(before), str(after))
    assert outcome.exit_code == 2 and "no shape in common" in words(outcome)


def test_plot_redraws_the_same_pictures(tmp_path: Path) -> None:
    decode(tmp_path / "a", "--against", "sdpa", "--context", "2K")
    outcome = run("plot", str(tmp_path / "a" / "decode.json"), "--out", str(tmp_path / "b"))
    assert outcome.exit_code == 0, outcome.output
    pictures(tmp_path / "b", "decode-time", "decode-share", "decode-speedup")
    for path in (tmp_path / "b").glob("*.svg"):
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()


def test_plot_compares_runs_and_marks_where_the_first_loses(two_runs: tuple[Path, Path, dict[str, Any]]) -> None:
    before, after, report = two_runs
    report["rows"][0]["sides"]["ours"]["time_us"]["median"] = 8.0
    after.write_text(json.dumps(report))
    out = before.parent / "plots"
    outcome = run("plot", str(before), str(after), "--out", str(out))
    assert outcome.exit_code == 0, outcome.output
    assert "8.00 x0.80" in words(outcome) and "20.00 x1.00" in words(outcome)
    stem = "before-against-after"
    pictures(out, f"{stem}-time", f"{stem}-share", f"{stem}-speedup")
    merged = records.side_by_side({"before": records.load(before), "after": records.load(after)})
    from msa_ops.bench import plots

    (axis,) = plots._speedup(merged, merged["rows"]).axes
    assert axis.get_title() == "after, bf16: losing at 1 of 2"
    assert [text.get_text() for text in axis.texts] == ["0.800"]
    (losing,) = [c.get_offsets().tolist() for c in axis.collections]
    assert losing == [[1.0, 0.8]]


def test_the_floor_is_drawn_into_the_time_plot(two_runs: tuple[Path, Path, dict[str, Any]]) -> None:
    from msa_ops.bench import plots

    report = records.load(two_runs[0])
    (axis,) = plots._time(report, report["rows"], report["rows"]).axes
    lines = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axis.lines}
    assert lines["floor"] == [(row["batch"], row["floor_us"]) for row in report["rows"]]
    assert lines["ours"] == [(1, 10.0), (2, 20.0)]
    (axis,) = plots._share(report, report["rows"]).axes
    shares = [100 * row["floor_us"] / (10.0 * row["batch"]) for row in report["rows"]]
    assert list(axis.lines[0].get_ydata()) == pytest.approx(shares)


def test_plot_draws_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    report = decode(tmp_path, "--against", "none", "--no-plots", "--batch", "1,2", "--heads", "4/2,4/1")
    file, out = str(tmp_path / "decode.json"), tmp_path / "some"
    assert run("plot", file, "--heads", "4/1", "--name", "some", "--out", str(out)).exit_code == 0
    pictures(out, "some-time", "some-share")
    chosen = records.select(report, heads=["4/1"], seqlen_q=None)
    assert [(row["heads"], row["batch"]) for row in chosen["rows"]] == [("4/1", 1), ("4/1", 2)]
    outcome = run("plot", file, "--kv", "fp8", "--out", str(tmp_path / "none"))
    assert outcome.exit_code == 2 and "--kv: the report has bf16, got fp8" in words(outcome)
    assert not (tmp_path / "none").exists()
    assert run("plot", file, "--seqlen-q", "x", "--out", str(out)).exit_code == 2


def test_pictures_of_the_real_run_are_small_and_mark_every_losing_point() -> None:
    from msa_ops.bench import plots

    report = records.load(Path(__file__).parents[1] / "benchmarks" / "results" / "h200.json")
    grid = records.select(report, preset=("grid",))
    losing = 0
    for axis in plots.figures(grid, "x")["x-speedup"].axes:
        found = [point for c in axis.collections for point in c.get_offsets().tolist()]
        assert f"losing at {len(found)} of" in axis.get_title() and all(y < 1 for _, y in found)
        losing += len(found)
    assert losing == sum(peer["losing"] for peer in report["summary"]["peers"].values())
    kvs = list(dict.fromkeys(row["kv"] for row in grid["rows"]))
    times = plots.figures(records.select(grid, heads=("64/4",), seqlen_q=(1,)), "x")["x-time"]
    assert [axis.get_title() for axis in times.axes] == [f"{kv}, heads 64/4, seqlen_q 1" for kv in kvs]
    assert all("floor" in [line.get_label() for line in axis.lines] for axis in times.axes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "has schema version 2; this msa-ops reads 1"),
        ({"kind": "sweep of this package alone"}, "is no report of msa-ops bench"),
        ({"rows": [{"kv": "fp8"}]}, "fields are missing"),
    ],
)
def test_a_file_that_is_no_such_report_is_refused(
    change: dict[str, Any], message: str, two_runs: tuple[Path, Path, dict[str, Any]]
) -> None:
    before, after, report = two_runs
    after.write_text(json.dumps(report | change))
    for arguments in (("plot", str(after)), ("diff", str(before), str(after))):
        outcome = run(*arguments)
        assert outcome.exit_code == 2 and message in words(outcome)


# --- on a GPU ---


@pytest.mark.gpu
def test_smoke_on_the_gpu(tmp_path: Path) -> None:
    outcome = run("decode", "--smoke", "--kv", "bf16,fp8", "--batch", "2", "--heads", "16/1", "--out", str(tmp_path))
    assert outcome.exit_code == 0, outcome.output
    assert json.loads((tmp_path / "decode.json").read_text())["driver"]
