"""The kernels beside the decode kernel: what they are compiled from, loading them, launching them.

A `KernelProgram` is a few files of ``kernels/`` and their entry points; parameters are one block of bytes, the kernel's one
`__grid_constant__` argument. `all_programs` lists them, for `msa-ops compile` and `warmup`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from typing import Any

import torch

from . import compile as compiler
from .driver import check, driver, ensure_context, launch_config, load_library, refuse_capture
from .plan import SYSTEM_SHARED


@dataclass(frozen=True)
class KernelProgram:
    """One compilation: `sources` of ``kernels/`` in order, entry points by name."""

    name: str
    sources: tuple[str, ...]
    entries: tuple[str, ...]
    defines: tuple[str, ...] = ()
    max_shared: int = 0
    """Most dynamic shared memory of a launch, in bytes."""
    resident: tuple[int | None, ...] = ()
    """For each entry point, blocks that a multiprocessor is to hold, where the first-level cache matters to it: shared
    memory is asked for these and no more. Left to itself the driver may keep the split of the kernel before, and the
    attention leaves next to no cache. 0: no cache is wanted, as in the attention: a multiprocessor that has to change its
    split for the next kernel must be empty first. None: as the driver likes."""


def all_programs() -> tuple[KernelProgram, ...]:
    """Every program that a call can ask for. Each is defined beside the Python that launches it."""
    from . import quantize, score, topk

    return (quantize.PROGRAM, *score.PROGRAMS.values(), topk.PROGRAM)


class _State:
    """All that is loaded, for this process. A forked child starts empty."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.libraries: dict[tuple[KernelProgram, str], Any] = {}
        self.functions: dict[tuple[KernelProgram, int], dict[str, Any]] = {}


_state = _State()


def _forget() -> None:
    global _state
    _state = _State()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def functions(program: KernelProgram, device: int) -> dict[str, Any]:
    """The program's entry points, loaded for `device`, the current one; compiled first if no cache holds them.

    Raises `RuntimeError` inside a CUDA graph capture that would have to load them.
    """
    state = _state
    ready = state.functions.get((program, device))
    if ready is not None:
        return ready
    refuse_capture(program)
    ensure_context()
    with state.lock:
        arch = compiler.architecture(torch.cuda.get_device_capability(device))
        library = state.libraries.get((program, arch))
        if library is None:
            library = state.libraries[program, arch] = load_library(program, arch)
        d = driver()
        handle = check(d.cuDeviceGet(device), "opening the device")
        found = {}
        for place, entry in enumerate(program.entries):
            kernel = check(d.cuLibraryGetKernel(library, entry.encode()), f"looking up {entry}")
            if program.max_shared:
                check(
                    d.cuKernelSetAttribute(
                        d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                        program.max_shared,
                        kernel,
                        handle,
                    ),
                    "raising the shared memory limit",
                )
            blocks = program.resident[place] if program.resident else None
            if blocks is not None:
                _prefer_shared(kernel, handle, blocks)
            # Lazy loading would do this at the first launch, which may be inside a capture.
            check(d.cuKernelGetFunction(kernel), "loading code onto the device")
            found[entry] = d.CUfunction(int(kernel))  # the launch call takes a CUkernel in its place
        state.functions[program, device] = found
    return found


def _prefer_shared(kernel: Any, handle: Any, resident: int) -> None:
    """Ask for the shared memory of `resident` blocks a multiprocessor of the device `handle`, the rest being cache; for all
    if that is 0."""
    d = driver()
    share = 100
    if resident:
        static = check(
            d.cuKernelGetAttribute(d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel, handle),
            "reading a kernel's shared memory",
        )
        most = check(
            d.cuDeviceGetAttribute(
                d.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, handle
            ),
            "reading the device's limits",
        )
        share = min(100, -(-100 * resident * (static + SYSTEM_SHARED) // most))
    check(
        d.cuKernelSetAttribute(
            d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, share, kernel, handle
        ),
        "setting the split of cache and shared memory",
    )


def warm_up(device: int) -> list[str]:
    """Load all programs for `device`, the current one, compiled where no cache holds them; their names."""
    wanted = all_programs()
    for program in wanted:
        functions(program, device)
    return [program.name for program in wanted]


def launch(
    function: Any, params: bytes, blocks: int, threads: int, *, device: int, shared: int = 0, cluster: int = 1
) -> None:
    """Launch on torch's current stream of `device`, the current one. Dependent launch from 9.0 on: the kernel must wait
    (`wait_for_previous_kernel`) before it reads what others wrote, hints and guesses aside, and before it writes what they may
    read."""
    ensure_context()
    block = ctypes.create_string_buffer(params, len(params))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(block))
    modern = torch.cuda.get_device_capability(device) >= (9, 0)
    stream = torch._C._cuda_getCurrentRawStream(device)
    config = launch_config(blocks, threads, shared, cluster, modern, stream)
    (error,) = driver().cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0)
    if int(error):
        raise RuntimeError(f"CUDA driver: {error.name} while launching {blocks} blocks of {threads} threads")
