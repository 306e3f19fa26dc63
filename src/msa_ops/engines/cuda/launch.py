"""Launching: the kernels of a device, the parameter block, the stream.

A launch allocates nothing on the none and cluster routes and reads nothing from the device. Objects that the driver reads
during a launch (parameter block, launch configuration) are kept per thread, because the call into the driver releases the
interpreter lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract import BLOCK_SIZE, FP8, SCALES_PER_ROW, DecodeProblem, KVFormat, KVLayout, ScaleLayout
from . import compile as compiler
from .driver import NO_CONTEXT, check, driver, ensure_context, launch_config, load_library, refuse_capture
from .plan import (
    MAX_GRID,
    ROW_BYTES,
    ClusterRoom,
    Combine,
    DeviceFacts,
    LaunchPlan,
    Shape,
    Variant,
    choosing_plan,
    may_choose,
    plan_for,
    scratch_elements,
    variants_for,
)

# struct Params of kernels/params.cuh, padded to its 64-byte alignment.
ADDRESSES = 15
_STRIDES_AND_SIZES = "18q"
_PARAMS = struct.Struct(f"128s128s{ADDRESSES}Q{_STRIDES_AND_SIZES}2f12I15i4x")
STRIDES_AT, FACTORS_AT, Q_OFFSET_AT = (
    struct.calcsize(f"128s128s{ADDRESSES}Q{fields}")
    for fields in ("", _STRIDES_AND_SIZES, f"{_STRIDES_AND_SIZES}2f12I7i")
)
"""Where the strides, the two factors and `q_offset_int` begin: `prepared` writes the factors, the offset, and what lies
before the strides."""
_CHOICE = struct.Struct("Q3q2i")
"""What a kernel that chooses its blocks has behind these."""
PARAMETER_BYTES = -(-(_PARAMS.size + _CHOICE.size) // 64) * 64
"""Size of such a kernel's parameter block, up to its alignment."""
_QUERY_TYPE = {torch.bfloat16: 0, torch.float16: 1, FP8: 2}
_PARTIAL_TYPE = {None: 0, torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, FP8: 3}
_PARTIAL_DTYPE = (torch.float32, torch.bfloat16, torch.float16, FP8)
_SCALES_TILED, _SCALES_PLANAR, _SCALES_GATHERED = 0, 1, 2  # enum ScaleLayout of kernels/params.cuh
_ALL_SHARED = 100  # per cent of the multiprocessor's memory
_MERGE_ROWS = 4  # output rows of one block of the merge kernel

calls: Counter[str] = Counter()
"""Calls served, by route: ``none``, ``cluster``, ``scratch``."""


class Kernels:
    """The loaded entry points of one variant, set up for every device that asked for them."""

    def __init__(self, variant: Variant, arch: str) -> None:
        self.variant = variant
        d = driver()
        self.library = library = load_library(variant, arch)
        self.kernel = check(d.cuLibraryGetKernel(library, b"msa_decode"), "looking up msa_decode")
        self.merge_kernel = check(d.cuLibraryGetKernel(library, b"msa_merge"), "looking up msa_merge")
        # The launch call takes a CUkernel in place of a CUfunction.
        self.decode, self.merge = d.CUfunction(int(self.kernel)), d.CUfunction(int(self.merge_kernel))

    def set_up(self, device: int, facts: DeviceFacts) -> None:
        """Set the kernels' attributes for `device`, which is the current one, and put their code there."""
        d = driver()
        a = d.CUfunction_attribute
        handle = check(d.cuDeviceGet(device), "opening the device")
        check(
            d.cuKernelSetAttribute(
                a.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self.variant.shared_bytes, self.kernel, handle
            ),
            "raising the shared memory limit",
        )
        # Left to itself the driver may keep more first-level cache than two blocks' copy rings leave room for.
        check(
            d.cuKernelSetAttribute(
                a.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, _ALL_SHARED, self.kernel, handle
            ),
            "preferring shared memory over cache",
        )
        if facts.max_cluster > 8:
            check(
                d.cuKernelSetAttribute(a.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, self.kernel, handle),
                "allowing clusters of 16",
            )
        # Lazy loading would do this at the first launch, which may be inside a capture.
        for kernel in (self.kernel, self.merge_kernel):
            check(d.cuKernelGetFunction(kernel), "loading code onto the device")

    def active_clusters(self, size: int) -> int:
        """Clusters of `size` blocks that the current device holds at once; 0 where it cannot launch them."""
        config = launch_config(size, self.variant.threads, self.variant.shared_bytes, size, False, 0)
        error, clusters = driver().cuOccupancyMaxActiveClusters(self.decode, config)
        if error.name in NO_CONTEXT:  # no answer about clusters, and not to be kept as one
            raise RuntimeError(f"CUDA driver: {error.name} while asking how many clusters fit")
        return 0 if int(error) else int(clusters)


