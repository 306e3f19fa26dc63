"""Kernel source to a loaded kernel: NVRTC through NVIDIA's Python packages, with a cache of cubins on disk.

NVRTC needs neither a GPU nor a host compiler nor headers. Cubins lie in ``MSA_OPS_CACHE_DIR`` (default
``$XDG_CACHE_HOME/msa_ops``, ``~/.cache/msa_ops``) as ``<source hash>/<architecture>/<program>-nvrtc<version>.cubin``, each
with its own checksum, written to a temporary file and renamed, so that any number of processes may start at once. A cache
that cannot be written costs a warning and a compilation per process.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import warnings
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Protocol


class Program(Protocol):
    """One compilation: files of ``kernels/`` one after the other, with these compiler options."""

    @property
    def name(self) -> str: ...
    @property
    def sources(self) -> tuple[str, ...]: ...
    @property
    def defines(self) -> tuple[str, ...]: ...


_OPTIONS = ("-std=c++17", "-default-device")
_MAGIC = b"msa_ops cubin 1\n"
INSTALL = (
    "in a checkout of msa_ops, pip install '.[cuda13]' (for a torch built with CUDA 13) or '.[cuda12]' (CUDA 12), which "
    "bring cuda-bindings and NVIDIA's NVRTC package"
)


class KernelCompileError(RuntimeError):
    """NVRTC refused the source; carries its log."""


@lru_cache(maxsize=64)
def source(sources: tuple[str, ...]) -> str:
    """The files of ``kernels/`` with these names, one after the other."""
    folder = resources.files(__package__) / "kernels"
    return "".join((folder / name).read_text(encoding="utf-8") for name in sources)


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Of all kernel files and common options: a changed file makes a new cache for all."""
    folder = resources.files(__package__) / "kernels"
    names = sorted(f.name for f in folder.iterdir() if f.name.endswith((".cu", ".cuh")))
    return hashlib.sha256("\0".join((*names, source(tuple(names)), *_OPTIONS)).encode()).hexdigest()[:16]


def architecture(capability: tuple[int, int]) -> str:
    """The NVRTC target of a compute capability. From 10.0 on it is the ``a`` target, which alone knows e2m1 conversion."""
    major, minor = capability
    if (major, minor) < (8, 0):
        raise RuntimeError(f"the CUDA engine needs compute capability 8.0 or newer, this GPU has {major}.{minor}")
    return f"sm_{major}{minor}" + ("a" if major >= 10 else "")


def cache_dir() -> Path:
    """Where cubins are kept. Raises `OSError` where there is no such place."""
    configured = os.environ.get("MSA_OPS_CACHE_DIR")
    general = os.environ.get("XDG_CACHE_HOME")
    try:
        if configured:
            return Path(configured).expanduser()
        return (Path(general) if general else Path.home() / ".cache") / "msa_ops"
    except RuntimeError as error:  # a user without a home directory, as in some containers
        raise OSError(str(error)) from error


# --- the disk cache ----------------------------------------------------------------------------------------------------


def _folder(arch: str, root: Path | None = None) -> Path:
    return (root or cache_dir()) / source_hash() / arch


def _stem(program: Program) -> str:
    """A cubin's file name up to its NVRTC: the program's, and what is compiled under it."""
    return f"{program.name}-{hashlib.sha256(repr((program.sources, program.defines)).encode()).hexdigest()[:8]}"


def read_cached(program: Program, arch: str) -> list[bytes]:
    """Cubins of this program from the cache, the newest NVRTC's first. Damaged files are passed over."""
    found: list[tuple[tuple[int, ...], bytes]] = []
    stem = _stem(program)
    try:
        entries = [e for e in os.scandir(_folder(arch)) if e.name.startswith(f"{stem}-nvrtc")]
    except OSError:
        return []
    for entry in entries:
        match = re.fullmatch(rf"{re.escape(stem)}-nvrtc(\d+)\.(\d+)\.cubin", entry.name)
        if not match:
            continue
        try:
            data = Path(entry.path).read_bytes()
        except OSError:
            continue
        head, digest, cubin = data[: len(_MAGIC)], data[len(_MAGIC) :][:32], data[len(_MAGIC) + 32 :]
        if head == _MAGIC and hashlib.sha256(cubin).digest() == digest:
            found.append(((int(match[1]), int(match[2])), cubin))
    return [cubin for _, cubin in sorted(found, key=lambda x: x[0], reverse=True)]


