"""The attention of a step that chooses its blocks itself: ids and results to the bit as those of a selection before it, with
every kernel that does so."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compare import assert_same_bits
from msa_ops import msa_decode_step, msa_sparse_decode_attention, msa_topk_select
from msa_ops.contract import FP8, KVFormat
from msa_ops.engines.cuda import plan, topk
from msa_ops.engines.cuda.plan import DeviceFacts, Shape

HEADS, POOL = 4, 300
DTYPES = {KVFormat.BF16: torch.bfloat16, KVFormat.FP16: torch.float16, KVFormat.FP8: FP8, KVFormat.NVFP4: torch.uint8}
BATCHES = (1, 2, 4, 8, 20, 40, 80, 130)
"""Requests of four KV heads each: items of every kernel."""


def make(kv: KVFormat, batch: int, pages: int, *, group: int = 4, seqlen_q: int = 1, seed: int = 0) -> dict[str, Any]:
    """Arguments of a step on a small pool of pages that requests share; lengths are ragged, the first and the last the
    longest and none."""
    g = torch.Generator("cuda").manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", generator=g)

    lengths = torch.randint(1, pages * 128 + 1, (batch,), device="cuda", generator=g).int()
    lengths[-1], lengths[0] = 0, pages * 128
    tokens, dtype = batch * seqlen_q, torch.float16 if kv is KVFormat.FP16 else torch.bfloat16
    index = FP8 if kv in (KVFormat.FP8, KVFormat.NVFP4) else dtype
    found: dict[str, Any] = {
        "q": randn(tokens, HEADS * group, 128).to(dtype),
        "index_q": randn(tokens, HEADS, 128).to(index),
        "index_k": randn(POOL, 1, 128, 128).to(index),
        "page_table": torch.randint(0, POOL, (batch, pages), device="cuda", generator=g).int(),
        "seqused_k": lengths,
        "seqlen_q": seqlen_q,
    }
    if kv is not KVFormat.NVFP4:
        return found | {name: randn(POOL, HEADS, 128, 128).to(DTYPES[kv]) for name in ("k", "v")}
    for name in ("k", "v"):
        codes = torch.randint(0, 256, (POOL, HEADS, 128, 64), device="cuda", generator=g)
        scales = torch.randint(40, 64, (POOL * HEADS * 128 * 8,), device="cuda", generator=g)
        found |= {name: codes.to(torch.uint8), f"{name}_scale": scales.to(torch.uint8), f"{name}_global_scale": 0.5}
    return found


def assert_chosen(
    a: dict[str, Any], chooses: bool, *, tokens_innermost: bool = False, ids_by_head: bool = False, **keywords: Any
) -> Tensor:
    """Run a step; its results are those of the separate calls on its scores, and the attention chose, or did not. Returns the
    ids."""
    tokens, pages = a["q"].shape[0], a["page_table"].shape[1]
    topk_ = keywords.setdefault("topk", 16)
    score = torch.full((HEADS, pages, tokens), math.nan, device="cuda")
    if not tokens_innermost:
        score = torch.full((HEADS, tokens, pages), math.nan, device="cuda").transpose(1, 2)
    buffer = torch.full((HEADS, tokens, topk_ + 5) if ids_by_head else (tokens, HEADS, topk_), -7, device="cuda").int()
    ids = buffer[..., 3 : topk_ + 3].transpose(0, 1) if ids_by_head else buffer
    before = topk.calls.total()
    result = msa_decode_step(**a, **keywords, return_softmax_lse=True, q2k_out=ids, score_out=score)
    assert (topk.calls.total() == before) == chooses
    length, seqlen_q = a["seqused_k"].long(), a["seqlen_q"]
    first = length - seqlen_q if keywords.get("q_offset") is None else keywords["q_offset"]
    seen = (first[:, None] + 1 + torch.arange(seqlen_q, device="cuda")).clamp(min=0).minimum(length[:, None])
    extent = ((seen.flatten() + 127) // 128).int()
    want = msa_topk_select(score, topk_, extent, None, keywords.get("sink_blocks", 0), keywords.get("local_blocks", 1))
    assert torch.equal(ids, want)
    if ids_by_head:
        assert bool((buffer[..., :3] == -7).all()) and bool((buffer[..., topk_ + 3 :] == -7).all())
    skipped = ("index_q", "index_k")
    attention = {name: value for name, value in a.items() if name not in skipped}
    attention |= {name: keywords[name] for name in ("q_offset", "force_fused") if name in keywords}
    separate = msa_sparse_decode_attention(
        **attention, q2k_indices=want.transpose(0, 1), return_softmax_lse=True
    )  # fmt: skip
    assert_same_bits(result, separate)
    return ids


def on_hopper() -> bool:
    """Whether this is where attention chooses at all."""
    return torch.cuda.get_device_capability() == (9, 0)


def expected_to_choose(
    kv: KVFormat, batch: int, pages: int, topk_: int = 16, group: int = 4, seqlen_q: int = 1
) -> bool:
    """By the plan with this device's own facts and room."""
    from msa_ops.engines.cuda import launch

    facts = launch.device_facts(torch.cuda.current_device())
    shape = Shape(kv, batch * seqlen_q, HEADS, group, topk_)
    taken = plan.plan_for(shape, facts, lambda v: launch.cluster_room(v, torch.cuda.current_device()))
    return plan.choosing_plan(taken, shape, facts, pages) is not None


