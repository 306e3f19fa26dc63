"""The torch.library op: schema, fake tensors, torch.compile."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cases import DTYPE_PAIRS, Case, Spec, build
from compare import assert_matches_oracle, assert_same_bits
from msa_ops import MSASparseAttentionWorkspace, msa_sparse_decode_attention
from test_contract import checked

SPECS = {
    "paged_bf16": Spec(),
    "paged_nhd_fp8_offset_tensor": Spec(kv_dtype="fp8", form="nhd", seqlen_q=2, q_offset=(250, 100, 60)),
    "flat_fp16_offset_int": Spec(q_dtype="fp16", kv_dtype="fp16", form="flat", q_offset=200),
    "fp8_q_global_scale_tensors": Spec(
        q_dtype="fp8", kv_dtype="fp8", k_global_scale=0.4, v_global_scale=2.0, global_scale_tensors=True
    ),
    "nvfp4_tiled": Spec(kv_dtype="nvfp4", ids_form="token_major", causal=False),
    "nvfp4_planar": Spec(kv_dtype="nvfp4", form="planar_pool", scale_dtype="fp8", k_global_scale=0.3),
}
needs_compiler = pytest.mark.skipif(
    all(shutil.which(name) is None for name in ("c++", "g++", "clang++")), reason="inductor needs a C++ compiler"
)
backends = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def op_arguments(
    case: Case, *, with_lse: bool, workspace: MSASparseAttentionWorkspace | None = None
) -> tuple[Any, ...]:
    p = checked(case, workspace=workspace)
    out = torch.empty(p.q.shape, dtype=p.out_dtype, device=p.q.device)
    lse = torch.empty(p.q.shape[:2], device=p.q.device) if with_lse else None
    return (*(getattr(p, name) for name in p.__dataclass_fields__), out, lse)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_opcheck(name: str, with_lse: bool, device: str) -> None:
    case = build(SPECS[name], device)
    workspace = MSASparseAttentionWorkspace(device, nbytes=256) if with_lse else None
    arguments = op_arguments(case, with_lse=with_lse, workspace=workspace)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(isinstance(a, Tensor) and a.dtype == torch.float8_e4m3fn for a in arguments):
        checks.remove("test_schema")  # it compares tensors before and after by arithmetic, which torch lacks for fp8
    result = torch.library.opcheck(
        torch.ops.msa_ops.sparse_decode_attention.default, arguments, test_utils=tuple(checks)
    )
    assert set(result.values()) == {"SUCCESS"}, result


def test_only_outputs_and_workspace_are_declared_as_written() -> None:
    schema = torch.ops.msa_ops.sparse_decode_attention.default._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["workspace", "out", "lse"]
    assert list(schema.returns) == []


@pytest.mark.parametrize("name", SPECS)
def test_fake_tensors_give_shapes_and_compute_nothing(name: str) -> None:
    case = build(SPECS[name])
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(x: Any) -> Any:
        return mode.from_tensor(x) if isinstance(x, Tensor) else x

    with mode:
        result = msa_sparse_decode_attention(
            *map(fake, case.args), **{n: fake(a) for n, a in case.kwargs.items()}, return_softmax_lse=True
        )
    assert isinstance(result, tuple)
    out, lse = result
    assert type(out).__name__ == "FakeTensor" and out.shape == case.args[0].shape
    assert out.dtype == (torch.float16 if case.spec.q_dtype == "fp16" else torch.bfloat16)
    assert lse.shape == case.args[0].shape[:2] and lse.dtype == torch.float32


def attention(args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Something on either side of the op, so that it sits inside a graph."""
    q, k, v, ids = args
    out, lse = msa_sparse_decode_attention(q * 1, k, v, ids, **kwargs, return_softmax_lse=True)
    return out * 1, lse * 1


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


def sizes_of(spec: Spec) -> list[Spec]:
    """The same kind of call with other batches, lengths, tops and groups."""
    changes: list[dict[str, Any]] = [
        {},
        {"lengths": (300, 129), "seed": 1},
        {"lengths": (129, 700, 5, 64, 300), "topk": 7, "seed": 2},
        {"lengths": (40,), "topk": 1, "group": 1, "seed": 3},
        {"lengths": (40, 0, 0, 200), "group": 20, "kv_heads": 3, "seed": 4},
    ]
    specs = []
    for change in changes:
        changed = replace(spec, **change)
        if isinstance(spec.q_offset, tuple):
            changed = replace(changed, q_offset=tuple(n - 1 for n in changed.lengths))
        specs.append(changed)
    return specs


@backends
@pytest.mark.parametrize("name", SPECS)
def test_compiled_calls_of_several_shapes(name: str, backend: str, device: str) -> None:
    function = compiled(attention, backend)
    for spec in sizes_of(SPECS[name]):
        case = build(spec, device)
        if case.args[0].dtype == torch.float8_e4m3fn:  # torch multiplies no fp8
            call = compiled(
                lambda args, kwargs: msa_sparse_decode_attention(*args, **kwargs, return_softmax_lse=True), backend
            )
            result = call(case.args, case.kwargs)
        else:
            result = function(case.args, case.kwargs)
        assert_matches_oracle(case, result)
        assert_same_bits(result, case.run())


