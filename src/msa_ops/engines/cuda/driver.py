"""The CUDA driver through NVIDIA's bindings: errors, libraries, launch configurations."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from . import compile as compiler

NO_CONTEXT = ("CUDA_ERROR_NOT_INITIALIZED", "CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_CONTEXT_IS_DESTROYED")


@lru_cache(maxsize=1)
def driver() -> Any:
    """The driver bindings. Raises `RuntimeError` naming what is missing."""
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise RuntimeError(f"the CUDA engine needs the package cuda-bindings ({error}): {compiler.INSTALL}") from error
    return bindings


def check(result: Any, doing: str) -> Any:
    """The values of a driver call's result. Raises `RuntimeError` for an error code."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA driver: {error.name} while {doing}")
    return values[0] if len(values) == 1 else values


def load_library(program: compiler.Program, arch: str) -> Any:
    """The program's CUlibrary, from the cache or compiled."""
    d = driver()
    for cubin in compiler.read_cached(program, arch):
        error, library = d.cuLibraryLoadData(cubin, [], [], 0, [], [], 0)
        if not int(error):
            return library  # else: a cubin of a newer NVRTC than the driver can load
    return check(d.cuLibraryLoadData(compiler.build(program, arch), [], [], 0, [], [], 0), f"loading {program.name}")


def refuse_capture(program: compiler.Program) -> None:
    """Raise `RuntimeError` inside a CUDA graph capture, which cannot load a program."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the kernel {program.name} is not loaded yet, and a CUDA graph capture cannot load it: make one eager call, or "
            "msa_ops.warmup(device), before capturing"
        )


def ensure_context() -> None:
    """Give a thread that has not used CUDA yet the context of torch's current device."""
    d = driver()
    error, context = d.cuCtxGetCurrent()
    if int(error) or int(context) == 0:
        # Setting the device that is already the current one would do nothing.
        device = check(d.cuDeviceGet(torch.cuda.current_device()), "opening the device")
        context = check(d.cuDevicePrimaryCtxRetain(device), "taking the device's context")
        check(d.cuCtxSetCurrent(context), "making its context current")


def launch_config(blocks: int, threads: int, shared: int, cluster: int, dependent: bool, stream: int) -> Any:
    """A CUlaunchConfig. `dependent`: may start while the previous kernel on the stream still runs (9.0 and newer)."""
    d = driver()
    config = d.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.hStream = stream
    attributes = []
    if dependent:
        a = d.CUlaunchAttribute()
        a.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        a.value.programmaticStreamSerializationAllowed = 1
        attributes.append(a)
    if cluster > 1:
        a = d.CUlaunchAttribute()
        a.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z = cluster, 1, 1
        attributes.append(a)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config
