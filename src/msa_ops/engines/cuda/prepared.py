"""Eager calls like an earlier one, served without asking again what cannot come out differently.

All that the contract and the plan read of a call, addresses and numbers aside, is its *likeness*: which arguments are given,
type, shape, strides, dtype, device and requires_grad of each tensor, the flags, and three environment variables. A call with
the likeness of one that the long way (contract, op, engine) has served passes the same checks and gets the same plan. What
is left is done here: addresses are checked for alignment and overlap, numbers for their range, and both are written into a
parameter block that holds all the rest. Every rule and every error stays on the long way: a call that looks wrong here, or
merely unusual, is sent there.

Tensors are compared by torch's own guard, the one that decides whether a compiled graph still fits. It also sees the state
in which torch would do more than run an op: autocast, inference mode, function transforms, tracing. Python's own modes are
asked for beside it, but for the one that only gives new tensors a device.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from ...contract import _PLAIN_TENSORS, FLOAT32_MAX, INT32_MAX, SOFTMAX_SCALE, DecodeProblem, extent
from ...workspace import MSASparseAttentionWorkspace

try:
    from torch._C import _increment_version, _len_torch_dispatch_stack, _len_torch_function_stack
    from torch._C._autograd import _profiler_enabled
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a torch without one of these: every call goes the long way
    TensorGuards = None  # type: ignore[assignment, misc]

MOST_CALLS = 64
"""Likenesses that a thread keeps: those used last."""
MOST_ADDRESSES = 512
"""Sets of addresses that are known to be right for a likeness."""
MOST_STREAMS = 64
"""Streams whose launch configurations are kept for a likeness."""

# Bits of a likeness: the arguments that are given, and the flags.
(
    _PAGE_TABLE, _SEQUSED_K, _CU_SEQLENS_K, _Q_OFFSET, _Q_OFFSET_INT, _K_GLOBAL, _V_GLOBAL, _V_GLOBAL_IS_K, _K_SCALE,
    _V_SCALE, _OUT, _LSE_OUT, _WORKSPACE, _CAUSAL, _LSE, _FUSED, _NOT_FUSED,
) = (1 << bit for bit in range(17))  # fmt: skip
_LENGTHS = _SEQUSED_K | _CU_SEQLENS_K
_V_GLOBALS = _V_GLOBAL | _V_GLOBAL_IS_K
_NUMBERS = (float, int)  # and no bool, no subclass, no SymInt
_CHECK, _COMBINE, _PLAN = (os.environ.encodekey(f"MSA_OPS_{name}") for name in ("CHECK", "COMBINE", "PLAN"))
_INT = struct.Struct("i")
_NAME = "msa_ops::sparse_decode_attention"

_on_gpu: Callable[[Tensor], bool] = attrgetter("is_cuda")
_address = Tensor.data_ptr


class Likeness(NamedTuple):
    """A call that may be remembered. Its tensors are in the order of the parameter block, a workspace's buffer last."""

    key: tuple[Any, ...]
    tensors: list[Tensor]


_UNLIKE = False, None


class _Local(threading.local):
    """One thread's prepared calls, the last used first."""

    def __init__(self) -> None:
        self.calls: list[PreparedCall] = []


_local = _Local()


def forget() -> None:
    """Start empty, in every thread."""
    global _local
    _local = _Local()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)


