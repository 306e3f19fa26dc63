"""What a call means: loose arguments in, one checked `DecodeProblem` out, or a clear error.

Every error of `msa_sparse_decode_attention` is raised here, before anything is allocated or launched. Engines receive a
`DecodeProblem` and never validate, never guess a layout. Device *values* (page ids, lengths) are not read here: engines skip
what is out of range; with ``MSA_OPS_CHECK=1`` `check_values` reads and reports them.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

HEAD_DIM = 128
BLOCK_SIZE = 128
"""Keys per selectable block; also the page size of a paged cache."""
MAX_TOPK = 4096
SOFTMAX_SCALE = HEAD_DIM**-0.5
"""Where a call gives none."""
SCALE_GROUP = 16
"""Elements that share one NVFP4 block scale."""
SCALES_PER_ROW = HEAD_DIM // SCALE_GROUP
ROW_ALIGNMENT = 16
"""Bytes: every row of q, K and V starts on such a boundary, so that engines may use 16-byte accesses."""

FP8 = torch.float8_e4m3fn


class KVFormat(enum.Enum):
    """Element format of K and V."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


class KVLayout(enum.Enum):
    """How a key position becomes an address: through a page table, or directly."""

    PAGED = "paged"
    FLAT = "flat"


class ScaleLayout(enum.Enum):
    """Where an NVFP4 block scale lies: in the 128x4 tiled layout, or in the regions of a planar page."""

    NONE = "none"
    TILED = "tiled"
    PLANAR = "planar"


