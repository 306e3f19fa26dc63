#!/usr/bin/env python3
"""Find, or make, a Python environment with what an extra of pyproject.toml needs, and print its interpreter's path.

    python3 tools/setup_env.py demo      # or: dev

Only the standard library is used. In order:

1. If this interpreter has every package in range, it is used as it is and nothing is installed.
2. Otherwise `.venv` in the project's root is used, and made if it is missing or its stamp is old (the stamp is a hash
   of the requirements, the pinned versions and the interpreter). An installed torch that is in range is reused through
   system site packages and pinned to its version: it is never replaced, whatever its build.

The packages include those of the CUDA engine (extra cuda12 or cuda13, by the CUDA version that torch was built for):
for `demo` where there is an NVIDIA GPU, for `dev` always, because compiling the kernels can be tested without a GPU.

Messages go to stderr; the last and only line on stdout is the interpreter to run.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "msa_ops.stamp"
PROJECT = "msa-ops"

Requirement = tuple[str, str]
"""A package's name and its range, e.g. ``("torch", ">=2.9")``."""


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


def _array(text: str, key: str) -> list[str]:
    """The array of strings named `key` in a TOML text. Python 3.10 has no tomllib; such an array is also Python."""
    match = re.search(rf"^{re.escape(key)}\s*=\s*(\[(?:[^\[\]]|\[[^\]]*\])*\])", text, re.MULTILINE)
    if match is None:
        raise SystemExit(f"setup: pyproject.toml has no array named {key!r}")
    return [str(item) for item in ast.literal_eval(match.group(1))]


def requirements(extra: str, *, base: bool = True) -> list[Requirement]:
    """The packages of `extra`, with `base` also the project's own; extras of the project itself are expanded."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    pending = [*(_array(text, "dependencies") if base else []), f"{PROJECT}[{extra}]"]
    while pending:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[([^\]]*)\])?\s*(.*)", pending.pop().strip())
        assert match is not None
        name, extras, span = match.group(1), match.group(2), match.group(3)
        if name == PROJECT:
            for part in (extras or "").split(","):
                pending += _array(text, part.strip())
        else:
            found[name] = span
    return sorted(found.items())


def release(version: str) -> tuple[int, ...]:
    """The numeric release of a version: ``2.13.0+cpu`` and ``2.13`` are both ``(2, 13)``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    parts = [int(p) for p in match.group(0).split(".")] if match else [0]
    while len(parts) > 1 and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def in_range(version: str, span: str) -> bool:
    """Whether `version` is in a range of ``>=``, ``<``, ``==``, ``>``, ``<=`` and ``!=`` bounds separated by commas."""
    have = release(version)
    for bound in filter(None, (b.strip() for b in span.split(","))):
        match = re.fullmatch(r"(>=|<=|==|!=|>|<)\s*(\S+)", bound)
        if match is None:
            raise SystemExit(f"setup: cannot read the version bound {bound!r} in pyproject.toml")
        want = release(match.group(2))
        holds = {
            ">=": have >= want, "<=": have <= want, "==": have == want, "!=": have != want, ">": have > want,
            "<": have < want,
        }  # fmt: skip
        if not holds[match.group(1)]:
            return False
    return True


def installed(name: str) -> str | None:
    """The version of a package that this interpreter has, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def lacking(wanted: list[Requirement]) -> list[str]:
    """What this interpreter lacks, in words."""
    found = [(name, span, installed(name)) for name, span in wanted]
    return [f"{n}{s} ({v or 'not installed'})" for n, s, v in found if v is None or not in_range(v, s)]


def torch_site(span: str) -> tuple[str, Path] | None:
    """Version and site directory of a torch in range that this interpreter has, or None."""
    version = installed("torch")
    if version is None or not in_range(version, span):
        return None
    return version, Path(str(importlib.metadata.distribution("torch").locate_file(""))).resolve()


def torch_cuda() -> str | None:
    """The CUDA version that this interpreter's torch was built for, or None (a CPU build, or no torch)."""
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else built_for(Path(spec.origin).with_name("version.py"))


def venv_torch_cuda() -> str | None:
    """The same for a torch that lies in `.venv` itself."""
    for folder in ("lib/python*", "Lib"):
        for file in VENV.glob(f"{folder}/site-packages/torch/version.py"):
            return built_for(file)
    return None


def built_for(version_file: Path) -> str | None:
    """The CUDA version in a torch/version.py. It is read as text: importing torch takes seconds."""
    text = version_file.read_text(encoding="utf-8") if version_file.exists() else ""
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else None


def engine_requirements(extra: str, cuda: str | None) -> list[Requirement]:
    """The CUDA engine's packages that an environment for `extra` needs beside a torch built for `cuda` (None: a CPU's)."""
    if extra != "dev" and (cuda is None or not has_nvidia_gpu()):
        return []
    if cuda is None:
        # NVRTC compiles without a GPU and without torch, but NVIDIA has packages of it for Linux and Windows only.
        return requirements("cuda13", base=False) if sys.platform in ("linux", "win32") else []
    name = f"cuda{cuda.partition('.')[0]}"
    if name not in ("cuda12", "cuda13"):
        say(f"WARNING: torch was built for CUDA {cuda}; the CUDA engine needs a torch built for CUDA 12 or 13.")
        return []
    return requirements(name, base=False)


def stamp(extra: str, wanted: list[Requirement], torch: tuple[str, Path] | None) -> str:
    """A hash of all that decides what `.venv` holds."""
    pins = (ROOT / "constraints-dev.txt").read_text(encoding="utf-8")
    engine = [requirements(name, base=False) for name in ("cuda12", "cuda13")]
    facts = repr((wanted, engine, extra == "dev" or has_nvidia_gpu(), pins, sys.version, str(torch)))
    return hashlib.sha256(facts.encode()).hexdigest()