def serve(  # noqa: PLR0915  # one path without branches back; every call inside it would cost as much as a tensor's check
    q: Any, k: Any, v: Any, q2k_indices: Any, page_table: Any, seqused_k: Any, cu_seqlens_k: Any, seqlen_q: Any, causal: Any,
    softmax_scale: Any, return_softmax_lse: Any, k_scale: Any, v_scale: Any, k_global_scale: Any, v_global_scale: Any,
    q_offset: Any, partial_dtype: Any, force_fused: Any, workspace: Any, out: Any, lse_out: Any,
) -> tuple[bool, Any]:  # fmt: skip
    """Serve a call of any arguments if it is like an earlier one of this thread: ``(True, what the call returns)``.

    ``(False, likeness)``: there was none; `remember` takes the likeness once the long way has served the call.
    ``(False, None)``: only the long way will do, for this call and those like it.
    """
    if TensorGuards is None or type(q) is not Tensor or not _on_gpu(q):
        return _UNLIKE
    modes = _len_torch_function_stack()
    if _len_torch_dispatch_stack() or (modes and not _only_a_default_device(modes)):
        return _UNLIKE
    tensors = [q, k, v, q2k_indices]
    given = 0
    if page_table is not None:
        tensors.append(page_table)
        given = _PAGE_TABLE
    if seqused_k is not None:
        tensors.append(seqused_k)
        given |= _SEQUSED_K
    if cu_seqlens_k is not None:
        tensors.append(cu_seqlens_k)
        given |= _CU_SEQLENS_K
    if q_offset is not None:
        if type(q_offset) is int:
            if not -INT32_MAX - 1 <= q_offset <= INT32_MAX:
                return _UNLIKE
            given |= _Q_OFFSET_INT
        else:
            tensors.append(q_offset)
            given |= _Q_OFFSET
    factor, output_factor = SOFTMAX_SCALE, 1.0
    if softmax_scale is not None:
        if type(softmax_scale) not in _NUMBERS or not -FLOAT32_MAX <= softmax_scale <= FLOAT32_MAX:
            return _UNLIKE
        factor = softmax_scale * 1.0
    if k_global_scale is not None:
        if type(k_global_scale) in _NUMBERS:
            if not -FLOAT32_MAX <= k_global_scale <= FLOAT32_MAX:
                return _UNLIKE
            factor *= k_global_scale
            if not -FLOAT32_MAX <= factor <= FLOAT32_MAX:
                return _UNLIKE
        else:
            tensors.append(k_global_scale)
            given |= _K_GLOBAL
    if v_global_scale is not None:
        if type(v_global_scale) in _NUMBERS:
            if not -FLOAT32_MAX <= v_global_scale <= FLOAT32_MAX:
                return _UNLIKE
            output_factor = v_global_scale
        elif v_global_scale is k_global_scale:
            given |= _V_GLOBAL_IS_K  # the guard takes no tensor twice
        else:
            tensors.append(v_global_scale)
            given |= _V_GLOBAL
    if k_scale is not None:
        tensors.append(k_scale)
        given |= _K_SCALE
    if v_scale is not None:
        tensors.append(v_scale)
        given |= _V_SCALE
    if out is not None:
        tensors.append(out)
        given |= _OUT
    if lse_out is not None:
        tensors.append(lse_out)
        given |= _LSE_OUT
    if workspace is not None:
        if type(workspace) is not MSASparseAttentionWorkspace:
            return _UNLIKE
        tensors.append(workspace.buffer)
        given |= _WORKSPACE
    if causal is True:
        given |= _CAUSAL
    elif causal is not False:
        return _UNLIKE
    if return_softmax_lse is True:
        given |= _LSE
    elif return_softmax_lse is not False:
        return _UNLIKE
    if force_fused is not None:
        if type(force_fused) is not bool:
            return _UNLIKE
        given |= _FUSED if force_fused else _NOT_FUSED
    if type(seqlen_q) is not int or (partial_dtype is not None and type(partial_dtype) is not torch.dtype):
        return _UNLIKE
    try:
        environ = os.environ._data  # type: ignore[attr-defined]  # os.environ.get encodes and decodes
    except AttributeError:  # a replaced os.environ
        return _UNLIKE
    key = (given, seqlen_q, partial_dtype, environ.get(_CHECK), environ.get(_COMBINE), environ.get(_PLAN))
    calls = _local.calls
    for call in calls:
        if call.key == key and call.fits(*tensors):
            break
    else:
        return False, Likeness(key, tensors)
    if call is not calls[0]:
        calls.remove(call)
        calls.insert(0, call)
    if modes:
        with torch._C.DisableTorchFunction():
            return call.run(tensors, out, lse_out, factor, output_factor, q_offset)
    return call.run(tensors, out, lse_out, factor, output_factor, q_offset)


def _only_a_default_device(modes: int) -> bool:
    """Whether torch's function modes are that of `torch.set_default_device` alone, which concerns no call of ours."""
    return modes == 1 and type(torch._C._get_function_stack_at(0)) is DeviceContext


