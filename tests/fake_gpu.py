"""A GPU for tests on machines without one: tensors of the CPU pass for its tensors, and its driver only takes notes.

Everything of a call runs, the op's dispatch included, but the kernels. `outcome` is all that a call did; `long_way` and
`short_way` are outcomes by contract, op and engine, and by what an earlier call left (`engines.cuda.prepared`).
"""

from __future__ import annotations

import ctypes
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import msa_ops.decode
import msa_ops.engines.cpu
from cases import Spec, build
from msa_ops import MSASparseAttentionWorkspace, contract, msa_sparse_decode_attention, ops
from msa_ops.contract import DecodeCall, DecodeProblem
from msa_ops.engines.cuda import launch, plan, prepared

Call = dict[str, Any]
HOPPER, AMPERE = (plan.DeviceFacts.of_capability(capability) for capability in ((9, 0), (8, 0)))
NAMES = ("q", "k", "v", "q2k_indices")
REAL_KERNELS_FOR = launch.kernels_for


# --- a driver that takes notes ---


@dataclass(frozen=True)
class Launch:
    """What the driver was asked for: the kernel, its configuration, the parameter block, the rows of the merge kernel."""

    kernel: Any
    config: Any
    block: bytes
    rows: int
    block_at: int = field(compare=False)
    current_device: Any = field(compare=False)


@dataclass
class FakeGPU:
    """The driver and the few facts of torch about a GPU. `long_ways` counts calls that the contract has checked."""

    facts: plan.DeviceFacts = HOPPER
    launches: list[Launch] = field(default_factory=list)
    long_ways: int = 0
    current_device: Any = None  # the index of the CPU's tensors
    stream: int = 7
    error: Any = 0

    def cuLaunchKernelEx(self, config: Any, kernel: Any, arguments: int, extra: int) -> tuple[Any]:
        block, rows = (ctypes.c_void_p * 2).from_address(arguments)
        assert block and rows and extra == 0
        content = ctypes.string_at(block, launch.PARAMETER_BYTES if kernel[0].selects else launch._PARAMS.size)
        merged = ctypes.c_longlong.from_address(rows).value
        self.launches.append(Launch(kernel, config, content, merged, block, self.current_device))
        return (self.error,)

    @contextmanager
    def on_device(self, index: Any) -> Iterator[None]:
        before, self.current_device = self.current_device, index
        yield
        self.current_device = before

    def kernels(self, variant: plan.Variant, _: Any) -> Any:
        return SimpleNamespace(decode=(variant, "decode"), merge=(variant, "merge"))


def encoded(address: int, *geometry: Any) -> bytes:
    """A tensor map that tells what it was made of."""
    return struct.pack("16Q", address, *(hash((geometry, i)) & (2**64 - 1) for i in range(15)))


def run_on_gpu(problem: DecodeProblem, out: Tensor, lse: Tensor | None) -> None:
    """In place of the CPU engine, behind the op's dispatch."""
    ops._cuda(*(getattr(problem, name) for name in problem.__dataclass_fields__), out, lse)


def with_scratch(problem: DecodeProblem, workspace: MSASparseAttentionWorkspace) -> DecodeProblem:
    return replace(problem, workspace=workspace.reserve(launch.scratch_bytes(problem)))


def install(gpu: FakeGPU, patch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "driver": lambda: gpu,
        "ensure_context": lambda: None,
        "device_facts": lambda _: gpu.facts,
        "kernels_for": gpu.kernels,
        "cluster_room": lambda variant, _: plan.typical_room(gpu.facts, variant),
        "launch_config": lambda *key: key,
        "_encode_map": encoded,
        "_state": launch._State(),
    }.items():
        patch.setattr(launch, name, value)
    launch._state.facts[None] = gpu.facts  # type: ignore[index]
    patch.setattr(torch.cuda, "current_device", lambda: gpu.current_device)
    patch.setattr(torch._C, "_cuda_getDevice", lambda: gpu.current_device, raising=False)
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: gpu.stream, raising=False)
    patch.setattr(torch.cuda, "device", gpu.on_device)
    patch.setattr(msa_ops.engines.cpu, "run", run_on_gpu)
    patch.setattr(ops, "with_scratch", with_scratch)
    patch.setattr(prepared, "_on_gpu", lambda t: t.device.type == "cpu")
    check = contract.check

    def counted(call: DecodeCall) -> Any:
        gpu.long_ways += 1
        return check(call)

    patch.setattr(msa_ops.decode, "check", counted)
    for name in ("CHECK", "COMBINE", "PLAN"):
        patch.delenv(f"MSA_OPS_{name}", raising=False)
    prepared.forget()


class Subclass(Tensor):
    """What torch hands to Python before it runs an op."""


# --- outcomes ---


@dataclass(frozen=True)
class Outcome:
    """Everything that a call does. Addresses of memory that it allocates itself are replaced by their relations."""

    error: str | None
    launches: tuple[Any, ...] = ()
    results: tuple[Any, ...] = ()
    versions: tuple[Any, ...] = ()
    counted: tuple[tuple[str, int], ...] = ()


ADDRESSES = struct.Struct("15Q")
_OUT, _LSE, _PARTIAL, _STATE = 11, 12, 13, 14


