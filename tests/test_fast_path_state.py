"""The short way of eager CUDA calls: when torch's state forbids it, what it keeps and for whom, and the same bits on a GPU."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import msa_ops.decode
from cases import Spec, build
from compare import assert_matches_oracle, assert_same_bits
from fake_gpu import (
    ADDRESSES,
    FORMS,
    PAGED,
    REAL_KERNELS_FOR,
    FakeGPU,
    Subclass,
    call_of,
    defaults,
    install,
    long_way,
    moved,
    outcome,
    outputs,
    prepare,
    short_way,
)  # fmt: skip
from msa_ops import MSASparseAttentionWorkspace, msa_sparse_decode_attention
from msa_ops.contract import DecodeCall
from msa_ops.engines.cuda import launch, prepared


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    gpu = FakeGPU()
    install(gpu, monkeypatch)
    yield gpu
    prepared.forget()


# --- when torch would do more than run the op ---


class Notes(TorchDispatchMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Silent(Notes):
    """A mode that torch's own guards are told to overlook."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@pytest.mark.parametrize("mode", [Notes, Silent])
def test_a_dispatch_mode_sees_the_op(gpu: FakeGPU, mode: type[Notes]) -> None:
    call = FORMS["outputs"]()
    prepare(gpu, call)
    with mode() as notes:
        for _ in range(2):
            assert outcome(gpu, call).error is None
    assert notes.seen.count("msa_ops.sparse_decode_attention.default") == 2
    assert len(prepared._local.calls) == 1 and short_way(gpu, call).error is None


def test_a_function_mode_sees_the_op(gpu: FakeGPU) -> None:
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    call = call_of(PAGED)
    prepare(gpu, call)
    with Functions():
        assert outcome(gpu, call).error is None
    assert "msa_ops.sparse_decode_attention.default" in seen


@pytest.mark.parametrize("name", ["q", "k", "page_table", "out"])
def test_a_subclass_sees_the_op(gpu: FakeGPU, name: str) -> None:
    call = FORMS["outputs"]()
    prepare(gpu, call)
    call[name] = call[name].as_subclass(Subclass)
    for ways in (2, 3):
        assert outcome(gpu, call).error is None and gpu.long_ways == ways
    assert len(prepared._local.calls) == 1


def test_tensors_of_the_cpu_are_none_of_its_business() -> None:
    case = build(PAGED)
    prepared.forget()
    assert prepared.serve(*(DecodeCall(*case.args, **{**defaults(), **case.kwargs}))) == (False, None)
    case.run()
    assert not prepared._local.calls


def test_fake_tensors_launch_nothing(gpu: FakeGPU) -> None:
    call = call_of(PAGED)
    prepare(gpu, call)
    mode = FakeTensorMode()
    fake = {n: mode.from_tensor(a) if isinstance(a, Tensor) else a for n, a in call.items()}
    before = len(gpu.launches)
    for _ in range(2):
        with mode:
            assert type(msa_sparse_decode_attention(**fake)).__name__ == "FakeTensor"
        assert prepared.serve(*({**defaults(), **fake}[n] for n in DecodeCall._fields)) == (False, None)
    assert len(gpu.launches) == before and len(prepared._local.calls) == 1


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_transforms_and_tracing_go_the_long_way(gpu: FakeGPU) -> None:
    call = call_of(PAGED)
    prepare(gpu, call)
    q = call.pop("q")

    def attend(x: Tensor) -> Tensor:
        out = msa_sparse_decode_attention(x, **call)
        assert isinstance(out, Tensor)
        return out

    ways = gpu.long_ways
    traced = torch.jit.trace(attend, (q,), check_trace=False)
    assert "msa_ops::sparse_decode_attention" in str(traced.graph) and gpu.long_ways > ways
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    ways, launches = gpu.long_ways, len(gpu.launches)
    for _ in range(2):
        compiled(q)
    assert len(gpu.launches) == launches + 2 and len(prepared._local.calls) == 1
    with pytest.raises(RuntimeError):
        torch.func.vmap(attend)(q[None])
    assert len(prepared._local.calls) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu"), lambda: torch.device("cpu")],
    ids=["no_grad", "inference_mode", "autocast", "device"],
)  # fmt: skip
def test_other_states_of_torch(gpu: FakeGPU, context: Callable[[], Any]) -> None:
    """Results, errors and version counters are those of the long way, also right after another state."""
    call = FORMS["outputs"]()
    with torch.inference_mode():
        inference = {n: moved(a) for n, a in call.items()}
    for like in (call, inference):
        prepared.forget()
        for within in (False, True, False, True, True):
            with ExitStack() as stack:
                if within:
                    stack.enter_context(context())
                assert outcome(gpu, like) == long_way(gpu, like)


