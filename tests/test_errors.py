"""Every way in which a call is refused: the message names the argument, what was expected and what came.

`test_every_raise_is_reached` counts the `raise` statements of contract.py and checking.py that the table below runs
through, so a new check needs a row here.
"""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import INT32_MAX, Spec, build
from msa_ops import MSASparseAttentionWorkspace, checking, contract, msa_sparse_decode_attention

Call = dict[str, Any]

PAGED = Spec(lengths=(300, 129), seqlen_q=2)
FLAT = Spec(form="flat", lengths=(300, 129), seqlen_q=2)
TILED = Spec(kv_dtype="nvfp4", lengths=(300, 129))
PLANAR = Spec(kv_dtype="nvfp4", form="planar", lengths=(300, 129))
FLAT_TILED = Spec(kv_dtype="nvfp4", form="flat", lengths=(300, 129))


@dataclass(frozen=True)
class Refused:
    """A change that makes a good call of `spec` bad, and pieces that the message must hold, in this order."""

    name: str
    change: Callable[[Call], Any]
    pieces: tuple[str, ...]
    error: type[Exception] = ValueError
    spec: Spec = PAGED
    check_values: bool = False


def put(**changes: Any) -> Callable[[Call], None]:
    return lambda call: call.update(changes)


def via(name: str, function: Callable[[Tensor], Any]) -> Callable[[Call], None]:
    """Replace one argument by a function of itself."""
    return lambda call: call.update({name: function(call[name])})


def both(first: Callable[[Call], Any], second: Callable[[Call], Any]) -> Callable[[Call], None]:
    def change(call: Call) -> None:
        first(call)
        second(call)

    return change


def strided(t: Tensor) -> Tensor:
    """The same numbers with a last stride of 2."""
    wide = torch.empty((*t.shape, 2), dtype=t.dtype, device=t.device)
    wide[..., 0] = t
    return wide[..., 0]


def shifted(t: Tensor, elements: int) -> Tensor:
    """A copy that starts `elements` past the start of its allocation."""
    room = torch.empty(t.numel() + 64, dtype=t.dtype, device=t.device)
    view = room[elements : elements + t.numel()].view(t.shape)
    return view.copy_(t)


def odd_pitch(t: Tensor) -> Tensor:
    """Rows `128 + 4` elements apart."""
    room = torch.empty((*t.shape[:-1], t.shape[-1] + 4), dtype=t.dtype, device=t.device)
    view = room[..., : t.shape[-1]]
    return view.copy_(t)


def q_and_out_overlap(call: Call) -> None:
    room = torch.empty(call["q"].numel() + 1024, dtype=torch.bfloat16, device=call["q"].device)
    n = call["q"].numel()
    call["out"] = room[1024:].view(call["q"].shape)
    call["q"] = room[:n].view(call["q"].shape).copy_(call["q"])


def put_lse_inside(name: str) -> Callable[[Call], None]:
    return lambda call: call.update(lse_out=call[name].view(-1).view(torch.float32)[8:40].view(4, 8))


def put_out_inside(name: str) -> Callable[[Call], None]:
    def change(call: Call) -> None:
        room = call[name].untyped_storage()
        start = torch.empty(0, dtype=torch.bfloat16, device=call[name].device).set_(room)  # type: ignore[call-overload]
        call["out"] = start[1024 : 1024 + call["q"].numel()].view(call["q"].shape)

    return change


def put_inside_output(name: str, output: str, dtype: torch.dtype) -> Callable[[Call], None]:
    """A small tensor argument that lies in an output's memory."""

    def change(call: Call) -> None:
        q = call["q"]
        room = (
            torch.zeros_like(q) if output == "out" else torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
        )
        small = 1 if "scale" in name else call["seqused_k"].shape[0]
        call.update({output: room, name: room.view(-1).view(dtype)[:small]})

    return change


def grad(call: Call, name: str) -> None:
    call[name] = call[name].detach().clone().requires_grad_()


