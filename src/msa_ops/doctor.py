"""What `msa-ops doctor` reports: facts of the machine, which engine serves each route, self-tests, and what is missing.

`probe` reads the machine; everything behind it is a function of what it found, so that a report about any machine can be
made on any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
import stat
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from . import selftest
from .engines.cuda import compile as compiler
from .engines.cuda import plan, programs
from .selftest import CompileResult, NumericResult

SCHEMA_VERSION = 1
TARGET_WITHOUT_GPU = (9, 0)
"""Compute capability that the compile self-test builds for where there is no GPU."""
_HIDING = "CUDA_VISIBLE_DEVICES"
_REPORTED = (_HIDING, "CUDA_DEVICE_ORDER")
_ESCAPED = "backslashreplace"
"""What becomes of bytes that are no UTF-8: a report stays printable, and shows them."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device that torch sees. Memory in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int

    @property
    def device(self) -> str:
        return f"cuda:{self.index}"

    @property
    def facts(self) -> plan.DeviceFacts:
        return plan.DeviceFacts(
            self.capability, self.multiprocessors, self.shared_per_block, self.shared_per_multiprocessor
        )

    @property
    def architecture(self) -> str | None:
        """The NVRTC target, None where the engine does not support the GPU."""
        try:
            return compiler.architecture(self.capability)
        except RuntimeError:
            return None


@dataclass(frozen=True, slots=True)
class CachedArchitecture:
    """Kernels of this version that the cache holds whole for one architecture, and how many calls there can ask for."""

    architecture: str
    kernels: int
    needed: int

    @property
    def complete(self) -> bool:
        return self.kernels >= self.needed