def test_a_default_device_is_no_obstacle(gpu: FakeGPU) -> None:
    call = call_of(PAGED, return_softmax_lse=True)
    with torch.device("meta"):  # asked for by name, outputs come where q is
        expected = outcome(gpu, call)
        assert short_way(gpu, call) == expected
        with torch.device("meta"):
            ways = gpu.long_ways
            assert outcome(gpu, call) == expected and gpu.long_ways == ways + 1
    assert short_way(gpu, call) == expected


def test_gradients_are_refused_only_while_they_are_on(gpu: FakeGPU) -> None:
    call = FORMS["outputs"]()
    call["v"] = moved(call["v"]).requires_grad_()
    with torch.no_grad():
        expected = outcome(gpu, call)
        assert short_way(gpu, call) == expected
    assert "v requires grad" in str(outcome(gpu, call).error)
    with torch.no_grad():
        assert short_way(gpu, call) == expected


def test_a_view_that_torch_has_yet_to_negate(gpu: FakeGPU) -> None:
    """The op gets the numbers, the short way would get the memory."""
    call = FORMS["outputs"]()
    prepare(gpu, call)
    before = call["q"].data_ptr()
    call["q"] = torch._neg_view(call["q"])
    for ways in (3, 4):
        assert outcome(gpu, call).error is None and gpu.long_ways == ways - 1
    assert ADDRESSES.unpack_from(gpu.launches[-1].block, 256)[0] != before