def meta(t: Tensor) -> Tensor:
    return t.to("meta")


ROWS = [
    # tensors and devices
    *[
        Refused(f"{name} is a list", put(**{name: [1, 2]}), (name, "torch.Tensor", "list"), TypeError)
        for name in ("q", "k", "v", "q2k_indices", "page_table", "seqused_k", "out")
    ],
    Refused("cu_seqlens_k is a list", put(cu_seqlens_k=[0]), ("cu_seqlens_k", "torch.Tensor", "list"), TypeError, FLAT),
    Refused("lse_out is a list", put(lse_out=[0]), ("lse_out", "torch.Tensor", "list"), TypeError),
    Refused("k_scale is a float", put(k_scale=1.0), ("k_scale", "torch.Tensor", "float"), TypeError, TILED),
    Refused("v_scale is a float", put(v_scale=1.0), ("v_scale", "torch.Tensor", "float"), TypeError, TILED),
    Refused("q on another kind of device", via("q", meta), ("q must", "cpu or cuda", "meta")),
    *[
        Refused(
            f"{name} elsewhere", via(name, meta), (name, "q's device", "cpu", "meta", f"{name}.to(q.device)"), spec=s
        )
        for name, s in {
            "k": PAGED,
            "v": PAGED,
            "q2k_indices": PAGED,
            "page_table": PAGED,
            "seqused_k": PAGED,
            "cu_seqlens_k": FLAT,
            "k_scale": TILED,
            "v_scale": TILED,
        }.items()
    ],
    Refused("out elsewhere", lambda c: c.update(out=torch.empty_like(c["q"], device="meta")), ("out", "cpu", "meta")),
    # q
    Refused("q float32", via("q", Tensor.float), ("q must", "bfloat16, float16 or float8_e4m3fn", "float32", "cast")),
    Refused("q rank 2", via("q", lambda t: t[:, 0]), ("q must", "(tokens, num_qo_heads, 128)", "(4, 128)")),
    Refused("q head_dim 64", via("q", lambda t: t[..., :64]), ("q must", "128", "64)")),
    Refused("q without heads", via("q", lambda t: t[:, :0]), ("q must", "at least one query head", "(4, 0, 128)")),
    Refused("q last dim strided", via("q", strided), ("q must", "dense last dim", "2)", "q.contiguous()")),
    Refused("q row pitch", via("q", odd_pitch), ("q must", "16 bytes", "264 bytes", "q.contiguous()")),
    Refused("q start", via("q", lambda t: shifted(t, 4)), ("q must", "16-byte boundary", "8 bytes past", "q.clone()")),
    # numbers and flags
    Refused("seqlen_q a bool", put(seqlen_q=True), ("seqlen_q", "an int", "bool"), TypeError),
    Refused("seqlen_q a float", put(seqlen_q=1.0), ("seqlen_q", "an int", "float"), TypeError),
    Refused("seqlen_q zero", put(seqlen_q=0), ("seqlen_q", "at least 1", "got 0")),
    Refused("seqlen_q no divisor", put(seqlen_q=3), ("q must", "4 tokens", "seqlen_q=3", "ragged")),
    Refused("causal an int", put(causal=1), ("causal", "a bool", "int"), TypeError),
    Refused("LSE flag None", put(return_softmax_lse=None), ("return_softmax_lse", "a bool", "NoneType"), TypeError),
    Refused("force_fused an int", put(force_fused=1), ("force_fused", "True, False or None", "int"), TypeError),
    Refused("partial_dtype float64", put(partial_dtype=torch.float64), ("partial_dtype", "float32", "torch.float64")),
    Refused("partial_dtype a str", put(partial_dtype="float32"), ("partial_dtype", "float32", "'float32'")),
    Refused("workspace a tensor", lambda c: c.update(workspace=c["q"]), ("workspace", "MSASpa", "Tensor"), TypeError),
    Refused(
        "workspace elsewhere",
        lambda c: c.update(workspace=MSASparseAttentionWorkspace("meta")),
        ("workspace", "q's device", "cpu", "meta", "MSASparseAttentionWorkspace('cpu')"),
    ),
    *[
        Refused(f"{name} a str", put(**{name: "1"}), (name, "a float", "str"), TypeError)
        for name in ("softmax_scale", "k_global_scale", "v_global_scale")
    ],
    *[
        Refused(f"{name} a bool", put(**{name: True}), (name, "a float", "bool"), TypeError)
        for name in ("softmax_scale", "k_global_scale", "v_global_scale")
    ],
    *[
        Refused(f"{name} {value}", put(**{name: float(value)}), (name, "finite", value))
        for name in ("softmax_scale", "k_global_scale", "v_global_scale")
        for value in ("nan", "inf")
    ],
    *[
        Refused(f"{name} past float32", put(**{name: value}), (name, "finite in float32", f"got {value}"))
        for name, value in (("softmax_scale", 1e39), ("k_global_scale", -1e39), ("v_global_scale", 10**39))
    ],
    Refused(
        "scales past float32 together",
        put(softmax_scale=1e20, k_global_scale=1e20),
        ("softmax_scale * k_global_scale", "finite in float32", "1e+40"),
    ),
    *[
        Refused(f"{name} of two", put(**{name: torch.ones(2)}), (name, "one-element float32", "float32", "(2,)"))
        for name in ("k_global_scale", "v_global_scale")
    ],
    Refused(
        "k_global_scale float64",
        put(k_global_scale=torch.ones(1).double()),
        ("k_global_scale", "one-element float32", "float64", "(1,)"),
    ),
    Refused(
        "v_global_scale elsewhere",
        put(v_global_scale=torch.ones(1, device="meta")),
        ("v_global_scale", "q's device", "cpu", "meta", "v_global_scale.to(q.device)"),
    ),
    Refused(
        "softmax_scale a tensor", put(softmax_scale=torch.ones(1)), ("softmax_scale", "float", "Tensor"), TypeError
    ),
    Refused("q_offset a float", put(q_offset=1.0), ("q_offset", "an int or an int32 tensor", "float"), TypeError),
    Refused("q_offset a bool", put(q_offset=True), ("q_offset", "an int or an int32 tensor", "bool"), TypeError),
    Refused("q_offset too large", put(q_offset=INT32_MAX + 1), ("q_offset", "int32", str(INT32_MAX + 1))),
    Refused("q_offset int64", put(q_offset=torch.zeros(2).long()), ("q_offset", "int32", "int64", "to(torch.int32)")),
    Refused("q_offset per token", put(q_offset=torch.zeros(4).int()), ("q_offset", "(batch,) = (2,)", "(4,)")),
    Refused("q_offset elsewhere", put(q_offset=torch.zeros(2, device="meta").int()), ("q_offset", "cpu", "meta")),
    # K and V
    Refused("k float32", via("k", Tensor.float), ("k must", "bfloat16, float16, float8_e4m3fn or uint8", "float32")),
    Refused("v of another dtype", via("v", Tensor.half), ("v must", "k's dtype bfloat16", "float16")),
    Refused(
        "fp16 KV under bf16 q",
        both(via("k", Tensor.half), via("v", Tensor.half)),
        ("k must", "bf16, fp8, nvfp4", "bfloat16 q", "got float16", "q.to(torch.float16)"),
    ),
    Refused(
        "bf16 KV under fp16 q",
        via("q", Tensor.half),
        ("k must", "fp16, fp8, nvfp4", "float16 q", "got bfloat16", "q.to(torch.bfloat16)"),
    ),
    Refused(
        "k rank 3 when paged", via("k", lambda t: t[:, 0]), ("k must", "128, 128)", "flat cache takes cu_seqlens_k")
    ),
    Refused(
        "k rank 4 when flat", via("k", lambda t: t[None]), ("k must", "(total_k,", "a paged one page_table"), spec=FLAT
    ),
    Refused("k NHD", via("k", lambda t: t.transpose(1, 2)), ("k must", "got (", "k.transpose(1, 2)")),
    Refused("v page of 64", via("v", lambda t: t[:, :, :64]), ("v must", "128, 128)", "64, 128)")),
    Refused("k head_dim 64", via("k", lambda t: t[..., :64]), ("k must", "128, 128)", "128, 64)")),
    Refused(
        "fp8 bytes",
        both(via("k", lambda t: t.view(torch.uint8)), via("v", lambda t: t.view(torch.uint8))),
        ("k must", "128, 64)", "128, 128)", "k.view(torch.float8_e4m3fn)"),
        spec=Spec(kv_dtype="fp8", lengths=(300, 129), seqlen_q=2),
    ),
    Refused("v last dim strided", via("v", strided), ("v must", "dense last dim", "v.contiguous()")),
    Refused("k row pitch", via("k", odd_pitch), ("k must", "16 bytes", "264 bytes", "dim 2")),
    Refused("v start", via("v", lambda t: shifted(t, 1)), ("v must", "16-byte boundary", "2 bytes past", "v.clone()")),
    Refused("NVFP4 start", via("k", lambda t: shifted(t, 8)), ("k must", "16-byte boundary", "8 bytes"), spec=TILED),
    Refused("v of another shape", via("v", lambda t: t[1:]), ("v must", "k's shape", "got (")),
    Refused("heads that do not divide", via("q", lambda t: t[:, :7]), ("q must", "multiple", "7 query", "2 KV heads")),
    Refused(
        "no KV heads",
        both(via("k", lambda t: t[:, :0]), via("v", lambda t: t[:, :0])),
        ("q must", "multiple", "8 query", "0 KV heads"),
    ),
    # which cache
    Refused("both caches", put(cu_seqlens_k=torch.zeros(3).int()), ("cu_seqlens_k", "page_table", "one of the two")),
    Refused("no seqused_k", put(seqused_k=None), ("seqused_k", "must be given with page_table", "int32")),
    Refused("neither cache", put(page_table=None, seqused_k=None), ("page_table", "cu_seqlens_k", "neither", "(")),
    Refused(
        "seqused_k for flat", put(seqused_k=torch.zeros(2).int()), ("seqused_k", "paged", "cu_seqlens_k"), spec=FLAT
    ),
    # lengths and tables
    Refused("page_table int64", via("page_table", Tensor.long), ("page_table", "int32", "int64", "to(torch.int32)")),
    Refused("seqused_k int64", via("seqused_k", Tensor.long), ("seqused_k", "int32", "int64", "to(torch.int32)")),
    Refused("cu_seqlens_k int64", via("cu_seqlens_k", Tensor.long), ("cu_seqlens_k", "int32", "int64"), spec=FLAT),
    Refused("page_table rank 1", via("page_table", lambda t: t[0]), ("page_table", "(batch, max_pages)", "(")),
    Refused("page_table a row a token", via("page_table", lambda t: t.repeat(2, 1)), ("page_table", "(2, any)", "(4,")),
    Refused(
        "page_table columns strided", via("page_table", strided), ("page_table", "dense rows", "2)", "contiguous()")
    ),
    Refused("seqused_k a token", via("seqused_k", lambda t: t.repeat(2)), ("seqused_k", "(batch,) = (2,)", "(4,)")),
    Refused("cu_seqlens_k short", via("cu_seqlens_k", lambda t: t[1:]), ("cu_seqlens_k", "(3,)", "(2,)"), spec=FLAT),
    # block scales
    Refused("k_scale for bf16", put(k_scale=torch.ones(8)), ("k_scale", "NVFP4", "bfloat16 KV", "k_global_scale")),
    Refused("v_scale for bf16", put(v_scale=torch.ones(8)), ("v_scale", "NVFP4", "bfloat16 KV", "v_global_scale")),
    Refused("no k_scale", put(k_scale=None), ("k_scale", "must be given", "e4m3"), spec=TILED),
    Refused("no v_scale", put(v_scale=None), ("v_scale", "must be given", "e4m3"), spec=PLANAR),
    Refused(
        "k_scale float32", via("k_scale", Tensor.float), ("k_scale", "uint8 or float8_e4m3fn", "float32"), spec=TILED
    ),
    Refused(
        "k_scale rank 3", via("k_scale", lambda t: t.view(2, -1, 8)), ("k_scale", "rank 1 or 2", "(2, "), spec=TILED
    ),
    Refused("k_scale short", via("k_scale", lambda t: t[:-1025]), ("k_scale", "at least", "rows", "got"), spec=TILED),
    Refused(
        "flat scales not padded",
        via("v_scale", lambda t: t[: (5 + 429 + 9) * 2 * 8]),
        ("v_scale", "at least 7168 bytes", "886 rows", "got 7088"),
        spec=FLAT_TILED,
    ),
    Refused("k_scale strided", via("k_scale", strided), ("k_scale", "contiguous", "tiled", "(2,)"), spec=TILED),
    Refused(
        "k_scale start", via("k_scale", lambda t: shifted(t, 2)), ("k_scale", "4-byte", "2 bytes past"), spec=TILED
    ),
    Refused(
        "rank 4 scales for flat", via("k_scale", lambda t: t.view(1, 1, -1, 8)), ("k_scale", "paged"), spec=FLAT_TILED
    ),
    Refused(
        "planar pages", via("v_scale", lambda t: t[1:]), ("v_scale", "(num_pages", "128, 8) = (", "got ("), spec=PLANAR
    ),
    Refused(
        "planar inner strides",
        via("k_scale", lambda t: t.contiguous().transpose(2, 3).contiguous().transpose(2, 3)),
        ("k_scale", "inner strides (8, 1)", "got (", "planar page"),
        spec=PLANAR,
    ),
    Refused(
        "planar page stride",
        via("v_scale", lambda t: torch.zeros(99999, dtype=torch.uint8).as_strided(t.shape, (2056, 1024, 8, 1))),
        ("v_scale", "whole 16 bytes", "2056"),
        spec=PLANAR,
    ),
    Refused(
        "planar start",
        via("v_scale", lambda t: shifted(t.contiguous(), 8)),
        ("v_scale", "16-byte", "8 bytes past"),
        spec=PLANAR,
    ),
    Refused(
        "two scale layouts",
        lambda c: c.update(v_scale=c["v_scale"].reshape(-1)),
        ("v_scale", "layout of k_scale", "(", ") and ("),
        spec=PLANAR,
    ),
    # selection
    Refused("ids int64", via("q2k_indices", Tensor.long), ("q2k_indices", "int32", "int64", "to(torch.int32)")),
    Refused(
        "ids token-major",
        via("q2k_indices", lambda t: t.transpose(0, 1)),
        ("q2k_indices", "(2, 4, topk)", "(4, 2, 4)", "q2k_indices.transpose(0, 1)"),
    ),
    Refused(
        "ids rank 2", via("q2k_indices", lambda t: t[0]), ("q2k_indices", "(num_kv_heads, tokens, topk)", "(4, 4)")
    ),
    Refused("ids of none", via("q2k_indices", lambda t: t[..., :0]), ("q2k_indices", "1 to 4096", "topk = 0")),
    Refused(
        "ids of too many",
        via("q2k_indices", lambda t: torch.zeros(2, 4, 4097).int()),
        ("q2k_indices", "1 to 4096", "topk = 4097"),
    ),
    Refused("ids strided", via("q2k_indices", strided), ("q2k_indices", "dense last dim", "2)", "contiguous()")),
    # outputs
    Refused("out float32", put(out=torch.empty(4, 8, 128)), ("out must", "bfloat16", "float32")),
    Refused("out fp16", put(out=torch.empty(4, 8, 128).half()), ("out must", "bfloat16", "float16")),
    Refused("out shape", put(out=torch.empty(4, 1024).bfloat16()), ("out must", "(4, 8, 128)", "(4, 1024)")),
    Refused("out strided", put(out=torch.empty(4, 16, 128).bfloat16()[:, ::2]), ("out must", "contiguous", "(2048, ")),
    Refused(
        "out start", put(out=shifted(torch.zeros(4, 8, 128).bfloat16(), 4)), ("out must", "16-byte", "8 bytes past")
    ),
    Refused("out is q", lambda c: c.update(out=c["q"]), ("out", "share memory with q")),
    Refused("out overlaps q", q_and_out_overlap, ("out", "share memory with q")),
    Refused("out in k", put_out_inside("k"), ("out", "share memory with k")),
    Refused(
        "sparse k_global_scale",
        put(k_global_scale=torch.ones(1).to_sparse()),
        ("k_global_scale", "strided", "to_dense"),
        TypeError,
    ),
    Refused("softmax_scale past every float", put(softmax_scale=10**5000), ("softmax_scale", "float32", "past it")),
    Refused(
        "lse_out unasked",
        put(lse_out=torch.empty(4, 8), return_softmax_lse=False),
        ("lse_out", "return_softmax_lse=True", "both or neither"),
    ),
    Refused("lse_out in q", put_lse_inside("q"), ("lse_out", "share memory with q")),
    *[
        Refused(f"{name} in {output}", put_inside_output(name, output, dtype), (output, f"share memory with {name}"))
        for output in ("out", "lse_out")
        for name, dtype in (
            ("k_global_scale", torch.float32),
            ("v_global_scale", torch.float32),
            ("q_offset", torch.int32),
        )
    ],
    Refused("lse_out in out", put_lse_inside("out"), ("lse_out", "share memory with out")),
    Refused("lse_out bf16", put(lse_out=torch.empty(4, 8).bfloat16()), ("lse_out", "float32", "bfloat16")),
    Refused("lse_out shape", put(lse_out=torch.empty(8, 4)), ("lse_out", "(4, 8)", "(8, 4)")),
    Refused("lse_out strided", put(lse_out=torch.empty(8, 4).T), ("lse_out", "contiguous", "(1, 4)")),
    # autograd
    *[
        Refused(
            f"{n} requires grad", lambda c, n=n: grad(c, n), (n, "requires grad", "torch.no_grad()", f"{n}.detach()")
        )
        for n in ("q", "k", "v")
    ],
    *[
        Refused(
            f"{n} requires grad", put(**{n: torch.ones(1, requires_grad=True)}), (n, "requires grad", f"{n}.detach()")
        )
        for n in ("k_global_scale", "v_global_scale")
    ],
    Refused(
        "out requires grad",
        put(out=torch.zeros(4, 8, 128, dtype=torch.bfloat16, requires_grad=True)),
        ("out", "requires grad", "out.detach()"),
    ),
    Refused(
        "lse_out requires grad",
        put(lse_out=torch.zeros(4, 8, requires_grad=True)),
        ("lse_out", "requires grad", "lse_out.detach()"),
    ),
    # values, with MSA_OPS_CHECK=1
    Refused(
        "k_global_scale holds NaN",
        put(k_global_scale=torch.tensor([float("nan")])),
        ("k_global_scale", "finite", "nan"),
        check_values=True,
    ),
    Refused(
        "v_global_scale holds inf",
        put(v_global_scale=torch.tensor([float("inf")])),
        ("v_global_scale", "finite", "inf"),
        check_values=True,
    ),
    *[
        Refused(
            f"cu_seqlens_k {starts}",
            put(cu_seqlens_k=torch.tensor(starts, dtype=torch.int32)),
            ("cu_seqlens_k", "ascend", "total_k = 443", str(starts[0])),
            spec=FLAT,
            check_values=True,
        )
        for starts in ([0, 300, 299], [-1, 300, 429], [0, 300, 444])
    ],
    Refused(
        "length past the table",
        via("seqused_k", lambda t: t.new_tensor([300, 641])),
        ("seqused_k[1] = 641", "5 pages", "640 keys"),
        check_values=True,
    ),
    *[
        Refused(
            f"page {page}",
            via("page_table", lambda t, page=page: torch.full_like(t, page)),
            ("page_table[0]", f"page {page} ", "selected block", "8 pages"),
            spec=Spec(lengths=(300, 129), seqlen_q=2, ids="all"),
            check_values=True,
        )
        for page in (-1, 8, INT32_MAX)
    ],
]


