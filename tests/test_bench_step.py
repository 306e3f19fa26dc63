"""Preset step: its inputs, what counts as right, its sides, and its rows."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch

import fake_peers
from msa_ops.bench import runner
from msa_ops.bench.inputs import KV_KINDS, Shape, make_pool
from msa_ops.bench.options import parse
from msa_ops.bench.peers import Absent, Refused, Side, load_peers
from msa_ops.bench.presets import STEP_BATCHES, STEP_CONTEXTS, Axes, jobs_of
from msa_ops.bench.runner import Runner
from msa_ops.bench.step_inputs import (
    StepCall,
    StepPool,
    exact_scores,
    index_bytes,
    make_index,
    make_step_calls,
    own_blocks,
    part_bytes,
    score_fault,
    selection_fault,
)
from msa_ops.bench.step_sides import PARTS, StepSide, load_step_peers, our_step

SMALL = Shape("bf16", 2, 4, 2, context=1024, topk=3)


def step_calls(shape: Shape = SMALL, count: int = 1, device: str = "cpu", pages: int = 40) -> list[StepCall]:
    generator = torch.Generator(device).manual_seed(5)
    pool = make_pool(shape.kv, pages, shape.num_kv_heads, generator)
    return make_step_calls(shape, StepPool(pool, make_index(shape.kv, pages, generator)), count, generator)


def run_step(sides: list[Side | Absent] | None, *argv: str) -> dict[str, Any]:
    options = parse(["--device", "cpu", "--smoke", "--preset", "step", "--heads", "4/2", "--topk", "3", *argv])
    return Runner(options, lambda line: None, sides).run()


# --- inputs ---


def test_the_preset_is_the_three_contexts_and_batches_in_every_format() -> None:
    jobs = jobs_of("step", Axes(KV_KINDS, None, None, None, 32768), 0)
    assert STEP_CONTEXTS == (8192, 131072, 1048576) and STEP_BATCHES == (1, 16, 64)
    want = [(kv, b, c) for kv in KV_KINDS for b in STEP_BATCHES for c in STEP_CONTEXTS]
    assert [(job.shape.kv, job.shape.batch, job.shape.context) for job in jobs] == want
    assert {job.shape.heads for job in jobs} == {"64/4"} and not any(job.in_grid for job in jobs)


@pytest.mark.parametrize("kv", KV_KINDS)
def test_calls_are_distinct_and_of_the_formats_dtypes(kv: str) -> None:
    first, second = step_calls(dataclasses.replace(SMALL, kv=kv), 2)
    dtype = torch.bfloat16 if kv == "bf16" else torch.float8_e4m3fn
    assert first.index_q.dtype == first.index_k.dtype == dtype and first.index_k.shape == (40, 1, 128, 128)
    assert first.index_q.shape == (2, 2, 128) and first.cu_seqlens_q.tolist() == [0, 1, 2]
    assert not torch.equal(first.scores, second.scores)
    assert not torch.equal(first.index_q.float(), second.index_q.float())
    assert not torch.equal(first.call.page_table, second.call.page_table)


def test_results_lie_as_a_side_asks_for() -> None:
    (call,) = step_calls()
    mine = call.with_buffers(scores_by_token=True, ids_by_head=False)
    theirs = call.with_buffers(scores_by_token=False, ids_by_head=True)
    for c in (mine, theirs):
        assert c.score_out.shape == c.scores.shape == (2, 8, 2) and c.ids_out.shape == (2, 2, 3)
        assert torch.equal(c.scores, call.scores)
    assert mine.score_out.stride(1) == mine.scores.stride(1) == 1 and mine.ids_out.transpose(0, 1).is_contiguous()
    assert theirs.score_out.is_contiguous() and theirs.ids_out.is_contiguous()
    assert mine.call.out.data_ptr() != theirs.call.out.data_ptr()


def test_bytes_of_the_parts() -> None:
    shape = dataclasses.replace(SMALL, kv="fp8", seqlen_q=2)
    (call,) = step_calls(shape)
    index = 2 * 1024 * 128
    assert index_bytes(shape) == index and index_bytes(SMALL) == 2 * index
    assert part_bytes("score", call) == part_bytes("score+select", call) == index
    assert part_bytes("select", call) == 4 * 2 * 4 * (8 + 3)
    assert part_bytes("attend", call) == call.call.unique_bytes
    assert part_bytes("step", call) == index + call.call.unique_bytes


# --- what counts as right ---


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_exact_scores_are_those_of_the_definition(kv: str) -> None:
    (call,) = step_calls(dataclasses.replace(SMALL, kv=kv, seqlen_q=3))
    tokens = torch.tensor([0, 4, 5])
    scores, tolerance = exact_scores(call, tokens)
    assert scores.shape == (2, 3, 8) and tolerance.shape == (2, 3, 1) and float(tolerance.max()) < 0.3
    for i, token in enumerate(tokens.tolist()):
        request, last = token // 3, 1024 - 3 + token % 3
        keys = call.index_k[call.call.page_table[request].long(), 0].float().double().view(-1, 128)[: last + 1]
        for head in range(2):
            dots = keys @ call.index_q[token, head].float().double()
            want = torch.stack([part.max() for part in dots.split(128)])
            torch.testing.assert_close(scores[head, i], want)
    assert own_blocks(call, tokens).tolist() == [7, 7, 7]


def test_blocks_without_a_visible_key_have_no_score() -> None:
    (call,) = step_calls(dataclasses.replace(SMALL, lengths=(300, 1024)))
    scores, _ = exact_scores(call, torch.tensor([0, 1]))
    assert bool((scores[:, 0, 3:] == -torch.inf).all()) and bool(scores[:, 1].isfinite().all())


def test_a_wrong_score_is_a_fault_and_a_marked_own_block_is_none() -> None:
    (call,) = step_calls()
    tokens = torch.tensor([0, 1])
    exact, tolerance = exact_scores(call, tokens)
    own = own_blocks(call, tokens)
    good = exact.float()
    good[..., 7] = 1e29
    assert score_fault(good, exact, tolerance, own) == ""
    for value in (float(exact[1, 0, 2]) + 0.3, torch.nan, -torch.inf):
        bad = good.clone()
        bad[1, 0, 2] = value
        assert "a score is off by" in score_fault(bad, exact, tolerance, own)


@pytest.mark.parametrize(
    ("ids", "fault"),
    [
        ([1, 3, 5], ""),
        ([5, 1, 3], ""),
        ([1, 2, 5], ""),  # block 2 is within the tolerance of block 3
        ([0, 3, 5], "a better block is left out"),
        ([1, 2, 3], "a token's own block is not chosen"),
        ([1, 1, 5], "a block is chosen twice"),
        ([1, 4, 5], "a block without a visible key is chosen"),
        ([1, 5, -1], "there are fewer ids than there could be"),
        ([1, 3, 6], "an id is neither a block nor -1"),
        ([1, 3, -7], "an id is neither a block nor -1"),
    ],
)
def test_what_a_selection_may_be(ids: list[int], fault: str) -> None:
    scores = torch.tensor([0.0, 9.0, 4.95, 5.0, -torch.inf, -3.0]).double()
    found = selection_fault(torch.tensor(ids).view(1, 1, -1), scores.view(1, 1, -1), torch.tensor([5]), 0.1)
    assert found == fault


def test_fewer_blocks_than_topk_are_all_chosen() -> None:
    scores = torch.tensor([1.0, 2.0, -torch.inf]).view(1, 1, -1)
    own = torch.tensor([1])
    assert selection_fault(torch.tensor([[[0, 1, -1, -1]]]), scores, own) == ""
    assert selection_fault(torch.tensor([[[1, -1, -1, -1]]]), scores, own) != ""


# --- sides ---


@pytest.mark.parametrize("kv", KV_KINDS)
def test_our_own_parts_are_right_in_every_format(kv: str) -> None:
    result = run_step([], "--kv", kv, "--batch", "2", "--context", "1K", "--seqlen-q", "1,3")
    assert [row["label"] for row in result["rows"]] == [*PARTS, *PARTS]
    for row in result["rows"]:
        assert {side["status"] for side in row["sides"].values()} == {"ok"}, row
        assert list(row["sides"]) == (["ours", "ours in three calls"] if row["label"] == "step" else ["ours"])
        assert row["best"] == "ours" and row["context"] == 1024 and row["page_uses"] == 1.0
        assert row["index_dtype"] == ("bfloat16" if kv == "bf16" else "float8_e4m3fn")
    errors = {row["label"]: row["sides"]["ours"]["error"] for row in result["rows"]}
    assert errors["score"] == 0 and 0 < errors["step"] < 0.005
    assert result["summary"]["step"].keys() == {f"{kv} ours in three calls"}


def test_peers_have_the_parts_for_which_they_have_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peers.with_indexers(monkeypatch)
    result = run_step(None, "--kv", "fp8", "--batch", "3", "--context", "2K", "--against", "flashinfer,vllm")
    status = {row["label"]: {name: side["status"] for name, side in row["sides"].items()} for row in result["rows"]}
    assert all(set(found.values()) == {"ok"} for part, found in status.items() if part != "select")
    assert status["select"] == {"ours": "ok", "flashinfer": "ok", "vllm": "refused"}
    assert result["rows"][1]["sides"]["vllm"]["reason"] == "its decode indexer scores and selects in one call"
    assert result["summary"]["step"].keys() == {f"fp8 {n}" for n in ("ours in three calls", "flashinfer", "vllm")}


def test_a_side_that_chooses_badly_is_wrong_though_its_attention_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peers.with_indexers(monkeypatch, worst=True)
    result = run_step(None, "--kv", "bf16", "--batch", "2", "--context", "2K", "--against", "vllm")
    found = {row["label"]: row["sides"]["vllm"] for row in result["rows"]}
    assert found["score"]["status"] == found["attend"]["status"] == "ok"
    for part in ("score+select", "step"):
        assert found[part] == {"status": "wrong", "reason": "a token's own block is not chosen"}


def test_a_step_that_attends_to_other_blocks_than_it_chose_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    import msa_ops

    def step(*args: Any, out: torch.Tensor, **kwargs: Any) -> None:
        msa_decode_step(*args, out=out, **kwargs)
        out[-1] *= 1.1

    msa_decode_step = msa_ops.msa_decode_step
    monkeypatch.setattr(msa_ops, "msa_decode_step", step)
    result = run_step([], "--kv", "bf16", "--batch", "2", "--context", "1K")
    sides = result["rows"][-1]["sides"]
    assert sides["ours"]["status"] == "wrong" and "row error 0.1" in sides["ours"]["reason"]
    assert sides["ours in three calls"]["status"] == "ok" and result["rows"][-1]["best"] is None


def test_a_peer_without_its_indexer_is_named_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peers.with_indexers(monkeypatch)
    monkeypatch.setitem(sys.modules, fake_peers.VLLM_INDEX, None)
    result = run_step(None, "--kv", "bf16", "--batch", "2", "--context", "1K", "--against", "flashinfer,vllm,sdpa")
    assert "vllm with its indexer" in result["absent"]
    (attend,) = [row for row in result["rows"] if row["label"] == "attend"]
    assert list(attend["sides"]) == ["ours", "flashinfer", "sdpa"]
    (whole,) = [row for row in result["rows"] if row["label"] == "step"]
    assert whole["sides"]["sdpa"] == {"status": "refused", "reason": "it has no indexer"}


def test_a_missing_part_refuses_in_its_words() -> None:
    side = StepSide(Side("some", lambda call: None, "1"), {}, {"select": "no such call"})
    with pytest.raises(Refused, match="no such call"):
        side.run("select")(step_calls()[0])


def test_a_sweep_measures_the_step_under_each_value() -> None:
    result = run_step([], "--kv", "bf16", "--batch", "1", "--context", "1K", "--sweep", "MSA_OPS_SWEPT=,2")
    labels = ["ours[MSA_OPS_SWEPT=unset]", "ours[MSA_OPS_SWEPT=2]"]
    assert list(result["rows"][0]["sides"]) == labels
    assert list(result["rows"][-1]["sides"]) == [f"{name}{end}" for name in labels for end in ("", " in three calls")]


def test_peers_are_found_by_their_attention() -> None:
    (sdpa,) = load_peers(("sdpa",))
    assert isinstance(sdpa, Side)
    (side,) = load_step_peers([sdpa])
    assert isinstance(side, StepSide) and list(side.parts) == ["attend"]
    assert [s.name for s in our_step({"MSA_OPS_SWEPT": "1"})] == [
        "ours[MSA_OPS_SWEPT=1]", "ours[MSA_OPS_SWEPT=1] in three calls",
    ]  # fmt: skip


# --- memory ---


def test_requests_share_pages_where_memory_is_short_and_the_record_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    per_page = SMALL.page_bytes + 128 * 128 * 2  # with the index keys
    monkeypatch.setattr(runner.environment, "free_bytes", lambda _: 20 * per_page)
    result = run_step([], "--kv", "bf16", "--batch", "3", "--context", "1K")
    assert {row["page_uses"] for row in result["rows"]} == {2.0}  # 24 pages wanted, room for 12
    assert {side["status"] for row in result["rows"] for side in row["sides"].values()} == {"ok"}


def test_a_mixed_run_fills_one_pool_at_a_time() -> None:
    options = parse(["--device", "cpu", "--smoke", "--kv", "bf16", "--batch", "2", "--heads", "4/2", "--seqlen-q", "1",
                     "--preset", "step", "--preset", "grid"])  # fmt: skip
    running = Runner(options, lambda line: None, [])
    presets = [row["preset"] for row in running.run()["rows"]]
    assert presets == ["step"] * 10 + ["grid"] and running.steps._pool is None and running._pool is not None


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_every_part_is_right_on_the_gpu(kv: str) -> None:
    options = parse(["--smoke", "--preset", "step", "--kv", kv, "--batch", "2", "--heads", "16/1", "--context", "4K",
                     "--workers", "0"])  # fmt: skip
    rows = Runner(options, lambda line: None, []).run()["rows"]
    reasons = {(row["label"], name, side.get("reason")) for row in rows for name, side in row["sides"].items()}
    assert {reason for _, _, reason in reasons} == {None}, reasons
