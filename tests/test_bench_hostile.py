"""The benchmark among broken reports, peers that misbehave, terminals without UTF-8 and bad values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fake_peers
from msa_ops import msa_sparse_decode_attention
from msa_ops.bench import main, records, runner
from msa_ops.bench.exact import error_against_rounding
from msa_ops.bench.options import parse
from msa_ops.bench.peers import Absent, Side, load_peers
from msa_ops.bench.presets import Job
from test_bench import right, run_with
from test_bench_cli import ONE_SHAPE, decode, run, words
from test_bench_runs import SMALL
from test_bench_step import run_step


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return decode(tmp_path_factory.mktemp("run"), "--against", "none", "--no-plots", "--batch", "1,2,3")


def copy(report: dict[str, Any]) -> Any:
    return json.loads(json.dumps(report))


# --- comparing reports ---


def test_shapes_that_are_no_longer_timed_are_an_exit_status(report: dict[str, Any], tmp_path: Path) -> None:
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.write_text(json.dumps(report))
    after.write_text(json.dumps(report | {"rows": report["rows"][:1]}))
    outcome = run("diff", str(before), str(after))
    assert outcome.exit_code == 1 and "0 slower, 0 faster, 1 within 3%, 2 no longer timed" in words(outcome)
    assert run("diff", str(after), str(before)).exit_code == 0  # more shapes are no loss


def test_a_time_that_is_no_number_is_slower() -> None:
    times = [{"kind": "cpu", "results": [{"form": "fp8", "ours_ms": ms}]} for ms in (4.0, float("nan"))]
    found = records.diff(*times, 0.03)
    assert [c.name for c in found.slower] == ["cpu fp8"] and found.within == 0


@pytest.mark.parametrize("name", ["ours", "ours[A=1]", "sdpa", "vllm", "_b", "floor"])
def test_a_run_called_like_a_side_stays_apart_from_it(name: str, report: dict[str, Any]) -> None:
    first, second = copy(report), copy(report)
    for row in second["rows"]:
        row["sides"]["ours"]["time_us"]["median"] = 123.0
    merged = records.side_by_side({"base": first, name: second})
    for row, old in zip(merged["rows"], first["rows"], strict=True):
        assert row["sides"].keys() == {"ours", f"run {name}"} and row["sides"]["ours"] == old["sides"]["ours"]
        assert records.median_of(row, f"run {name}") == 123.0


def _broken(report: dict[str, Any], what: str) -> str:
    side = report["rows"][1]["sides"]["ours"]
    if what == "deep":
        return "[" * 200_000
    if what == "no time":
        del side["time_us"]
    elif what == "no sides":
        report["rows"][1]["sides"] = {}
    elif what == "host":
        report["host"] = None
    elif what == "not ours":
        report["rows"][1] |= {"sides": {"vllm": side}, "best": "vllm"}
    elif what == "best":
        report["rows"][1]["best"] = "vllm"
    elif what == "batch":
        report["rows"][1]["batch"] = "2"
    else:
        side["time_us"]["median"] = {"zero": 0, "text": "5", "nan": float("nan"), "huge": 10**400}[what]
    return json.dumps(report)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no time", "rows[1].sides['ours'].time_us must be an object"),
        ("no sides", "rows[1].sides must hold a side of this package"),
        ("host", "host must be an object, got nothing"),
        ("not ours", "rows[1].sides must hold a side of this package"),
        ("best", "rows[1].best must be null or a side that was timed"),
        ("batch", "rows[1].batch must be a finite whole number above 0, got '2'"),
        ("zero", "time_us.median must be a finite number above 0, got 0"),
        ("text", "time_us.median must be a finite number above 0, got '5'"),
        ("nan", "time_us.median must be a finite number above 0, got nan"),
        ("huge", "time_us.median must be a finite number above 0"),
        ("deep", "nested too deeply"),
    ],
)
def test_a_broken_report_is_named_and_no_slower_time(
    what: str, message: str, report: dict[str, Any], tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(report))
    bad.write_text(_broken(copy(report), what))
    for arguments in (("diff", str(good), str(bad)), ("plot", str(bad)), ("plot", str(good), str(bad))):
        outcome = run(*arguments)
        assert outcome.exit_code == 2, outcome.output
        assert message.replace(" ", "") in words(outcome).replace(" ", "")  # however the lines are broken


# --- peers ---


@pytest.mark.parametrize("name", ["q", "q2k_indices", "page_table", "seqused_k"])
def test_a_side_that_changes_its_inputs_is_wrong_and_the_next_is_not(name: str) -> None:
    def altering(call: Any) -> None:
        right(call)
        getattr(call, name).flatten()[:1].zero_()
        getattr(call, name).view(-1)[-1] += 1

    sides: list[Side | Absent] = [Side("altering", altering, "1"), Side("right", right, "1")]
    (row,) = run_with(sides, "--seqlen-q", "1")["rows"]
    assert row["sides"]["altering"] == {"status": "wrong", "reason": "it changed its inputs"}
    assert row["sides"]["ours"]["status"] == row["sides"]["right"]["status"] == "ok"


def test_a_part_of_a_step_that_changes_its_inputs_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def altering(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = msa_sparse_decode_attention(q, *args, **kwargs)
        q.zero_()
        return result

    fake_peers.with_indexers(monkeypatch)
    monkeypatch.setattr(sys.modules[fake_peers.FLASHINFER], "msa_sparse_decode_attention", altering)
    result = run_step(None, "--kv", "bf16", "--batch", "2", "--context", "1K", "--against", "flashinfer,vllm")
    sides = {row["label"]: row["sides"] for row in result["rows"]}
    assert sides["attend"]["flashinfer"] == {"status": "wrong", "reason": "it changed its inputs"}
    assert sides["attend"]["vllm"]["status"] == sides["step"]["ours"]["status"] == "ok"


def test_a_side_that_ends_the_process_only_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def leaving(call: Any) -> None:
        sys.exit(0)

    (row,) = run_with([Side("leaving", leaving, "1")], "--seqlen-q", "1")["rows"]
    assert row["sides"]["leaving"] == {"status": "error", "reason": "SystemExit: 0"}
    assert row["sides"]["ours"]["status"] == "ok"
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.delitem(sys.modules, fake_peers.FLASHINFER, raising=False)
    assert load_peers(("flashinfer",)) == [Absent("flashinfer", "SystemExit: 0")]


# --- interrupts and files ---


@pytest.mark.parametrize(("stop", "status"), [(KeyboardInterrupt, 130), (BrokenPipeError, 141)])
def test_what_was_measured_before_an_end_is_kept(
    stop: type[BaseException], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = runner.Runner.measure

    def stopped(self: runner.Runner, job: Job) -> Any:
        if self.rows:
            raise stop
        return whole(self, job)

    monkeypatch.setattr(runner.Runner, "measure", stopped)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back after a broken pipe
    file = tmp_path / "r.json"
    assert main.main([*SMALL, "--against", "none", "--json", str(file)]) == status
    found = records.load(file)
    assert found["finished"] is False and len(found["rows"]) == 1
    if stop is KeyboardInterrupt:
        outcome = run("decode", *ONE_SHAPE, "--batch", "1,2", "--against", "none", "--out", str(tmp_path / "out"))
        assert outcome.exit_code == 130 and len(records.load(tmp_path / "out" / "decode.json")["rows"]) == 1


@pytest.mark.parametrize("option", ["--json", "--markdown"])
def test_a_file_that_cannot_be_written_is_named_before_anything_runs(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "Runner", None)
    for file in (tmp_path / "nowhere" / "x", tmp_path):
        assert main.main([*SMALL, option, str(file)]) == 2
        assert f"{option} must be a file to write" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_everything_works_without_utf8(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "LC_ALL": "C"}
    environment |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment.pop("PYTHONIOENCODING", None)
    line = "from msa_ops.cli.bench import app; app()"
    common = [*ONE_SHAPE, "--batch", "2", "--seqlen-q", "1", "--against", "none"]
    done = subprocess.run(
        [sys.executable, "-c", line, "decode", *common, "--sweep", "MSA_OPS_SWEPT=\u2717", "--no-plots",
         "--out", str(tmp_path)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "decode.json").exists()
    assert (tmp_path / "decode.md").read_text(encoding="utf-8").count("MSA_OPS_SWEPT=\u2717") > 0


# --- values ---


def test_a_result_that_needs_no_rounding_has_a_figure(tmp_path: Path) -> None:
    exact = torch.ones(2, 3, 128, dtype=torch.float64)
    assert error_against_rounding(exact.bfloat16(), exact) == {"rms": 0.0, "max": 0.0}
    outcome = run("accuracy", *ONE_SHAPE, "--context", "1", "--against", "none", "--out", str(tmp_path))
    assert outcome.exit_code == 0, outcome.output

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    json.loads((tmp_path / "accuracy.json").read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode", "--smoke", "--seed", str(2**64)), "--seed must be from -2^63"),
        (("decode", "--smoke", "--seed", str(-(2**63) - 1)), "--seed must be from -2^63"),
        (("decode", "--smoke", "--batch", "99999999999"), "--batch takes positive numbers"),
        (("decode", "--smoke", "--batch", "999999999"), "--batch must be at most"),
        (("decode", "--smoke", "--topk", "99999999999"), "--topk must be at most"),
        (("cpu", "--batch", "99999999999"), "--batch, --heads and --context must make a cache that memory holds"),
    ],
)
def test_values_past_all_bounds_are_named(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    outcome = run(*arguments, "--out", str(tmp_path / "out"))
    assert outcome.exit_code == 2 and message in words(outcome) and not (tmp_path / "out").exists()
    assert parse(["--seed", str(2**64 - 1)]).seed == 2**64 - 1


@pytest.mark.parametrize("name", ["a/b", "..", ""])
def test_a_name_of_pictures_holds_no_folder(name: str, report: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(report))
    outcome = run("plot", str(file), "--name", name, "--out", str(tmp_path / "out"))
    assert outcome.exit_code == 2 and "--name must be the beginning" in words(outcome)