def write_cached(program: Program, arch: str, cubin: bytes, version: tuple[int, int], root: Path | None = None) -> Path:
    """Write one cubin so that a reader sees all of it or nothing. Raises `OSError`."""
    folder = _folder(arch, root)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_stem(program)}-nvrtc{version[0]}.{version[1]}.cubin"
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(_MAGIC + hashlib.sha256(cubin).digest() + cubin)
        os.chmod(temporary, 0o644)  # a cache prebuilt by one user serves others; mkstemp makes files private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


_warned_unwritable = False


def _store(program: Program, arch: str, cubin: bytes, version: tuple[int, int]) -> None:
    global _warned_unwritable
    try:
        write_cached(program, arch, cubin, version)
    except OSError as error:
        if not _warned_unwritable:
            _warned_unwritable = True
            warnings.warn(
                f"msa_ops cannot write its kernel cache ({error}): kernels are compiled again in every process. Set "
                "MSA_OPS_CACHE_DIR to a writable folder.",
                RuntimeWarning,
                stacklevel=2,
            )


# --- NVRTC -------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def nvrtc() -> Any:
    """The NVRTC bindings. Raises `RuntimeError` naming the missing package."""
    try:
        from cuda.bindings import nvrtc as bindings
    except ImportError as error:
        raise RuntimeError(f"the CUDA engine needs the package cuda-bindings ({error}): {INSTALL}") from error
    try:
        bindings.nvrtcVersion()
    except Exception as error:
        raise RuntimeError(f"the CUDA engine found no NVRTC library ({error}): {INSTALL}") from error
    return bindings


def nvrtc_version() -> tuple[int, int]:
    _, major, minor = nvrtc().nvrtcVersion()
    return major, minor


def supported_architectures() -> list[int]:
    """Compute capabilities (as 80, 90, 121...) that the installed NVRTC compiles for."""
    _, archs = nvrtc().nvrtcGetSupportedArchs()
    return list(archs)


def compile_program(program: Program, arch: str, *extra_options: str) -> tuple[bytes, str]:
    """Compile one program; returns the cubin and the compiler's log. Raises `KernelCompileError`."""
    rtc = nvrtc()
    options = [o.encode() for o in (f"--gpu-architecture={arch}", *_OPTIONS, *program.defines, *extra_options)]
    error, handle = rtc.nvrtcCreateProgram(source(program.sources).encode(), b"msa_ops.cu", 0, [], [])
    if int(error):
        raise KernelCompileError(f"NVRTC could not create a program: {error}")
    try:
        (error,) = rtc.nvrtcCompileProgram(handle, len(options), options)
        _, size = rtc.nvrtcGetProgramLogSize(handle)
        log = b" " * size
        rtc.nvrtcGetProgramLog(handle, log)
        text = log.rstrip(b"\0 \n").decode(errors="replace")
        if int(error):
            major, minor = nvrtc_version()
            raise KernelCompileError(
                f"NVRTC {major}.{minor} could not compile {program.name} for {arch} ({error.name}). If it does not know the "
                f"architecture, install a newer NVRTC package. Its log:\n{text}"
            )
        _, size = rtc.nvrtcGetCUBINSize(handle)
        cubin = b" " * size
        rtc.nvrtcGetCUBIN(handle, cubin)
        return cubin, text
    finally:
        rtc.nvrtcDestroyProgram(handle)


def build(program: Program, arch: str) -> bytes:
    """Compile and put into the cache."""
    cubin, _ = compile_program(program, arch)
    _store(program, arch, cubin, nvrtc_version())
    return cubin