def refuse(row: Refused, monkeypatch: pytest.MonkeyPatch) -> Exception:
    """Run a bad call; returns what it raised. Nothing may have been written."""
    spec = row.spec
    case = build(spec)
    call: Call = dict(zip(("q", "k", "v", "q2k_indices"), case.args, strict=True))
    call.update(case.kwargs, return_softmax_lse=True)
    sentinel = torch.full((spec.tokens, 8, 128), 7.0, dtype=torch.bfloat16)
    sentinel_lse = torch.full((spec.tokens, 8), 7.0)
    call.update(out=sentinel, lse_out=sentinel_lse)
    result = msa_sparse_decode_attention(**call)
    assert isinstance(result, tuple) and not (sentinel == 7).all(), "the call is meant to be good before the change"
    sentinel.fill_(7.0)
    sentinel_lse.fill_(7.0)
    row.change(call)
    monkeypatch.setenv("MSA_OPS_CHECK", "1" if row.check_values else "0")
    with pytest.raises((TypeError, ValueError)) as caught:
        msa_sparse_decode_attention(**call)
    assert (sentinel == 7).all() and (sentinel_lse == 7).all(), "the outputs were touched before the error"
    return caught.value


def names(rows: list[Refused]) -> list[str]:
    found = [row.name.replace(" ", "_") for row in rows]
    assert len(set(found)) == len(found)
    return found


