"""The whole decode step against itself done by hand: float64 scores, a sorted list, the oracle's attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import msa_ops
from compare import assert_lse_close, assert_rows_close, assert_same_bits
from msa_ops import msa_decode_step, msa_proxy_score, msa_sparse_decode_attention, msa_topk_select, step
from msa_ops.contract import FP8
from msa_ops.reference import decode_reference
from test_pitfalls_gpu import captured

NAN, INF = math.nan, math.inf
MIXED = (9000, 130, 8500, 256, 9000, 300, 8192, 1)
OUTPUTS = ("out", "lse_out", "q2k_out", "score_out")


def make(
    lengths: tuple[int, ...], *, heads: int = 2, group: int = 4, seqlen_q: int = 1, topk: int = 4, device: str = "cpu",
    q_dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype = torch.bfloat16, index_dtype: torch.dtype = torch.bfloat16,
    capacity: int | None = None, seed: int = 0, **keywords: Any,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of a step. Pages of nobody and slots past a length hold NaN; `capacity` is the page table's width."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-max(n, 0) // 128) for n in lengths]
    width = max(blocks) if capacity is None else capacity
    pages = torch.randperm(len(lengths) * width + 2, generator=generator).int()
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    caches = {
        name: torch.full((len(pages), h, 128, 128), NAN) for name, h in (("k", heads), ("v", heads), ("index_k", 1))
    }
    for b, n in enumerate(lengths):
        owned = blocks[b] if capacity is None else width
        table[b, :owned] = pages[b * width : b * width + owned]
        room = owned * 128 if capacity is not None else max(n, 0)
        for cache in caches.values():
            for block in range(-(-room // 128)):
                some = min(room - block * 128, 128)
                cache[table[b, block], :, :some] = torch.randn(cache.shape[1], some, 128, generator=generator)
    tokens = len(lengths) * seqlen_q
    arguments = {
        "q": torch.randn(tokens, heads * group, 128, generator=generator).to(q_dtype),
        "k": caches["k"].to(kv_dtype),
        "v": caches["v"].to(kv_dtype),
        "index_q": torch.randn(tokens, heads, 128, generator=generator).to(index_dtype),
        "index_k": caches["index_k"].to(index_dtype),
        "page_table": table,
        "seqused_k": torch.tensor(lengths, dtype=torch.int32),
        "seqlen_q": seqlen_q,
        "topk": topk,
        **keywords,
    }
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in arguments.items()}


def expected_ids(a: dict[str, Any]) -> list[list[list[int]]]:
    """``[token][head][topk]`` by the rule, one key at a time in float64."""
    host = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in a.items()}
    seqlen_q, topk = host["seqlen_q"], host["topk"]
    local, sinks, offset = host.get("local_blocks", 1), host.get("sink_blocks", 0), host.get("q_offset")
    rows = []
    for t in range(host["q"].shape[0]):
        b, i = divmod(t, seqlen_q)
        length = max(int(host["seqused_k"][b]), 0)
        first = length - seqlen_q if offset is None else int(offset[b]) if isinstance(offset, Tensor) else offset
        seen = max(min(length, first + i + 1), 0) if host.get("causal", True) else length
        blocks = -(-seen // 128)
        best: list[list[float]] = [[] for _ in range(host["index_q"].shape[1])]
        for block in range(blocks):
            keys = host["index_k"][host["page_table"][b, block], 0].double()[: seen - block * 128]
            for h, scores in enumerate(best):
                scores.append(float((keys @ host["index_q"][t, h].double()).max()))
        row = []
        for scores in best:
            forced = [*range(min(sinks, blocks)), *reversed(range(max(blocks - local, 0), blocks))]
            others = [x for x in range(blocks) if not math.isnan(scores[x]) and scores[x] != -INF]
            others.sort(key=lambda x: (-scores[x], x))
            chosen = sorted(list(dict.fromkeys([*forced, *others]))[:topk])
            row.append(chosen + [-1] * (topk - len(chosen)))
        rows.append(row)
    return rows


def outputs_of(a: dict[str, Any]) -> dict[str, Tensor]:
    """Poisoned destinations of every result; scores with blocks innermost."""
    q, device = a["q"], a["q"].device
    tokens, heads, width = q.shape[0], a["index_q"].shape[1], a["page_table"].shape[1]
    return {
        "out": torch.full(
            q.shape, NAN, dtype=torch.float16 if q.dtype == torch.float16 else torch.bfloat16, device=device
        ),
        "lse_out": torch.full(q.shape[:2], NAN, device=device),
        "q2k_out": torch.full((tokens, heads, a["topk"]), -7, dtype=torch.int32, device=device),
        "score_out": torch.full((heads, tokens, width), NAN, device=device).transpose(1, 2),
    }


def attention_of(a: dict[str, Any], ids: Tensor) -> dict[str, Any]:
    """The attention call's arguments."""
    own = ("index_q", "index_k", "topk", "local_blocks", "sink_blocks", *OUTPUTS)
    return {**{n: x for n, x in a.items() if n not in own}, "q2k_indices": ids.transpose(0, 1)}


