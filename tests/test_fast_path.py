"""The short way of eager CUDA calls (`engines.cuda.prepared`): whatever is asked, the outcome is the long way's."""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

import msa_ops.decode
from cases import Spec
from fake_gpu import (
    AMPERE,
    FORMS,
    HOPPER,
    PAGED,
    FakeGPU,
    Subclass,
    call_of,
    defaults,
    forms,
    install,
    long_way,
    moved,
    outcome,
    outputs,
    prepare,
    short_way,
)  # fmt: skip
from msa_ops import MSASparseAttentionWorkspace, contract, msa_sparse_decode_attention
from msa_ops.contract import DecodeCall
from msa_ops.engines import cuda
from msa_ops.engines.cuda import compile as compiler
from msa_ops.engines.cuda import launch, plan, prepared
from test_cuda_compile import c_layout
from test_errors import ROWS, Refused, names
from test_properties import specs


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    gpu = FakeGPU()
    install(gpu, monkeypatch)
    yield gpu
    prepared.forget()


# --- the same launch ---


@forms
@pytest.mark.parametrize("combine", ["", "none", "cluster", "scratch"])
@pytest.mark.parametrize("facts", [HOPPER, AMPERE], ids=["9.0", "8.0"])
def test_both_ways_ask_the_driver_for_the_same(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, facts: plan.DeviceFacts, combine: str, form: str
) -> None:
    if combine == "cluster" and not facts.has_clusters:
        pytest.skip("a cluster needs 9.0")
    gpu.facts = facts
    launch._state.facts[None] = facts  # type: ignore[index]
    monkeypatch.setenv("MSA_OPS_COMBINE", combine)
    call = FORMS[form]()
    prepare(gpu, call)
    expected = long_way(gpu, call)
    ((route, count),) = expected.counted
    assert count == 1 and route == (combine or route) and len(expected.launches) == (2 if route == "scratch" else 1)
    for _ in range(2):
        assert short_way(gpu, call) == expected


@given(spec=specs(), force_fused=st.sampled_from([None, True, False]), data=st.data())
def test_any_call_and_any_like_it(spec: Spec, force_fused: bool | None, data: st.DataObject) -> None:
    """Random forms; then the same form with other addresses, factors and offset."""
    gpu = FakeGPU(data.draw(st.sampled_from([HOPPER, AMPERE])))
    with pytest.MonkeyPatch.context() as patch:
        install(gpu, patch)
        patch.setenv("MSA_OPS_COMBINE", data.draw(st.sampled_from(["", "scratch"])))
        call = call_of(spec, force_fused=force_fused)
        if data.draw(st.booleans()):
            call |= outputs(call)
        if data.draw(st.booleans()):
            call["workspace"] = MSASparseAttentionWorkspace("cpu", 1 << 24)
        calls, unusual = [call], 0
        number = st.one_of(st.floats(-1e30, 1e30), st.integers(-(10**9), 10**9), st.sampled_from([0.0, -0.0]))
        for _ in range(3):
            like = {name: moved(value) for name, value in call.items()}
            odd = data.draw(st.sampled_from([None, None, None, *(n for n, t in call.items() if isinstance(t, Tensor))]))
            if odd is not None:
                like[odd] = moved(call[odd], data.draw(st.sampled_from([4, 8, 16])))
                unusual += like[odd].data_ptr() % 16 > 0
            for name in ("softmax_scale", "k_global_scale", "v_global_scale"):
                if not isinstance(call[name], Tensor):
                    like[name] = data.draw(st.one_of(number, st.none()), label=name)
            if isinstance(call["q_offset"], int):
                like["q_offset"] = data.draw(st.integers(-(2**31), 2**31 - 1))
            calls.append(like)
        calls = data.draw(st.permutations(calls))
        short = [outcome(gpu, like) for like in calls]
        assert gpu.long_ways <= 1 + unusual + sum(s.error is not None for s in short)
        assert short == [long_way(gpu, like) for like in calls]
        prepared.forget()


def test_a_scale_that_is_both_is_one_tensor(gpu: FakeGPU) -> None:
    one = torch.ones(1)
    call = call_of(PAGED, k_global_scale=one, v_global_scale=one)
    expected = long_way(gpu, call)
    assert outcome(gpu, call) == expected == short_way(gpu, call)
    apart = {**call, "v_global_scale": torch.ones(1)}
    assert outcome(gpu, apart) == long_way(gpu, apart) != expected


