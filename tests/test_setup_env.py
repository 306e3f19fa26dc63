"""tools/setup_env.py, which `make` runs with nothing installed: what it reads, and what it decides."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def setup_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with its environment in a temporary folder and every command recorded, not run."""
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools" / "setup_env.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "msa_ops.stamp")
    return module


def installed_versions(monkeypatch: pytest.MonkeyPatch, module: ModuleType, versions: dict[str, str]) -> None:
    monkeypatch.setattr(module, "installed", versions.get)


def main(module: ModuleType, monkeypatch: pytest.MonkeyPatch, extra: str = "demo") -> None:
    monkeypatch.setattr(sys, "argv", ["setup_env.py", extra])
    module.main()


def test_it_runs_on_this_interpreter_without_the_project() -> None:
    """The tests' own interpreter has everything: it is printed, and nothing is installed."""
    command = [sys.executable, "-I", str(ROOT / "tools" / "setup_env.py"), "dev"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.splitlines() == [sys.executable] and not outcome.stderr


@pytest.mark.parametrize(
    "version, span, holds",
    [
        ("2.13.0+cpu", ">=2.9", True),
        ("2.9", ">=2.9.0", True),
        ("2.8.1", ">=2.9", False),
        ("2.10.0", ">=2.9", True),
        ("5.24.0", ">=5.17,<6", True),
        ("6.0.0.dev0", ">=5.17,<6", False),
        ("5.16.9", ">=5.17, <6", False),
        ("1.0", "", True),
        ("1.0", "!=1.0", False),
        ("1.0.0", "==1", True),
        ("1.1", "<=1.0", False),
        ("1.1", ">1.0", True),
    ],
)
def test_version_ranges(setup_env: ModuleType, version: str, span: str, holds: bool) -> None:
    assert setup_env.in_range(version, span) == holds


def test_unreadable_ranges_stop_it(setup_env: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"cannot read the version bound '~=1\.0'"):
        setup_env.in_range("1.0", "~=1.0")


def test_extras_of_the_project_are_expanded(setup_env: ModuleType) -> None:
    demo, dev = (dict(setup_env.requirements(extra)) for extra in ("demo", "dev"))
    assert (
        demo["torch"] == ">=2.9"
        and demo["transformers"] == ">=5.17,<6"
        and {"rich", "typer", "matplotlib"} <= set(demo)
    )
    assert set(demo) < set(dev) and {"pytest", "pytest-xdist", "ruff", "mypy"} <= set(dev)
    assert "msa-ops" not in dev
    with pytest.raises(SystemExit, match="no array named 'nothing'"):
        setup_env.requirements("nothing")


def test_requirements_are_what_a_toml_parser_reads(setup_env: ModuleType) -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra, listed in project["optional-dependencies"].items():
        names = {re.split(r"[\[<>=!~ ]", item)[0] for item in listed} - {"msa-ops"}
        assert names <= set(dict(setup_env.requirements(extra))), extra


def test_an_interpreter_with_everything_is_used_as_it_is(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {name: "999" for name, span in setup_env.requirements("demo") if "<" not in span}
    installed_versions(monkeypatch, setup_env, {**versions, "transformers": "5.20.1"})
    monkeypatch.setattr(setup_env, "install", lambda *_: pytest.fail("it installed"))
    main(setup_env, monkeypatch)
    assert capsys.readouterr().out.splitlines() == [sys.executable]


@pytest.mark.parametrize("torch", [None, ("2.11.0+cu130", Path("/site"))])
def test_a_torch_in_range_is_kept_and_a_missing_one_is_announced(
    setup_env: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    torch: tuple[str, Path] | None,
) -> None:
    """The constraints pin an installed torch to its own build; without one they pin the tested version, and say so."""
    commands: list[list[str]] = []

    def create_venv(_: Any) -> list[str]:
        setup_env.VENV.mkdir()
        return ["pip"]

    monkeypatch.setattr(setup_env, "create_venv", create_venv)
    monkeypatch.setattr(setup_env, "run", commands.append)
    monkeypatch.setattr(setup_env, "report_torch", lambda: None)
    wanted = setup_env.requirements("demo")
    setup_env.install("demo", wanted, torch)
    pins = (setup_env.VENV / "constraints.txt").read_text(encoding="utf-8").split()
    said = capsys.readouterr().err
    if torch is None:
        assert "torch==2.13.0" in pins and "no torch in range is installed: installing torch==2.13.0" in said
    else:
        assert "torch==2.11.0+cu130" in pins and "torch==2.13.0" not in pins and "reusing the installed torch" in said
    assert len(commands) == 1 and {name + span for name, span in wanted} <= set(commands[0])


def test_the_environment_is_made_once(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run with the same requirements installs nothing; other pins do; an environment for dev serves demo."""
    made: list[str] = []

    def install(extra: str, wanted: Any, torch: Any) -> None:
        made.append(extra)
        setup_env.venv_python().parent.mkdir(parents=True, exist_ok=True)
        setup_env.venv_python().touch()
        setup_env.STAMP.write_text(setup_env.stamp(wanted, torch) + f" {extra}\n", encoding="utf-8")

    monkeypatch.setattr(setup_env, "install", install)
    installed_versions(monkeypatch, setup_env, {})
    for extra in ("demo", "demo", "dev", "demo", "dev"):
        main(setup_env, monkeypatch, extra)
    assert made == ["demo", "dev"]
    monkeypatch.setattr(setup_env.sys, "version", "another")
    main(setup_env, monkeypatch, "demo")
    assert made == ["demo", "dev", "demo"]


def test_a_cpu_build_beside_a_gpu_is_not_passed_over(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for output, gpu, warned in (
        ("2.13.0+cpu \n", True, True),
        ("2.13.0+cpu \n", False, False),
        ("2.13.0 13.0\n", True, False),
    ):
        done = subprocess.CompletedProcess([], 0, stdout=output, stderr="")
        monkeypatch.setattr(setup_env.subprocess, "run", lambda *a, done=done, **k: done)
        monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda gpu=gpu: gpu)
        setup_env.report_torch()
        said = capsys.readouterr().err
        assert ("WARNING: this machine has an NVIDIA GPU" in said) == warned
        assert ("CPU build" if "cpu" in output else "CUDA 13.0") in said