_KV_FORMAT = dict(zip((torch.bfloat16, torch.float16, FP8, torch.uint8), KVFormat, strict=True))
_KV_FORMATS_OF_Q = {
    torch.bfloat16: (KVFormat.BF16, KVFormat.FP8, KVFormat.NVFP4),
    torch.float16: (KVFormat.FP16, KVFormat.FP8, KVFormat.NVFP4),
    FP8: (KVFormat.BF16, KVFormat.FP8, KVFormat.NVFP4),
}
_OUT_DTYPE = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float16, FP8: torch.bfloat16}
_PARTIAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, FP8)
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class DecodeCall(NamedTuple):
    """The arguments of one `msa_sparse_decode_attention` call, as given."""

    q: Tensor
    k: Tensor
    v: Tensor
    q2k_indices: Tensor
    page_table: Tensor | None
    seqused_k: Tensor | None
    cu_seqlens_k: Tensor | None
    seqlen_q: int
    causal: bool
    softmax_scale: float | None
    return_softmax_lse: bool
    k_scale: Tensor | None
    v_scale: Tensor | None
    k_global_scale: float | Tensor | None
    v_global_scale: float | Tensor | None
    q_offset: int | Tensor | None
    partial_dtype: torch.dtype | None
    force_fused: bool | None
    workspace: Any
    out: Tensor | None
    lse_out: Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeProblem:
    """One checked decode step: inputs only; the outputs are handed to the engine beside it.

    Global scales given as floats are already folded: `softmax_scale` includes ``k_global_scale`` and `output_scale` is
    ``v_global_scale``; given as one-element tensors they stay tensors, to be read on the device. A float ``q_offset``
    does not exist: an int stays in `q_offset_int`, a tensor in `q_offset`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q2k_indices: Tensor
    page_table: Tensor | None
    seqused_k: Tensor | None
    cu_seqlens_k: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    k_global_scale: Tensor | None
    v_global_scale: Tensor | None
    q_offset: Tensor | None
    workspace: Tensor | None
    seqlen_q: int
    causal: bool
    softmax_scale: float
    output_scale: float
    q_offset_int: int | None
    force_fused: bool | None
    partial_dtype: torch.dtype | None

    @property
    def tokens(self) -> int:
        return self.q.shape[0]

    @property
    def num_qo_heads(self) -> int:
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def topk(self) -> int:
        return self.q2k_indices.shape[2]

    @property
    def batch_size(self) -> int:
        return self.q.shape[0] // self.seqlen_q

    @property
    def kv_format(self) -> KVFormat:
        return _KV_FORMAT[self.k.dtype]

    @property
    def kv_layout(self) -> KVLayout:
        return KVLayout.FLAT if self.page_table is None else KVLayout.PAGED

    @property
    def scale_layout(self) -> ScaleLayout:
        if self.k_scale is None:
            return ScaleLayout.NONE
        return ScaleLayout.PLANAR if self.k_scale.dim() == 4 else ScaleLayout.TILED

    @property
    def out_dtype(self) -> torch.dtype:
        return _OUT_DTYPE[self.q.dtype]


def check(call: DecodeCall) -> DecodeProblem:
    """Check every host-visible property of a call. Raises `TypeError` or `ValueError`; reads no device memory."""
    _check_tensors(call)
    _check_query(call.q)
    _check_flags(call)
    _check_kv(call)
    _check_lengths(call)
    _check_scales(call)
    _check_selection(call)
    softmax_scale = SOFTMAX_SCALE if call.softmax_scale is None else _number("softmax_scale", call.softmax_scale)
    k_factor, k_global = _global_scale("k_global_scale", call.k_global_scale, call.q)
    _require_float32("softmax_scale * k_global_scale", softmax_scale * k_factor)
    output_scale, v_global = _global_scale("v_global_scale", call.v_global_scale, call.q)
    q_offset_int, q_offset = _query_offset(call)
    _check_outputs(call)  # after all that they are to lie apart from
    _check_autograd(call)
    problem = DecodeProblem(
        call.q, call.k, call.v, call.q2k_indices, call.page_table, call.seqused_k, call.cu_seqlens_k, call.k_scale,
        call.v_scale, k_global, v_global, q_offset, None if call.workspace is None else call.workspace.buffer,
        call.seqlen_q, call.causal, softmax_scale * k_factor, output_scale, q_offset_int, call.force_fused,
        call.partial_dtype,
    )  # fmt: skip
    if not torch.compiler.is_compiling() and os.environ.get("MSA_OPS_CHECK") == "1":
        from .checking import check_values

        check_values(problem)
    return problem


# --- the pieces of `check` ---------------------------------------------------------------------------------------------


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(t: Tensor) -> tuple[int, ...]:
    return tuple(t.shape)


def _require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got {value.layout}: pass {name}.to_dense()")


def _check_tensors(call: DecodeCall) -> None:
    _require_tensor("q", call.q)
    _require_tensor("k", call.k)
    _require_tensor("v", call.v)
    _require_tensor("q2k_indices", call.q2k_indices)
    device = call.q.device
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"q must be on a cpu or cuda device, got {device}")
    for name in (
        "k", "v", "q2k_indices", "page_table", "seqused_k", "cu_seqlens_k", "k_scale", "v_scale", "out", "lse_out",
    ):  # fmt: skip
        value = getattr(call, name)
        if value is None:
            continue
        _require_tensor(name, value)
        if value.device != device:
            raise ValueError(f"{name} must be on q's device {device}, got {value.device}: pass {name}.to(q.device)")


def _check_dense_rows(name: str, t: Tensor) -> None:
    """Last dim dense, every row on a 16-byte boundary."""
    if t.stride(-1) != 1:
        raise ValueError(
            f"{name} must have a dense last dim (stride 1), got strides {t.stride()}: pass {name}.contiguous()"
        )
    size = t.element_size()
    for dim in range(t.dim() - 1):
        if t.shape[dim] > 1 and (t.stride(dim) * size) % ROW_ALIGNMENT:
            raise ValueError(
                f"{name} must have rows aligned to {ROW_ALIGNMENT} bytes, got a stride of {t.stride(dim) * size} bytes "
                f"in dim {dim}: pad the row pitch or pass {name}.contiguous()"
            )
    past = _bytes_past_boundary(t, ROW_ALIGNMENT)
    if past:
        raise ValueError(
            f"{name} must start on a {ROW_ALIGNMENT}-byte boundary, got one {past} bytes past it: pass {name}.clone()"
        )


def _bytes_past_boundary(t: Tensor, alignment: int) -> int:
    """How far `t` starts past a multiple of `alignment` bytes. 0 while torch.compile traces, where no address exists."""
    if torch.compiler.is_compiling():
        return 0
    start = t.data_ptr() if type(t) in _PLAIN_TENSORS else t.storage_offset() * t.element_size()
    return int(start % alignment)


def _check_query(q: Tensor) -> None:
    if q.dtype not in _KV_FORMATS_OF_Q:
        raise ValueError(f"q must be bfloat16, float16 or float8_e4m3fn, got {_name(q.dtype)}: cast q")
    if q.dim() != 3 or q.shape[2] != HEAD_DIM:
        raise ValueError(f"q must have shape (tokens, num_qo_heads, {HEAD_DIM}), got {_shape(q)}")
    if q.shape[1] == 0:
        raise ValueError(f"q must have at least one query head, got shape {_shape(q)}")
    _check_dense_rows("q", q)


def _check_flags(call: DecodeCall) -> None:
    if isinstance(call.seqlen_q, bool) or not isinstance(call.seqlen_q, (int, torch.SymInt)):
        raise TypeError(f"seqlen_q must be an int, got {type(call.seqlen_q).__name__}")
    if call.seqlen_q < 1:
        raise ValueError(f"seqlen_q must be at least 1, got {call.seqlen_q}")
    if call.q.shape[0] % call.seqlen_q:
        raise ValueError(
            f"q must hold seqlen_q tokens for every request: {call.q.shape[0]} tokens do not divide by "
            f"seqlen_q={call.seqlen_q} (ragged query lengths are not supported)"
        )
    for name in ("causal", "return_softmax_lse"):
        if not isinstance(getattr(call, name), bool):
            raise TypeError(f"{name} must be a bool, got {type(getattr(call, name)).__name__}")
    if call.force_fused is not None and not isinstance(call.force_fused, bool):
        raise TypeError(f"force_fused must be True, False or None, got {type(call.force_fused).__name__}")
    if call.partial_dtype is not None and call.partial_dtype not in _PARTIAL_DTYPES:
        raise ValueError(
            f"partial_dtype must be float32, bfloat16, float16 or float8_e4m3fn, got {call.partial_dtype!r}"
        )
    if call.workspace is not None:
        _check_workspace(call.workspace, call.q.device)


def _check_workspace(workspace: Any, device: torch.device) -> None:
    from .workspace import MSASparseAttentionWorkspace

    if not isinstance(workspace, MSASparseAttentionWorkspace):
        raise TypeError(f"workspace must be an MSASparseAttentionWorkspace, got {type(workspace).__name__}")
    if workspace.device != device:
        raise ValueError(
            f"workspace must be on q's device {device}, got {workspace.device}: "
            f"make one with MSASparseAttentionWorkspace({str(device)!r})"
        )


def _check_kv(call: DecodeCall) -> None:
    q, k, v = call.q, call.k, call.v
    if k.dtype not in _KV_FORMAT:
        raise ValueError(
            f"k must be bfloat16, float16, float8_e4m3fn or uint8 (NVFP4 codes), got {_name(k.dtype)}: "
            f"cast the cache, or view its bytes as one of these"
        )
    if v.dtype != k.dtype:
        raise ValueError(f"v must have k's dtype {_name(k.dtype)}, got {_name(v.dtype)}")
    allowed = _KV_FORMATS_OF_Q[q.dtype]
    if _KV_FORMAT[k.dtype] not in allowed:
        names = ", ".join(f.value for f in allowed)
        want = "bfloat16" if k.dtype == torch.bfloat16 else "float16"
        raise ValueError(
            f"k must be one of {names} for {_name(q.dtype)} q, got {_name(k.dtype)}: pass q.to(torch.{want})"
        )
    paged = _is_paged(call)
    rank = 4 if paged else 3
    inner = HEAD_DIM // 2 if k.dtype == torch.uint8 else HEAD_DIM
    want_shape = f"(num_pages, num_kv_heads, {BLOCK_SIZE}, {inner})" if paged else f"(total_k, num_kv_heads, {inner})"
    for name, t in (("k", k), ("v", v)):
        if t.dim() != rank or t.shape[-1] != inner or (paged and t.shape[2] != BLOCK_SIZE):
            hint = ""
            if t.dtype == torch.uint8 and t.dim() == rank and t.shape[-1] == HEAD_DIM:
                hint = f": for fp8 bytes pass {name}.view(torch.float8_e4m3fn)"
            elif t.dim() == 7 - rank:
                hint = ": a flat cache takes cu_seqlens_k, a paged one page_table and seqused_k"
            elif paged and t.dim() == 4 and t.shape[1] == BLOCK_SIZE:
                hint = f": an NHD cache is passed as {name}.transpose(1, 2)"
            raise ValueError(f"{name} must have shape {want_shape}, got {_shape(t)}{hint}")
        _check_dense_rows(name, t)
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {_shape(k)}, got {_shape(v)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q must have a multiple of k's heads: {q.shape[1]} query heads, {k.shape[1]} KV heads (dim 1 of k is heads)"
        )


def _is_paged(call: DecodeCall) -> bool:
    if call.page_table is not None:
        if call.cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k belongs to a flat cache and page_table to a paged one: pass one of the two")
        if call.seqused_k is None:
            raise ValueError("seqused_k must be given with page_table: the valid KV tokens of each request, int32")
        return True
    if call.cu_seqlens_k is None:
        raise ValueError(
            "page_table and seqused_k (paged cache) or cu_seqlens_k (flat cache) must be given: "
            f"got neither, with k of shape {_shape(call.k)}"
        )
    if call.seqused_k is not None:
        raise ValueError("seqused_k belongs to a paged cache: a flat cache takes its lengths from cu_seqlens_k alone")
    return False


def _check_int32(name: str, t: Tensor, dims: str, shape: tuple[int | None, ...]) -> None:
    """`dims` names the dimensions. The message is made when needed: formatting a size makes torch.compile fix it."""
    if t.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, got {_name(t.dtype)}: pass {name}.to(torch.int32)")
    if t.dim() != len(shape) or any(w is not None and g != w for g, w in zip(t.shape, shape, strict=True)):
        want = str(tuple("any" if w is None else w for w in shape)).replace("'", "")
        raise ValueError(f"{name} must have shape {dims} = {want}, got {_shape(t)}")


def _check_lengths(call: DecodeCall) -> None:
    batch = call.q.shape[0] // call.seqlen_q
    if call.page_table is None:
        assert call.cu_seqlens_k is not None
        _check_int32("cu_seqlens_k", call.cu_seqlens_k, "(batch + 1,)", (batch + 1,))
        return
    assert call.seqused_k is not None
    _check_int32("page_table", call.page_table, "(batch, max_pages)", (batch, None))
    if call.page_table.shape[1] > 1 and call.page_table.stride(1) != 1:
        raise ValueError(
            f"page_table must have dense rows (stride 1 in its last dim), got strides {call.page_table.stride()}: "
            "pass page_table.contiguous()"
        )
    _check_int32("seqused_k", call.seqused_k, "(batch,)", (batch,))


def _check_scales(call: DecodeCall) -> None:
    names = ("k_scale", "v_scale")
    if call.k.dtype != torch.uint8:
        for name in names:
            if getattr(call, name) is not None:
                raise ValueError(
                    f"{name} belongs to NVFP4 (uint8) K and V, got {_name(call.k.dtype)} KV: leave it out "
                    f"(a per-tensor factor is {name[0]}_global_scale)"
                )
        return
    for name in names:
        scale = getattr(call, name)
        if scale is None:
            raise ValueError(
                f"{name} must be given with NVFP4 (uint8) K and V: e4m3 block scales, one per {SCALE_GROUP}"
            )
        if scale.dtype not in (torch.uint8, FP8):
            raise ValueError(f"{name} must be uint8 or float8_e4m3fn, got {_name(scale.dtype)}")
        if scale.dim() in (1, 2):
            _check_tiled_scale(name, scale, call.k)
        elif scale.dim() == 4:
            _check_planar_scale(name, scale, call)
        else:
            raise ValueError(
                f"{name} must have rank 1 or 2 (128x4 tiled) or 4 (planar page), got shape {_shape(scale)}"
            )
    assert call.k_scale is not None and call.v_scale is not None
    if (call.k_scale.dim() == 4) != (call.v_scale.dim() == 4):
        raise ValueError(
            f"v_scale must have the scale layout of k_scale: got shapes {_shape(call.k_scale)} and {_shape(call.v_scale)}"
        )


def _check_tiled_scale(name: str, scale: Tensor, k: Tensor) -> None:
    rows = k.shape[0] * k.shape[1] * (k.shape[2] if k.dim() == 4 else 1)
    need = (rows + 127) // 128 * 128 * SCALES_PER_ROW
    if scale.numel() < need:
        raise ValueError(
            f"{name} must hold at least {need} bytes ({rows} rows padded to a multiple of 128, {SCALES_PER_ROW} scales "
            f"each), got {scale.numel()}"
        )
    if not scale.is_contiguous():
        raise ValueError(f"{name} must be contiguous in the 128x4 tiled layout, got strides {scale.stride()}")
    # A tile's 512 bytes are read in 4-byte groups.
    _check_start(name, scale, 4)


def _check_planar_scale(name: str, scale: Tensor, call: DecodeCall) -> None:
    if call.page_table is None:
        raise ValueError(f"{name} of rank 4 (planar page) needs a paged cache: a flat cache takes 128x4 tiled scales")
    want = (call.k.shape[0], call.k.shape[1], BLOCK_SIZE, SCALES_PER_ROW)
    if _shape(scale) != want:
        raise ValueError(f"{name} must have shape (num_pages, num_kv_heads, 128, 8) = {want}, got {_shape(scale)}")
    if scale.stride(2) != SCALES_PER_ROW or scale.stride(3) != 1:
        raise ValueError(
            f"{name} must have inner strides (8, 1) inside a head's 1024 bytes, got {scale.stride()}: pass the view of the "
            "planar page itself (a copy made by .contiguous() of another layout has other bytes)"
        )
    for dim in (0, 1):
        if scale.shape[dim] > 1 and scale.stride(dim) % ROW_ALIGNMENT:
            raise ValueError(f"{name} must have page and head strides of whole 16 bytes, got {scale.stride()}")
    _check_start(name, scale, ROW_ALIGNMENT)


def _check_start(name: str, t: Tensor, alignment: int) -> None:
    past = _bytes_past_boundary(t, alignment)
    if past:
        raise ValueError(f"{name} must start on a {alignment}-byte boundary, got one {past} bytes past it")


def _check_selection(call: DecodeCall) -> None:
    t = call.q2k_indices
    tokens, kv_heads = call.q.shape[0], call.k.shape[1]
    if t.dtype != torch.int32:
        raise ValueError(f"q2k_indices must be int32, got {_name(t.dtype)}: pass q2k_indices.to(torch.int32)")
    if t.dim() != 3 or t.shape[0] != kv_heads or t.shape[1] != tokens:
        hint = ""
        if t.dim() == 3 and t.shape[0] == tokens and t.shape[1] == kv_heads:
            hint = ": a (tokens, num_kv_heads, topk) buffer is passed as q2k_indices.transpose(0, 1)"
        raise ValueError(
            f"q2k_indices must have shape (num_kv_heads, tokens, topk) = ({kv_heads}, {tokens}, topk), got {_shape(t)}{hint}"
        )
    if not 1 <= t.shape[2] <= MAX_TOPK:
        raise ValueError(f"q2k_indices must select 1 to {MAX_TOPK} blocks a token, got topk = {t.shape[2]}")
    if t.shape[2] > 1 and t.stride(2) != 1:
        raise ValueError(
            f"q2k_indices must have a dense last dim (stride 1), got strides {t.stride()}: pass q2k_indices.contiguous()"
        )


def _check_outputs(call: DecodeCall) -> None:
    if call.out is not None:
        _check_output("out", call.out, tuple(call.q.shape), _OUT_DTYPE[call.q.dtype])
        _check_start("out", call.out, ROW_ALIGNMENT)
        _check_apart("out", call.out, call)
    if call.lse_out is not None:
        if not call.return_softmax_lse:
            raise ValueError("lse_out was given without return_softmax_lse=True: pass both or neither")
        _check_output("lse_out", call.lse_out, tuple(call.q.shape[:2]), torch.float32)
        _check_apart("lse_out", call.lse_out, call)


def _check_output(name: str, t: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if t.dtype != dtype:
        raise ValueError(f"{name} must be {_name(dtype)}, got {_name(t.dtype)}")
    if _shape(t) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {_shape(t)}")
    if not t.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {t.stride()}: nothing is copied into it")


_IN_USE = (
    "q", "k", "v", "q2k_indices", "page_table", "seqused_k", "cu_seqlens_k", "q_offset", "k_scale", "v_scale",
    "k_global_scale", "v_global_scale", "out",
)  # fmt: skip


def _check_apart(name: str, output: Tensor, call: DecodeCall) -> None:
    for other in _IN_USE:
        t = getattr(call, other)
        if other != name and isinstance(t, Tensor) and _overlap(output, t):
            raise ValueError(f"{name} must not share memory with {other}: both are in use while the call runs")


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the memory between the first and last elements of the two meets. False where no address exists yet."""
    if torch.compiler.is_compiling() or type(a) not in _PLAIN_TENSORS or type(b) not in _PLAIN_TENSORS:
        return False
    if a.numel() == 0 or b.numel() == 0:
        return False
    a0, b0 = a.data_ptr(), b.data_ptr()
    if b0 >= a0:
        return b0 < a0 + extent(a)
    return a0 < b0 + extent(b)