def test_signed_zeros_reach_the_kernel(gpu: FakeGPU) -> None:
    call = call_of(PAGED, softmax_scale=1.0, v_global_scale=1.0)
    prepare(gpu, call)
    for zero in (0.0, -0.0, 0):
        call.update(softmax_scale=zero, v_global_scale=zero)
        assert short_way(gpu, call) == long_way(gpu, call)
    factors = {done.block[launch.FACTORS_AT : launch.FACTORS_AT + 8] for done in gpu.launches}
    assert {struct.pack("2f", 0.0, 0.0), struct.pack("2f", -0.0, -0.0)} <= factors


def test_the_kernel_is_told_whether_to_read_early(gpu: FakeGPU) -> None:
    """By the plan: calls of few items on 9.0."""
    fields, _ = c_layout(compiler.source(("common.cuh", "params.cuh")), "Params")
    (at,) = (offset for name, offset, _ in fields if name == "early")
    few = call_of(PAGED)
    many = call_of(replace(PAGED, lengths=(PAGED.lengths * 9)[:9]))
    for facts, call, early in ((HOPPER, few, 1), (HOPPER, many, 0), (AMPERE, few, 0)):
        gpu.facts = facts
        launch._state.facts[None] = facts  # type: ignore[index]
        prepared.forget()
        for way in (long_way, short_way):
            del gpu.launches[:]
            prepare(gpu, call)
            way(gpu, call)
            assert {struct.unpack_from("i", done.block, at) for done in gpu.launches} == {(early,)}


@pytest.mark.parametrize("pages, kernel", [(7, "c128"), (200, "c256"), (257, None)])
def test_what_an_attention_that_chooses_is_handed(gpu: FakeGPU, pages: int, kernel: str | None) -> None:
    """All that any attention is, and behind it where the scores lie and how many blocks are forced."""
    bound = signature(msa_sparse_decode_attention).bind(**call_of(PAGED))
    bound.apply_defaults()
    problem = contract.check(DecodeCall(**bound.arguments))
    tokens, heads = problem.tokens, problem.num_kv_heads
    scores = torch.zeros(heads, tokens + 3, pages)[:, 3:].transpose(1, 2)
    out = torch.empty_like(problem.q, dtype=problem.out_dtype)
    assert launch.run(problem, out, None)
    (plain,) = gpu.launches
    chose = launch.run(problem, out, None, launch.Choice(scores, 3, 2**31 - 1))
    assert chose == (kernel is not None) == (len(gpu.launches) == 2)
    if kernel is not None:
        done = gpu.launches[-1]
        assert done.kernel[0].name == plain.kernel[0].name + kernel and done.config == plain.config
        assert done.block[: len(plain.block)] == plain.block
        told = struct.unpack_from("Q3q2i", done.block, len(plain.block))
        assert told == (scores.data_ptr(), (tokens + 3) * pages, 1, pages, 3, 2**31 - 1)
    gpu.facts = AMPERE
    launch._state.facts[None] = AMPERE  # type: ignore[index]
    before = len(gpu.launches)
    assert not launch.run(problem, out, None, launch.Choice(scores, 0, 1)) and len(gpu.launches) == before


# --- what the long way reads ---


def test_the_short_way_is_handed_every_argument() -> None:
    assert tuple(signature(prepared.serve).parameters) == DecodeCall._fields
    assert tuple(signature(msa_sparse_decode_attention).parameters) == DecodeCall._fields


SEEN_BY_THE_GUARD = {
    "shape", "stride", "dtype", "device", "layout", "requires_grad", "dim", "numel", "element_size", "is_contiguous", "is_cuda",
}  # fmt: skip
"""The guard compares type, dispatch keys (device, layout), dtype, device index, requires_grad, sizes and strides; the rest
follows from these."""
SEEN_EVERY_TIME = {"data_ptr"}