@dataclass(frozen=True, slots=True)
class Cache:
    """The folder of compiled kernels. `folder` is None where there is no place for one. `error`: what could not be read,
    and why; None where all could."""

    folder: str | None
    exists: bool
    writable: bool
    architectures: tuple[CachedArchitecture, ...]
    files: int
    bytes: int
    files_of_other_versions: int
    error: str | None = None

    def holds(self, architecture: str | None) -> bool:
        """Whether every kernel of an architecture is there."""
        return any(a.architecture == architecture and a.complete for a in self.architectures)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine and its packages are. A version that is None was not found; its ``_error`` then says why.

    `system_gpus`: GPUs that the system names, whether torch sees them or not. `driver_cuda`: the newest CUDA version that
    the driver serves. `nvrtc_architectures`: compute capabilities as 80, 90, 121. `unreadable`: one sentence for each
    reading that failed and has no ``_error`` of its own.
    """

    msa_ops: str | None
    kernel_source: str
    python: str
    platform: str
    torch: str
    torch_cuda: str | None
    threads: int
    system_gpus: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    driver: str | None
    driver_cuda: tuple[int, int] | None
    cuda_bindings: str | None
    cuda_bindings_error: str | None
    nvrtc: tuple[int, int] | None
    nvrtc_error: str | None
    nvrtc_architectures: tuple[int, ...]
    cache: Cache
    environment: dict[str, str]
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that this machine should have, and the command that mends it."""

    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class RouteReport:
    """How one device serves one route. `engine`: None on a GPU that is not supported. `why_not`: why nothing can run there,
    None where the route was tested."""

    device: str
    q: str
    kv: str
    layout: str
    engine: str | None
    kernels: tuple[str, ...]
    why_not: str | None
    tests: tuple[NumericResult, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All of it. `not_run` says, for each kind of self-test that did not run somewhere, why."""

    machine: Machine
    routes: tuple[RouteReport, ...]
    compile_tests: tuple[CompileResult, ...]
    missing: tuple[Missing, ...]
    not_run: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """One sentence for each self-test that failed."""
        compiled = [f"compiling {c.variant} for {c.target}: {c.message}" for c in self.compile_tests if not c.passed]
        numeric = [
            f"{t.device}: {t.q} q, {t.kv} KV, {t.layout}, {t.way}: {t.message}"
            for route in self.routes
            for t in route.tests
            if not t.passed
        ]
        return (*compiled, *numeric)

    @property
    def exit_code(self) -> int:
        """0: all well. 1: a self-test failed. 2: none failed, and something that the machine should have is missing."""
        if self.failures:
            return 1
        return 2 if self.missing else 0

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON; `SCHEMA_VERSION` changes when a key changes its meaning or goes."""
        body = dataclasses.asdict(self)
        for gpu, found in zip(self.machine.gpus, body["machine"]["gpus"], strict=True):
            found["supported"] = gpu.architecture is not None
            found["architecture"] = gpu.architecture
        return {
            "schema_version": SCHEMA_VERSION,
            "exit_code": self.exit_code,
            "failures": list(self.failures),
            **body,
        }


# --- reading the machine -----------------------------------------------------------------------------------------------


def probe() -> Machine:
    """Read this machine. Raises nothing: what cannot be read is None or empty, with its reason in the ``_error`` beside it
    or in `Machine.unreadable`."""
    unreadable: list[str] = []

    def read(what: str, reading: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return reading()
        except Exception as error:  # drivers and packages in ruins raise anything; the report is about them
            unreadable.append(_printable(f"{what}: {type(error).__name__}: {error}"))
            return otherwise

    bindings, bindings_error = _bindings()
    nvrtc, nvrtc_error, architectures = _nvrtc()
    return Machine(
        msa_ops=read("the version of msa-ops", lambda: _version("msa-ops"), None),
        kernel_source=read("the kernels' sources", compiler.source_hash, "unknown"),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        threads=torch.get_num_threads(),
        system_gpus=read("the GPUs that the system names", _system_gpus, ()),
        gpus=read("the GPUs that torch sees", _gpus, ()),
        driver=read("the driver's version", _driver, None),
        driver_cuda=_driver_cuda(),
        cuda_bindings=bindings,
        cuda_bindings_error=bindings_error,
        nvrtc=nvrtc,
        nvrtc_error=nvrtc_error,
        nvrtc_architectures=architectures,
        cache=read("the kernel cache", read_cache, Cache(None, False, False, (), 0, 0, 0)),
        environment=read("the environment", _environment, {}),
        unreadable=tuple(unreadable),
    )


def _printable(text: str) -> str:
    """Text without the surrogates that stand for bytes which are no UTF-8: no stream can print those."""
    return text.encode("utf-8", _ESCAPED).decode("utf-8")


def _environment() -> dict[str, str]:
    """Variables that change what this package does."""
    read = {n: v for n, v in sorted(os.environ.items()) if n.startswith("MSA_OPS_") or n in _REPORTED}
    return {_printable(n): _shortened(Path(v)) if os.path.isabs(v) else _printable(v) for n, v in read.items()}


def _version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def _bindings() -> tuple[str | None, str | None]:
    try:
        import cuda.bindings
        from cuda.bindings import driver  # noqa: F401

        return str(cuda.bindings.__version__), None
    except Exception as error:  # a broken package is a finding like a missing one
        return None, _printable(str(error))


def _nvrtc() -> tuple[tuple[int, int] | None, str | None, tuple[int, ...]]:
    try:
        return compiler.nvrtc_version(), None, tuple(compiler.supported_architectures())
    except Exception as error:
        return None, _printable(str(error)), ()


def _command(*command: str) -> str:
    """What a command prints, empty where it cannot run. Bytes that are no UTF-8 are shown as escapes."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=True)
        return done.stdout.decode("utf-8", _ESCAPED)
    except (OSError, subprocess.SubprocessError):
        return ""


def _system_gpus() -> tuple[str, ...]:
    named = re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", _command("nvidia-smi", "-L"), re.MULTILINE)
    if named:
        return tuple(named)
    with contextlib.suppress(OSError):
        return tuple("NVIDIA GPU" for _ in Path("/proc/driver/nvidia/gpus").iterdir())
    return ()


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    return tuple(_gpu(i, torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count()))


def _gpu(index: int, properties: Any) -> Gpu:
    capability = (properties.major, properties.minor)
    typical = plan.SHARED_PER_BLOCK.get(capability, 101376)
    return Gpu(
        index,
        properties.name,
        capability,
        properties.total_memory,
        properties.multi_processor_count,
        getattr(properties, "shared_memory_per_block_optin", typical),
        getattr(properties, "shared_memory_per_multiprocessor", typical + plan.SYSTEM_SHARED),
    )


def _driver() -> str | None:
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors=_ESCAPED)
        if found := re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text):
            return found[1]
    lines = _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else None


def _driver_cuda() -> tuple[int, int] | None:
    """Needs no context and no GPU, only the driver's library."""
    with contextlib.suppress(Exception):
        from .engines.cuda import driver

        error, version = driver.driver().cuDriverGetVersion()
        if not int(error):
            return version // 1000, version % 1000 // 10
    return None


def read_cache() -> Cache:
    """What the cache folder holds; nothing is created. What cannot be read is in `Cache.error`."""
    try:
        folder = compiler.cache_dir()
    except OSError as error:
        return Cache(None, False, False, (), 0, 0, 0, _printable(str(error)))
    errors: list[OSError] = []
    mine, others = _cubins(folder, errors)
    architectures = []
    for capability in plan.SHARED_PER_BLOCK:
        target = compiler.architecture(capability)
        wanted: list[compiler.Program] = [*plan.variants(capability), *programs.all_programs()]
        held = sum(bool(compiler.read_cached(kernel, target)) for kernel in wanted)
        if held:
            architectures.append(CachedArchitecture(target, held, len(wanted)))
    return Cache(
        folder=_shortened(folder),
        exists=os.path.isdir(folder),
        writable=_can_be_written(folder, errors),
        architectures=tuple(architectures),
        files=len(mine),
        bytes=sum(mine),
        files_of_other_versions=others,
        error=(errors[0].strerror or type(errors[0]).__name__) if errors else None,
    )


def _cubins(folder: Path, errors: list[OSError]) -> tuple[list[int], int]:
    """Sizes of this version's kernels, and the number of other versions' kernels. Files that cannot be read are left out;
    of this version they are errors."""
    ignored: list[OSError] = []
    mine, others = [], 0
    for version in _listed(folder, errors):
        ours = version.name == compiler.source_hash()
        seen = errors if ours else ignored
        files = (path for arch in _listed(version, seen) for path in _listed(arch, seen))
        for path in (path for path in files if path.suffix == ".cubin"):
            try:
                status = path.stat()
            except OSError as error:
                seen.append(error)
                continue
            if stat.S_ISREG(status.st_mode):
                mine += [status.st_size] if ours else []
                others += not ours
    return mine, others


def _listed(folder: Path, errors: list[OSError]) -> list[Path]:
    """What a folder holds: nothing where it is none, is not there, or cannot be read, which is an error."""
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        errors.append(error)
        return []


def _can_be_written(folder: Path, errors: list[OSError]) -> bool:
    """Whether a folder, or the nearest that is there and would hold it, can be written."""
    whole = folder.absolute()
    for place in (whole, *whole.parents):
        try:
            status = place.stat()
        except FileNotFoundError:
            continue
        except OSError as error:  # no search permission on the way, a name that is too long, a file in the way
            errors.append(error)
            return False
        return stat.S_ISDIR(status.st_mode) and os.access(place, os.W_OK | os.X_OK)
    return False


def _shortened(folder: Path) -> str:
    """The path with ~ for the home folder: reports are pasted in public."""
    with contextlib.suppress(RuntimeError, ValueError):
        return _printable(str(Path("~") / folder.relative_to(Path.home())))
    return _printable(str(folder))


# --- what is missing ---------------------------------------------------------------------------------------------------


def missing(machine: Machine) -> list[Missing]:
    """What this machine should have and has not. A machine without a GPU lacks nothing."""
    if not machine.gpus:
        return _unseen_gpu(machine)
    found = []
    gpus = [gpu for gpu in machine.gpus if gpu.architecture is not None]
    if gpus and machine.cuda_bindings is None:
        what = f"the package cuda-bindings, which the CUDA engine needs ({machine.cuda_bindings_error})"
        found.append(Missing(what, _install(machine)))
    elif any(not machine.cache.holds(gpu.architecture) for gpu in gpus):
        found += _compiler(machine, gpus)
        if not machine.cache.writable:
            place = machine.cache.folder or "no home folder"
            why = f" ({machine.cache.error})" if machine.cache.error else ""
            what = f"a writable cache folder: {place}{why}; every process compiles again"
            found.append(Missing(what, "export MSA_OPS_CACHE_DIR=/some/writable/folder"))
    return found


def _unseen_gpu(machine: Machine) -> list[Missing]:
    if not machine.system_gpus:
        return []
    name = machine.system_gpus[0]
    if machine.torch_cuda is None:
        return [
            Missing(
                f"a torch built with CUDA: this machine has a GPU ({name}), and torch {machine.torch} is a CPU build",
                "pip install --force-reinstall torch (on Windows: the command at https://pytorch.org/get-started)",
            )
        ]
    if _HIDING in machine.environment:
        return []  # hidden on purpose: a note says so
    served = "an unknown CUDA version" if machine.driver_cuda is None else f"CUDA {_dotted(machine.driver_cuda)}"
    what = (
        f"a driver that torch can use: this machine has a GPU ({name}), and torch {machine.torch} (CUDA "
        f"{machine.torch_cuda}) sees none; the driver {machine.driver or 'of unknown version'} serves {served}"
    )
    return [Missing(what, "update the NVIDIA driver, or install a torch built for the driver's CUDA version")]


def _compiler(machine: Machine, gpus: list[Gpu]) -> list[Missing]:
    if machine.nvrtc is None:
        return [Missing(f"NVRTC, which compiles the kernels ({machine.nvrtc_error})", _install(machine))]
    found = []
    version = _dotted(machine.nvrtc)
    if machine.driver_cuda is not None and machine.nvrtc[0] > machine.driver_cuda[0]:
        what = (
            f"an NVRTC that suits the driver: its kernels (NVRTC {version}) do not load where the driver serves CUDA "
        )
        major = machine.driver_cuda[0]
        found.append(Missing(what + _dotted(machine.driver_cuda), _from_checkout(f"cuda{major}")))
    known = machine.nvrtc_architectures
    for gpu in gpus:
        if gpu.capability[0] * 10 + gpu.capability[1] not in known:
            package = "nvidia-cuda-nvrtc-cu12" if machine.nvrtc[0] == 12 else "nvidia-cuda-nvrtc"
            what = f"an NVRTC that knows compute capability {_dotted(gpu.capability)} ({gpu.name}): {version} does not"
            found.append(Missing(what, f"pip install --upgrade {package}"))
    return found


def _install(machine: Machine) -> str:
    extra = "cuda12" if (machine.torch_cuda or "").startswith("12.") else "cuda13"
    return _from_checkout(extra)


def _from_checkout(extra: str) -> str:
    """A line to paste into a shell."""
    return f"pip install '.[{extra}]'  # in a checkout of msa_ops"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def notes(machine: Machine) -> list[str]:
    """What is worth knowing and wants no repair."""
    found = []
    if not machine.gpus:
        hidden = machine.system_gpus and machine.torch_cuda and _HIDING in machine.environment
        found.append(
            f"{_HIDING} hides this machine's GPU." if hidden else "torch sees no GPU: the CPU engine serves calls."
        )
    for gpu in machine.gpus:
        if gpu.architecture is None:
            found.append(
                f"{gpu.device}: compute capability {_dotted(gpu.capability)} is not supported, 8.0 is the oldest."
            )
        elif gpu.capability not in plan.SHARED_PER_BLOCK:
            found.append(f"{gpu.device}: kernels were never compiled for compute capability {_dotted(gpu.capability)}.")
    forced = [n for n in ("MSA_OPS_COMBINE", "MSA_OPS_PLAN") if machine.environment.get(n)]
    if forced and machine.gpus:
        found.append(f"{' and '.join(forced)} forces the plan of every call; the self-tests leave it aside.")
    if machine.environment.get("MSA_OPS_CHECK") == "1":
        found.append("MSA_OPS_CHECK=1 makes every call read its lengths and tables first, which is slow.")
    if machine.cache.error:
        found.append(f"Not all of the kernel cache can be read: {machine.cache.error}")
    found += [f"Could not be read: {what}" for what in machine.unreadable]
    return found


# --- the examination ---------------------------------------------------------------------------------------------------

CompileTest = Callable[[str, plan.DeviceFacts], CompileResult]
NumericTest = Callable[[str, selftest.Route, str, "plan.DeviceFacts | None"], NumericResult]


def examine(
    machine: Machine | None = None,
    *,
    compile_test: CompileTest = selftest.compile_one,
    numeric_test: NumericTest = selftest.numeric,
    progress: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Probe the machine (unless one is given), run every self-test that it can run, and report.

    `progress` is told each stage as it begins. The two tests can be replaced, for machines that are not at hand.
    """
    if machine is None:
        progress("reading the machine")
        machine = probe()
    not_run: list[str] = []
    compiled = []
    if machine.nvrtc is None:
        why = machine.nvrtc_error or "no NVRTC"
        not_run.append(f"compile self-test: {'needed on GPUs only' if not machine.gpus else 'no NVRTC'} ({why})")
    else:
        for target, facts in _compile_targets(machine):
            progress(f"compiling for {target}")
            compiled.append(compile_test(target, facts))
    found: list[RouteReport] = []
    devices: list[tuple[str, Gpu | None]] = [("cpu", None), *((gpu.device, gpu) for gpu in machine.gpus)]
    for device, gpu in devices:
        unusable = None if gpu is None else _unusable(gpu, machine)
        if unusable:
            not_run.append(f"numeric self-tests on {device}: {unusable}")
        for route in selftest.routes():
            progress(f"{device}: {route.q} q, {route.kv.value} KV, {route.layout_name}")
            found.append(_examine_route(device, gpu, route, unusable, numeric_test))
    return Report(
        machine, tuple(found), tuple(compiled), tuple(missing(machine)), tuple(not_run), tuple(notes(machine))
    )


def _compile_targets(machine: Machine) -> list[tuple[str, plan.DeviceFacts]]:
    """Each GPU's architecture once; 9.0 on a machine without a GPU. Targets that NVRTC does not know are reported missing."""
    if not machine.gpus:
        return [(compiler.architecture(TARGET_WITHOUT_GPU), plan.DeviceFacts.of_capability(TARGET_WITHOUT_GPU))]
    known = machine.nvrtc_architectures
    targets = {
        gpu.architecture: gpu.facts
        for gpu in machine.gpus
        if gpu.architecture is not None and gpu.capability[0] * 10 + gpu.capability[1] in known
    }
    return list(targets.items())


def _unusable(gpu: Gpu, machine: Machine) -> str | None:
    """Why no kernel can run on a GPU, None where one can."""
    if gpu.architecture is None:
        return f"compute capability {_dotted(gpu.capability)} is not supported"
    if machine.cuda_bindings is None:
        return "cuda-bindings is missing"
    if machine.cache.holds(gpu.architecture):
        return None
    if machine.nvrtc is None:
        return "NVRTC is missing"
    if gpu.capability[0] * 10 + gpu.capability[1] not in machine.nvrtc_architectures:
        return f"NVRTC {_dotted(machine.nvrtc)} does not know compute capability {_dotted(gpu.capability)}"
    if machine.driver_cuda is not None and machine.nvrtc[0] > machine.driver_cuda[0]:
        return f"the driver does not load what NVRTC {_dotted(machine.nvrtc)} compiles"
    return None


def _examine_route(
    device: str, gpu: Gpu | None, route: selftest.Route, unusable: str | None, numeric_test: NumericTest
) -> RouteReport:
    facts = None if gpu is None else gpu.facts
    names = (device, route.q, route.kv.value, route.layout_name)
    if gpu is not None and gpu.architecture is None:
        return RouteReport(*names, None, (), unusable, ())
    tests = () if unusable else tuple(numeric_test(device, route, way, facts) for way in selftest.ways(route, facts))
    return RouteReport(*names, "cpu" if gpu is None else "cuda", selftest.variants(route, facts), unusable, tests)
