"""What a process can ask of the engines beside a call: build kernels ahead, and say how a call would be served."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .contract import (
    _KV_FORMAT,
    BLOCK_SIZE,
    SCALES_PER_ROW,
    DecodeCall,
    DecodeProblem,
    KVFormat,
    check,
)
from .decode import msa_sparse_decode_attention

if TYPE_CHECKING:
    from .engines.cuda.plan import LaunchPlan, Shape

_CUDA_GRAPH = (
    "Before capture: one eager call of the same shapes and dtypes on the device, or msa_ops.warmup(device). A kernel that is "
    "not loaded by then raises RuntimeError inside the capture. Nothing else is needed: with out= (and lse_out=) the none and "
    "cluster routes allocate nothing, the scratch route takes the workspace or the graph's own pool, and nothing is read back. "
    "Between replays queries, ids, lengths, page tables, caches, block scales and tensor global scales may change in place, "
    "shapes may not."
)


def warmup(
    device: torch.device | str | int | None = None, kv_dtypes: Sequence[torch.dtype] | None = None
) -> tuple[str, ...]:
    """Compile, where no cache holds them, and load every kernel that calls with these KV dtypes can ask for on a device.

    After it a first call costs no compilation, and a CUDA graph may capture calls of any shape. Query dtype, layout, scales
    and group size are run-time values: they need no kernel of their own. On the CPU there is nothing to do.

    Args:
        device: a CUDA device or the CPU; None: the current CUDA device, or the CPU where torch sees no GPU. An int is a
            CUDA device.
        kv_dtypes: dtypes of K and V among bfloat16, float16, float8_e4m3fn and uint8 (NVFP4); None: all, and the kernels of
            `msa_proxy_score`, `msa_topk_select`, quantising and cache writing.

    Returns:
        Names of the kernels that are now loaded; empty on the CPU.

    Raises:
        TypeError, ValueError: not such a device or dtype.
        RuntimeError: no GPU, an unsupported one, or a missing compiler package.
    """
    formats = None if kv_dtypes is None else _formats(kv_dtypes)
    where = _device(device)
    if where.type == "cpu":
        return ()
    from .engines.cuda import launch, programs

    assert where.index is not None
    if formats is not None:
        return tuple(launch.warm_up(where.index, formats))
    names = launch.warm_up(where.index)
    with launch.on_device(where.index):
        return (*names, *programs.warm_up(where.index))


def msa_decode_nvfp4_specialized_warmup(device: torch.device | str | int | None = None) -> tuple[str, ...]:
    """`warmup` of the attention kernels for NVFP4 KV alone, in both scale layouts. Those that quantise and write caches come
    with `warmup(device)`. The CPU needs no warm-up: an empty tuple."""
    return warmup(device, (torch.uint8,))


def msa_decode_nvfp4_specialized_stats() -> dict[str, Any]:
    """How NVFP4 is served, and what this process has loaded and run on CUDA devices.

    Returns:
        ``"engines"``: True for ``"cpu"`` and for ``"cuda"``: NVFP4 KV runs on both. ``"cuda_graph"``: what a capture needs.
        ``"nvfp4_variants"``: NVFP4 kernels loaded. ``"variants"``: kernels loaded, of every KV format. ``"calls"``: calls
        that the CUDA engine served by route (``none``, ``cluster``, ``scratch``), of every KV format; calls on the CPU are
        not counted.
    """
    from .engines.cuda import launch, plan

    loaded = launch.loaded_variants()
    return {
        "engines": {"cpu": True, "cuda": True},
        "cuda_graph": _CUDA_GRAPH,
        "nvfp4_variants": tuple(v.name for v in loaded if v.kv_format is KVFormat.NVFP4),
        "variants": tuple(v.name for v in loaded),
        "calls": {combine.name.lower(): launch.calls[combine.name.lower()] for combine in plan.Combine},
    }


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a call is served.

    `route`: how partial results meet. On CUDA ``none`` (one block an item), ``cluster`` (in shared memory, one launch) or
    ``scratch`` (in device memory, a second kernel); on the CPU ``segments``, runs of at most 16 selected blocks merged by
    their log-sum-exp. `splits`: ways that an item (a token, a KV head and up to 16 of its query heads) is split. `blocks`:
    thread blocks launched, 0 on the CPU. `variant`: the kernel's name, None on the CPU. `scratch_bytes`: device memory for
    partial results. `kv_bytes`: upper bound, from shapes alone, of the distinct bytes of K and V (block scales included)
    that the call reads.
    """

    engine: str
    route: str
    splits: int
    blocks: int
    variant: str | None
    why: str
    force_fused: str
    partial_dtype: str
    workspace: str
    scratch_bytes: int
    kv_bytes: int


def explain(*args: Any, **kwargs: Any) -> Explanation:
    """Say how `msa_sparse_decode_attention` would serve these arguments, without running it.

    Takes the arguments of that call and raises its errors. On a CUDA device the plan depends on how many clusters of the
    kernel fit, so the kernel is loaded (and compiled, if no cache holds it).

    Returns:
        An `Explanation`; its fields ``force_fused``, ``partial_dtype`` and ``workspace`` say what each hint changes.
    """
    bound = inspect.signature(msa_sparse_decode_attention).bind(*args, **kwargs)
    bound.apply_defaults()
    problem = check(DecodeCall(**bound.arguments))
    given = problem.workspace is not None
    return _explain_cuda(problem, given) if problem.q.is_cuda else _explain_cpu(problem, given)