@pytest.mark.parametrize("name", ["paged_bf16", "flat_fp16_offset_int", "nvfp4_tiled", "nvfp4_planar"])
def test_traffic_does_not_recompile(name: str, device: str) -> None:
    """Other lengths, ids, batch sizes, page counts and tops use one graph.

    All sizes of a case differ and are above 1, because torch itself gives equal sizes one symbol and fixes sizes of 1;
    the page table is contiguous, because torch fixes strides that are no product of sizes.
    """
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    function = torch.compile(attention, fullgraph=True, dynamic=True, backend=count)
    for i, lengths in enumerate([(300, 129, 5), (700, 5, 64, 1, 1), (40, 1000, 7, 9), (128, 256, 300, 1, 2, 3)]):
        case = build(replace(SPECS[name], lengths=lengths, group=5 + i, topk=17 + i, seed=i), device)
        if "page_table" in case.kwargs:
            case.kwargs["page_table"] = case.kwargs["page_table"].contiguous()
        assert_matches_oracle(case, function(case.args, case.kwargs))
    assert graphs == 1


@backends
def test_compiled_with_out_and_lse_out(backend: str, device: str) -> None:
    """Outputs handed in are written, also as slices of larger tensors, and nothing else is."""

    def step(args: tuple[Tensor, ...], kwargs: dict[str, Any], out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        tokens = args[0].shape[0]
        got = msa_sparse_decode_attention(
            *args, **kwargs, return_softmax_lse=True, out=out[:tokens], lse_out=lse[:tokens]
        )
        assert isinstance(got, tuple)
        return got[0] + 0, got[1] + 0

    function = compiled(step, backend)
    for spec in sizes_of(Spec()):
        case = build(spec, device)
        tokens, heads = case.args[0].shape[:2]
        out = torch.full((tokens + 2, heads, 128), 7.0, dtype=torch.bfloat16, device=device)
        lse = torch.full((tokens + 2, heads), 7.0, device=device)
        result = function(case.args, case.kwargs, out, lse)
        assert_matches_oracle(case, result)
        assert_same_bits((out[:tokens], lse[:tokens]), result)
        assert (out[tokens:] == 7).all() and (lse[tokens:] == 7).all()


@backends
def test_compiled_with_other_numbers(backend: str, device: str) -> None:
    """Scales, an int offset and the causal flag are part of the call, not of the first call."""

    def step(args: tuple[Tensor, ...], kwargs: dict[str, Any], asked: dict[str, Any]) -> Any:
        return msa_sparse_decode_attention(*args, **{**kwargs, **asked}, return_softmax_lse=True)

    function = compiled(step, backend)
    case = build(Spec(lengths=(300, 129), ids="all", topk=3, causal=False, seqlen_q=2, kv_dtype="fp8"), device)
    for scale, k, v, causal in [
        (0.1, 1.0, 1.0, True),
        (-0.05, 0.5, 2.0, True),
        (0.0, 0.3, -1.0, False),
        (0.2, 1.0, 1.0, False),
    ]:
        asked = {"softmax_scale": scale, "k_global_scale": k, "v_global_scale": v, "causal": causal}
        assert_matches_oracle(case, function(case.args, case.kwargs, asked), **asked)


@backends
def test_compiled_with_other_offsets(backend: str, device: str) -> None:
    def step(args: tuple[Tensor, ...], kwargs: dict[str, Any], q_offset: int) -> Any:
        return msa_sparse_decode_attention(*args, **{**kwargs, "q_offset": q_offset}, return_softmax_lse=True)

    function = compiled(step, backend)
    case = build(Spec(lengths=(300, 290), ids="all", topk=3, causal=False), device)
    case.kwargs["causal"] = True
    for q_offset in (299, 130, 5, 0, -1):
        assert_matches_oracle(case, function(case.args, case.kwargs, q_offset), q_offset=q_offset)


@pytest.mark.parametrize("q_dtype, kv_dtype", DTYPE_PAIRS)
def test_compiled_dtypes_are_told_apart(q_dtype: str, kv_dtype: str, device: str) -> None:
    """One compiled function, first with another dtype."""

    def step(args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        return msa_sparse_decode_attention(*args, **kwargs, return_softmax_lse=True)

    function = compiled(step, "aot_eager")
    for pair in (("bf16", "bf16"), (q_dtype, kv_dtype)):
        case = build(Spec(q_dtype=pair[0], kv_dtype=pair[1]), device)
        assert_matches_oracle(case, function(case.args, case.kwargs))


def test_compiled_views_keep_their_strides(device: str) -> None:
    """Packed halves, pool layers and token-major ids made inside the graph are read with the strides that they have."""

    def step(pool: Tensor, q: Tensor, ids: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        layer = pool[1].transpose(1, 2)
        out = msa_sparse_decode_attention(
            q.transpose(0, 1), layer[..., :128], layer[..., 128:], ids.transpose(0, 1), page_table=table, seqused_k=lens
        )
        assert isinstance(out, Tensor)
        return out

    case = build(Spec(form="packed_nhd", lengths=(300, 129), ids="ascending"), device)
    q, k, v, ids = case.args
    pool = torch.full((3, k.shape[0], 128, 2, 256), float("nan"), dtype=torch.bfloat16, device=device)
    pool[1, ..., :128].copy_(k.transpose(1, 2))
    pool[1, ..., 128:].copy_(v.transpose(1, 2))
    turned = (pool, q.transpose(0, 1).contiguous(), ids.transpose(0, 1).contiguous())
    for backend in ("aot_eager", "eager"):
        out = compiled(step, backend)(*turned, case.kwargs["page_table"], case.kwargs["seqused_k"])
        assert_matches_oracle(case, (out, case.run()[1]))


def test_errors_reach_the_caller_of_a_compiled_function(device: str) -> None:
    case = build(Spec(), device)
    bad = {**case.kwargs, "seqused_k": case.kwargs["seqused_k"].long()}
    with pytest.raises(Exception, match="seqused_k must be int32, got int64"):
        compiled(attention, "aot_eager")(case.args, bad)