def test_every_kernel_that_chooses_has_a_call_here() -> None:
    facts = DeviceFacts.of_capability((9, 0))
    found = set()
    for kv in KVFormat:
        for batch in BATCHES:
            for pages in plan.CHOICES:
                shape = Shape(kv, batch, HEADS, 4, 16)
                taken = plan.plan_for(shape, facts, functools.partial(plan.typical_room, facts))
                chosen = plan.choosing_plan(taken, shape, facts, pages)
                found |= set() if chosen is None else {chosen.variant}
    assert found == {v for v in plan.variants((9, 0)) if v.selects}


@pytest.mark.gpu
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kv", KVFormat, ids=lambda kv: kv.value)
def test_ids_and_results_are_those_of_a_selection(kv: KVFormat, batch: int) -> None:
    for pages in (3, 64, 100, 128, 129, 255, 256, 257):
        assert_chosen(make(kv, batch, pages, seed=pages), expected_to_choose(kv, batch, pages))


@pytest.mark.gpu
@pytest.mark.parametrize("pages", [90, 220])
@pytest.mark.parametrize("kv", KVFormat, ids=lambda kv: kv.value)
def test_the_ways_of_a_call(kv: KVFormat, pages: int) -> None:
    """Forced blocks, any top-k, tokens that see different extents, heads in several tiles, routes, layouts of the scores."""
    for topk_ in (1, 2, 15, 31, 32, 33):
        a = make(kv, 3, pages, seed=topk_)
        assert_chosen(a, expected_to_choose(kv, 3, pages, topk_), topk=topk_)
    a = make(kv, 5, pages)
    chooses = expected_to_choose(kv, 5, pages)
    for sinks, local in ((0, 0), (3, 0), (2, 2), (9, 9), (40, 40), (2**31 - 1, 2**31 - 1)):
        assert_chosen(a, chooses, sink_blocks=sinks, local_blocks=local)
    assert_chosen(a, chooses, tokens_innermost=True)
    assert_chosen(a, chooses, ids_by_head=True)
    tokens = make(kv, 5, pages, seqlen_q=4)
    assert_chosen(tokens, expected_to_choose(kv, 5, pages, seqlen_q=4))
    offset = torch.tensor([5, -3, 900, 128 * pages, 127], dtype=torch.int32, device="cuda")
    assert_chosen(tokens, expected_to_choose(kv, 5, pages, seqlen_q=4), q_offset=offset)
    tall = make(kv, 5, pages, group=40)
    assert_chosen(tall, expected_to_choose(kv, 5, pages, group=40))
    for fused in (True, False):
        assert_chosen(a, on_hopper(), force_fused=fused)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["none", "cluster", "scratch"])
@pytest.mark.parametrize("kv", KVFormat, ids=lambda kv: kv.value)
def test_routes(kv: KVFormat, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if route == "cluster" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs thread-block clusters")
    monkeypatch.setenv("MSA_OPS_COMBINE", route)
    for pages in (100, 200):
        assert_chosen(make(kv, 6, pages), on_hopper())


@pytest.mark.gpu
@pytest.mark.parametrize("pages", [64, 128, 256])
def test_equal_scores_and_scores_that_are_none(pages: int) -> None:
    """More equal scores than a list has room for; blocks whose scores are NaN or infinite."""
    a = make(KVFormat.FP8, 6, pages)
    a["seqused_k"].fill_(pages * 128)
    for levels in (1, 2, 5):  # of scores
        a["index_q"].copy_(torch.ones_like(a["index_q"], dtype=torch.float32))
        steps = torch.randint(
            0, levels, (POOL, 1, 1, 1), device="cuda", generator=torch.Generator("cuda").manual_seed(levels)
        )
        a["index_k"].copy_(steps.float().expand(a["index_k"].shape))
        ids = assert_chosen(a, on_hopper(), sink_blocks=1)
        if levels == 1:
            assert ids[0, 0].tolist() == [*range(15), pages - 1]
    a = make(KVFormat.BF16, 6, pages)
    a["seqused_k"].fill_(pages * 128)
    for value in (math.nan, -math.inf, math.inf):
        a["index_k"][::2] = value
        a["index_q"].abs_()
        assert_chosen(a, on_hopper())
    a["index_k"].fill_(math.nan)
    ids = assert_chosen(a, on_hopper(), sink_blocks=2)
    assert ids[0, 0].tolist() == [0, 1, pages - 1, *[-1] * 13]


@pytest.mark.gpu
@pytest.mark.parametrize("kv", KVFormat, ids=lambda kv: kv.value)
def test_many_items_a_block_in_turn(kv: KVFormat) -> None:
    """A block chooses for its next item in a stage of the ring that was in use."""
    for seed in range(3):
        assert_chosen(make(kv, 300, 200, seed=seed), on_hopper(), force_fused=True)


@pytest.mark.gpu
def test_a_step_is_two_launches_where_the_attention_chooses() -> None:
    for pages, wanted in ((128, 2), (256, 2), (257, 3)):
        a = make(KVFormat.FP8, 4, pages)
        msa_decode_step(**a)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            msa_decode_step(**a)
            torch.cuda.synchronize()
        on_device = [e for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
        kernels = [e.key for e in on_device for _ in range(e.count) if e.key != "Activity Buffer Request"]
        if not kernels:
            pytest.skip("the profiler sees no kernels here")
        if on_hopper():
            assert len(kernels) == wanted, kernels
        else:
            assert len(kernels) in (3, 4), kernels  # with the scratch route's merging one