class _State:
    """All that is loaded, for this process. A forked child starts empty."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kernels: dict[tuple[Variant, str], Kernels] = {}
        self.ready: dict[tuple[Variant, int], Kernels] = {}
        self.facts: dict[int, DeviceFacts] = {}
        self.room: dict[tuple[Variant, int], ClusterRoom] = {}
        self.local = threading.local()


_state = _State()


def _forget() -> None:
    global _state
    _state = _State()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def device_facts(device: int) -> DeviceFacts:
    """Facts of one CUDA device. Raises `RuntimeError` where it is not supported."""
    facts = _state.facts.get(device)
    if facts is None:
        d = driver()
        compiler.architecture(torch.cuda.get_device_capability(device))
        handle = check(d.cuDeviceGet(device), "opening the device")
        a = d.CUdevice_attribute

        def attribute(which: Any) -> int:
            return int(check(d.cuDeviceGetAttribute(which, handle), "reading the device's limits"))

        facts = _state.facts[device] = DeviceFacts(
            torch.cuda.get_device_capability(device),
            attribute(a.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            attribute(a.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
            attribute(a.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),
        )
    return facts


def cluster_room(variant: Variant, device: int) -> ClusterRoom:
    """Clusters of each size that the device, the current one, runs at once with this kernel, as the driver answers."""
    room = _state.room.get((variant, device))
    if room is None:
        facts = device_facts(device)
        sizes = [size for size in variant.cluster_sizes if size <= facts.max_cluster]
        kernels = kernels_for(variant, device)
        room = _state.room[variant, device] = tuple((size, kernels.active_clusters(size)) for size in sizes)
    return room


def kernels_for(variant: Variant, device: int) -> Kernels:
    """The variant, loaded and set up for a device, the current one; compiled first if no cache holds it."""
    state = _state
    ready = state.ready.get((variant, device))
    if ready is not None:
        return ready
    refuse_capture(variant)
    with state.lock:
        facts = device_facts(device)
        arch = compiler.architecture(facts.capability)
        loaded = state.kernels.get((variant, arch))
        if loaded is None:
            loaded = state.kernels[variant, arch] = Kernels(variant, arch)
        loaded.set_up(device, facts)
        state.ready[variant, device] = loaded
    return loaded


@contextlib.contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make `device` the current one, with its context current in this thread too."""
    with torch.cuda.device(device):
        _launcher()
        yield


def warm_up(device: int, formats: Sequence[KVFormat] = tuple(KVFormat)) -> list[str]:
    """Compile, where no cache holds them, and load all variants that calls with these KV formats can ask for; their names."""
    with on_device(device):
        wanted = variants_for(device_facts(device), formats)
        for variant in wanted:
            kernels_for(variant, device)
            if device_facts(device).has_clusters:
                cluster_room(variant, device)
    return [variant.name for variant in wanted]


def loaded_variants() -> list[Variant]:
    """The variants that this process has loaded on some device."""
    return sorted({variant for variant, _ in _state.ready}, key=lambda variant: variant.name)


# --- one call ----------------------------------------------------------------------------------------------------------


def _forced_combine() -> Combine | None:
    name = os.environ.get("MSA_OPS_COMBINE")
    if not name:
        return None
    try:
        return Combine[name.upper()]
    except KeyError:
        raise ValueError(f"MSA_OPS_COMBINE must be none, cluster or scratch, got {name!r}") from None


