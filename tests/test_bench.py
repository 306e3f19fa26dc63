"""The benchmark: its inputs, its float64 check, its gate, its bars and its report."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from msa_ops.bench import goals, host, report, runner, warm
from msa_ops.bench.exact import error_against_rounding, exact_output, relative_error
from msa_ops.bench.inputs import KV_KINDS, Call, Shape, make_calls, make_pool, select_blocks
from msa_ops.bench.main import main
from msa_ops.bench.measure import Bench, Prepared, geometric_mean, timing_of
from msa_ops.bench.options import Options, parse
from msa_ops.bench.peers import UNKNOWN, Absent, Refused, Side, load_peers, ours
from msa_ops.bench.presets import BATCHES, LONGEST, Axes, jobs_of, ragged_lengths, separate_requests, split_heads
from msa_ops.bench.runner import Runner
from msa_ops.bench.step_sides import PARTS, StepSide
from msa_ops.reference import decode_reference

SMALL = Shape("bf16", 2, 4, 2, context=512)
AXES = Axes(KV_KINDS, None, None, None, 32768)


def calls_of(shape: Shape, device: str = "cpu", count: int = 1, pages: int = 24) -> list[Call]:
    generator = torch.Generator(device).manual_seed(3)
    return make_calls(shape, make_pool(shape.kv, pages, shape.num_kv_heads, generator), count, generator)


def reference_of(call: Call) -> torch.Tensor:
    p = call.pool
    out, _ = decode_reference(
        call.q, p.k, p.v, call.q2k_indices, round_output=False, page_table=call.page_table, seqused_k=call.seqused_k,
        seqlen_q=call.shape.seqlen_q, k_scale=p.k_scale, v_scale=p.v_scale, k_global_scale=p.k_global_scale,
        v_global_scale=p.v_global_scale,
    )  # fmt: skip
    return out


def right(call: Call) -> None:
    """A peer that is right, being the check itself."""
    call.out.copy_(exact_output(call, torch.arange(call.shape.tokens, device=call.out.device)))


def run_with(sides: list[Side | Absent], *argv: str) -> dict[str, Any]:
    options = parse(["--device", "cpu", "--smoke", "--kv", "bf16", "--batch", "2", "--heads", "4/2", *argv])
    return Runner(options, lambda line: None, sides).run()


# --- inputs and the float64 check ---


@pytest.mark.parametrize("kv", KV_KINDS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"seqlen_q": 3, "overlap": True},
        {"lengths": (1, 389)},
        {"blocks": (1, 2)},
        {"lengths": (3, 200), "seqlen_q": 4},
    ],
    ids=["plain", "overlapping", "ragged", "few blocks", "shorter than seqlen_q"],
)
def test_float64_check_agrees_with_the_oracle(kv: str, fields: dict[str, Any], device: str) -> None:
    call = calls_of(dataclasses.replace(SMALL, kv=kv, topk=3, **fields), device)[0]
    tokens = torch.arange(call.shape.tokens, device=device)
    exact = exact_output(call, tokens).cpu()
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact, reference_of(call), rtol=1e-12, atol=1e-13)
    some = tokens.flip(0)[:2]
    torch.testing.assert_close(exact_output(call, some).cpu(), exact[some.cpu()], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("overlap", [False, True])
def test_selections_are_ascending_distinct_and_hold_the_own_block(overlap: bool, device: str) -> None:
    shape = Shape("fp8", 5, 8, 2, seqlen_q=4, context=8192, overlap=overlap)
    generator = torch.Generator(device).manual_seed(0)
    first, second = (t.cpu() for t in select_blocks(shape, 2, generator))
    assert first.shape == (2, 20, 16) and first.is_contiguous() and first.dtype == torch.int32
    assert not torch.equal(first, second)
    assert bool((first.diff(dim=-1) > 0).all()) and int(first.min()) >= 0
    assert bool((first[..., -1] == 63).all())
    tokens = first.view(2, 5, 4, 16)
    shared = [
        len(set(tokens[h, b, i].tolist()) & set(tokens[h, b, i + 1].tolist()))
        for h in range(2) for b in range(5) for i in range(3)
    ]  # fmt: skip
    if overlap:
        assert set(shared) <= {12, 13, 14, 15} and len(set(shared)) > 1
    else:
        assert sum(shared) / len(shared) < 8  # 16 of 64 blocks drawn anew share 4 in the mean


def test_short_requests_select_what_they_have() -> None:
    shape = Shape("fp8", 3, 4, 1, lengths=(1, 300, 4000), context=512)
    ids = select_blocks(shape, 1, torch.Generator().manual_seed(0))[0][0]
    assert ids[0].tolist() == [0] + [-1] * 15
    assert ids[1].tolist() == [0, 1, 2] + [-1] * 13
    assert int(ids[2].min()) >= 0 and int(ids[2, -1]) == 31


def test_pages_are_distinct_within_a_call_and_between_neighbours() -> None:
    first, second = calls_of(SMALL, count=2, pages=16)
    assert first.page_table.unique().numel() == 8
    assert torch.cat((first.page_table, second.page_table)).unique().numel() == 16


@pytest.mark.parametrize("kv", KV_KINDS)
def test_unique_bytes_count_a_shared_row_once(kv: str) -> None:
    shape = Shape(kv, 2, 4, 2, seqlen_q=4, context=4096, overlap=True, lengths=(4000, 777))
    call = calls_of(shape, pages=64)[0]
    rows = 0
    for head in range(2):
        for b, length in enumerate((4000, 777)):
            chosen = set(call.q2k_indices[head, 4 * b : 4 * b + 4].flatten().tolist()) - {-1}
            rows += sum(min(128, length - 128 * block) for block in chosen)
    assert call.unique_bytes == rows * 2 * {"bf16": 256, "fp8": 128}.get(kv, 72)


def test_pools_hold_no_zeros_and_no_nan() -> None:
    for kv in KV_KINDS:
        pool = make_pool(kv, 4, 2, torch.Generator().manual_seed(0))
        values = pool.k.float()
        assert bool(values.isfinite().all()) and float((values == 0).float().mean()) < 0.2
        if pool.k_scale is not None:
            assert int(pool.k_scale.min()) >= 0x20 and int(pool.k_scale.max()) < 0x30


def test_planar_pool_is_one_page_of_four_regions() -> None:
    pool = make_pool("nvfp4-planar", 3, 2, torch.Generator().manual_seed(0))
    assert pool.k_scale is not None and pool.v_scale is not None
    assert pool.k.stride(0) == 2 * 18432
    starts = [t.data_ptr() - pool.k.data_ptr() for t in (pool.k_scale, pool.v, pool.v_scale)]
    assert starts == [16384, 18432, 18432 + 16384]


def test_separate_requests_are_the_same_tokens() -> None:
    call = calls_of(dataclasses.replace(SMALL, seqlen_q=3, overlap=True, context=1024, topk=5))[0]
    apart = separate_requests(call)
    tokens = torch.arange(6)
    assert apart.shape.batch == 6 and apart.seqused_k.tolist() == [1022, 1023, 1024] * 2
    torch.testing.assert_close(exact_output(apart, tokens), exact_output(call, tokens), rtol=1e-12, atol=1e-13)


# --- presets and options ---


def test_grid_is_the_goals_grid() -> None:
    jobs = jobs_of("grid", AXES, 0)
    assert len(jobs) == len(KV_KINDS) * 2 * 2 * len(BATCHES) and all(job.in_grid for job in jobs)
    keys = [(job.shape.heads, job.shape.kv) for job in jobs]
    assert len(dict.fromkeys(keys)) == sum(a != b for a, b in zip(keys, [None, *keys], strict=False))  # a pool each
    extra = jobs_of("grid", dataclasses.replace(AXES, extra=True), 0)
    assert {job.shape.heads for job in extra if not job.in_grid} == {"32/2", "8/1"}


@pytest.mark.parametrize("batch", [16, 64, 128, 256])
def test_ragged_lengths_span_the_range_with_eight_blocks_in_the_mean(batch: int) -> None:
    lengths = ragged_lengths(batch, LONGEST, 0)
    assert min(lengths) == 1 and max(lengths) == LONGEST and list(lengths) != sorted(lengths)
    assert sum(min(16, -(-n // 128)) for n in lengths) / batch >= 8


def test_even_baseline_has_as_many_blocks() -> None:
    for job in jobs_of("ragged", dataclasses.replace(AXES, kvs=("fp8",)), 0):
        assert job.baseline_shape is not None and job.baseline_shape.blocks is not None
        total = sum(min(16, -(-n // 128)) for n in job.shape.request_lengths)
        assert sum(job.baseline_shape.blocks) == total
        assert max(job.baseline_shape.blocks) - min(job.baseline_shape.blocks) <= 1


def test_options_read_the_command_line() -> None:
    o = parse(["--kv", "nvfp4,fp8", "--batch", "1,8", "--against", "vllm", "--preset", "spec", "--preset", "grid"])
    assert o.axes.kvs == ("nvfp4-planar", "nvfp4-tiled", "fp8") and o.axes.batches == (1, 8)
    assert o.peers == ("vllm",) and o.presets == ("spec", "grid") and o.replays >= 7
    assert parse(["--sweep", "A=;1,2;3,4"]).sweep == ({"A": None}, {"A": "1,2"}, {"A": "3,4"})
    assert parse(["--sweep", "A=1,2", "--sweep", "B=x"]).sweep == ({"A": "1", "B": "x"}, {"A": "2", "B": "x"})
    assert parse(["--sweep", "A=1"]).peers == () and parse([]).peers == ("flashinfer", "vllm")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--kv", "int8"], "--kv takes fp8"),
        (["--batch", "0"], "--batch takes positive numbers"),
        (["--heads", "5/2"], "QUERY a multiple of KV"),
        (["--against", "torch"], "--against takes flashinfer"),
        (["--sweep", "NAME"], "--sweep takes NAME=V1"),
        (["--replays", "3"], "at least 7"),
        (["--preset", "step", "--context", "8000"], "--context must be a multiple of 128 in preset step"),
        (["--preset", "step", "--seqlen-q", "200"], "--seqlen-q must be at most 128 in preset step"),
        (["--preset", "grid", "--preset", "step", "--context", "8K,16K"], "several for presets model and step alone"),
        (["--peer-version", "vllm"], "--peer-version takes PEER=VERSION"),
        (["--peer-version", "torch=2"], "with a peer of flashinfer, vllm, sdpa"),
    ],
)
def test_bad_options_say_what_is_expected(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(argv)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_a_given_version_stands_where_a_peer_says_none() -> None:
    result = run_with([Side("vllm", right, UNKNOWN), Side("flashinfer", right, "0.7")], "--seqlen-q", "1",
                      "--peer-version", "vllm=0.33.0", "--peer-version", "flashinfer=9")  # fmt: skip
    assert result["sides"]["vllm"] == "0.33.0" and result["sides"]["flashinfer"] == "0.7"
    assert result["options"]["versions"] == (("vllm", "0.33.0"), ("flashinfer", "9"))


def test_heads_are_query_over_kv() -> None:
    assert split_heads("64/4") == (64, 4)


# --- the gate ---


def test_wrong_refusing_and_failing_sides_are_reported_and_not_timed() -> None:
    def wrong(call: Call) -> None:
        right(call)
        call.out[-1, -1] *= 1.1

    def unwritten(call: Call) -> None:
        right(call)
        call.out[0, 0, 5] = torch.nan

    def refusing(call: Call) -> None:
        raise NotImplementedError("no route for\nthis shape")

    def declining(call: Call) -> None:
        raise Refused("only for left-handed caches")

    def failing(call: Call) -> None:
        raise RuntimeError("nvcc was not found")

    fakes = {f.__name__: f for f in (right, wrong, unwritten, refusing, declining, failing)}
    sides: list[Side | Absent] = [Side(name, run, "1") for name, run in fakes.items()]
    result = run_with([*sides, Absent("gone", "ImportError: no module")], "--seqlen-q", "1")
    (row,) = result["rows"]
    assert row["sides"]["ours"]["status"] == "ok" and row["sides"]["right"]["status"] == "ok"
    assert row["sides"]["right"]["time_us"]["median"] > 0
    status = {name: (s["status"], s.get("reason")) for name, s in row["sides"].items() if s["status"] != "ok"}
    assert status["wrong"][0] == "wrong" and "row error 0.1" in str(status["wrong"][1])
    assert status["unwritten"] == ("wrong", "2 elements are NaN or unwritten")  # one in each of the two calls
    assert status["refusing"] == ("refused", "NotImplementedError: no route for")
    assert status["declining"] == ("refused", "only for left-handed caches")
    assert status["failing"] == ("error", "RuntimeError: nvcc was not found")
    assert all("time_us" not in row["sides"][name] for name in status)
    assert result["absent"] == {"gone": "ImportError: no module"}


def test_a_dropped_key_is_past_the_gate() -> None:
    """The gate's threshold lies between rounding and the smallest mistake: one key of 2,048."""
    call = calls_of(dataclasses.replace(SMALL, context=2048), pages=40)[0]
    tokens = torch.arange(2)
    exact = exact_output(call, tokens)
    short = dataclasses.replace(call, seqused_k=call.seqused_k - 1)
    assert relative_error(exact_output(short, tokens), exact) > 0.01 > 2 * relative_error(exact.bfloat16(), exact)