def test_autograd_hears_of_written_outputs(gpu: FakeGPU) -> None:
    call = FORMS["outputs"]()
    prepare(gpu, call)
    x = torch.ones_like(call["out"], requires_grad=True)
    product = (x * call["out"]).sum()
    assert short_way(gpu, call).versions == (1, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_profile_names_the_call(gpu: FakeGPU) -> None:
    call = call_of(PAGED)
    prepare(gpu, call)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert short_way(gpu, call).error is None
    assert "msa_ops::sparse_decode_attention" in {event.key for event in profile.key_averages()}


# --- what is kept ---


def test_each_stream_has_its_configuration(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST_STREAMS", 2)
    call = call_of(PAGED)
    prepare(gpu, call)
    for stream in (1, 2, 1, 3, 2, 1):
        gpu.stream = stream
        assert short_way(gpu, call) == long_way(gpu, call)
        assert gpu.launches[-1].config[-1] == stream
    assert len(prepared._local.calls[0].launches) <= 2


def test_another_current_device(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch happens with the tensors' device as the current one, which is then as before."""
    call = call_of(PAGED)
    prepare(gpu, call)
    gpu.current_device = 3
    assert short_way(gpu, call) == long_way(gpu, call)
    prepared.forget()
    assert outcome(gpu, call) == short_way(gpu, call)
    assert {done.current_device for done in gpu.launches} == {None} and gpu.current_device == 3


def test_a_failed_launch_is_an_error(gpu: FakeGPU) -> None:
    call = call_of(PAGED)
    prepare(gpu, call)

    class Failed(int):
        name = "CUDA_ERROR_LAUNCH_FAILED"

    gpu.error = Failed(719)
    found = short_way(gpu, call)
    assert found.error is not None and "CUDA_ERROR_LAUNCH_FAILED while launching" in found.error
    assert found.error == long_way(gpu, call).error


def test_a_kernel_that_is_not_loaded_is_not_loaded_in_a_capture(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "kernels_for", REAL_KERNELS_FOR)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for _ in range(2):
            found = outcome(gpu, call_of(PAGED))
            assert found.error is not None and "make one eager call, or msa_ops.warmup(device)" in found.error
    assert not gpu.launches and not prepared._local.calls
    call = call_of(PAGED)
    prepare(gpu, call)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert short_way(gpu, call).error is None


def test_the_likenesses_asked_for_last_are_kept(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST_CALLS", 3)
    calls = [call_of(replace(PAGED, topk=topk)) for topk in range(1, 6)]
    for i in (0, 1, 2, 0, 3):
        outcome(gpu, calls[i])
    for i in (0, 2, 3, 0):
        short_way(gpu, calls[i])
    ways = gpu.long_ways
    outcome(gpu, calls[1])
    assert gpu.long_ways == ways + 1 and len(prepared._local.calls) == 3
    short_way(gpu, calls[1])


def test_a_workspace_that_has_grown(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSA_OPS_COMBINE", "scratch")
    workspace = MSASparseAttentionWorkspace("cpu", 64)
    call = call_of(PAGED, workspace=workspace)
    assert outcome(gpu, call).error is None and workspace.nbytes > 64
    assert short_way(gpu, call) == long_way(gpu, call)
    state = ADDRESSES.unpack_from(gpu.launches[-1].block, 256)[-1]
    assert state == workspace.buffer.data_ptr()
    workspace.reserve(2 * workspace.nbytes)
    assert outcome(gpu, call) == short_way(gpu, call) == long_way(gpu, call)
    assert ADDRESSES.unpack_from(gpu.launches[-1].block, 256)[-1] == workspace.buffer.data_ptr() != state


def test_a_likeness_is_kept_once(gpu: FakeGPU) -> None:
    call = FORMS["NVFP4 tiled"]()
    prepare(gpu, call)
    call["k_scale"] = moved(call["k_scale"], 4)  # what the short way does not serve
    for _ in range(3):
        outcome(gpu, call)
    assert len(prepared._local.calls) == 1


def test_addresses_are_kept_up_to_a_limit(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST_ADDRESSES", 4)
    call = FORMS["outputs"]()
    prepare(gpu, call)
    others = [{**call, "k": moved(call["k"]), "v": moved(call["v"])} for _ in range(6)]
    for other in others + others:
        assert short_way(gpu, other) == long_way(gpu, other)
        assert len(prepared._local.calls[0].known) <= 4


def test_without_torchs_guard_everything_goes_the_long_way(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "TensorGuards", None)
    call = call_of(PAGED)
    for ways in (1, 2):
        assert outcome(gpu, call).error is None and gpu.long_ways == ways


def test_nothing_is_kept_of_calls_that_launch_nothing(gpu: FakeGPU) -> None:
    for call in (call_of(Spec(lengths=())), call_of(PAGED) | {n: call_of(PAGED)[n][:0] for n in ("k", "v")}):
        for _ in range(2):
            assert outcome(gpu, call).error is None
    assert not prepared._local.calls


def test_one_tensor_as_two_arguments(gpu: FakeGPU) -> None:
    lengths = torch.tensor([300, 129], dtype=torch.int32)
    call = call_of(PAGED, seqused_k=lengths, q_offset=lengths)
    for ways in (1, 3):
        assert outcome(gpu, call) == long_way(gpu, call) and gpu.long_ways == ways + 1
    assert not prepared._local.calls


def test_threads_share_nothing(gpu: FakeGPU) -> None:
    calls = [(c := call_of(replace(PAGED, seed=i))) | outputs(c) | {"q_offset": i} for i in range(6)]
    start, wrong = threading.Barrier(len(calls)), list[object]()
    expected = [long_way(gpu, call).launches for call in calls]
    gpu.launches.clear()

    def work(i: int) -> None:
        start.wait()
        for _ in range(50):
            msa_sparse_decode_attention(**calls[i])
        wrong.extend(() if len(prepared._local.calls) == 1 else [i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not prepared._local.calls
    blocks = [{done.block_at for done in gpu.launches if done.block == e[0][2]} for e in expected]
    assert all(len(places) == 2 for places in blocks), "the long way's block of a thread, and the short way's"
    assert len(set().union(*blocks)) == 2 * len(calls)
    assert len(gpu.launches) == 50 * len(calls)


def test_a_forked_child_starts_empty(gpu: FakeGPU) -> None:
    prepare(gpu, call_of(PAGED))
    child = os.fork()
    if child == 0:
        os._exit(len(prepared._local.calls))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(prepared._local.calls) == 1


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype, form", [("bf16", "hnd"), ("fp8", "packed"), ("fp8", "flat")])
@pytest.mark.parametrize("combine", ["", "none", "scratch"])
def test_the_same_bits_on_a_gpu(monkeypatch: pytest.MonkeyPatch, kv_dtype: str, form: str, combine: str) -> None:
    """Over several calls that differ in all that a likeness leaves open; the last ones in another stream, and in a graph."""
    monkeypatch.setenv("MSA_OPS_COMBINE", combine)
    prepared.forget()
    spec = Spec(kv_dtype=kv_dtype, form=form, lengths=(1500, 700), topk=9, ids="all")
    cases = [build(replace(spec, seed=seed), "cuda") for seed in range(3)]
    asked = [{}, {"softmax_scale": -0.2}, {"k_global_scale": 0.5, "v_global_scale": 3}, {"force_fused": True}]
    calls = [(case, changes) for case in cases for changes in asked]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "serve", lambda *_: (False, None))
        expected = [[t.clone() for t in case.run(**changes)] for case, changes in calls]
    before = sum(launch.calls.values())
    checks = Counter[str]()
    check = msa_ops.decode.check
    monkeypatch.setattr(msa_ops.decode, "check", lambda call: (checks.update(["long"]), check(call))[1])
    for (case, changes), wanted in zip(calls, expected, strict=True):
        assert_same_bits(case.run(**changes), (wanted[0], wanted[1]))
    assert checks["long"] == 2, "once without and once with force_fused"
    assert sum(launch.calls.values()) == before + len(calls)
    assert_matches_oracle(cases[0])
    case, wanted = cases[1], expected[len(asked)]
    out, lse = (torch.full_like(t, float("nan")) for t in wanted)
    case.run(out=out, lse_out=lse)
    with torch.cuda.stream(torch.cuda.Stream()):
        case.run(out=out, lse_out=lse)
        torch.cuda.current_stream().synchronize()
    assert_same_bits((out, lse), (wanted[0], wanted[1]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(out=out, lse_out=lse)
    out.fill_(float("nan")), lse.fill_(float("nan"))
    graph.replay()
    assert_same_bits((out, lse), (wanted[0], wanted[1]))
    assert checks["long"] == 3, "once more for the outputs"
    with pytest.raises(ValueError, match="out must not share memory with q"):
        case.run(out=case.args[0], lse_out=lse)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_same_bits_on_a_device_that_is_not_the_current_one() -> None:
    case = build(Spec(lengths=(1500, 700), topk=9, ids="all"), "cuda:1")
    with torch.cuda.device(0):
        first = [t.clone() for t in case.run()]
        assert_same_bits(case.run(), (first[0], first[1]))
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert_same_bits(case.run(), (first[0], first[1]))
