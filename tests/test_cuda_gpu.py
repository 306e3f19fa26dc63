"""The CUDA engine on a GPU: routes, graphs, streams, threads, devices, large grids.

What both engines share is tested elsewhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import Case, Spec, build
from compare import ROW_TOLERANCE, assert_lse_close, assert_matches_oracle, assert_same_bits
from msa_ops import MSASparseAttentionWorkspace, explain, msa_sparse_decode_attention
from msa_ops.bench.exact import exact_output, relative_error
from msa_ops.bench.inputs import Call, Shape, make_calls, make_pool
from msa_ops.engines.cuda import launch
from test_pitfalls import everything_used, set_ids
from test_pitfalls_gpu import captured, outputs_of

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
ROUTES = ("none", "cluster", "scratch")
SRC = str(Path(__file__).parents[1] / "src")
Result = tuple[Tensor, Tensor]


def has_clusters() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way for an item's blocks to meet, forced."""
    name = str(request.param)
    if name == "cluster" and not has_clusters():
        pytest.skip("needs compute capability 9.0 or newer")
    monkeypatch.setenv("MSA_OPS_COMBINE", name)
    return name


def run_counted(case: Case, **changes: Any) -> tuple[Result, str]:
    """The result of a call and the route that it took."""
    before = dict(launch.calls)
    result = case.run(**changes)
    taken = [name for name in ROUTES if launch.calls[name] != before.get(name, 0)]
    assert len(taken) == 1 and sum(launch.calls.values()) == sum(before.values()) + 1
    return result, taken[0]


def explained(case: Case, **changes: Any) -> Any:
    return explain(*case.args, **{**case.kwargs, "return_softmax_lse": True, **changes})


def clone(result: Result) -> Result:
    return result[0].clone(), result[1].clone()


def in_fresh_process(code: str) -> str:
    """Run `code`, with the call's tensors made by `arguments`, in a process that has loaded nothing."""
    head = f"""
import sys; sys.path.insert(0, {SRC!r})
import torch
import msa_ops
from msa_ops.engines.cuda import launch
def arguments():
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(1, 16, 128, device="cuda", generator=g).bfloat16()
    k, v = (torch.randn(2048, 1, 128, device="cuda", generator=g).bfloat16() for _ in "kv")
    ids = torch.arange(16, dtype=torch.int32, device="cuda")[None, None]
    return (q, k, v, ids), {{"cu_seqlens_k": torch.tensor([0, 2048], dtype=torch.int32, device="cuda")}}
"""
    run = subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


# --- routes ---

PAIRS = [
    ("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8"), ("fp16", "fp8"), ("fp8", "bf16"), ("fp8", "fp8"),
    ("bf16", "nvfp4"), ("fp16", "nvfp4"), ("fp8", "nvfp4"),
]  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "one request": {"lengths": (700,), "kv_heads": 1, "group": 16, "topk": 6, "ids": "all"},
    "two row tiles": {"lengths": (300, 129, 64), "seqlen_q": 3, "kv_heads": 2, "group": 20, "topk": 5},
    "packed": {"form": "packed", "lengths": (700, 0, 513), "group": 1, "topk": 8},
    "flat": {"form": "flat", "lengths": (260, 0, 513), "group": 9, "topk": 3, "causal": False},
}


def spec_of(q_dtype: str, kv_dtype: str, shape: str) -> Spec:
    fields = SHAPES[shape]
    if kv_dtype == "nvfp4" and fields.get("form") == "packed":
        fields = {
            **fields,
            "form": "planar_pool",
        }  # K and V as halves of one tensor is no NVFP4 form; a pool's pages are
    return Spec(q_dtype=q_dtype, kv_dtype=kv_dtype, **fields)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("q_dtype, kv_dtype", PAIRS)
def test_a_forced_route_is_taken_and_right(route: str, q_dtype: str, kv_dtype: str, shape: str) -> None:
    case = build(spec_of(q_dtype, kv_dtype, shape), "cuda")
    result, taken = run_counted(case)
    e = explained(case)
    assert (taken, e.route) == (route, route)
    assert (e.splits > 1) == (route != "none")
    assert_matches_oracle(case, result)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [3, 6])