@forms
def test_the_long_way_reads_nothing_else(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Of tensors and of the environment. A new kind of read belongs into the likeness, and into the tests below."""
    read, environment = set(), set()

    class Reads(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            owner = getattr(func, "__self__", None)
            read.add(owner.__name__ if func.__name__ == "__get__" else func.__name__)
            return func(*args, **(kwargs or {}))

    get = os.environ.get

    def noted(name: str, default: Any = None) -> Any:
        environment.add(name)
        return get(name, default)

    call = FORMS[form]()
    monkeypatch.setattr(os.environ, "get", noted)
    with Reads():
        problem = contract.check(DecodeCall(**{**defaults(), **call}))
        out = outputs(call)
        cuda.run(problem, out["out"], out["lse_out"])
    assert {"shape", "stride", "data_ptr"} <= read <= SEEN_BY_THE_GUARD | SEEN_EVERY_TIME | {"empty", "empty_like"}
    assert environment == {"MSA_OPS_CHECK", "MSA_OPS_COMBINE", "MSA_OPS_PLAN"}


# --- whatever differs, the outcome is the long way's ---


def other_type(t: Tensor) -> Tensor:
    return t.as_subclass(Subclass)


def longer(t: Tensor) -> Tensor:
    return torch.cat([t, t[-1:]]) if t.dim() else t


def restrided(t: Tensor) -> Tensor:
    """The same numbers with other strides; the last dim stays dense."""
    wide = torch.zeros((*t.shape[:-1], t.shape[-1] + 32), dtype=torch.uint8).to(t.dtype)
    return wide[..., : t.shape[-1]].copy_(t)


def last_strided(t: Tensor) -> Tensor:
    return torch.zeros((*t.shape, 2), dtype=torch.uint8).to(t.dtype)[..., 0].copy_(t)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "other memory": moved,
    "4 bytes on": lambda t: moved(t, 4),
    "16 bytes on": lambda t: moved(t, 16),
    "a subclass": other_type,
    "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "a list": lambda t: t.tolist()[:1],
    "None": lambda t: None,
    "requires grad": lambda t: moved(t).requires_grad_() if t.is_floating_point() else t,
    "another device": lambda t: t.to("meta"),
    "sparse": lambda t: torch.zeros(2, 2).to_sparse(),
    "bool": lambda t: torch.zeros_like(t, dtype=torch.bool),
    "int32": lambda t: t.to(torch.int32),
    "int64": lambda t: t.to(torch.int64),
    "bf16": lambda t: t.to(torch.bfloat16),
    "fp16": lambda t: t.to(torch.float16),
    "fp8": lambda t: t.to(torch.float8_e4m3fn),
    "float32": lambda t: t.to(torch.float32),
    "uint8": lambda t: t.view(torch.uint8),
    "longer": longer,
    "shorter": lambda t: t[:-1],
    "one more dim": lambda t: t[None],
    "one dim less": lambda t: t[0],
    "transposed": lambda t: t.transpose(0, 1) if t.dim() > 1 else t,
    "rows turned": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else t,
    "restrided": restrided,
    "last dim strided": last_strided,
    "empty": lambda t: t[:0],
}


def arguments(form: str) -> list[str]:
    return [name for name, value in FORMS[form]().items() if isinstance(value, Tensor)]


@pytest.mark.parametrize("form, name", [(form, name) for form in FORMS for name in arguments(form)])
def test_a_tensor_that_differs(gpu: FakeGPU, form: str, name: str) -> None:
    """In each thing that can be read of it. Twice, because the first call may prepare for the second."""
    good = FORMS[form]()
    seen = Counter[bool]()
    for change in CHANGES.values():
        prepared.forget()
        prepare(gpu, good)
        try:
            changed = {**good, name: change(good[name])}
        except RuntimeError:
            continue  # no such tensor
        expected = long_way(gpu, changed)
        for _ in range(2):
            assert outcome(gpu, changed) == expected
        seen[expected.error is None] += 1
        assert short_way(gpu, good) == long_way(gpu, good), "the call before is still known"
    assert seen[True] and seen[False] > 5


@pytest.mark.parametrize("row", ROWS, ids=names(ROWS))
def test_every_error_of_the_contract(gpu: FakeGPU, row: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is refused after a good one like it gets the same error, and nothing is launched."""
    call = call_of(row.spec)
    call |= outputs(call)
    prepare(gpu, call)
    assert short_way(gpu, call).error is None
    row.change(call)
    if row.check_values:
        monkeypatch.setenv("MSA_OPS_CHECK", "1")
    expected = long_way(gpu, call)
    assert expected.error is not None and not expected.launches
    assert outcome(gpu, call) == expected


@forms
@pytest.mark.parametrize("inputs", ["q", "k", "v", "q2k_indices", "page_table", "seqused_k", "k_scale", "q_offset"])
def test_outputs_inside_inputs(gpu: FakeGPU, form: str, inputs: str) -> None:
    """At both ends of what an input spans, and just outside. Where the contract allows it, so does the short way."""
    call = FORMS[form]()
    if not isinstance(call.get(inputs), Tensor) or call.get("out") is None or call.get("lse_out") is None:
        pytest.skip("no such input")
    prepare(gpu, call)
    t = call[inputs]
    size, span, lse_size = call["out"].numel() * 2, contract.extent(t), call["lse_out"].numel() * 4
    room = torch.zeros(2 * size + span + 4096, dtype=torch.uint8)
    first = -(-(size + 64 - t.storage_offset() * t.element_size()) // 16) * 16 + t.storage_offset() * t.element_size()
    at = torch.empty(0, dtype=t.dtype).set_(  # type: ignore[call-overload]
        room.untyped_storage(), first // t.element_size(), t.shape, t.stride()
    )
    call[inputs] = at.copy_(t)
    errors = Counter[bool]()
    for name, length in (("out", size), ("lse_out", lse_size)):
        for start in (first - length - 16, first - length, first - length + 16, first, first + span // 2, first + span - 4,
                      first + span, first + span + 16):  # fmt: skip
            output = room[start // 16 * 16 :][:length].view(call[name].dtype).view(call[name].shape)
            changed = {**call, name: output}
            expected = long_way(gpu, changed)
            ways = gpu.long_ways
            assert outcome(gpu, changed) == expected
            if inputs != "q_offset":  # which the contract lets overlap, and the short way leaves to it
                assert (gpu.long_ways > ways) == (expected.error is not None)
            errors[expected.error is None] += 1
    assert errors[True] and (errors[False] or inputs == "q_offset")


class EqualToAll:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


FLAGS = ("seqlen_q", "causal", "softmax_scale", "return_softmax_lse", "k_global_scale", "v_global_scale", "q_offset",
         "partial_dtype", "force_fused", "workspace")  # fmt: skip


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_differs(gpu: FakeGPU, name: str) -> None:
    numbers = (0, 1, 2, -1, 2**31, -(2**31), -(2**31) - 1, 1.0, 2.0, 0.0, 1e39, float("nan"), float("inf"), 10**400)
    others = ("1", [1], torch.ones(1), torch.ones(2), torch.float16, torch.float64, EqualToAll())
    good = FORMS["scalars"]()
    prepare(gpu, good)
    for value in (True, False, None, *numbers, *others):
        changed = {**good, name: value}
        expected = long_way(gpu, changed)
        for _ in range(2):
            assert outcome(gpu, changed) == expected, value


def test_scales_too_large_together(gpu: FakeGPU) -> None:
    call = call_of(PAGED, softmax_scale=1.0, k_global_scale=1.0)
    prepare(gpu, call)
    for scales in ((1e20, 1e20), (-1e20, 1e20), (3.4e38, 1.0), (2e38, 1.0), (1e20, 1e18)):
        call.update(softmax_scale=scales[0], k_global_scale=scales[1])
        assert outcome(gpu, call) == long_way(gpu, call)


@pytest.mark.parametrize("name", ["MSA_OPS_COMBINE", "MSA_OPS_PLAN", "MSA_OPS_CHECK"])
def test_the_environment_counts(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    call = FORMS["outputs"]()
    prepare(gpu, call)
    values = {
        "MSA_OPS_COMBINE": ("none", "scratch", "cluster", "wrong", ""),
        "MSA_OPS_PLAN": ("1,4,64,3,2,1,0", "1,4,64,3,2,2,0", "nonsense", ""),
        "MSA_OPS_CHECK": ("1", "0", ""),
    }[name]
    found = []
    for value in (*values, *values):
        monkeypatch.setenv(name, value)
        found.append(outcome(gpu, call))
        assert found[-1] == long_way(gpu, call)
    monkeypatch.delenv(name)
    assert short_way(gpu, call) == long_way(gpu, call)
    if name == "MSA_OPS_CHECK":
        call["page_table"] = moved(call["page_table"]).fill_(-1)
        monkeypatch.setenv(name, "1")
        assert "names page -1" in str(outcome(gpu, call).error)
    else:
        assert len({f.launches for f in found}) >= 3


def test_an_environment_that_changes_during_a_call(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread: what the engine then made is not what the call began with."""
    call = call_of(PAGED)
    check = msa_ops.decode.check

    def meanwhile(given: DecodeCall) -> Any:
        monkeypatch.setenv("MSA_OPS_COMBINE", "scratch")
        return check(given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(msa_ops.decode, "check", meanwhile)
        assert outcome(gpu, call).counted == (("scratch", 1),)
    assert not prepared._local.calls
    monkeypatch.delenv("MSA_OPS_COMBINE")
    assert outcome(gpu, call) == long_way(gpu, call)


def test_a_replaced_environment_goes_the_long_way(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(PAGED)
    prepare(gpu, call)
    monkeypatch.setattr(os, "environ", {"MSA_OPS_COMBINE": "scratch"})
    found = outcome(gpu, call)
    assert found == long_way(gpu, call) and found.counted == (("scratch", 1),)


def test_scales_that_start_between_are_read_as_before(gpu: FakeGPU) -> None:
    call = FORMS["NVFP4 tiled"]()
    between = {**call, "k_scale": moved(call["k_scale"], 4)}
    for like in (between, call, between, call):
        assert outcome(gpu, like) == long_way(gpu, like)
    assert short_way(gpu, call).error is None