def test_relative_error_never_passes_nan() -> None:
    exact = torch.ones(2, 3, 128, dtype=torch.float64)
    out = exact.clone()
    out[1, 1, 7] = torch.nan
    assert not relative_error(out, exact) <= 1e9
    assert relative_error(torch.zeros(1, 128), torch.zeros(1, 128).double()) == 0
    assert relative_error(torch.ones(1, 128), torch.zeros(1, 128).double()) == float("inf")


def test_error_of_one_rounding_is_one() -> None:
    exact = torch.randn(4, 8, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert error_against_rounding(exact.bfloat16(), exact) == {"rms": pytest.approx(1, abs=1e-3), "max": 1.0}


def test_a_sweep_sets_its_variable_for_the_side_and_restores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSA_OPS_SWEPT", "before")
    for value in ("1", None):
        with ours({"MSA_OPS_SWEPT": value}).in_environment():
            assert os.environ.get("MSA_OPS_SWEPT") == value
    assert os.environ["MSA_OPS_SWEPT"] == "before"


def test_a_sweep_times_each_value_and_names_the_best() -> None:
    result = run_with([], "--seqlen-q", "1", "--sweep", "MSA_OPS_SWEPT=,2")
    (row,) = result["rows"]
    assert list(row["sides"]) == ["ours[MSA_OPS_SWEPT=unset]", "ours[MSA_OPS_SWEPT=2]"]
    times = {name: side["time_us"]["median"] for name, side in row["sides"].items()}
    assert row["best"] == min(times, key=lambda name: times[name])


def test_a_peer_that_is_not_installed_is_absent_and_an_unknown_one_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.msa_ops", None)
    monkeypatch.setitem(sys.modules, "vllm.models.minimax_m3.common.ops.sparse_attn", None)
    found = load_peers(("flashinfer", "vllm"))
    assert [type(side) for side in found] == [Absent, Absent]
    with pytest.raises(ValueError, match="peers are flashinfer"):
        load_peers(("torch",))


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_the_torch_peer_is_right(kv: str) -> None:
    (side,) = load_peers(("sdpa",))
    assert isinstance(side, Side)
    call = calls_of(dataclasses.replace(SMALL, kv=kv, context=2048), pages=40)[0]
    side.run(call)
    assert relative_error(call.out, exact_output(call, torch.arange(2))) < 0.01


# --- timing ---


def test_timing_summary_is_of_quartiles() -> None:
    t = timing_of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (t.min, t.p25, t.median, t.p75, t.max, t.replays) == (1, 2, 3, 4, 5, 5)
    assert timing_of([2.0]).median == 2.0


def test_sides_are_timed_in_alternation() -> None:
    order: list[str] = []
    sides = {name: Prepared(lambda n=name: order.append(n), 4) for name in "abc"}
    result = Bench(torch.device("cpu")).time(sides, 3)
    assert {name: t.replays for name, t in result.items()} == {"a": 3, "b": 3, "c": 3}
    assert "".join(order) == "cab" + "abc" + "bca" + "cab"  # an untimed round first


def test_geometric_mean() -> None:
    assert geometric_mean([1, 4]) == pytest.approx(2)
    assert geometric_mean([]) != geometric_mean([])


# --- bars ---


def test_speed_bar_at_the_published_shape() -> None:
    nbytes = 128 * 4 * 524288
    goal = goals.speed_goal("fp8", nbytes, 66.0, goals.H200_READ_BYTES_PER_S)
    assert goal == {"must_us": pytest.approx(67.855, abs=1e-3), "aim_us": pytest.approx(66.855, abs=1e-3), "met": "aim"}
    assert goals.speed_goal("fp8", nbytes, 67.0, goals.H200_READ_BYTES_PER_S)["met"] == "must"
    assert goals.speed_goal("fp8", nbytes, 68.0, goals.H200_READ_BYTES_PER_S)["met"] == "miss"
    nvfp4 = goals.speed_goal("nvfp4-tiled", 128 * 4 * 294912, 43.0, goals.H200_READ_BYTES_PER_S)
    assert nvfp4["must_us"] == pytest.approx(42.97, abs=0.01)


def test_peer_bar_never_asks_for_more_than_the_ceiling() -> None:
    assert goals.peer_goal("fp8", {"flashinfer": 136.54}, 131.3, 120.4) == {
        "peer": "flashinfer", "ratio": pytest.approx(1.0399), "bar": 1.05, "met": False,
    }  # fmt: skip
    goal = goals.peer_goal("fp8", {"flashinfer": 130.0}, 125.0, 120.4)
    assert goal is not None and goal["bar"] == pytest.approx(0.95 * 130 / 120.4, abs=1e-4) and goal["met"]
    assert goals.peer_goal("bf16", {"flashinfer": 1.0}, 1.0, 1.0) is None
    assert goals.peer_goal("nvfp4-tiled", {"vllm": 1.0}, 1.0, 1.0) is None


def grid_row(kv: str, batch: int, ours_us: float, **peers: float) -> dict[str, Any]:
    sides = {
        name: {"status": "ok", "error": 0.002, "time_us": timing_of([t, t, t]).as_dict()}
        for name, t in {"ours": ours_us, **peers}.items()
    }
    nbytes = batch * 4 * 16 * 256 * {"bf16": 256, "fp8": 128}.get(kv, 72)
    return {
        "preset": "grid", "label": "", "kv": kv, "batch": batch, "heads": "64/4", "num_qo_heads": 64, "num_kv_heads": 4,
        "seqlen_q": 1, "context": 32768, "topk": 16, "overlap": False, "in_grid": True, "best": "ours", "sides": sides,
        "floor_us": nbytes / 4.46e6, "speed_goal": goals.speed_goal(kv, nbytes, ours_us, 4.46e12),
        "peer_goal": goals.peer_goal(kv, peers, ours_us, nbytes / 4.46e6), "work_goal": None,
    }  # fmt: skip


def test_summary_takes_geometric_means_and_counts_bars() -> None:
    rows = [
        grid_row("fp8", 1, 3.9, flashinfer=7.8, vllm=9.0),
        grid_row("fp8", 64, 40.0, flashinfer=39.0, vllm=80.0),
        grid_row("bf16", 64, 66.0, vllm=73.0),
        grid_row("nvfp4-tiled", 64, 22.0),
        grid_row("nvfp4-tiled", 8, 5.0),
    ]
    summary = goals.summarise(rows)
    assert summary["speed"]["fp8"] | {"floor_over_time_geomean": None} == {
        "shapes": 2, "timed": 2, "aim": 1, "must": 1, "floor_over_time_geomean": None,
    }  # fmt: skip
    fi = summary["peers"]["fp8 flashinfer"]
    assert fi["geomean"] == pytest.approx((2 * 39 / 40) ** 0.5, abs=1e-4)
    assert (fi["losing"], fi["points_met"], fi["points"], fi["met"]) == (1, 1, 2, "aim")
    assert "must" not in summary["peers"]["fp8 vllm"] and summary["peers"]["bf16 vllm"]["met"] == "miss"
    assert [(r["batch"], r["ratio"], r["met"]) for r in summary["nvfp4_over_bf16"]] == [(64, 3.0, True)]
    rows[0]["in_grid"] = False
    assert goals.summarise(rows)["peers"]["fp8 flashinfer"]["shapes"] == 1


def test_nvfp4_has_goals_of_its_own() -> None:
    """0.88 of the ceiling, 2.8 times our own bf16 from 256 items on, and both layouts within 5%."""
    rows = [grid_row("bf16", batch, time) for batch, time in ((32, 36.0), (64, 66.0), (128, 127.0))]
    for kv, factor in (("nvfp4-planar", 1.0), ("nvfp4-tiled", 1.06)):
        rows += [
            grid_row(kv, batch, time * factor, flashinfer=99.0) for batch, time in ((32, 13.0), (64, 23.0), (128, 46.0))
        ]
    summary = goals.summarise(rows)
    found = [(r["kv"], r["batch"], r["ratio"], r["met"]) for r in summary["nvfp4_over_bf16"]]
    assert found == [
        ("nvfp4-planar", 64, 2.8696, True), ("nvfp4-planar", 128, 2.7609, False), ("nvfp4-tiled", 64, 2.7071, False),
        ("nvfp4-tiled", 128, 2.6046, False),
    ]  # fmt: skip
    layouts = summary["nvfp4_layouts"]
    assert [(r["batch"], r["ratio"], r["met"]) for r in layouts] == [(b, 0.9434, False) for b in (32, 64, 128)]
    rows[-1] = grid_row("nvfp4-tiled", 128, 48.0)
    assert goals.summarise(rows)["nvfp4_layouts"][-1] == {
        "batch": 128, "heads": "64/4", "seqlen_q": 1, "ratio": 0.9583, "met": True,
    }  # fmt: skip
    assert rows[3]["speed_goal"]["must_us"] == pytest.approx(32 * 4 * 294912 / (0.88 * 4.46e12) * 1e6 + 4.5, abs=1e-3)
    assert rows[3]["peer_goal"] is None and "must" not in summary["peers"]["nvfp4-planar flashinfer"]
    lines = report.summary_lines({"summary": summary, "rows": rows, "accuracy": [], "host": {}})
    assert "NVFP4 over our bf16: 2.60 at least, bar held at 1 of 4" in lines
    assert "NVFP4 planar over tiled: 0.943 to 0.943, limit held at 0 of 3" in lines


def test_nvfp4_is_measured_in_both_layouts() -> None:
    """On the CPU: the inputs, the check and the rows are those of a GPU."""
    result = run_with([], "--kv", "nvfp4", "--seqlen-q", "1", "--preset", "grid", "--preset", "accuracy")
    assert [row["kv"] for row in result["rows"]] == ["nvfp4-planar", "nvfp4-tiled"]
    assert all(row["sides"]["ours"]["status"] == "ok" for row in result["rows"])
    assert [r["ratio"] for r in result["summary"]["nvfp4_layouts"]] and {r["kv"] for r in result["accuracy"]} == {
        "nvfp4-planar", "nvfp4-tiled",
    }  # fmt: skip


def test_goals_are_read_at_the_h200s_own_ceiling_only_there() -> None:
    assert goals.goal_ceiling("NVIDIA H200", 4.4e12) == 4.46e12
    assert goals.goal_ceiling("NVIDIA H100 80GB HBM3", 3.0e12) == 3.0e12


# --- the report ---


def test_markdown_marks_losing_rows_and_broken_bars() -> None:
    result = run_with([Side("right", right, "1")], "--seqlen-q", "1")
    result["rows"] = [grid_row("fp8", 64, 40.0, flashinfer=39.0), grid_row("fp8", 1, 4.0, flashinfer=8.0)]
    result["rows"][1]["sides"]["vllm"] = {"status": "refused", "reason": "NotImplementedError: no"}
    result["summary"] = goals.summarise(result["rows"])
    page = report.markdown(result)
    assert "**0.975**" in page and "✗ flashinfer 0.975 < 1.050" in page and "✗ must" in page
    assert "2.000" in page and "**2.000**" not in page
    assert "refused [1]" in page and "\n[1] NotImplementedError: no" in page
    assert "losing at 1" in page


def test_spent_budget_stops_cleanly_and_names_what_was_left(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / name) for name in ("r.json", "r.md")]
    argv = ["--device", "cpu", "--smoke", "--kv", "bf16", "--against", "none", "--time-budget", "0.000001"]
    assert main([*argv, "--json", files[0], "--markdown", files[1]]) == 3
    result = json.loads(pathlib.Path(files[0]).read_text())
    assert result["rows"] == [] and len(result["not_measured"]) == 8
    assert "bf16 4/2 seqlen_q 1 B 1" in result["not_measured"][0]
    assert "not measured: grid bf16 4/2" in capsys.readouterr().out
    assert "## not measured" in pathlib.Path(files[1]).read_text()