def remember(likeness: Likeness, problem: DecodeProblem, out: Tensor, lse: Tensor | None) -> None:
    """Prepare for calls like the one that the long way has just served in this thread, where that is possible."""
    key, tensors = likeness
    if problem.q.numel() == 0 or problem.k.numel() == 0:
        return
    if os.environ.get("MSA_OPS_CHECK") == "1":  # device values are read, every time
        return
    if any(t is not None and t.data_ptr() & 15 for t in (problem.k_scale, problem.v_scale)):
        return  # the kernel reads such scales in another way than those that the short way lets pass
    if problem.workspace is not None:
        tensors[-1] = problem.workspace  # grown, perhaps
    if len({id(t) for t in tensors}) < len(tensors):  # the guard takes no tensor twice
        return
    if not all(type(t) in _PLAIN_TENSORS and _is_plain(t) for t in tensors):
        return
    call = PreparedCall(key, tensors, problem, out, lse)
    if key[-3:] == _environment():  # else another thread has changed it meanwhile
        _local.calls.insert(0, call)
        del _local.calls[MOST_CALLS:]


def _environment() -> tuple[Any, ...]:
    environ = os.environ._data  # type: ignore[attr-defined]
    return environ.get(_CHECK), environ.get(_COMBINE), environ.get(_PLAN)


def _is_plain(t: Tensor) -> bool:
    """Whether torch, in its present state, would do nothing for `t` but run an op's kernel for its device."""
    c = torch._C
    state = (c._dispatch_keys(t) | c._dispatch_tls_local_include_set()) - c._dispatch_tls_local_exclude_set()
    return not state.raw_repr() & ~_plain_keys()


@lru_cache(maxsize=1)
def _plain_keys() -> int:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    for name in ("ADInplaceOrView", "CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA"):
        keys = keys.add(getattr(torch._C.DispatchKey, name))
    return int(keys.raw_repr())