def assert_step(a: dict[str, Any], **destinations: Any) -> dict[str, Tensor]:
    """Run the step with every destination given and hold all of it against the oracles; returns what it wrote."""
    results = {**outputs_of(a), **destinations}
    got = msa_decode_step(**a, **results, return_softmax_lse=True)
    assert got[0] is results["out"] and got[1] is results["lse_out"]
    return assert_results(a, results)


def assert_results(a: dict[str, Any], results: dict[str, Tensor]) -> dict[str, Tensor]:
    want = expected_ids(a)
    assert results["q2k_out"].tolist() == want
    out, lse = decode_reference(**attention_of(a, torch.tensor(want, dtype=torch.int32)), round_output=False)
    assert_lse_close(results["lse_out"], lse)
    assert bool((results["out"].cpu()[lse.isneginf()] == 0).all())
    assert_rows_close(results["out"], out)
    return results


def in_three_calls(a: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, output and LSE of the public calls, for one token a request."""
    starts = torch.arange(a["q"].shape[0] + 1, dtype=torch.int32, device=a["q"].device)
    common = {n: a[n] for n in ("page_table", "seqused_k")}
    score = msa_proxy_score(a["index_q"], a["index_k"], starts, **common, max_k_tiles=a["page_table"].shape[1])
    ids = msa_topk_select(
        score,
        a["topk"],
        (a["seqused_k"].clamp(min=0) + 127) // 128,
        None,
        a.get("sink_blocks", 0),
        a.get("local_blocks", 1),
    )
    result = msa_sparse_decode_attention(**attention_of(a, ids), return_softmax_lse=True)
    assert isinstance(result, tuple)
    return ids, *result


CASES: dict[str, dict[str, Any]] = {
    "plain": {"lengths": (700, 129, 1, 128, 0)},
    "speculative": {"lengths": (700, 130, 2, 0, 385), "seqlen_q": 3},
    "offsets": {"lengths": (700, 300, 260), "seqlen_q": 2, "q_offset": torch.tensor([3, -1, 900], dtype=torch.int32)},
    "one offset": {"lengths": (700, 300), "seqlen_q": 2, "q_offset": 127},
    "not causal": {"lengths": (700, 300, 0), "seqlen_q": 2, "causal": False},
    "sinks": {"lengths": (900, 300, 60), "sink_blocks": 2},
    "no forced block": {"lengths": (900, 300, 60), "local_blocks": 0},
    "forced blocks overlap": {"lengths": (900, 300, 140, 60), "sink_blocks": 2, "local_blocks": 2},
    "forced blocks alone": {"lengths": (900, 300, 140), "sink_blocks": 3, "local_blocks": 3},
    "more forced than exist": {"lengths": (900, 60), "sink_blocks": 2**31 - 1, "local_blocks": 2**31 - 1, "topk": 9},
    "fewer blocks than top-k": {"lengths": (700, 60, 300), "topk": 33},
    "one block": {"lengths": (700, 300), "topk": 1},
    "no token": {"lengths": (0, -5)},
    "wide table": {"lengths": (200, 129), "capacity": 40, "topk": 16},
    "fp16": {"lengths": (500, 129), "q_dtype": torch.float16, "kv_dtype": torch.float16, "index_dtype": torch.float16},
    "fp8": {"lengths": (500, 129), "kv_dtype": FP8, "index_dtype": FP8, "k_global_scale": 0.5, "v_global_scale": 2.0},
    "fp8 queries": {"lengths": (500, 129), "q_dtype": FP8, "kv_dtype": FP8},
    "one head": {"lengths": (700, 300), "heads": 1, "group": 16},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_rule_and_the_attention(name: str, device: str) -> None:
    assert_step(make(**CASES[name], device=device))


def test_every_length_has_its_own_extent(device: str) -> None:
    """The limit of a batch's longest request must not show in the others."""
    results = assert_step(make(MIXED, heads=1, group=4, topk=16, device=device))
    for ids, length in zip(results["q2k_out"].cpu(), MIXED, strict=True):
        assert (ids >= 0).sum() == min(16, -(-length // 128)) and int(ids.max()) == (length - 1) // 128


def test_it_is_the_three_calls_to_the_bit(device: str) -> None:
    a = make((900, 513, 129, 0), topk=3, sink_blocks=1, device=device)
    out, lse = msa_decode_step(**a, return_softmax_lse=True)
    ids, *separate = in_three_calls(a)
    assert_same_bits((out, lse), tuple(separate))
    q2k = torch.full(ids.shape, -7, dtype=torch.int32, device=device)
    assert torch.equal(msa_decode_step(**a, q2k_out=q2k), out)
    assert torch.equal(q2k, ids)


def test_strided_inputs_and_destinations(device: str) -> None:
    """Index keys as half of a wider cache, tokens outermost; ids and scores in the middle of larger buffers."""
    a = make((700, 300, 129), topk=5, device=device)
    want = assert_step(a)
    pages = a["index_k"].shape[0]
    wide = torch.full((pages, 128, 3, 128), NAN, dtype=torch.bfloat16, device=device)
    wide[:, :, 1:2] = a["index_k"].transpose(1, 2)
    index_q = torch.full((3, 5, 256), NAN, dtype=torch.bfloat16, device=device)
    index_q[:, 2:4, :128] = a["index_q"]
    strided = {**a, "index_k": wide[:, :, 1:2].transpose(1, 2), "index_q": index_q[:, 2:4, :128]}
    ids = torch.full((2, 9, 11), -7, dtype=torch.int32, device=device)
    scores = torch.full((6, 4, 2), NAN, device=device)  # blocks, tokens, heads
    view = ids[:, 1:4, 2:7].transpose(0, 1)
    assert_step(strided, q2k_out=view, score_out=scores[:, :3].permute(2, 0, 1))
    assert torch.equal(view, want["q2k_out"])
    assert (
        (ids[:, 0] == -7).all()
        and (ids[:, 4:] == -7).all()
        and (ids[..., 7:] == -7).all()
        and (ids[..., :2] == -7).all()
    )
    assert bool(scores[:, 3].isnan().all())


def test_equal_scores_take_the_lower_blocks(device: str) -> None:
    a = make((1400, 700), topk=5, device=device)
    a["index_k"].fill_(1.0)
    a["index_q"].fill_(0.5)
    results = assert_step(a)
    assert results["q2k_out"][0, 0].tolist() == [0, 1, 2, 3, 10]


def test_a_block_of_nan_keys_is_never_chosen_for_its_score(device: str) -> None:
    a = make((1000, 700), topk=3, device=device)
    table = a["page_table"].cpu()
    for block in (1, 2, 4):
        a["index_k"][int(table[0, block])] = NAN
    results = assert_step(a)
    assert not {1, 2, 4} & set(results["q2k_out"][0].flatten().tolist())
    a["index_k"].fill_(NAN)
    results = assert_step(a)
    assert results["q2k_out"][:, 0].tolist() == [[7, -1, -1], [5, -1, -1]]


def test_nvfp4_cache(device: str) -> None:
    cache = msa_ops.PagedKVCache(16, 2, kv_format="nvfp4", device=device)
    requests = [cache.add_request() for _ in range(2)]
    lengths = (700, 300)
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(sum(lengths), 2, 128, generator=generator).to(device) for _ in "kv")
    cache.append(requests, k, v, lengths)
    a = {**make(lengths, topk=3, device=device), **cache.arguments(requests)}
    table, index_k = a["page_table"].cpu(), torch.randn(16, 1, 128, 128, generator=generator).bfloat16()
    a["index_k"] = index_k.to(device)
    assert table.shape == (2, 6)
    assert_step(a)


def test_two_runs_are_equal_to_the_bit(device: str) -> None:
    a = make(MIXED[:4], topk=16, device=device)
    first = msa_decode_step(**a, **outputs_of(a), return_softmax_lse=True)
    for _ in range(5):
        assert_same_bits(msa_decode_step(**a, **outputs_of(a), return_softmax_lse=True), first)


def test_a_batch_without_requests(device: str) -> None:
    a = make((300,), device=device)
    for name in ("q", "index_q", "page_table", "seqused_k"):
        a[name] = a[name][:0]
    assert msa_decode_step(**a).shape == (0, 8, 128)


def test_query_starts_are_kept() -> None:
    device = torch.device("cpu")
    first = step.query_starts(5, 3, device)
    assert first.tolist() == [0, 3, 6, 9, 12, 15] and first.dtype == torch.int32
    assert step.query_starts(63, 3, device).data_ptr() == first.data_ptr()
    more = step.query_starts(64, 3, device)
    assert more.tolist() == list(range(0, 65 * 3, 3)) and first.tolist() == [0, 3, 6, 9, 12, 15]
    assert step.query_starts(7, 3, device).data_ptr() == more.data_ptr()
    assert step.query_starts(0, 3, device).tolist() == [0]


def test_checking_mode_reads_the_chosen_ids_alone(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Whatever lies in the buffer for ids before the step is no id, and a bad page is reported where it is chosen."""
    monkeypatch.setenv("MSA_OPS_CHECK", "1")
    a = make((700, 300), topk=6, device=device)
    results = {**outputs_of(a), "q2k_out": torch.full((2, 2, 6), 3, dtype=torch.int32, device=device)}
    a["page_table"][1] = torch.tensor([*a["page_table"][1, :3].tolist(), 99, 99, 99], dtype=torch.int32)
    msa_decode_step(**a, **results, return_softmax_lse=True)
    assert_results(a, results)
    a["page_table"][0, 5] = 99
    with pytest.raises(ValueError, match=r"page_table\[0\] names page 99 for a selected block"):
        msa_decode_step(**a)


PLAIN = make((300, 129))
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "topk": ({"topk": 0}, r"topk must lie in 1\.\.4096, got 0"),
    "local": ({"local_blocks": -1}, "local_blocks must lie in"),
    "sinks": ({"sink_blocks": -1}, "sink_blocks must lie in"),
    "index_q dtype": ({"index_q": PLAIN["index_q"].float()}, "index_q must be bfloat16, float16 or float8_e4m3fn"),
    "index_q heads": ({"index_q": PLAIN["index_q"][:, :1]}, r"index_q must have shape .* = \(2, 2, 128\), one index head"),
    "index_q tokens": ({"index_q": PLAIN["index_q"][:1]}, r"index_q must have shape .* = \(2, 2, 128\)"),
    "index_k dtype": ({"index_k": PLAIN["index_k"].view(torch.int16)}, "index_k must be bfloat16, float16 or float8"),
    "index_k rows": ({"index_k": PLAIN["index_k"].transpose(2, 3)}, "index_k must have a dense last dim"),
    "index_q rows": ({"index_q": torch.zeros(2, 2, 132).bfloat16()[..., :128]}, "index_q must have rows aligned to 16 bytes"),
    "index_k flat": ({"index_k": PLAIN["index_k"].flatten(0, 1)}, r"index_k must have shape \(num_pages, 1, 128, 128\)"),
    "index_k heads": ({"index_k": PLAIN["index_k"].expand(-1, 3, -1, -1)}, "index_k must have one head, or a number that"),
    "table": ({"page_table": PLAIN["page_table"][0]}, r"page_table must have shape \(batch, max_pages\)"),
    "table dtype": ({"page_table": PLAIN["page_table"].long()}, "page_table must be int32"),
    "lengths": ({"seqused_k": PLAIN["seqused_k"].long()}, "seqused_k must be int32"),
    "flat cache": ({"k": PLAIN["k"].flatten(0, 1)}, r"k must have shape \(num_pages"),
    "q": ({"q": PLAIN["q"][0]}, r"q must have shape \(tokens"),
    "k_scale": ({"k_scale": PLAIN["k"]}, r"k_scale belongs to NVFP4"),
    "lse_out": ({"lse_out": torch.zeros(2, 8)}, "lse_out was given without return_softmax_lse"),
    "out": ({"out": torch.zeros(2, 8, 128)}, "out must be bfloat16"),
    "out in index_q": ({"out": PLAIN["q"], "index_q": PLAIN["q"][:, :2], "q": PLAIN["q"].clone()}, "must not share memory"),
    "ids dtype": ({"q2k_out": torch.zeros(2, 2, 4)}, r"q2k_out must be int32 of shape \(2, 2, 4\) on cpu, got float32"),
    "ids shape": ({"q2k_out": torch.zeros(2, 2, 5, dtype=torch.int32)}, "q2k_out must be int32 of shape"),
    "ids strides": ({"q2k_out": torch.zeros(2, 2, 8, dtype=torch.int32)[..., ::2]}, "q2k_out must have a dense last dim"),
    "ids expanded": ({"q2k_out": torch.zeros(1, 2, 4, dtype=torch.int32).expand(2, 2, 4)}, "q2k_out must have memory for"),
    "scores dtype": ({"score_out": torch.zeros(2, 3, 2).half()}, r"score_out must be float32 of shape \(2, 3, 2\)"),
    "scores shape": ({"score_out": torch.zeros(2, 4, 2)}, "score_out must be float32 of shape"),
    "seqlen_q": ({"seqlen_q": 3}, "q must hold seqlen_q tokens for every request"),
    "offset": ({"q_offset": torch.zeros(2, dtype=torch.int64)}, "q_offset must be int32"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_before_anything_is_written(name: str) -> None:
    change, message = BAD[name]
    scores = torch.full((2, 3, 2), NAN)
    with pytest.raises(ValueError, match=message):
        msa_decode_step(**{**PLAIN, "score_out": scores, **change})
    assert bool(scores.isnan().all())


def test_scores_and_ids_must_lie_apart() -> None:
    buffer = torch.zeros(64)
    ids, scores = buffer.view(torch.int32)[8:24].view(2, 2, 4), buffer[:12].view(2, 3, 2)
    with pytest.raises(ValueError, match="q2k_out must not share memory with score_out"):
        msa_decode_step(**PLAIN, q2k_out=ids, score_out=scores)


def test_wrong_types_are_refused() -> None:
    for change in ({"topk": 2.0}, {"local_blocks": True}, {"sink_blocks": "1"}):
        with pytest.raises(TypeError, match=f"{next(iter(change))} must be an int, got"):
            msa_decode_step(**{**PLAIN, **change})
    for name in ("q", "k", "v", "index_q", "index_k", "page_table", "seqused_k", "q2k_out", "score_out"):
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got str"):
            msa_decode_step(**{**PLAIN, name: "no"})
    with pytest.raises(TypeError, match=r"page_table must be a torch.Tensor, got NoneType"):
        msa_decode_step(**{**PLAIN, "page_table": None})


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
def test_a_graph_follows_growing_lengths(kv_dtype: torch.dtype) -> None:
    """One capture serves a request from its first token on, across block borders, and a shorter one after it."""
    a = make((300, 1, 130), capacity=12, topk=4, kv_dtype=kv_dtype, sink_blocks=1, device="cuda")
    results = outputs_of(a)
    graph = captured(lambda: msa_decode_step(**a, **results, return_softmax_lse=True))
    generator = torch.Generator("cuda").manual_seed(1)
    for lengths in ((300, 1, 130), (383, 127, 1000), (384, 128, 1001), (385, 129, 1536), (0, -3, 5), (1024, 200, 640)):
        for name, t in results.items():
            t.fill_(-7 if name == "q2k_out" else NAN)
        a["seqused_k"].copy_(torch.tensor(lengths))
        a["index_q"].normal_(generator=generator)
        graph.replay()
        torch.cuda.synchronize()
        assert_results(a, results)


@pytest.mark.gpu
def test_nothing_is_allocated_and_nothing_waits() -> None:
    a = make((2000, 1500), topk=16, device="cuda")
    results = outputs_of(a)
    msa_decode_step(**a, **results, return_softmax_lse=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        msa_decode_step(**a, **results, return_softmax_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert_results(a, results)


@pytest.mark.gpu
def test_steps_in_a_row_wait_for_each_other() -> None:
    """Each step's output is the next one's query and index query, with dependent launches all the way."""
    a = make((2000, 900), heads=2, group=1, topk=4, device="cuda")

    def chain(synchronise: bool) -> Tensor:
        x = a["q"]
        for _ in range(20):
            x = msa_decode_step(**{**a, "q": x, "index_q": x * 8})
            if synchronise:
                torch.cuda.synchronize()
        return x

    assert torch.equal(chain(False), chain(True))


@pytest.mark.gpu
def test_a_step_is_at_most_three_launches() -> None:
    a = make((2000, 1500), topk=16, device="cuda")
    results = outputs_of(a)
    msa_decode_step(**a, **results, return_softmax_lse=True)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        msa_decode_step(**a, **results, return_softmax_lse=True)
        torch.cuda.synchronize()
    on_device = [e for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [e.key for e in on_device for _ in range(e.count) if e.key != "Activity Buffer Request"]
    if not kernels:
        pytest.skip("the profiler sees no kernels here")
    merge = torch.cuda.get_device_capability() < (9, 0)  # no clusters: the attention's partial results meet in memory
    assert len(kernels) <= 3 + merge, kernels
