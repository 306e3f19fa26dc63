"""benchmarks/quantize.py and benchmarks/selection.py without a GPU: help, refusal, and their work done by the CPU's engine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import msa_ops

ROOT = Path(__file__).parents[1]
SCRIPTS = ("quantize", "selection")
CPU = torch.device("cpu")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["quantize", "selection", "decode", "cpu"])
def test_a_script_prints_its_help(name: str, tmp_path: Path) -> None:
    """As a program: the folder of the scripts then comes before the standard library on the path."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout and "--commit" in done.stdout


def test_no_script_hides_a_module_of_the_standard_library() -> None:
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert set(SCRIPTS) < names and not names & sys.stdlib_module_names


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_gpu_a_script_says_what_it_needs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load(name).main(["--json", str(tmp_path / "r.json")]) == 1
    assert "no CUDA device: use a machine with an NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


def with_cpu_as_gpu(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    facts = module.environment.short_facts
    monkeypatch.setattr(module.environment, "short_facts", lambda _, commit: facts(CPU, commit))


def fields(name: str) -> tuple[set[str], list[dict[str, Any]]]:
    """The fields of a committed file, and its records."""
    whole = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    key = "rows" if "rows" in whole else "records"
    return set(whole), whole[key]


def test_quantize_writes_the_committed_files_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("quantize")
    with_cpu_as_gpu(module, monkeypatch)

    def graph_us(self: Any, calls: Any, *_: int) -> float:
        for call in calls:
            call()
        return 2.0

    rows = module.ROWS
    for name, value in (("SIZE", 1 << 20), ("ROWS", 4096)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module.Timer, "graph_us", graph_us)
    monkeypatch.setattr(module, "kernel_calls", lambda xs: [])
    monkeypatch.setattr(module.quantize, "quantize_rows", msa_ops.nvfp4_quantize)
    monkeypatch.setattr(module, "measure", lambda device, whole=module.measure: whole(CPU))
    file = tmp_path / "q.json"
    assert module.main(["--commit", "abc", "--json", str(file)]) == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    wanted, old = fields("h200-quantize.json")
    assert set(found) == wanted | {"time"} and found["commit"] == "abc" and found["schema_version"] == 1
    names = [row["name"].strip().replace("16384 tokens", "256 tokens") for row in old]
    assert [row["name"] for row in found["rows"]] == names
    assert [set(row) for row in found["rows"]] == [set(row) for row in old]
    sizes = [(row["bytes"], was["bytes"]) for row, was in zip(found["rows"], old, strict=True) if "bytes" in row]
    assert all(was == nbytes * rows // 4096 for nbytes, was in sizes) and rows == 1 << 18


def test_selection_writes_the_committed_files_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("selection")
    with_cpu_as_gpu(module, monkeypatch)
    small = {"BLOCKS": (64, 256), "BATCHES": (1, 2), "STEP_CONTEXTS": (2048,), "STEP_PAGES": 20, "REPLAYS": 1}
    small |= {"SCORE_SHAPES": ((1, 256), (2, 2048)), "RAGGED": (3, 1024), "SCORE_POOL_BYTES": 1 << 19}
    for name, value in (small | {"_FILL": 1 << 20, "GOALS": {(64, 1): 1e9, (256, 2): 0.0}}).items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "Measurement", lambda _, budget, whole=module.Measurement: whole(CPU, budget))
    file = tmp_path / "s.json"
    assert module.main(["--commit", "abc", "--json", str(file), "--time-budget", "1000"]) == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    wanted, old = fields("h200-select.json")
    assert set(found) == wanted | {"time"} and found["commit"] == "abc"
    for part in ("select", "step"):
        (keys,) = {frozenset(row) for row in old if row["part"] == part}
        assert {frozenset(row) for row in found["records"] if row["part"] == part} == {keys}
    chosen = [(r["blocks"], r["batch"], r["innermost"], r["goal"]) for r in found["records"] if r["part"] == "select"]
    assert chosen == [
        (64, 1, "blocks", "ok"), (64, 2, "blocks", ""), (64, 2, "tokens", ""), (256, 1, "blocks", ""),
        (256, 2, "blocks", "OVER 0.0"), (256, 2, "tokens", "OVER 0.0"),
    ]  # fmt: skip
    steps = [(r["kv"], r["batch"]) for r in found["records"] if r["part"] == "step"]
    assert steps == [("bf16", 1), ("bf16", 2), ("fp8", 1), ("fp8", 2)]
    scores = [r for r in found["records"] if r["part"] == "scores"]
    assert [(r["keys"], r["batch"], r["context"], r["ragged"]) for r in scores] == [
        (keys, *shape)
        for keys in ("fp8", "bf16", "nvfp4")
        for shape in ((1, 256, False), (2, 2048, False), (3, 1024, True))
    ]
    assert [r["floor"] for r in scores if not r["ragged"]] == pytest.approx(
        [tokens * row / 4.46e6 for row in (128, 256, 72) for tokens in (256, 4096)]
    )
    for r in scores:
        assert r["bar"] == pytest.approx(r["floor"] / 0.95 + 4.5) and r["held"] == (r["both"] <= r["bar"])
    (floor,) = {r["score_floor"] for r in found["records"] if r.get("kv") == "bf16" and r["batch"] == 1}
    assert floor == pytest.approx(2048 * 256 / 4.46e6)


def test_a_wrong_selection_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = load("selection")
    with_cpu_as_gpu(module, monkeypatch)
    monkeypatch.setattr(module, "Measurement", lambda _, budget, whole=module.Measurement: whole(CPU, budget))
    right, asked = msa_ops.msa_topk_select, [0]

    def wrong(*arguments: Any) -> torch.Tensor:
        asked[0] += 1
        return right(*arguments) - asked[0] % 2

    monkeypatch.setattr(msa_ops, "msa_topk_select", wrong)
    assert module.main([]) == 1
    assert "ids differ from the CPU's; a wrong result is not timed" in capsys.readouterr().err


def test_wrong_scores_are_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = load("selection")
    with_cpu_as_gpu(module, monkeypatch)
    monkeypatch.setattr(module, "Measurement", lambda _, budget, whole=module.Measurement: whole(CPU, budget))
    small = {"BLOCKS": (), "SCORE_SHAPES": ((2, 1024),), "SCORE_POOL_BYTES": 1 << 19, "_FILL": 1 << 20}
    for name, value in small.items():
        monkeypatch.setattr(module, name, value)
    right = msa_ops.msa_proxy_score

    def wrong(*arguments: Any, output: torch.Tensor, **options: Any) -> torch.Tensor:
        return right(*arguments, output=output, **options).mul_(1.01)

    monkeypatch.setattr(msa_ops, "msa_proxy_score", wrong)
    assert module.main([]) == 1
    assert "they are not those of the products; a wrong result is not timed" in capsys.readouterr().err