def test_a_running_benchmark_saves_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_CHECKPOINT_S", 0.0)
    options = parse(
        ["--device", "cpu", "--smoke", "--kv", "bf16", "--batch", "1,2", "--heads", "4/2", "--seqlen-q", "1"]
    )
    saved: list[tuple[int, bool]] = []
    running = Runner(options, lambda line: None, [])
    running.checkpoint = lambda so_far: saved.append((len(so_far["rows"]), so_far["finished"]))
    assert running.run()["finished"] is True
    assert saved == [(1, False), (2, False)]


def test_workers_run_every_side_on_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, tuple[int, ...] | None]] = []
    fake = Side("fake", lambda call: seen.append((call.shape.kv, call.shape.lengths)), "1")
    monkeypatch.setattr(warm, "load_peers", lambda names: [fake, Absent("gone", "")])
    shapes = [dataclasses.asdict(dataclasses.replace(SMALL, kv=kv, lengths=(5, 300))) for kv in KV_KINDS]
    spec = {"device": "cpu", "peers": ["fake"], "sweep": [{"MSA_OPS_SWEPT": None}], "shapes": shapes, "steps": []}
    warm.work(json.loads(json.dumps(spec)))
    assert seen == [(kv, (5, 300)) for kv in KV_KINDS]


def test_workers_run_every_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def seeing(part: str) -> Any:
        return lambda call: seen.append((part, call.shape.kv))

    fake = Side("fake", lambda call: None, "1")
    side = StepSide(fake, {part: seeing(part) for part in PARTS})
    monkeypatch.setattr(warm, "load_peers", lambda names: [fake])
    monkeypatch.setattr(warm, "load_step_peers", lambda sides: [side, Absent("gone", "")])
    spec = {"device": "cpu", "peers": ["fake"], "sweep": [], "shapes": [], "steps": [dataclasses.asdict(SMALL)]}
    warm.work(json.loads(json.dumps(spec)))
    assert seen == [(part, "bf16") for part in PARTS]


