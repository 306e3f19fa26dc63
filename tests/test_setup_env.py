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
    machine(monkeypatch, module)
    return module


def machine(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *, gpu: bool = False, cuda: str | None = None) -> None:
    """Pretend a machine with or without a GPU, whose torch was built for `cuda` (None: for the CPU)."""
    monkeypatch.setattr(module, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(module, "torch_cuda", lambda: cuda)
    monkeypatch.setattr(module.sys, "platform", "linux")


def complete(module: ModuleType, extra: str = "demo") -> dict[str, str]:
    """Versions of every package of an extra, all in range; without the CUDA engine's."""
    versions = {name: "999" for name, span in module.requirements(extra) if "<" not in span}
    return {**versions, "transformers": "5.20.1"}


CUDA12 = {"cuda-bindings": "12.9.4", "nvidia-cuda-nvrtc-cu12": "12.8.93"}
CUDA13 = {"cuda-bindings": "13.0.3", "nvidia-cuda-nvrtc": "13.0.88"}


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
    assert outcome.stdout.splitlines() == [sys.executable]
    # A GPU beside a CPU build of torch is the one thing it may remark.
    assert all("CPU build" in line or "Install a CUDA build" in line for line in outcome.stderr.splitlines())


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
    installed_versions(monkeypatch, setup_env, complete(setup_env))
    monkeypatch.setattr(setup_env, "install", lambda *_: pytest.fail("it installed"))
    main(setup_env, monkeypatch)
    assert capsys.readouterr().out.splitlines() == [sys.executable]


@pytest.mark.parametrize(
    "extra, gpu, cuda, engine",
    [
        ("demo", False, None, {}),
        ("demo", False, "13.0", {}),
        ("demo", True, None, {}),
        ("demo", True, "12.8", CUDA12),
        ("demo", True, "13.0", CUDA13),
        ("dev", False, None, CUDA13),
        ("dev", True, None, CUDA13),
        ("dev", False, "12.6", CUDA12),
        ("dev", True, "12.8", CUDA12),
        ("dev", True, "13.0", CUDA13),
    ],
)
def test_the_cuda_engines_packages_are_those_of_torchs_cuda_version(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    extra: str, gpu: bool, cuda: str | None, engine: dict[str, str],
) -> None:  # fmt: skip
    """An interpreter that has them is used as it is; one that lacks one of them is not."""
    machine(monkeypatch, setup_env, gpu=gpu, cuda=cuda)
    installs: list[str] = []
    monkeypatch.setattr(setup_env, "install", lambda extra, *_: installs.append(extra))
    monkeypatch.setattr(setup_env, "torch_site", lambda _: None)
    have = {**complete(setup_env, extra), **engine}
    installed_versions(monkeypatch, setup_env, have)
    main(setup_env, monkeypatch, extra)
    assert not installs and capsys.readouterr().out.splitlines() == [sys.executable]
    for name in engine:
        installed_versions(monkeypatch, setup_env, {n: v for n, v in have.items() if n != name})
        main(setup_env, monkeypatch, extra)
        assert installs.pop() == extra and f"{name}>=" in capsys.readouterr().err
    if engine:
        other = CUDA12 if engine is CUDA13 else CUDA13
        installed_versions(monkeypatch, setup_env, {**complete(setup_env, extra), **other})
        main(setup_env, monkeypatch, extra)
        assert installs == [extra]


def test_an_older_cuda_version_is_named(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    machine(monkeypatch, setup_env, gpu=True, cuda="11.8")
    assert setup_env.engine_requirements("demo", "11.8") == []
    assert "torch was built for CUDA 11.8; the CUDA engine needs a torch built for CUDA 12 or 13" in (
        capsys.readouterr().err
    )


def test_where_nvidia_has_no_packages_none_are_asked_for(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env.sys, "platform", "darwin")
    assert setup_env.engine_requirements("dev", None) == []


def test_no_extra_but_the_two_pins_the_cuda_bindings(setup_env: ModuleType) -> None:
    """`dev` fits a torch of either CUDA version; the range of the other would be installed over its bindings."""
    assert not {name for name, _ in setup_env.requirements("dev") if "cuda" in name}
    for name, engine in (("cuda12", CUDA12), ("cuda13", CUDA13)):
        assert {n for n, _ in setup_env.requirements(name, base=False)} == set(engine)


def test_torchs_cuda_version_is_read_from_its_file(setup_env: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "version.py"
    for line, want in (
        ("cuda: Optional[str] = '12.8'", "12.8"), ('cuda = "13.0"', "13.0"), ("cuda: Optional[str] = None", None),
    ):  # fmt: skip
        file.write_text(
            f"__version__ = '2.13.0'\ndebug = False\n{line}\nhip: Optional[str] = '6.4'\n", encoding="utf-8"
        )
        assert setup_env.built_for(file) == want
    assert setup_env.built_for(tmp_path / "none.py") is None
    import torch

    assert setup_env.built_for(Path(torch.__file__).with_name("version.py")) == torch.version.cuda


def test_a_cpu_build_beside_a_gpu_is_reported_on_every_path(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A complete interpreter; an environment made before around a reused torch; one made before with its own torch."""
    warning = "WARNING: this machine has an NVIDIA GPU, and this torch is a CPU build"
    machine(monkeypatch, setup_env, gpu=True)
    installed_versions(monkeypatch, setup_env, complete(setup_env))
    main(setup_env, monkeypatch)
    said = capsys.readouterr()
    assert warning in said.err and said.out.splitlines() == [sys.executable]

    installed_versions(monkeypatch, setup_env, {})
    setup_env.venv_python().parent.mkdir(parents=True)
    setup_env.venv_python().touch()
    for torch in (("2.13.0+cpu", Path("/site")), None):
        monkeypatch.setattr(setup_env, "torch_site", lambda _, torch=torch: torch)
        stamp = setup_env.stamp("demo", setup_env.requirements("demo"), torch)
        setup_env.STAMP.write_text(f"{stamp} demo\n", encoding="utf-8")
        main(setup_env, monkeypatch)
        said = capsys.readouterr()
        assert warning in said.err and said.out.splitlines() == [str(setup_env.venv_python())]
    site = setup_env.VENV / "lib" / "python3.11" / "site-packages" / "torch"
    site.mkdir(parents=True)
    (site / "version.py").write_text("cuda: Optional[str] = '13.0'\n", encoding="utf-8")
    main(setup_env, monkeypatch)
    assert warning not in capsys.readouterr().err


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
    monkeypatch.setattr(setup_env, "report_torch", lambda: "13.0" if torch else None)
    machine(monkeypatch, setup_env, gpu=True)
    wanted = setup_env.requirements("demo")
    setup_env.install("demo", wanted, torch)
    pins = (setup_env.VENV / "constraints.txt").read_text(encoding="utf-8").split()
    said = capsys.readouterr().err
    if torch is None:
        assert "torch==2.13.0" in pins and "no torch in range is installed: installing torch==2.13.0" in said
    else:
        assert "torch==2.11.0+cu130" in pins and "torch==2.13.0" not in pins and "reusing the installed torch" in said
    assert {name + span for name, span in wanted} <= set(commands[0])
    # The CUDA engine's packages come once it is known what torch was built for, within the same constraints.
    assert len(commands) == (1 if torch is None else 2)
    if torch is not None:
        assert commands[1][: len(commands[0])] == commands[0]
        assert commands[1][len(commands[0]) :] == ["cuda-bindings>=13.0,<14", "nvidia-cuda-nvrtc>=13.0,<14"]


@pytest.mark.parametrize("pip", [None, "22.0.2", "22.3", "23.2.1"])
def test_without_ensurepip_an_old_pip_gets_the_remedy(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, pip: str | None
) -> None:
    """``pip --python`` came with pip 22.3; Ubuntu 22.04 has 22.0.2."""
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="")
    monkeypatch.setattr(setup_env.subprocess, "run", lambda *a, **k: failed)
    commands: list[list[str]] = []
    monkeypatch.setattr(setup_env, "run", commands.append)
    installed_versions(monkeypatch, setup_env, {} if pip is None else {"pip": pip})
    if pip in (None, "22.0.2"):
        with pytest.raises(SystemExit, match="apt-get install python3-venv"):
            setup_env.create_venv(None)
        assert not commands
    else:
        assert "--python" in setup_env.create_venv(None) and "--without-pip" in commands[0]


def test_the_environment_is_made_once(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run with the same requirements installs nothing; other pins do; an environment for dev serves demo."""
    made: list[str] = []

    def install(extra: str, wanted: Any, torch: Any) -> None:
        made.append(extra)
        setup_env.venv_python().parent.mkdir(parents=True, exist_ok=True)
        setup_env.venv_python().touch()
        setup_env.STAMP.write_text(setup_env.stamp(extra, wanted, torch) + f" {extra}\n", encoding="utf-8")

    monkeypatch.setattr(setup_env, "install", install)
    installed_versions(monkeypatch, setup_env, {})
    for extra in ("demo", "demo", "dev", "demo", "dev"):
        main(setup_env, monkeypatch, extra)
    assert made == ["demo", "dev"]
    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: True)
    main(setup_env, monkeypatch, "demo")
    assert made == ["demo", "dev"], "an environment for dev has the CUDA engine's packages"
    monkeypatch.setattr(setup_env.sys, "version", "another")
    main(setup_env, monkeypatch, "demo")
    assert made == ["demo", "dev", "demo"]
    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: False)
    main(setup_env, monkeypatch, "demo")
    assert made == ["demo", "dev", "demo", "demo"]


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
        assert setup_env.report_torch() == (None if "cpu" in output else "13.0")
        said = capsys.readouterr().err
        assert ("WARNING: this machine has an NVIDIA GPU" in said) == warned
        assert ("CPU build" if "cpu" in output else "CUDA 13.0") in said