def _forced_plan() -> tuple[int, ...] | None:
    text = os.environ.get("MSA_OPS_PLAN")
    if not text:
        return None
    try:
        numbers = tuple(int(x) for x in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != 7:
        raise ValueError(f"MSA_OPS_PLAN must be groups,warps,tile,stages,min_blocks,splits,blocks, got {text!r}")
    return numbers


def shape_of(problem: DecodeProblem) -> Shape:
    p = problem
    return Shape(
        p.kv_format, p.tokens, p.num_kv_heads, p.group_size, p.topk, p.force_fused, _forced_combine(),
        _forced_plan(),
    )  # fmt: skip


def plan_of(problem: DecodeProblem) -> LaunchPlan:
    """The plan that `run` takes."""
    with on_device(problem.q.device.index):
        return _plan(problem, shape_of(problem))


def _plan(problem: DecodeProblem, shape: Shape) -> LaunchPlan:
    index = problem.q.device.index
    facts = device_facts(index)
    return plan_for(shape, facts, lambda variant: cluster_room(variant, index))


def scratch_bytes(problem: DecodeProblem) -> int:
    """Bytes of workspace that this call uses."""
    return sum(scratch_layout(problem, plan_of(problem), shape_of(problem)))


def scratch_layout(problem: DecodeProblem, plan: LaunchPlan, shape: Shape) -> tuple[int, int]:
    """Bytes of the states, which come first, and of the partial outputs."""
    if plan.combine is not Combine.SCRATCH:
        return 0, 0
    values, state = scratch_elements(shape, plan.splits)
    return state * 4, values * _PARTIAL_DTYPE[_PARTIAL_TYPE[problem.partial_dtype]].itemsize


class Choice(NamedTuple):
    """What an attention chooses its blocks by, where it writes the problem's ids and does not read them: scores
    ``(heads, pages, tokens)``, as `msa_proxy_score` returns them for all pages of the table, and forced blocks."""

    scores: Tensor
    sink_blocks: int
    local_blocks: int


def run(problem: DecodeProblem, out: Tensor, lse: Tensor | None, choice: Choice | None = None) -> bool:
    """Serve one checked problem on the current stream of its device. With a `choice` it returns False, and has done nothing,
    where a selection before the attention is faster."""
    if problem.q.numel() == 0:
        return choice is None
    index = problem.q.device.index
    if index == torch.cuda.current_device():
        return _run(problem, out, lse, choice, index)
    with torch.cuda.device(index):
        return _run(problem, out, lse, choice, index)


def _run(problem: DecodeProblem, out: Tensor, lse: Tensor | None, choice: Choice | None, index: int) -> bool:
    launcher = _launcher()  # first: it gives the thread a context
    if choice is not None and not may_choose(device_facts(index), problem.topk, choice.scores.shape[1]):
        return False
    shape = shape_of(problem)
    plan = _plan(problem, shape)
    if choice is not None:
        choosing = choosing_plan(plan, shape, device_facts(index), choice.scores.shape[1])
        if choosing is None:
            return False
        plan = choosing
    if shape.items > MAX_GRID:
        raise ValueError(f"q has {shape.items} (token, KV head) items: more than one launch can serve ({MAX_GRID})")
    kernels = kernels_for(plan.variant, index)
    modern = _state.facts[index].has_clusters
    scratch = _scratch(problem, plan, shape) if plan.combine is Combine.SCRATCH else (0, 0, None)
    launcher.pack(problem, plan, shape, out, lse, scratch, modern)
    if choice is not None:
        launcher.pack_choice(choice)
    stream = torch._C._cuda_getCurrentRawStream(index)
    launcher.rows.value = output_rows(shape)
    for kernel, grid in grids(plan, shape, kernels):
        launcher.launch(kernel, grid, modern, stream)
    calls[plan.combine.name.lower()] += 1
    return True


class Grid(NamedTuple):
    """One launch: blocks, threads of each, dynamic shared bytes, blocks of a cluster."""

    blocks: int
    threads: int
    shared: int
    cluster: int

    def __str__(self) -> str:
        return f"{self.blocks} blocks of {self.threads} threads"


def output_rows(shape: Shape) -> int:
    """Rows of the output, one for each token and query head: what the merge kernel goes over."""
    return shape.tokens * shape.kv_heads * shape.group


def grids(plan: LaunchPlan, shape: Shape, kernels: Kernels) -> list[tuple[Any, Grid]]:
    """The kernels of a call in order, each with its grid."""
    variant, cluster = plan.variant, plan.splits if plan.combine is Combine.CLUSTER else 1
    found = [
        (kernels.decode, Grid(plan.blocks, variant.threads, variant.dynamic_bytes(plan.combine, cluster), cluster))
    ]
    if plan.combine is Combine.SCRATCH:
        found.append((kernels.merge, Grid(-(-output_rows(shape) // _MERGE_ROWS), 32 * _MERGE_ROWS, 0, 1)))
    return found


def _scratch(problem: DecodeProblem, plan: LaunchPlan, shape: Shape) -> tuple[int, int, Tensor]:
    """Addresses of partial outputs and states, and what keeps them alive during the launch."""
    state_bytes, value_bytes = scratch_layout(problem, plan, shape)
    need = state_bytes + value_bytes
    buffer = problem.workspace
    if buffer is None or buffer.numel() < need:
        # Freed after the launch into the stream's own pool (the graph's, during capture), so reuse is ordered.
        buffer = torch.empty(need, dtype=torch.uint8, device=problem.q.device)
    address = buffer.data_ptr()
    return address + state_bytes, address, buffer


@lru_cache(maxsize=1024)
def divisor(value: int) -> tuple[int, int, int]:
    """struct Divisor: n // value as a multiplication and a shift, for 0 <= n < 2^31 (Granlund and Montgomery, 1994)."""
    if value == 1:
        return 1, 0, 0
    power = 31 + (value - 1).bit_length()
    return value, -(-(1 << power) // value), power - 32


def tensor_maps(k: Tensor, v: Tensor, variant: Variant, modern: bool) -> tuple[bytes, bytes]:
    """How tensor copies find K and V; nothing below 9.0."""
    return (tensor_map(k, variant.tile), tensor_map(v, variant.tile)) if modern else (b"", b"")


def tensor_map(t: Tensor, tile: int) -> bytes:
    """The driver's description of K or V for tensor copies of `tile` rows of one head."""
    if t.numel() == 0:
        return _NO_MAP  # nothing of an empty cache is ever copied
    return _encode_map(t.data_ptr(), tuple(t.shape), t.stride(), t.element_size(), tile)


_NO_MAP = bytes(128)


@lru_cache(maxsize=4096)
def _encode_map(address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int, tile: int) -> bytes:
    # A pure function of address, shape and strides, so that keeping results ties nothing to a tensor's identity.
    d = driver()
    if _rows_paired(shape, strides, size):
        shape, tile = (*shape[:2], shape[2] // 2, 2 * shape[3]), tile // 2
        strides = (*strides[:2], 2 * strides[2], strides[3])
    order = (3, 2, 1, 0) if len(shape) == 4 else (2, 0, 1)  # bytes of a row, rows, heads, pages
    row = shape[-1] * size
    # A dim whose stride is 0 (an expanded cache) has but one entry, which the kernel asks for.
    dims = [row] + [max(1, shape[i]) if strides[i] else 1 for i in order[1:]]
    steps = [strides[i] * size if shape[i] > 1 and strides[i] else 16 for i in order[1:]]
    column = min(row, 128)
    swizzle = d.CUtensorMapSwizzle
    encoded = check(
        d.cuTensorMapEncodeTiled(
            d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(dims),
            address,
            [d.cuuint64_t(x) for x in dims],
            [d.cuuint64_t(x) for x in steps],
            [d.cuuint32_t(x) for x in [column, tile] + [1] * (len(dims) - 2)],
            [d.cuuint32_t(1)] * len(dims),
            d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle.CU_TENSOR_MAP_SWIZZLE_128B if column == 128 else swizzle.CU_TENSOR_MAP_SWIZZLE_64B,
            d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"describing a cache of shape {shape} and strides {strides}",
    )
    return struct.pack("16Q", *(int(x) for x in encoded.opaque))


def _rows_paired(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> bool:
    return len(shape) == 4 and shape[3] * size == ROW_BYTES[KVFormat.NVFP4] == strides[2] * size


def paired(t: Tensor) -> bool:
    """Whether K or V is copied in pairs of rows: NVFP4 rows that lie one behind the other in a page (copy.cuh)."""
    return _rows_paired(tuple(t.shape), t.stride(), t.element_size())


def _scale_layout(p: DecodeProblem) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """How the kernel reads NVFP4's block scales, and the strides of a page and a head of K's and V's, in bytes."""
    k, v = p.k_scale, p.v_scale
    if k is None or v is None:
        return _SCALES_TILED, (0, 0), (0, 0)
    if p.scale_layout is ScaleLayout.PLANAR:
        return _SCALES_PLANAR, k.stride(), v.stride()
    # A copy of whole pages needs 16-byte starts; a flat cache's rows of one head are no page.
    gathered = p.kv_layout is not KVLayout.PAGED or (k.data_ptr() | v.data_ptr()) & 15
    page = (p.num_kv_heads * BLOCK_SIZE * SCALES_PER_ROW, BLOCK_SIZE * SCALES_PER_ROW)
    return _SCALES_GATHERED if gathered else _SCALES_TILED, page, page


def _launcher() -> _Launcher:
    local = _state.local
    try:
        launcher: _Launcher = local.launcher
    except AttributeError:
        launcher = local.launcher = _Launcher()
    return launcher


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


class _Launcher:
    """One thread's parameter block and launch configurations."""

    def __init__(self) -> None:
        d = driver()
        ensure_context()
        self.block = ctypes.create_string_buffer(PARAMETER_BYTES)
        self.rows = ctypes.c_longlong(0)
        self.pointers = (ctypes.c_void_p * 2)(ctypes.addressof(self.block), ctypes.addressof(self.rows))
        self.arguments: int = ctypes.addressof(self.pointers)
        self.configs: dict[tuple[Grid, bool, int], Any] = {}
        self.cu_launch = d.cuLaunchKernelEx

    def pack(
        self,
        p: DecodeProblem,
        plan: LaunchPlan,
        shape: Shape,
        out: Tensor,
        lse: Tensor | None,
        scratch: tuple[int, int, Tensor | None],
        modern: bool,
    ) -> None:
        q, k, v, ids = p.q, p.k, p.v, p.q2k_indices
        paged = p.kv_layout is KVLayout.PAGED
        lengths = p.seqused_k if paged else p.cu_seqlens_k
        assert lengths is not None
        table_row, width = (p.page_table.stride(0), p.page_table.shape[1]) if p.page_table is not None else (0, 0)
        size = k.element_size()
        ks, vs = k.stride(), v.stride()
        row = 2 if paged else 0
        scale_layout, k_scale, v_scale = _scale_layout(p)
        offset = p.q_offset_int
        # Unseen by the contract in a compiled graph.
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) & 15:
            raise ValueError("q, k, v and out must start on a 16-byte boundary")
        start = 16 if scale_layout == _SCALES_PLANAR else 4
        if (_pointer(p.k_scale) | _pointer(p.v_scale)) % start:
            raise ValueError(f"k_scale and v_scale must start on a {start}-byte boundary")
        maps = tensor_maps(k, v, plan.variant, modern)
        _PARAMS.pack_into(
            self.block, 0, *maps,
            q.data_ptr(), k.data_ptr(), v.data_ptr(), ids.data_ptr(), _pointer(p.page_table), lengths.data_ptr(),
            _pointer(p.q_offset), _pointer(p.k_global_scale), _pointer(p.v_global_scale), _pointer(p.k_scale),
            _pointer(p.v_scale), out.data_ptr(), _pointer(lse), scratch[0], scratch[1],
            q.stride(0) * q.element_size(), q.stride(1) * q.element_size(),
            ks[0] * size if paged else 0, ks[1] * size, ks[row] * size,
            vs[0] * size if paged else 0, vs[1] * size, vs[row] * size,
            ids.stride(0), ids.stride(1), table_row, lengths.stride(0),
            0 if p.q_offset is None else p.q_offset.stride(0),
            k_scale[0], k_scale[1], v_scale[0], v_scale[1], k.shape[0],
            p.softmax_scale, p.output_scale,
            *divisor(shape.kv_heads), *divisor(shape.row_tiles), *divisor(p.seqlen_q), *divisor(plan.splits),
            shape.group, shape.topk, width, shape.items, plan.combine, _QUERY_TYPE[q.dtype], _PARTIAL_TYPE[p.partial_dtype],
            offset or 0, offset is not None, p.causal, paged, scale_layout,
            modern and paired(k), modern and paired(v), plan.early,
        )  # fmt: skip

    def pack_choice(self, choice: Choice) -> None:
        scores = choice.scores
        _CHOICE.pack_into(
            self.block, _PARAMS.size, scores.data_ptr(), *scores.stride(), choice.sink_blocks, choice.local_blocks
        )

    def launch(self, kernel: Any, grid: Grid, dependent: bool, stream: int) -> None:
        (error,) = self.cu_launch(self.config(grid, dependent, stream), kernel, self.arguments, 0)
        if error:
            raise_error(error, grid)

    def config(self, grid: Grid, dependent: bool, stream: int) -> Any:
        """`launch_config` of these, kept."""
        key = (grid, dependent, stream)
        config = self.configs.get(key)
        if config is None:
            if len(self.configs) > 4096:
                self.configs.clear()
            config = self.configs[key] = launch_config(*grid, dependent, stream)
        return config


def raise_error(error: Any, grid: Grid) -> None:
    raise RuntimeError(f"CUDA driver: {error.name} while launching {grid}")