@pytest.mark.parametrize("row", ROWS, ids=names(ROWS))
def test_refused(row: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refuse(row, monkeypatch)
    assert type(error) is row.error
    message = str(error)
    assert re.search(".*".join(re.escape(piece) for piece in row.pieces), message), message


def test_no_synchronisation_inside_a_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    problem: Any = SimpleNamespace(q=SimpleNamespace(is_cuda=True))
    with pytest.raises(ValueError, match=r"MSA_OPS_CHECK=1 reads device values.*capture.*unset it"):
        checking.check_values(problem)


def test_every_raise_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [Path(contract.__file__), Path(checking.__file__)]
    raises = [
        (path, node) for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)
    ]
    reached = set()
    for row in ROWS:
        with monkeypatch.context() as patch:
            frames = traceback.extract_tb(refuse(row, patch).__traceback__)
        reached.add(next((Path(f.filename), f.lineno) for f in reversed(frames) if Path(f.filename) in paths))
    missed = [
        (path, n)
        for path, n in raises
        if not any(at == path and n.lineno <= line <= (n.end_lineno or n.lineno) for at, line in reached)
    ]
    texts = ["\n".join(path.read_text().splitlines()[n.lineno - 1 : n.end_lineno]) for path, n in missed]
    # This one is reached by test_no_synchronisation_inside_a_graph_capture.
    assert [t for t in texts if "capture forbids" not in t] == []


def test_positional_arguments_after_the_ids_are_refused() -> None:
    case = build(PAGED)
    with pytest.raises(TypeError, match="positional"):
        msa_sparse_decode_attention(*case.args, case.kwargs["page_table"])  # type: ignore[misc]


def test_unknown_arguments_are_refused() -> None:
    case = build(PAGED)
    with pytest.raises(TypeError, match="sinks"):
        msa_sparse_decode_attention(*case.args, **case.kwargs, sinks=None)