def test_smoke_run_measures_every_preset(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    argv = ["--device", "cpu", "--smoke", "--kv", "fp8,nvfp4-planar", "--batch", "2", "--heads", "4/2"]
    argv += ["--seqlen-q", "2"]
    for preset in ("grid", "ragged", "spec", "accuracy"):
        argv += ["--preset", preset]
    assert main([*argv, "--against", "sdpa", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["schema_version"] == 1 and result["torch"] == torch.__version__ and result["card"].startswith("CPU")
    assert result["not_measured"] == [] and result["options"]["seed"] == 0
    assert [(r["preset"], r["label"]) for r in result["rows"] if r["kv"] == "fp8"] == [
        ("grid", ""), ("ragged", "ragged"), ("ragged", "one long"), ("spec", ""),
    ]  # fmt: skip
    for row in result["rows"]:
        side = row["sides"]["ours"]
        assert side["status"] == "ok" and side["error"] < 0.005
        assert {"median", "min", "max", "p25", "p75", "replays"} == set(side["time_us"])
    assert result["rows"][-1]["work_goal"]["baseline"] == "separate"
    assert all(r["rms"] <= 1.1 for r in result["accuracy"] if r["side"] == "ours")
    assert "grid" in capsys.readouterr().out


def test_without_a_gpu_the_default_device_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--against", "none"]) == 1
    assert "pass --device cpu --smoke" in capsys.readouterr().err


def test_host_costs_are_measured_in_calls_and_fresh_processes() -> None:
    call = calls_of(SMALL)[0]
    cost = host.eager_cost(ours(), call, 3, 2)
    assert cost["host_us"]["median"] > 0 and cost["allocations_per_call"] == 0
    assert host.import_cost(1)["median_ms"] > 0
    first = host.first_call_cost(torch.device("cpu"), "bf16")
    assert first["cold_ms"] > 0 and first["warm_ms"] > 0


def test_importing_the_package_does_not_load_the_benchmark() -> None:
    code = "import sys, msa_ops; sys.exit(any(m.startswith('msa_ops.bench') for m in sys.modules))"
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == 0


# --- on a GPU ---


@pytest.mark.gpu
def test_graphs_replay_all_calls_with_cold_l2() -> None:
    bench = Bench(torch.device("cuda", 0), 1 << 24)
    counters = torch.zeros(5, dtype=torch.int32, device="cuda")
    prepared = bench.prepare(lambda i: counters[i].add_(1), range(5))
    assert counters.tolist() == [1] * 5  # eagerly, not in the capture
    result = bench.time({"a": prepared}, 7)["a"]
    assert counters.tolist() == [9] * 5 and result.replays == 7 and result.min > 0
    rate, method = bench.read_ceiling(nbytes=1 << 28)
    assert rate > 1e11 and method
    assert 0 < bench.empty_node() < 100


@pytest.mark.gpu
def test_an_error_in_a_capture_leaves_the_device_usable() -> None:
    bench = Bench(torch.device("cuda", 0), 1 << 24)
    seen: list[int] = []

    def run(i: int) -> None:
        seen.append(i)
        if len(seen) > 2:
            raise NotImplementedError("not in a capture")

    with pytest.raises(NotImplementedError, match="not in a capture"):
        bench.prepare(run, range(2))
    assert float(torch.ones(3, device="cuda").sum()) == 3


@pytest.mark.gpu
def test_smoke_run_on_the_gpu() -> None:
    options = parse(["--smoke", "--kv", "bf16,fp8", "--batch", "2", "--heads", "16/1"])
    assert isinstance(options, Options)
    result = Runner(options, lambda line: None, [Side("right", right, "1")]).run()
    assert {s["status"] for row in result["rows"] for s in row["sides"].values()} == {"ok"}
    assert all(row["speed_goal"] for row in result["rows"])