@pytest.mark.parametrize(
    "kv_dtype, variant",
    [("bf16", "2,4,64,5,1"), ("bf16", "1,8,64,5,1"), ("fp8", "2,4,128,5,1"), ("nvfp4", "2,4,128,5,1")],
)
def test_clusters_of_which_not_all_blocks_own_rows(
    kv_dtype: str, variant: str, size: int, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_clusters():
        pytest.skip("this GPU has no clusters")
    monkeypatch.delenv("MSA_OPS_COMBINE", raising=False)
    monkeypatch.setenv("MSA_OPS_PLAN", f"{variant},{size},0")
    case = build(spec_of("bf16", kv_dtype, shape), "cuda")
    result, taken = run_counted(case)
    assert taken == "cluster" and explained(case).splits == size
    assert_matches_oracle(case, result)


def test_the_route_follows_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MSA_OPS_COMBINE", raising=False)
    few = build(Spec(lengths=(2000,), kv_heads=1, topk=16, ids="all"), "cuda")
    many = build(Spec(lengths=(130,) * 400, kv_heads=1, group=1, topk=2, ids="all"), "cuda")
    split = "cluster" if has_clusters() else "scratch"
    for case, force_fused, expected in [
        (few, None, split),
        (few, False, split),
        (few, True, "none"),
        (many, None, "none"),
        (many, True, "none"),
        (many, False, split),
    ]:
        result, taken = run_counted(case, force_fused=force_fused)
        e = explained(case, force_fused=force_fused)
        assert taken == e.route == expected, (case.spec, force_fused, e)
        assert not bool(result[0].isnan().any())
    assert_matches_oracle(few)


def test_one_tile_is_not_split(route: str) -> None:
    case = build(Spec(kv_dtype="fp8", lengths=(100,), kv_heads=1, topk=1, ids="all"), "cuda")
    result, taken = run_counted(case)
    e = explained(case)
    assert "t128" in e.variant, "a tile was meant to be a block here"
    assert taken == e.route == "none"
    assert_matches_oracle(case, result)


def test_a_cluster_cannot_be_forced_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    if has_clusters():
        pytest.skip("this GPU has clusters")
    monkeypatch.setenv("MSA_OPS_COMBINE", "cluster")
    with pytest.raises(ValueError, match=r"needs compute capability 9\.0 or newer"):
        build(Spec(), "cuda").run()


@pytest.mark.parametrize("topk", [1, 2, 3, 15, 31, 32, 33, 63, 64, 65, 96, 97, 100])
def test_any_topk_with_duplicates_in_any_window(route: str, topk: int) -> None:
    """Ids are looked at 32 at a time: a repeat of an id of an earlier window counts no more than one of the same."""
    case = everything_used(Spec(lengths=(1500, 1100), kv_heads=1, group=3, topk=topk, seed=topk), "cuda")
    g = torch.Generator().manual_seed(topk)
    rows = torch.randint(-2, 14, (2, topk), generator=g).tolist()
    result = set_ids(case, rows).run()
    assert_matches_oracle(case, result)
    once = [list(dict.fromkeys(row)) for row in rows]
    assert_matches_oracle(set_ids(case, once), result)


def test_repeats_of_the_first_window_among_new_blocks_of_the_second(route: str) -> None:
    case = everything_used(Spec(kv_dtype="fp8", lengths=(6000,), kv_heads=1, group=16, topk=70), "cuda")
    ascending = list(range(32))
    second = [32, 0, 33, 31, 34, 32, 16, 35, 36, 37, 38, 39, 40, 41, 1, 2, *range(42, 47), *[5] * 11]
    assert_matches_oracle(set_ids(case, [*ascending, *second, 46, 0, 31, 32, 6]))


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize("q_dtype, kv_dtype", [("bf16", "fp8"), ("fp16", "fp16"), ("bf16", "nvfp4")])
def test_partial_results_are_stored_as_asked(
    dtype: torch.dtype | None, q_dtype: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSA_OPS_COMBINE", "scratch")
    spec = Spec(q_dtype=q_dtype, kv_dtype=kv_dtype, lengths=(900, 1300), kv_heads=1, group=8, topk=12, ids="all")
    case = build(spec, "cuda")
    (out, lse), taken = run_counted(case, partial_dtype=dtype)
    assert taken == "scratch"
    expected, expected_lse = case.oracle()
    assert_lse_close(lse, expected_lse)
    # n partial results are each larger than the merged one by about the root of n, and their roundings are independent:
    # the merged result is off by what one rounding of it would be.
    roundoff = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, FP8: 2.0**-4}.get(dtype or torch.float32, 0.0)
    error = float(((out.cpu().double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    assert error <= ROW_TOLERANCE[out.dtype] + roundoff
    if dtype == FP8:
        assert error > 2 * ROW_TOLERANCE[out.dtype], "that is not e4m3"
    fp32 = case.run(partial_dtype=torch.float32)
    if dtype in (None, torch.float32):
        assert_same_bits((out, lse), fp32)
    monkeypatch.setenv("MSA_OPS_COMBINE", "none")
    assert_same_bits(case.run(partial_dtype=dtype), case.run())


def test_no_route_allocates_or_waits_with_outputs_and_workspace_given(route: str) -> None:
    case = build(Spec(lengths=(2000, 1500), topk=16, ids="all"), "cuda")
    workspace = MSASparseAttentionWorkspace("cuda")
    out, lse = outputs_of(case)
    keywords: dict[str, Any] = {"out": out, "lse_out": lse, "workspace": workspace}
    case.run(**keywords)
    need = explained(case, **keywords).scratch_bytes
    assert workspace.nbytes == need and (need > 0) == (route == "scratch")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run(**keywords)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert_matches_oracle(case, (out, lse))


def test_a_small_workspace_in_a_compiled_call_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op cannot grow a tensor that is handed to it: it takes memory of its own, and writes nothing past the end."""
    monkeypatch.setenv("MSA_OPS_COMBINE", "scratch")
    case = build(Spec(lengths=(2000,), topk=16, ids="all"), "cuda")
    workspace = MSASparseAttentionWorkspace("cuda", 64)
    workspace.buffer.fill_(7)
    call = torch.compile(
        lambda q: msa_sparse_decode_attention(q, *case.args[1:], **case.kwargs, workspace=workspace),
        backend="aot_eager",
        fullgraph=True,
    )
    assert torch.equal(call(case.args[0]), case.run_output())
    assert workspace.nbytes == 64 and bool((workspace.buffer == 7).all())


# --- graphs ---


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "nvfp4"])
def test_replays_follow_everything_that_changes_in_place(route: str, kv_dtype: str) -> None:
    spec = Spec(kv_dtype=kv_dtype, lengths=(1000, 700, 513), seqlen_q=2, topk=9, q_offset=(998, 698, 511))
    case = set_ids(everything_used(spec, "cuda"), list(range(9)))
    q, table, lengths = case.args[0], case.kwargs["page_table"], case.kwargs["seqused_k"]
    case.kwargs["k_global_scale"] = torch.ones(1, device="cuda")
    case.kwargs["v_global_scale"] = torch.ones(1, device="cuda")
    out, lse = outputs_of(case)
    graph = captured(lambda: case.run(out=out, lse_out=lse))

    def replayed() -> Result:
        out.fill_(float("nan")), lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        return assert_matches_oracle(case, (out, lse))

    first = clone(replayed())
    q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(1)))
    replayed()
    set_ids(case, [7, 3, 3, -1, 0, 99])
    replayed()
    table.copy_(table[[1, 0, 2]].clone())
    lengths.copy_(lengths[[1, 0, 2]].clone())
    case.kwargs["q_offset"].copy_(torch.tensor([300, 999, 0]))
    replayed()
    case.kwargs["k_global_scale"].fill_(-0.5)
    case.kwargs["v_global_scale"].fill_(3.0)
    replayed()
    for shorter in ([129, 1, 0], [0, 0, 0], [-5, 128, 513]):
        lengths.copy_(torch.tensor(shorter))
        replayed()
    lengths.copy_(torch.tensor([700, 1000, 513]))
    assert not torch.equal(replayed()[0], first[0])


@pytest.mark.parametrize("form", ["hnd", "planar"])
def test_replays_read_an_nvfp4_cache_as_it_is_then(route: str, form: str) -> None:
    """Codes and block scales, which may change between replays as all else may."""
    spec = Spec(kv_dtype="nvfp4", form=form, lengths=(900, 513), topk=8, ids="all")
    case, other = build(spec, "cuda"), build(dataclasses.replace(spec, seed=1), "cuda")
    out, lse = outputs_of(case)
    graph = captured(lambda: case.run(out=out, lse_out=lse))
    expected = clone(other.run())
    for mine, theirs in zip((*case.args, *case.kwargs.values()), (*other.args, *other.kwargs.values()), strict=True):
        if isinstance(mine, torch.Tensor):
            mine.copy_(theirs)
    out.fill_(float("nan")), lse.fill_(float("nan"))
    graph.replay()
    assert_same_bits((out, lse), expected)


def test_a_graph_may_hold_its_own_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a workspace the scratch comes from the graph's pool; eager calls between replays take other memory."""
    monkeypatch.setenv("MSA_OPS_COMBINE", "scratch")
    case = build(Spec(lengths=(2000, 900), topk=16, ids="all"), "cuda")
    other = build(Spec(lengths=(1900, 1000, 800), topk=16, ids="all", seed=1), "cuda")
    out, lse = outputs_of(case)
    graph = captured(lambda: case.run(out=out, lse_out=lse))
    expected, expected_other = clone(case.run()), clone(other.run())
    for _ in range(10):
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(other.run(), expected_other)
        assert_same_bits((out, lse), expected)


def test_a_capture_that_would_compile_raises_and_warmup_is_the_remedy() -> None:
    code = """
args, keywords = arguments()
out = torch.empty_like(args[0])
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    try:
        msa_ops.msa_sparse_decode_attention(*args, **keywords, out=out)
    except RuntimeError as error:
        print(error)
print(msa_ops.warmup("cuda", (torch.bfloat16,)))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    msa_ops.msa_sparse_decode_attention(*args, **keywords, out=out)
out.fill_(float("nan"))
graph.replay()
replayed = out.clone()
assert torch.equal(replayed, msa_ops.msa_sparse_decode_attention(*args, **keywords))
print("equal")
"""
    error, names, equal = in_fresh_process(code).strip().splitlines()
    assert "is not loaded yet" in error and "msa_ops.warmup(device)" in error
    assert names.startswith("('bf16-") and equal == "equal"


# --- order and repetition ---


def test_a_hundred_runs_are_equal_to_the_bit(route: str) -> None:
    for kv_dtype in ("bf16", "fp8"):
        case = build(Spec(kv_dtype=kv_dtype, lengths=(3000, 1, 2000, 0), group=16, topk=24), "cuda")
        out, lse = clone(case.run())
        for _ in range(100):
            again, again_lse = case.run()
            assert torch.equal(again.view(torch.int16), out.view(torch.int16))
            assert torch.equal(again_lse.view(torch.int32), lse.view(torch.int32))


def test_a_call_waits_for_what_its_stream_did_before(route: str) -> None:
    """The kernel may start while the previous one runs; it must not read before that one has written."""
    case = build(Spec(lengths=(2000, 900), topk=16, ids="all"), "cuda")
    names = ("page_table", "seqused_k")
    sources: list[Tensor] = [case.args[0], case.args[3], *(case.kwargs[n] for n in names)]
    right = [t.clone() for t in sources]
    expected = clone(case.run())
    stream = torch.cuda.Stream()
    for t in sources:
        t.copy_(torch.zeros_like(t))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        for t, r in zip(sources, right, strict=True):
            t.copy_(r)
        result = case.run()
        kept = clone(result)
        for t in sources:  # and what comes behind must not overtake it
            t.zero_()
    stream.synchronize()
    assert_same_bits(kept, expected)


def test_calls_in_a_row_read_what_the_one_before_wrote(route: str) -> None:
    """Each output is the next query, with dependent launches all the way."""
    case = build(Spec(lengths=(2000, 900), topk=16, ids="all"), "cuda")

    def chain(each: Callable[[], None]) -> Tensor:
        q = case.args[0]
        for _ in range(30):
            q = msa_sparse_decode_attention(q, *case.args[1:], **case.kwargs)
            each()
        return q

    assert torch.equal(chain(lambda: None), chain(torch.cuda.synchronize))


def test_two_streams_at_once(route: str) -> None:
    cases = [
        build(Spec(kv_dtype=kv_dtype, lengths=(3000, 2500), group=16, topk=24, ids="all", seed=seed), "cuda")
        for seed, kv_dtype in enumerate(("bf16", "fp8"))
    ]
    expected = [clone(case.run()) for case in cases]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[list[Result]] = [[], []]
    for _ in range(40):
        for i in (0, 1):
            with torch.cuda.stream(streams[i]):
                results[i].append(cases[i].run())
    torch.cuda.synchronize()
    for i in (0, 1):
        for result in results[i]:
            assert_same_bits(result, expected[i])


def test_threads_at_once(route: str) -> None:
    """Each thread has a parameter block of its own: the driver reads it with the interpreter lock released."""
    cases = [build(Spec(lengths=(300 + 200 * i,), group=8, topk=12, ids="all", seed=i), "cuda") for i in range(6)]
    expected = [clone(case.run()) for case in cases]
    torch.cuda.synchronize()
    start = threading.Barrier(len(cases))
    wrong: list[object] = []

    def work(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                start.wait()
                results = [cases[i].run() for _ in range(50)]
                torch.cuda.current_stream().synchronize()
            for result in results:
                assert_same_bits(result, expected[i])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def test_the_first_call_may_come_from_a_thread_that_never_used_cuda() -> None:
    """Without a context of its own a thread gets no answer about clusters, and the plan would be another."""
    code = """
import threading
args, keywords = arguments()
torch.cuda.synchronize()
def work():
    global out
    out = msa_ops.msa_sparse_decode_attention(*args, **keywords)
thread = threading.Thread(target=work)
thread.start(); thread.join()
assert torch.equal(out, msa_ops.msa_sparse_decode_attention(*args, **keywords))
print(dict(launch.calls))
"""
    expected = "cluster" if has_clusters() else "scratch"
    assert in_fresh_process(code).strip() == str({expected: 2})


# --- other devices ---

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_devices
def test_the_tensors_device_counts_not_the_current_one(route: str) -> None:
    spec = Spec(lengths=(2000, 900), topk=16, ids="all")
    expected = clone(build(spec, "cuda:0").run())
    with torch.cuda.device(0):
        case = build(spec, "cuda:1")
        workspace = MSASparseAttentionWorkspace("cuda:1")
        assert_matches_oracle(case, case.run(workspace=workspace))
        assert explained(case).route == route
        if torch.cuda.get_device_properties(0).name == torch.cuda.get_device_properties(1).name:
            assert_same_bits(case.run(), expected)
        assert torch.cuda.current_device() == 0


@two_devices
def test_a_second_device_used_first() -> None:
    code = """
args, keywords = arguments()
there = [t.to("cuda:1") for t in args]
keywords_there = {name: t.to("cuda:1") for name, t in keywords.items()}
workspace = msa_ops.MSASparseAttentionWorkspace("cuda:1")
first = msa_ops.explain(*there, **keywords_there, workspace=workspace)
out = msa_ops.msa_sparse_decode_attention(*there, **keywords_there, workspace=workspace)
second = msa_ops.explain(*args, **keywords)
here = msa_ops.msa_sparse_decode_attention(*args, **keywords)
torch.testing.assert_close(out.cpu(), here.cpu(), rtol=2**-7, atol=1e-3)
print(first.route, first.splits, second.route, second.splits)
"""
    route, splits, other_route, other_splits = in_fresh_process(code).split()
    assert route in ("cluster", "scratch") and int(splits) > 1
    if torch.cuda.get_device_properties(0).name == torch.cuda.get_device_properties(1).name:
        assert (route, splits) == (other_route, other_splits)


# --- large grids ---


def run_call(call: Call) -> Result:
    keywords = {"page_table": call.page_table, "seqused_k": call.seqused_k, "seqlen_q": call.shape.seqlen_q}
    result = msa_sparse_decode_attention(
        call.q, call.pool.k, call.pool.v, call.q2k_indices, **keywords, return_softmax_lse=True
    )
    assert isinstance(result, tuple)
    return result


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def ragged(request: pytest.FixtureRequest) -> tuple[Call, Tensor]:
    """600 tokens over 4 KV heads, many more items than blocks that fit, lengths from 0 on; the exact output."""
    lengths = tuple(itertools.islice(itertools.cycle((0, 4096, 1, 129, 128, 0, 2500, 127, 700, 3000, 0)), 600))
    shape = Shape(request.param, 600, {"bf16": 64, "fp8": 80}[request.param], 4, context=4096, lengths=lengths)
    generator = torch.Generator("cuda").manual_seed(0)
    call = make_calls(shape, make_pool(shape.kv, 3000, 4, generator), 1, generator)[0]
    return call, exact_output(call, torch.arange(shape.tokens, device="cuda"))


def test_more_items_than_the_device_holds(route: str, ragged: tuple[Call, Tensor]) -> None:
    """On the none route blocks go through several items each, and an empty one must leave nothing behind in the ring."""
    call, exact = ragged
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    assert call.shape.tokens * call.shape.num_kv_heads > 2 * multiprocessors
    out, lse = run_call(call)
    # The worst of 38,400 rows; those of a few keys gain nothing from averaging their weights' roundings.
    assert relative_error(out, exact) <= 1.25 * ROW_TOLERANCE[torch.bfloat16]
    empty = call.seqused_k == 0
    assert bool((out[empty] == 0).all())
    assert torch.equal(lse.isneginf(), empty[:, None].expand_as(lse)) and not bool(lse.isnan().any())
    again, again_lse = run_call(call)
    assert torch.equal(again, out) and torch.equal(again_lse, lse)


def test_items_beyond_a_grid_dimension(route: str) -> None:
    shape = Shape("fp8", 70_000, 3, 1, context=300, topk=2)
    generator = torch.Generator("cuda").manual_seed(1)
    call = make_calls(shape, make_pool("fp8", 512, 1, generator), 1, generator)[0]
    out, lse = run_call(call)
    assert not bool(out.isnan().any()) and bool(lse.isfinite().all())
    some = torch.cat([torch.arange(0, 70_000, 211), torch.arange(65_500, 65_600), torch.tensor([69_999])]).cuda()
    assert relative_error(out[some], exact_output(call, some)) <= ROW_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("batch", [20, 70, 110])
def test_a_long_list_that_ends_empty(blocks: int, batch: int) -> None:
    """The last 32 of 64 ids name no block: after its tiles an item has a mark, in a stage that was used before. By the
    number of items NVFP4 has two, three or four blocks a multiprocessor."""
    shape = Shape("nvfp4-planar", batch, 64, 4, context=12_000, topk=64, blocks=(blocks,) * batch)
    generator = torch.Generator("cuda").manual_seed(2)
    call = make_calls(shape, make_pool("nvfp4-planar", 12_000, 4, generator), 1, generator)[0]
    pool = call.pool
    for _ in range(8):
        out = msa_sparse_decode_attention(
            call.q, pool.k, pool.v, call.q2k_indices, page_table=call.page_table, seqused_k=call.seqused_k,
            k_scale=pool.k_scale, v_scale=pool.v_scale, k_global_scale=pool.k_global_scale,
            v_global_scale=pool.v_global_scale,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
    expected = exact_output(call, torch.arange(batch, device="cuda"))
    assert relative_error(out, expected) <= ROW_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("dim", [0, 1])
def test_an_expanded_cache(kv_dtype: str, dim: int) -> None:
    """All pages, or all KV heads, are one: a stride of 0."""
    case = build(Spec(kv_dtype=kv_dtype, lengths=(300,), kv_heads=2, fill="zero"), "cuda")
    q, k, v, ids = case.args
    place = int(case.kwargs["page_table"][0, 0]) if dim == 0 else 0  # other pages may be unused, and hold nothing
    one = [t.narrow(dim, place, 1).expand(t.shape) for t in (k, v)]
    assert one[0].stride(dim) == 0
    got = msa_sparse_decode_attention(q, *one, ids, **case.kwargs)
    want = msa_sparse_decode_attention(q, *(t.contiguous() for t in one), ids, **case.kwargs)
    assert torch.equal(got, want) and bool(got.any())