def venv_python() -> Path:
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def run(command: list[str]) -> None:
    """Run a command with its output on stderr, so that stdout stays the interpreter's path."""
    result = subprocess.run(command, stdout=sys.stderr, check=False)
    if result.returncode != 0:
        raise SystemExit(f"setup: this command failed ({result.returncode}): {' '.join(command)}")


def create_venv(torch: tuple[str, Path] | None) -> list[str]:
    """Make `.venv` afresh, able to see `torch` if one is installed. Returns the pip command that installs into it."""
    shutil.rmtree(VENV, ignore_errors=True)
    flags = ["--system-site-packages"] if torch is not None and sys.prefix == sys.base_prefix else []
    made = subprocess.run(
        [sys.executable, "-m", "venv", *flags, str(VENV)], stdout=sys.stderr, stderr=subprocess.DEVNULL, check=False
    )
    pip = [str(venv_python()), "-m", "pip"]
    if made.returncode != 0:
        # Debian splits ensurepip off into python3-venv; a system's pip can install into an environment without one, if
        # it is new enough to know --python.
        shutil.rmtree(VENV, ignore_errors=True)
        if not in_range(installed("pip") or "0", ">=22.3"):
            raise SystemExit(
                f"setup: {sys.executable} can make no environment with pip. Install its venv package (Debian and "
                "Ubuntu: apt-get install python3-venv) and run again."
            )
        run([sys.executable, "-m", "venv", "--without-pip", *flags, str(VENV)])
        pip = [sys.executable, "-m", "pip", "--python", str(venv_python())]
    if torch is not None and not flags:
        # This interpreter is itself a virtual environment, which --system-site-packages would not show.
        paths = subprocess.run(
            [str(venv_python()), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        (Path(paths.stdout.strip()) / "installed_torch.pth").write_text(f"{torch[1]}\n", encoding="utf-8")
    return pip


def has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def install(extra: str, wanted: list[Requirement], torch: tuple[str, Path] | None) -> None:
    pins = (ROOT / "constraints-dev.txt").read_text(encoding="utf-8").splitlines()
    if torch is not None:
        say(f"reusing the installed torch {torch[0]}")
        pins = [line for line in pins if re.match(r"torch\b", line) is None] + [f"torch=={torch[0]}"]
    else:
        pin = next((line for line in pins if re.match(r"torch\b", line)), "torch")
        say(f"no torch in range is installed: installing {pin} and its dependencies from your package index")
        say("(with CUDA libraries that is several GB; to choose a build, install torch first and run again)")
    pip = create_venv(torch)
    constraints = VENV / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n", encoding="utf-8")
    # A download may take minutes: someone at a terminal sees it go on, a log stays short.
    flags = ["--disable-pip-version-check", *([] if sys.stderr.isatty() else ["--quiet"])]
    command = [*pip, "install", *flags, "-c", str(constraints), *(name + span for name, span in wanted)]
    run(command)
    # Only now is it known what a torch that was just installed was built for. What is in range is not installed again.
    engine = engine_requirements(extra, report_torch())
    if engine:
        run([*command, *(name + span for name, span in engine)])
    STAMP.write_text(stamp(extra, wanted, torch) + f" {extra}\n", encoding="utf-8")


def report_torch() -> str | None:
    """Say which torch the environment has, and return the CUDA version that it was built for, or None."""
    code = "import torch; print(torch.__version__, torch.version.cuda or '')"
    result = subprocess.run([str(venv_python()), "-c", code], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"setup: torch does not import in {VENV}:\n{result.stderr}")
    version, _, cuda = result.stdout.strip().partition(" ")
    say(f"torch {version} ({'CUDA ' + cuda if cuda else 'CPU build'}) is ready")
    warn_of_cpu_build(cuda or None)
    return cuda or None


def warn_of_cpu_build(cuda: str | None) -> None:
    """Say where a GPU meets a torch that cannot use it."""
    if cuda is None and has_nvidia_gpu():
        say("WARNING: this machine has an NVIDIA GPU, and this torch is a CPU build that cannot use it.")
        say(f"Install a CUDA build of torch for {sys.executable} (see pytorch.org), delete .venv, and run again.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("extra", help="extra of pyproject.toml: demo or dev")
    extra = parser.parse_args().extra
    if sys.version_info < (3, 10):  # noqa: UP036 (this runs before anything could check)
        raise SystemExit(
            f"setup: Python 3.10 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.12 ..."
        )
    wanted = requirements(extra)
    cuda = torch_cuda()
    missing = lacking(wanted + engine_requirements(extra, cuda))
    if not missing:
        warn_of_cpu_build(cuda)
        print(sys.executable)
        return
    torch = torch_site(dict(wanted)["torch"])
    if not is_current(extra, wanted, torch):
        say(f"{sys.executable} lacks {', '.join(missing)}")
        say(f"making {VENV} (once)")
        install(extra, wanted, torch)
    else:
        warn_of_cpu_build(cuda if torch is not None else venv_torch_cuda())
    print(venv_python())


def is_current(extra: str, wanted: list[Requirement], torch: tuple[str, Path] | None) -> bool:
    """Whether `.venv` was made for these requirements, or for `dev`, which contains those of every other extra."""
    if not STAMP.exists() or not venv_python().exists():
        return False
    have, _, made_for = STAMP.read_text(encoding="utf-8").strip().partition(" ")
    if made_for == "dev" and extra != "dev":
        extra, wanted = "dev", requirements("dev")
    return have == stamp(extra, wanted, torch)


if __name__ == "__main__":
    main()