def extent(t: Tensor) -> int:
    """Bytes from the first element to the end of the last one, gaps included."""
    if t.numel() == 0:
        return 0
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()


def _check_autograd(call: DecodeCall) -> None:
    if not torch.is_grad_enabled():
        return
    for name in ("q", "k", "v", "k_global_scale", "v_global_scale", "out", "lse_out"):
        t = getattr(call, name)
        if isinstance(t, Tensor) and t.requires_grad:
            raise ValueError(
                f"{name} requires grad, and decode attention has no backward: call it under torch.no_grad() or pass "
                f"{name}.detach()"
            )


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    _require_float32(name, value)
    return float(value)


FLOAT32_MAX = torch.finfo(torch.float32).max


def _require_float32(name: str, value: float) -> None:
    """Engines compute in float32. (torch.compile does not trace math.isfinite of a symbolic float.)"""
    if not -FLOAT32_MAX <= value <= FLOAT32_MAX:
        got = value if isinstance(value, float) or value.bit_length() < 1024 else "a number past it"
        raise ValueError(f"{name} must be finite in float32, got {got}")


def _global_scale(name: str, value: float | Tensor | None, q: Tensor) -> tuple[float, Tensor | None]:
    """The factor known on the host, and the tensor to read on the device."""
    if value is None:
        return 1.0, None
    if not isinstance(value, Tensor):
        return _number(name, value), None
    _require_tensor(name, value)
    if value.dtype != torch.float32 or value.numel() != 1:
        raise ValueError(
            f"{name} must be a float or a one-element float32 tensor, got {_name(value.dtype)} of shape {_shape(value)}"
        )
    if value.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {value.device}: pass {name}.to(q.device)")
    return 1.0, value


INT32_MAX = 2**31 - 1


def _query_offset(call: DecodeCall) -> tuple[int | None, Tensor | None]:
    offset = call.q_offset
    if offset is None:
        return None, None
    if isinstance(offset, Tensor):
        batch = call.q.shape[0] // call.seqlen_q
        _check_int32("q_offset", offset, "(batch,)", (batch,))
        if offset.device != call.q.device:
            raise ValueError(f"q_offset must be on q's device {call.q.device}, got {offset.device}")
        return None, offset
    if isinstance(offset, bool) or not isinstance(offset, (int, torch.SymInt)):
        raise TypeError(f"q_offset must be an int or an int32 tensor of shape (batch,), got {type(offset).__name__}")
    if not -INT32_MAX - 1 <= offset <= INT32_MAX:
        raise ValueError(f"q_offset must fit int32, got {offset}")
    return offset, None