class PreparedCall:
    """What one thread keeps of a served call: guard, parameter block, kernels, launch configurations."""

    def __init__(
        self, key: tuple[Any, ...], tensors: list[Tensor], problem: DecodeProblem, out: Tensor, lse: Tensor | None
    ) -> None:
        from . import launch
        from .plan import Combine

        given, index = key[0], problem.q.device.index
        launcher, shape = launch._launcher(), launch.shape_of(problem)
        plan = launch._plan(problem, shape)
        kernels = launch.kernels_for(plan.variant, index)
        modern = launch.device_facts(index).has_clusters
        self.key = key
        self.fits: Callable[..., bool] = TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        self.requires_grad = any(t.requires_grad for t in tensors)

        # The addresses of the parameter block: which are there, and where some of them are among those.
        scratch = plan.combine is Combine.SCRATCH
        bits = (_PAGE_TABLE, _LENGTHS, _Q_OFFSET, _K_GLOBAL, _V_GLOBALS, _K_SCALE, _V_SCALE)
        there = [True] * 4 + [bool(given & bit) for bit in bits] + [True, lse is not None, scratch, scratch]
        assert len(there) == launch.ADDRESSES
        k_global_place, k_scale_place, self.out_place = (sum(there[:slot]) for slot in (7, 9, 11))
        self.k_global_place = k_global_place if given & _V_GLOBAL_IS_K else None
        self.scale_places = (k_scale_place, k_scale_place + 1) if given & _K_SCALE else ()

        # Outputs that are given: where, how long, and the extents of what they must not meet, all that lies before them.
        inputs = tensors[: self.out_place - bool(given & _V_GLOBAL_IS_K)]
        if self.k_global_place is not None:
            inputs.insert(self.k_global_place, inputs[self.k_global_place])
        before = [extent(t) for t in inputs]
        self.given_outputs: list[tuple[int, int, tuple[int, ...]]] = []
        for bit, output in ((_OUT, out), (_LSE_OUT, lse)):
            size = 0 if output is None else extent(output)
            if given & bit:
                self.given_outputs.append((len(before), size, tuple(before)))
            before.append(size)

        # Outputs and scratch that are not.
        self.device, self.index = problem.q.device, index
        self.out_shape, self.out_dtype = out.shape, out.dtype
        self.lse_shape = None if lse is None or given & _LSE_OUT else lse.shape
        self.state_bytes, value_bytes = launch.scratch_layout(problem, plan, shape)
        self.scratch_bytes = self.state_bytes + value_bytes
        assert problem.workspace is None or problem.workspace.numel() >= self.scratch_bytes, "the long way has grown it"

        # The parameter block: what stays of it, and what a call writes.
        launcher.pack(problem, plan, shape, out, lse, (0, 0, None), modern)
        content = launcher.block.raw
        self.block = ctypes.create_string_buffer(content, len(content))
        self.rows = ctypes.c_longlong(launch.output_rows(shape))
        self.pointers = (ctypes.c_void_p * 2)(ctypes.addressof(self.block), ctypes.addressof(self.rows))
        self.arguments = ctypes.addressof(self.pointers)
        self.strides = content[launch.STRIDES_AT : launch.FACTORS_AT]
        addresses = "".join("Q" if address else "8x" for address in there)
        self.pack_into = struct.Struct(f"256s{addresses}{len(self.strides)}s2f").pack_into
        self.q_offset_at = launch.Q_OFFSET_AT if given & _Q_OFFSET_INT else None
        self.known: dict[tuple[int, ...], bytes] = {}
        self.variant, self.modern, self.tensor_maps = plan.variant, modern, launch.tensor_maps

        # The launches.
        self.launcher, self.grids = launcher, launch.grids(plan, shape, kernels)
        self.launches: dict[int, list[tuple[Any, Any, Any]]] = {}
        self.cu_launch, self.raise_error = launcher.cu_launch, launch.raise_error
        self.current_device: Callable[[], int] = torch._C._cuda_getDevice
        self.current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.tally, self.route = launch.calls, plan.combine.name.lower()

    def run(
        self,
        tensors: list[Tensor],
        out: Tensor | None,
        lse: Tensor | None,
        factor: float,
        output_factor: float,
        q_offset: Any,
    ) -> tuple[bool, Any]:
        """Serve a call whose tensors fit, as `serve` does. `out` and `lse` are those that are given."""
        if self.requires_grad and torch.is_grad_enabled():
            return _UNLIKE
        buffer = tensors.pop() if self.key[0] & _WORKSPACE else None
        addresses = list(map(_address, tensors))
        if self.k_global_place is not None:
            addresses.insert(self.k_global_place, addresses[self.k_global_place])
        if out is None:
            out = torch.empty(self.out_shape, dtype=self.out_dtype, device=self.device)
            addresses.insert(self.out_place, out.data_ptr())
        if self.lse_shape is not None:
            lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
            addresses.append(lse.data_ptr())
        known = tuple(addresses)
        maps = self.known.get(known) or self._look_at(known, tensors[1], tensors[2])
        if maps is None:
            return _UNLIKE
        if self.scratch_bytes:
            if buffer is None:
                buffer = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self.device)
            state = buffer.data_ptr()
            addresses += (state + self.state_bytes, state)
        self.pack_into(self.block, 0, maps, *addresses, self.strides, factor, output_factor)
        if self.q_offset_at is not None:
            _INT.pack_into(self.block, self.q_offset_at, q_offset)
        if self.current_device() == self.index and not _profiler_enabled():
            self._launch()
        else:
            with torch.cuda.device(self.index), torch.profiler.record_function(_NAME):
                self._launch()
        # A kernel writes unseen by autograd.
        if lse is None:
            _increment_version((out,))
            return True, out
        result = out, lse
        _increment_version(result)
        return True, result

    def _look_at(self, addresses: tuple[int, ...], k: Tensor, v: Tensor) -> bytes | None:
        """Tensor maps of K and V, if the addresses are right. None: the long way says whether they are wrong."""
        bits = addresses[0] | addresses[1] | addresses[2] | addresses[self.out_place]
        for place in self.scale_places:
            bits |= addresses[place]
        if bits & 15:
            return None
        for place, size, extents in self.given_outputs:
            start = addresses[place]
            end = start + size
            if any(a < end and start < a + length for a, length in zip(addresses, extents)):  # noqa: B905  # those before it
                return None
        if len(self.known) >= MOST_ADDRESSES:
            self.known.clear()
        maps = b"".join(m.ljust(128, b"\0") for m in self.tensor_maps(k, v, self.variant, self.modern))
        self.known[addresses] = maps
        return maps

    def _launch(self) -> None:
        stream = self.current_stream(self.index)
        for kernel, config, grid in self.launches.get(stream) or self._configure(stream):
            (error,) = self.cu_launch(config, kernel, self.arguments, 0)
            if error:
                self.raise_error(error, grid)
        self.tally[self.route] += 1

    def _configure(self, stream: int) -> list[tuple[Any, Any, Any]]:
        if len(self.launches) >= MOST_STREAMS:
            self.launches.clear()
        found = [(kernel, self.launcher.config(grid, self.modern, stream), grid) for kernel, grid in self.grids]
        self.launches[stream] = found
        return found