def _explain_cpu(problem: DecodeProblem, workspace: bool) -> Explanation:
    from .engines.cpu.plan import SEGMENT_BLOCKS

    splits = -(-problem.topk // SEGMENT_BLOCKS)
    return Explanation(
        engine="cpu",
        route="segments",
        splits=splits,
        blocks=0,
        variant=None,
        why=f"q is on the CPU; topk = {problem.topk} in runs of {SEGMENT_BLOCKS} blocks",
        force_fused=_hint(
            problem.force_fused,
            "no effect: a request's bits never depend on its batch on the CPU, and nothing else is split",
        ),
        partial_dtype=_hint(problem.partial_dtype, "no effect: partial results stay in float32 on the CPU"),
        workspace=_hint(workspace or None, "no effect: the CPU engine needs none"),
        scratch_bytes=0,
        kv_bytes=kv_bytes_bound(problem),
    )


def _explain_cuda(problem: DecodeProblem, workspace: bool) -> Explanation:
    from .engines.cuda import launch
    from .engines.cuda.plan import Combine

    plan, shape = launch.plan_of(problem), launch.shape_of(problem)
    scratch = plan.combine is Combine.SCRATCH
    need = launch.scratch_bytes(problem)
    stored = str(problem.partial_dtype or torch.float32).removeprefix("torch.")
    on_chip = "no effect: partial results, if any, meet on chip in float32"
    return Explanation(
        engine="cuda",
        route=plan.combine.name.lower(),
        splits=plan.splits,
        blocks=plan.blocks if problem.q.numel() else 0,
        variant=plan.variant.name,
        why=plan.why,
        force_fused=_force_fused_effect(shape, plan),
        partial_dtype=_hint(problem.partial_dtype, f"partial results are stored as {stored}" if scratch else on_chip),
        workspace=_hint(
            workspace or None,
            f"holds the {need} bytes of partial results"
            if scratch
            else "no effect: this route stores no partial results",
        ),
        scratch_bytes=need,
        kv_bytes=kv_bytes_bound(problem),
    )


def _force_fused_effect(shape: Shape, plan: LaunchPlan) -> str:
    if shape.override is not None or shape.combine is not None:
        name = "MSA_OPS_COMBINE" if shape.override is None else "MSA_OPS_PLAN"
        return _hint(shape.force_fused, f"overridden by {name}: {plan.splits} blocks an item")
    if shape.force_fused:
        return "one block an item, whatever the batch: a request's bits do not depend on it"
    return _hint(shape.force_fused, f"as many blocks an item as the device allows: {plan.splits}")


def _hint(value: object, effect: str) -> str:
    return "not given" if value is None else effect


def kv_bytes_bound(problem: DecodeProblem) -> int:
    """Upper bound of the distinct bytes of K, V and their block scales that a call reads, from shapes alone.

    A request's tokens may select the same blocks, requests may share pages, and ids may be holes: then it is less.
    """
    p = problem
    scale_bytes = SCALES_PER_ROW if p.kv_format is KVFormat.NVFP4 else 0
    row = 2 * (p.k.shape[-1] * p.k.element_size() + scale_bytes)
    selected = p.seqlen_q * p.topk
    if p.page_table is None:
        rows = min(p.batch_size * selected * BLOCK_SIZE, p.k.shape[0])
    else:
        rows = min(p.batch_size * min(selected, p.page_table.shape[1]), p.k.shape[0]) * BLOCK_SIZE
    return rows * p.num_kv_heads * row


def _formats(kv_dtypes: Sequence[torch.dtype]) -> list[KVFormat]:
    if isinstance(kv_dtypes, torch.dtype):
        raise TypeError(f"kv_dtypes must be a sequence of dtypes, got {kv_dtypes}: pass ({kv_dtypes},)")
    for dtype in kv_dtypes:
        if dtype not in _KV_FORMAT:
            raise ValueError(f"kv_dtypes must be of bfloat16, float16, float8_e4m3fn and uint8 (NVFP4), got {dtype!r}")
    return list(dict.fromkeys(_KV_FORMAT[dtype] for dtype in kv_dtypes))


def _device(device: torch.device | str | int | None) -> torch.device:
    """The device with its index."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise TypeError(f"device must be a torch.device, a str, an int or None, got {type(device).__name__}")
    try:
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must name a cpu or cuda device, got {device!r}") from error
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a cpu or cuda device, got {where}")
    if where.type == "cpu":
        return where
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"device {where} needs an NVIDIA GPU and a torch built with CUDA, and torch sees no GPU: see "
            "https://pytorch.org/get-started for the command that installs such a torch, or pass device='cpu'"
        )
    index = torch.cuda.current_device() if where.index is None else where.index
    if not 0 <= index < torch.cuda.device_count():
        raise ValueError(
            f"device must be one of the {torch.cuda.device_count()} CUDA devices that torch sees, got {where}"
        )
    return torch.device("cuda", index)