def outcome(gpu: FakeGPU, call: Call) -> Outcome:
    before, counted = len(gpu.launches), Counter(launch.calls)
    written = [t for t in (call.get("out"), call.get("lse_out")) if type(t) in (Tensor, torch.nn.Parameter)]
    if isinstance(call.get("workspace"), MSASparseAttentionWorkspace):
        written.append(call["workspace"].buffer)
    versions = [0 if t.is_inference() else t._version for t in written]
    try:
        result = msa_sparse_decode_attention(**call)
    except Exception as error:
        return Outcome(f"{type(error).__name__}: {error}", tuple(gpu.launches[before:]))
    results = result if isinstance(result, tuple) else (result,)
    launches = []
    for done in gpu.launches[before:]:
        content = bytearray(done.block)
        addresses = list(ADDRESSES.unpack_from(content, 256))
        for slot, name, got in ((_OUT, "out", results[0]), (_LSE, "lse_out", results[-1] if results[1:] else None)):
            assert addresses[slot] == (0 if got is None else got.data_ptr())
            if call.get(name) is None:
                addresses[slot] = 0
        if addresses[_STATE] and call.get("workspace") is None:
            addresses[_PARTIAL], addresses[_STATE] = addresses[_PARTIAL] - addresses[_STATE], 0
        ADDRESSES.pack_into(content, 256, *addresses)
        launches.append((done.kernel, done.config, bytes(content), done.rows))
    return Outcome(
        None,
        tuple(launches),
        tuple((t is call.get("out"), t is call.get("lse_out"), t.shape, t.dtype, t.stride(), type(t)) for t in results),
        tuple((0 if t.is_inference() else t._version) - v for t, v in zip(written, versions, strict=True)),
        tuple(sorted((launch.calls - counted).items())),
    )


def long_way(gpu: FakeGPU, call: Call) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "serve", lambda *_: (False, None))
        ways = gpu.long_ways
        found = outcome(gpu, call)
        assert gpu.long_ways == ways + 1
    return found


def short_way(gpu: FakeGPU, call: Call) -> Outcome:
    """The outcome without the contract having been asked."""
    ways = gpu.long_ways
    found = outcome(gpu, call)
    assert gpu.long_ways == ways, "the call went the long way"
    return found


def call_of(spec: Spec, **changes: Any) -> Call:
    case = build(spec)
    return {**dict(zip(NAMES, case.args, strict=True)), **case.kwargs, **changes}


def outputs(call: Call) -> Call:
    q = call["q"]
    dtype = torch.float16 if q.dtype == torch.float16 else torch.bfloat16
    return {"out": torch.empty(q.shape, dtype=dtype), "lse_out": torch.empty(q.shape[:2]), "return_softmax_lse": True}


def moved(value: Any, by: int = 0) -> Any:
    """The same tensor, or workspace, in other memory; a tensor starts `by` bytes further past an aligned address."""
    if isinstance(value, MSASparseAttentionWorkspace):
        return MSASparseAttentionWorkspace("cpu", value.nbytes)
    if not isinstance(value, Tensor):
        return value
    old = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())  # type: ignore[call-overload]
    new = torch.empty(old.numel() + by, dtype=torch.uint8)
    new[by:].copy_(old)
    storage = new.untyped_storage()
    where = (value.storage_offset() + by // value.element_size(), value.shape, value.stride())
    return torch.empty(0, dtype=value.dtype).set_(storage, *where)  # type: ignore[call-overload]


def prepare(gpu: FakeGPU, call: Call) -> None:
    """Make `call` a call that the short way serves, by one like it."""
    assert outcome(gpu, {name: moved(value) for name, value in call.items()}).error is None
    assert len(prepared._local.calls) == 1


PAGED = Spec(lengths=(300, 129), seqlen_q=2)
FORMS: dict[str, Callable[[], Call]] = {
    "paged": lambda: call_of(PAGED),
    "fp8, LSE": lambda: call_of(replace(PAGED, kv_dtype="fp8", form="packed"), return_softmax_lse=True),
    "outputs": lambda: (c := call_of(replace(PAGED, form="nhd"))) | outputs(c),
    "out alone": lambda: (c := call_of(PAGED)) | {"out": outputs(c)["out"]},
    "lse_out alone": lambda: (c := call_of(PAGED)) | {**outputs(c), "out": None},
    "flat fp16": lambda: (c := call_of(Spec(q_dtype="fp16", kv_dtype="fp16", form="flat"))) | outputs(c),
    "scalars": lambda: (
        (c := call_of(replace(PAGED, q_dtype="fp8", kv_dtype="fp8", softmax_scale=0.3, k_global_scale=-0.5, v_global_scale=2)))
        | outputs(c)
        | {"q_offset": 100, "force_fused": False, "partial_dtype": torch.bfloat16, "causal": False}
    ),
    "tensors": lambda: (
        (c := call_of(replace(PAGED, q_offset=(3, 4), k_global_scale=0.4, v_global_scale=2.0, global_scale_tensors=True)))
        | outputs(c)
        | {"workspace": MSASparseAttentionWorkspace("cpu", 1 << 20)}
    ),
    "NVFP4 tiled": lambda: (c := call_of(Spec(kv_dtype="nvfp4"))) | outputs(c),
    "NVFP4 planar": lambda: (c := call_of(Spec(kv_dtype="nvfp4", form="planar_pool"))) | outputs(c),
}  # fmt: skip
forms = pytest.mark.parametrize("form", FORMS)


def defaults() -> Call:
    """Of the keyword arguments."""
    return {n: p.default for n, p in signature(msa_sparse_decode_attention).parameters.items() if n not in NAMES}
