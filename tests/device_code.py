"""Device code on the host: kernels' own sources, compiled by a C++ compiler against device_code.h and run by it.

Functions whose bodies are instructions are taken out and found in that header; all else is the kernels'.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from msa_ops.engines.cuda import compile as sources
from msa_ops.engines.cuda import score

ARRIVALS = ("early", "late", "any")
"""Of copies to shared memory: at once, when they are waited for, or either; the order of the header's `Arrival`."""
_HEADER = Path(__file__).with_name("device_code.h")
_OPTIONS = ("-std=c++17", "-w")
# A fiber goes on where it left off by longjmp, which a fortified one takes for an error; and nothing is fused, so that the
# result does not depend on the host. Memory is seen as different types, as on a GPU.
_BUILD = ("-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")
_DEFINITION = re.compile(
    r"(?:template <[^<>]*>\s*)?\[\[maybe_unused\]\] static __device__ __forceinline__ [^(){};]*\([^{};]*\)\s*\{"
)
_SHARED = re.compile(r"__shared__ ([^;]*) (\w+);")
_LAUNCH = """
extern "C" const char *launch(void (*kernel)(ScoreParams), const ScoreParams *params, int grid, int block, int arrivals,
                              unsigned seed, Region *regions, int count) {
  return machine::launch(kernel, *params, grid, block, arrivals, seed, regions, count);
}
"""


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++"))), None)


class DeviceError(Exception):
    """What no GPU would do in an orderly way."""


class _Region(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in ("first", "last", "before")), ("hints", ctypes.c_uint64)]


@dataclass(frozen=True)
class Kernels:
    """A program's kernels, compiled."""

    library: ctypes.CDLL

    def launch(
        self, plan: score.ScorePlan, params: bytes, reads: Sequence[tuple[Tensor, Tensor | None, int]], arrivals: str, seed: int
    ) -> list[int]:  # fmt: skip
        """Run a plan's kernel. It may copy, or read ahead, from the storages of `reads` alone, but for so many bytes at their
        ends; each may come with what stands there while the kernel before still runs, a tensor of the same storage size.
        Returns how often L2 was asked for a line of each."""
        regions = (_Region * len(reads))()
        for region, (now, before, left_alone) in zip(regions, reads, strict=True):
            storage = now.untyped_storage()
            assert before is None or before.untyped_storage().nbytes() == storage.nbytes()
            region.first, region.last = storage.data_ptr(), storage.data_ptr() + storage.nbytes() - left_alone
            region.before = None if before is None else before.untyped_storage().data_ptr()
        launch = self.library.launch
        launch.restype = ctypes.c_char_p
        kernel = ctypes.cast(getattr(self.library, plan.entry), ctypes.c_void_p)
        error = launch(
            kernel, params, plan.fill_blocks + plan.workers, score._THREADS, ARRIVALS.index(arrivals),
            ctypes.c_uint(seed), regions, len(regions),
        )  # fmt: skip
        if error:
            raise DeviceError(f"{plan.entry}: {error.decode()}")
        return [region.hints for region in regions]


def build(program: sources.Program, folder: Path, arch: int = 900, edit: tuple[str, str] | None = None) -> Kernels:
    """Compile a program for the host as if for compute capability `arch`, with one place of its source changed by `edit`."""
    text = sources.source(program.sources)
    if edit is not None:
        assert text.count(edit[0]) == 1, f"{edit[0]} stands {text.count(edit[0])} times in {program.name}"
        text = text.replace(*edit)
    folder.mkdir()
    defines = (*_OPTIONS, *program.defines, f"-D__CUDA_ARCH__={arch}")
    raw, full, library = folder / "raw.cpp", folder / "full.cpp", folder / "kernels.so"
    raw.write_text(text)
    text = _run(*defines, "-E", "-P", str(raw))
    text, found = _SHARED.subn(r"\1 &\2 = machine::shared<\1>();", text)
    assert found == 1, "a kernel has all its shared memory in one place"
    full.write_text(f'#include "{_HEADER}"\n{_without_instructions(text)}{_LAUNCH}')
    _run(*defines, *_BUILD, str(full), "-o", str(library))
    return Kernels(ctypes.CDLL(str(library)))


def _run(*arguments: str) -> str:
    command = compiler()
    assert command is not None
    done = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _without_instructions(text: str) -> str:
    """Of preprocessed source, without the functions that are asm. Braces are even in the strings of these, too."""
    kept, at = [], 0
    for match in _DEFINITION.finditer(text):
        depth, end = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if re.search(r"\basm\b", text[match.end() : end]):
            kept.append(text[at : match.start()])
            at = end
    return "".join((*kept, text[at:]))
