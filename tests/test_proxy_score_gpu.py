"""Index scores on a GPU: the same as on the CPU, whatever the lengths, layouts and plans; graphs, large offsets, no reads.

What both engines share is tested in test_proxy_score, against float64.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from msa_ops import msa_proxy_score, msa_proxy_score_fp4, msa_topk_select
from msa_ops.contract import FP8
from msa_ops.engines.cuda import score
from test_large_offsets import BEYOND, reserve
from test_pitfalls_gpu import captured
from test_proxy_score import DTYPES, assert_fp4_scores, cumulative, expected, fp4_case, fp4_rounding, move

pytestmark = pytest.mark.gpu

NAN, INF = math.nan, math.inf
MIXED = [9000, 130, 8500, 256, 9000, 300, 8192, 1]
Arguments = dict[str, Any]


def nan_bytes(x: Tensor, where: Tensor) -> None:
    """Make the rows NaN that `where` names."""
    if x.dtype == FP8:
        x.view(torch.uint8)[where] = 0x7F
    else:
        x[where] = NAN


def keys_of(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def case(
    lengths: list[int], tokens: list[int], *, heads: int = 4, kv_heads: int = 1, paged: bool = True, spare: int = 0,
    q_dtype: torch.dtype = torch.bfloat16, k_dtype: torch.dtype = torch.bfloat16, seed: int = 0,
) -> Arguments:  # fmt: skip
    """Arguments on the GPU. All keys of no request are NaN, the page table is one page wider than it need be."""
    g = torch.Generator("cuda").manual_seed(seed)
    q = keys_of(g, (sum(tokens) + spare, heads, 128), q_dtype)
    arguments: Arguments = {"q": q, "cu_seqlens_q": cumulative(tokens).cuda()}
    if not paged:
        k = keys_of(g, (sum(lengths) + 200, kv_heads, 128), k_dtype)
        nan_bytes(k, torch.arange(len(k), device="cuda") >= sum(lengths))
        return {**arguments, "k": k, "cu_seqlens_k": cumulative(lengths).cuda()}
    counts = torch.tensor([-(-n // 128) for n in lengths])
    pages = int(counts.sum()) + 5
    k = keys_of(g, (pages, kv_heads, 128, 128), k_dtype)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    table = torch.full((len(lengths), int(counts.max()) + 1), -1, dtype=torch.int32)
    used = torch.zeros(pages, 128, dtype=torch.bool)
    for b, owned in enumerate(order.split([*counts.tolist(), 5])[:-1]):
        table[b, : len(owned)] = owned
        used[owned] = torch.arange(128) < (lengths[b] - 128 * torch.arange(len(owned))[:, None])
    nan_bytes(k.transpose(1, 2), ~used.cuda())
    return {
        **arguments, "k": k, "page_table": table.cuda(), "seqused_k": torch.tensor(lengths, dtype=torch.int32).cuda()
    }  # fmt: skip


def on_cpu(arguments: Arguments) -> Arguments:
    return {n: x.cpu() if isinstance(x, Tensor) else x for n, x in arguments.items()}


def launches() -> int:
    return sum(score.calls.values())


def assert_same_as_cpu(arguments: Arguments, **options: Any) -> Tensor:
    """One launch, and the CPU's scores up to the order of float32 sums; returns the GPU's."""
    before = launches()
    got = msa_proxy_score(**arguments, **options)
    assert launches() == before + 1
    want = msa_proxy_score(**on_cpu(arguments), **on_cpu(options))
    assert_close(got, want, arguments)
    return got


def assert_close(got: Tensor, want: Tensor, arguments: Arguments) -> None:
    # 2 * 128 roundings of sums that lie below the product of the largest norms.
    q, k = arguments["q"].float(), arguments["k"].float()
    bound = float(q.norm(dim=-1).max()) * float(k.norm(dim=-1).nan_to_num(0.0).max())
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=2 * 128 * 2**-24 * bound)


# --- values ---


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("k_dtype", DTYPES)
@pytest.mark.parametrize("q_dtype", DTYPES)
def test_ragged_lengths_in_every_dtype(q_dtype: torch.dtype, k_dtype: torch.dtype, paged: bool) -> None:
    """A batch-wide bound on blocks would show here, and any key of no request is NaN."""
    lengths = [*MIXED, 0]
    assert_same_as_cpu(case(lengths, [1] * 9, q_dtype=q_dtype, k_dtype=k_dtype, paged=paged), max_k_tiles=80)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, 8, 20, 300])
@pytest.mark.parametrize("k_dtype", [torch.bfloat16, FP8])
def test_query_lengths(k_dtype: torch.dtype, tokens: int) -> None:
    """Every number of columns that the kernel has an entry for, and several tiles of tokens."""
    arguments = case([517, 0, 3, 1280, 1000], [tokens] * 5, k_dtype=k_dtype, spare=3)
    for options in ({"max_seqlen_q": tokens}, {"causal": False}, {"reduce_heads": True}, {"q_offset": 130}):
        assert_same_as_cpu(arguments, **options, max_k_tiles=12)


def test_query_lengths_differ_within_a_batch() -> None:
    arguments = case([700, 513, 40, 2000, 129, 0], [1, 90, 0, 17, 3, 2], spare=1)
    for bound in (90, None):
        assert_same_as_cpu(arguments, max_seqlen_q=bound, max_k_tiles=16)
    offset = torch.tensor([699, 5, 0, -1, 1000, 3], dtype=torch.int32, device="cuda")
    assert_same_as_cpu(arguments, q_offset=offset, max_k_tiles=17)


def decoding_lengths(batch: int, longest: int) -> list[int]:
    some = [longest, 0, 1, longest // 2, 128, 129, longest - 1, longest // 9]
    return [some[i * 5 % 8] if i % 3 else longest for i in range(batch)]


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("k_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize(
    "batch, longest", [(1, 300), (1, 60_000), (1, 120_000), (3, 20_000), (16, 4000), (16, 8000), (64, 900), (64, 8192)]
)
def test_decoding_steps(batch: int, longest: int, k_dtype: torch.dtype, paged: bool) -> None:
    """A thread block for each block of keys, and requests whose thread blocks share a row of them."""
    for lengths in ([longest] * batch, decoding_lengths(batch, longest)):
        arguments = case(lengths, [1] * batch, k_dtype=k_dtype, paged=paged)
        blocks = -(-longest // 128)
        for options in ({}, {"q_offset": longest // 3}, {"reduce_heads": True}):
            assert_same_as_cpu(arguments, **options, max_k_tiles=blocks, max_seqlen_q=1)
    assert_same_as_cpu(arguments, max_k_tiles=blocks + 3, max_seqlen_q=1)


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("k_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("longest", [2600, 5000, 12_000])
def test_requests_of_more_or_fewer_tokens_than_promised(longest: int, k_dtype: torch.dtype, paged: bool) -> None:
    lengths, blocks = decoding_lengths(24, longest), -(-longest // 128)
    for tokens in ([1] * 23 + [30], [0, 1, 2, 1] * 6, [0] * 23 + [24], [3] + [1] * 22 + [0]):
        arguments = case(lengths, tokens, k_dtype=k_dtype, paged=paged)
        want = msa_proxy_score(**on_cpu(arguments), max_k_tiles=blocks)
        for bound in (1, None):
            assert_close(msa_proxy_score(**arguments, max_k_tiles=blocks, max_seqlen_q=bound), want, arguments)


@pytest.mark.parametrize("kv_heads, group", [(1, 1), (1, 5), (1, 16), (1, 70), (2, 4), (3, 1), (3, 24)])
@pytest.mark.parametrize("paged", [True, False])
def test_heads_are_reduced_in_the_kernel(paged: bool, kv_heads: int, group: int) -> None:
    arguments = case([600, 130, 1], [3, 1, 2], heads=kv_heads * group, kv_heads=kv_heads, paged=paged)
    each = assert_same_as_cpu(arguments, max_k_tiles=6)
    one = assert_same_as_cpu(arguments, max_k_tiles=6, reduce_heads=True)
    assert torch.equal(one[0], each.amax(0))


@pytest.mark.parametrize("paged", [True, False])
def test_strides(paged: bool) -> None:
    arguments = case([700, 300, 129], [2, 2, 2], kv_heads=2, paged=paged)
    want = msa_proxy_score(**arguments, max_k_tiles=6)
    wide = torch.full((6, 9, 136), NAN, device="cuda").bfloat16()
    q = wide[:, 3:7, :128]
    q.copy_(arguments["q"])
    k = arguments["k"]
    packed = torch.full((*k.shape[:-1], 256), NAN, device="cuda").bfloat16()
    packed[..., 128:] = k
    nhd = k.transpose(-3, -2).contiguous().transpose(-3, -2)
    pool = torch.full((3, *k.shape), NAN, device="cuda").bfloat16()
    pool[1] = k
    for view in (packed[..., 128:], nhd, pool[1]):
        assert torch.equal(msa_proxy_score(**{**arguments, "q": q, "k": view}, max_k_tiles=6), want)
    spread = {}
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        if name in arguments:
            spread[name] = torch.stack((arguments[name], arguments[name] + 9), 1)[:, 0]
    if paged:
        spread["page_table"] = torch.stack((arguments["page_table"], arguments["page_table"] + 9), 2)[..., 0]
    assert torch.equal(msa_proxy_score(**{**arguments, **spread}, max_k_tiles=6), want)


def test_the_output_is_written_and_nothing_beside_it() -> None:
    arguments = case([700, 300, 129], [2, 1, 2], spare=2)
    want = msa_proxy_score(**arguments, max_k_tiles=9)
    for order in ((0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)):
        shape = [want.shape[i] + 3 for i in order]
        buffer = torch.full(shape, 777.0, device="cuda")
        output = buffer.permute([order.index(i) for i in range(3)])[1:5, 1:10, 1:8]
        assert msa_proxy_score(**arguments, output=output) is output
        assert torch.equal(output, want)
        output.fill_(777.0)
        assert bool((buffer == 777.0).all()), "written outside"


def test_many_blocks_that_no_token_sees() -> None:
    arguments = case([130] * 64, [1] * 64)
    got = assert_same_as_cpu(arguments, max_k_tiles=3000)
    assert bool((got[:, 2:] == -INF).all())


def test_pages_outside_the_cache_have_no_score() -> None:
    arguments = case([1000, 600], [1, 1], k_dtype=FP8)
    table = arguments["page_table"]
    for place, page in (((0, 1), 10**6), ((0, 3), -1), ((1, 0), -(2**31)), ((1, 4), 2**31 - 1)):
        table[place] = page
    got = assert_same_as_cpu(arguments, max_k_tiles=8)
    assert bool((got[:, [1, 3], 0] == -INF).all() and (got[:, [0, 4], 1] == -INF).all())


@pytest.mark.parametrize("k_dtype", [FP8, torch.float16])
def test_bf16_queries_keep_their_range(k_dtype: torch.dtype) -> None:
    arguments = case([300, 300, 300, 300], [1] * 4, k_dtype=k_dtype)
    size = torch.tensor([1e-30, 2e5, 1e30, 0.0], device="cuda").view(4, 1, 1)
    arguments["q"] = (arguments["q"].float() * size).bfloat16()
    got, want = msa_proxy_score(**arguments), msa_proxy_score(**on_cpu(arguments))
    assert bool((want[:, :, :3].abs() > 0).all())
    torch.testing.assert_close(got.cpu(), want, rtol=2e-4, atol=0)


def test_a_key_that_is_seen_and_not_a_number_makes_its_block_so() -> None:
    for k_dtype in DTYPES:
        arguments = case([600], [1], k_dtype=k_dtype)
        page = int(arguments["page_table"][0, 2])
        nan_bytes(arguments["k"][page, 0], torch.arange(128, device="cuda") == 77)
        if k_dtype == FP8 and torch.cuda.get_device_capability() < (8, 9):
            continue  # bytes are widened by integer operations, which know no NaN
        got = msa_proxy_score(**arguments)
        assert bool(got[:, 2].isnan().all()) and bool(got[:, [0, 1, 3, 4]].isfinite().all())


# --- NVFP4 ---


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 40])
def test_nvfp4(tokens: int, kv_heads: int, paged: bool) -> None:
    lengths = [1100, 0, 300, 128, 1] if tokens > 1 else [*MIXED, 0]
    arguments, exact, keys = fp4_case(lengths, [tokens] * len(lengths), kv_heads=kv_heads, paged=paged, padding=2)
    given = {n: x.cuda() if isinstance(x, Tensor) else x for n, x in arguments.items()}
    for options in ({}, {"reduce_heads": True}, {"causal": False}):
        before = launches()
        got = msa_proxy_score_fp4(**given, **options, max_k_tiles=75)
        assert launches() == before + 1
        want = msa_proxy_score_fp4(**arguments, **options, max_k_tiles=75)
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=2 * fp4_rounding(exact, keys))  # of both engines


# --- bits ---


@pytest.mark.parametrize("k_dtype", [torch.bfloat16, FP8])
def test_equal_inputs_give_equal_bits(k_dtype: torch.dtype) -> None:
    """From run to run, for any bound on the tokens, and whatever else is in the batch."""
    arguments = case(MIXED, [2] * 8, k_dtype=k_dtype)
    want = msa_proxy_score(**arguments, max_k_tiles=80)
    for bound in (None, 2, 5, 16, 1000):
        assert torch.equal(msa_proxy_score(**arguments, max_k_tiles=80, max_seqlen_q=bound), want)
    for b in (0, 3):
        alone = msa_proxy_score(
            arguments["q"][2 * b : 2 * b + 2], arguments["k"], cumulative([2]).cuda(),
            page_table=arguments["page_table"][b : b + 1], seqused_k=arguments["seqused_k"][b : b + 1], max_k_tiles=80,
        )  # fmt: skip
        assert torch.equal(alone, want[:, :, 2 * b : 2 * b + 2])


def entries_since(before: Counter[str]) -> set[str]:
    return {entry.split()[1].rpartition("_")[0] for entry in score.calls - before}


def assert_each_way_agrees(way: str, arguments: Arguments, tokens: int, **options: Any) -> Tensor:
    """The same bits as from the kernel that serves any number of tokens, in a buffer that is not touched elsewhere."""
    want = msa_proxy_score(**arguments, **options)
    before, buffer = (
        score.calls.copy(),
        torch.full((want.shape[2], want.shape[1] + 2, want.shape[0]), 7.0, device="cuda"),
    )
    got = buffer.permute(2, 1, 0)[:, 1:-1]
    msa_proxy_score(**arguments, **options, max_seqlen_q=tokens, output=got)
    assert entries_since(before) == {f"msa_score_{way}"}
    assert torch.equal(got.nan_to_num(), want.nan_to_num()) and torch.equal(got.isnan(), want.isnan())
    assert (buffer[:, [0, -1]] == 7.0).all()
    return got


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("k_dtype", DTYPES)
@pytest.mark.parametrize("q_dtype", DTYPES)
def test_each_way_gives_the_same_bits_in_every_dtype(
    way: str, q_dtype: torch.dtype, k_dtype: torch.dtype, paged: bool
) -> None:
    """Some requests have no tokens, or more than is promised; some blocks that tokens see are not wanted."""
    for tokens in (1, 4):
        arguments = case(
            [*MIXED, 0, 700, 64, 513],
            [tokens] * 10 + [0, tokens + 9],
            q_dtype=q_dtype,
            k_dtype=k_dtype,
            paged=paged,
            spare=2,
        )
        for options in ({}, {"q_offset": 2**31 - 1}, {"q_offset": -3}):
            assert_each_way_agrees(way, arguments, tokens, **options, max_k_tiles=77)
        assert_each_way_agrees(way, arguments, tokens, max_k_tiles=40)


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("k_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("tokens", [2, 8])
def test_each_way_gives_the_same_bits(way: str, tokens: int, k_dtype: torch.dtype, paged: bool) -> None:
    arguments = case([*MIXED, 0, 700, 64, 513], [tokens] * 10 + [0, tokens + 9], k_dtype=k_dtype, paged=paged)
    for options in ({}, {"reduce_heads": True}, {"causal": False}, {"q_offset": 300}):
        assert_each_way_agrees(way, arguments, tokens, **options, max_k_tiles=77)


def test_each_way_leaves_out_pages_outside_the_cache(way: str) -> None:
    arguments = case([1000, 1000, 1000], [1, 1, 1])
    arguments["page_table"][:, [2, 5]] = torch.tensor([-1, 10**9], dtype=torch.int32, device="cuda")
    got = assert_each_way_agrees(way, arguments, 1, max_k_tiles=8)
    assert (got[:, [2, 5]] == -INF).all() and got[:, [0, 1, 3, 4, 6, 7]].isfinite().all()


def test_each_way_takes_any_strides(way: str) -> None:
    """Token-major pages with a gap between tokens, every second entry of wider tables, queries that are apart."""
    arguments = case([1000, 300, 129], [2, 2, 2], k_dtype=FP8)
    k, table = arguments["k"], arguments["page_table"]
    apart = torch.full((len(k), 128, 3, 128), NAN, device="cuda").to(FP8)
    apart[:, :, 1] = k[:, 0]
    wide = torch.full((3, 2 * table.shape[1]), -7, dtype=torch.int32, device="cuda")
    wide[:, ::2] = table
    q = torch.full((6, 9, 128), NAN, dtype=torch.bfloat16, device="cuda")
    q[:, 2:6] = arguments["q"]
    lengths = torch.full((9,), 10**6, dtype=torch.int32, device="cuda")
    lengths[::3] = arguments["seqused_k"]
    strided = {
        "q": q[:, 2:6], "k": apart[:, :, 1:2].transpose(1, 2), "page_table": wide[:, ::2], "seqused_k": lengths[::3],
        "cu_seqlens_q": arguments["cu_seqlens_q"],
    }  # fmt: skip
    want = msa_proxy_score(**arguments, max_k_tiles=9)
    assert torch.equal(assert_each_way_agrees(way, strided, 2, max_k_tiles=9), want)


@pytest.mark.parametrize(
    "tokens, paged", [(1, False), *((tokens, paged) for tokens in (2, 4, 8) for paged in (True, False))]
)
def test_each_way_gives_the_same_bits_of_nvfp4(way: str, tokens: int, paged: bool) -> None:
    """But where codes are multiplied: test_score_codes_gpu.py."""
    lengths = [*MIXED, 0, 700, 129]
    arguments, _, _ = fp4_case(lengths, [tokens] * 9 + [0, tokens + 9], kv_heads=1, paged=paged, padding=2)
    given = {n: x.cuda() if isinstance(x, Tensor) else x for n, x in arguments.items()}
    for options in ({}, {"reduce_heads": True}, {"causal": False}, {"q_offset": -5}):
        want = msa_proxy_score_fp4(**given, **options, max_k_tiles=75)
        before = score.calls.copy()
        got = msa_proxy_score_fp4(**given, **options, max_k_tiles=75, max_seqlen_q=tokens)
        assert entries_since(before) == {f"msa_score_{way}"}
        assert torch.equal(got, want)


def test_unused_bytes_have_no_influence() -> None:
    arguments = case([700, 129], [2, 2])
    want = msa_proxy_score(**arguments, max_k_tiles=8)
    for value in (0.0, INF, 3e38):
        k = arguments["k"].clone()
        k[k.isnan()] = value
        table = torch.where(arguments["page_table"] < 0, 10**9, arguments["page_table"])
        assert torch.equal(msa_proxy_score(**{**arguments, "k": k, "page_table": table}, max_k_tiles=8), want)


# --- graphs and reads ---


def test_replays_follow_lengths_and_tables() -> None:
    longest = 9000
    arguments = case([longest] * 4, [2] * 4, k_dtype=FP8)
    output = torch.full((4, 71, 8), NAN, device="cuda")
    graph = captured(lambda: msa_proxy_score(**arguments, max_seqlen_q=2, output=output))
    full = arguments["page_table"].clone()
    for lengths, starts in (
        ([1, 2, 0, 128], [0, 2, 4, 6, 8]), ([130, 3000, 129, 8999], [0, 2, 4, 6, 8]), ([longest] * 4, [0, 1, 1, 6, 7]),
        ([0, 0, 0, 0], [0, 2, 4, 6, 8]), ([5000, 1, 9000, 257], [1, 3, 4, 4, 5]),
    ):  # fmt: skip
        arguments["seqused_k"].copy_(torch.tensor(lengths, dtype=torch.int32))
        arguments["cu_seqlens_q"].copy_(torch.tensor(starts, dtype=torch.int32))
        arguments["page_table"].copy_(full.roll(1, 0))
        output.fill_(NAN)
        graph.replay()
        want = msa_proxy_score(**on_cpu(arguments), max_k_tiles=71)
        assert_close(output, want, arguments)


@pytest.mark.parametrize("bound", [None, 1])
def test_score_and_selection_follow_each_other_in_a_graph(bound: int | None) -> None:
    """Each may start while the one before still runs: a later read of scores that are not written yet would show."""
    arguments = case([8192] * 16, [1] * 16)
    want = msa_topk_select(msa_proxy_score(**arguments, max_k_tiles=64), 16, force_end_blocks=1)
    scores = torch.full((4, 64, 16), NAN, device="cuda")
    ids = [torch.full_like(want, -7) for _ in range(8)]

    def steps() -> None:
        for to in ids:
            msa_proxy_score(**arguments, max_seqlen_q=bound, output=scores)
            msa_topk_select(scores, 16, output=to, force_end_blocks=1)

    graph = captured(steps)
    for to in ids:
        to.fill_(-7)
    for _ in range(5):
        graph.replay()
    assert all(torch.equal(to, want) for to in ids)


def test_a_bounded_call_reads_nothing_on_the_host() -> None:
    arguments = case([700, 129], [2, 2])
    output = torch.empty(4, 6, 4, device="cuda")
    msa_proxy_score(**arguments, output=output)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        msa_proxy_score(**arguments, output=output)
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        msa_proxy_score(**arguments, max_k_tiles=6)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert allocated == before


def test_a_capture_needs_the_number_of_blocks() -> None:
    arguments = case([300], [1])
    msa_proxy_score(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(
            ValueError, match="a CUDA graph capture forbids reading lengths: give max_k_tiles or output"
        ):
            msa_proxy_score(**arguments)
        msa_proxy_score(**arguments, max_k_tiles=3)


def test_checking_mode_reads_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, what lies outside is left out, and nothing is read there."""
    arguments = case([700, 300], [2, 2])
    want = msa_proxy_score(**arguments, max_k_tiles=6)
    long = {**arguments, "seqused_k": torch.tensor([2**31 - 1, 300], dtype=torch.int32, device="cuda")}
    got = msa_proxy_score(**long, max_k_tiles=6, q_offset=torch.tensor([698, 298], dtype=torch.int32, device="cuda"))
    assert torch.equal(got, want)
    few = msa_proxy_score(**arguments, max_k_tiles=2)
    assert torch.equal(few, want[:, :2])
    for starts in ([0, 2, 2**31 - 1], [-5, 2, 4], [3, 1, 0]):
        wrong = {**arguments, "cu_seqlens_q": torch.tensor(starts, dtype=torch.int32, device="cuda")}
        msa_proxy_score(**wrong, max_k_tiles=6)
    flat = case([700, 300], [2, 2], paged=False)
    for starts in ([0, 700, 2**31 - 1], [-(2**31), 0, 300], [900, 100, 5000]):
        wrong = {**flat, "cu_seqlens_k": torch.tensor(starts, dtype=torch.int32, device="cuda")}
        msa_proxy_score(**wrong, max_k_tiles=6)
    torch.cuda.synchronize()
    monkeypatch.setenv("MSA_OPS_CHECK", "1")
    with pytest.raises(ValueError, match="seqused_k must fit page_table's 7 pages"):
        msa_proxy_score(**long, max_k_tiles=6)
    with pytest.raises(ValueError, match=r"max_k_tiles must lie in 6\.\."):
        msa_proxy_score(**arguments, max_k_tiles=2)
    with pytest.raises(ValueError, match="cu_seqlens_k must ascend"):
        msa_proxy_score(**wrong, max_k_tiles=6)


# --- large offsets ---


def far_view(small: Tensor, strides: tuple[int, ...]) -> Tensor:
    """`small` with these strides (elements), in memory of its own that is otherwise not touched."""
    size = sum((n - 1) * s for n, s in zip(small.shape, strides, strict=True)) + 1
    bytes_each = small.element_size()
    view = reserve(size * bytes_each, "cuda").view(small.dtype).as_strided(small.shape, strides)
    for index in range(small.shape[0]):
        view[index].view(torch.uint8).copy_(small[index].view(torch.uint8))
    return view


@pytest.mark.parametrize("kv_heads, bound", [(2, None), (1, 1)])
def test_keys_past_2_31(kv_heads: int, bound: int | None) -> None:
    arguments = {**case([300, 129], [1, 1], kv_heads=kv_heads, k_dtype=FP8), "max_seqlen_q": bound}
    want = msa_proxy_score(**arguments, max_k_tiles=3)
    keys: Tensor = arguments["k"]
    pages, step = keys.shape[0], -(-BEYOND // 4 // 128) * 128
    assert step * (pages - 1) > BEYOND
    for strides in ((step, 128 * 128, 128, 1), (128 * 128, BEYOND + 128, 128, 1), (128, 128 * pages, BEYOND // 64, 1)):
        k = far_view(keys, strides)
        assert torch.equal(msa_proxy_score(**{**arguments, "k": k}, max_k_tiles=3), want)
        del k
        torch.cuda.empty_cache()


@pytest.mark.parametrize("kv_heads, bound", [(2, None), (1, 1)])
def test_flat_keys_and_queries_past_2_31(kv_heads: int, bound: int | None) -> None:
    given = case([300, 129], [1, 1], kv_heads=kv_heads, k_dtype=FP8, q_dtype=FP8, paged=False)
    arguments = {**given, "max_seqlen_q": bound}
    want = msa_proxy_score(**arguments, max_k_tiles=3)
    k = far_view(given["k"], (BEYOND // 128, 128, 1))
    q = far_view(given["q"], (BEYOND + 512, 128, 1))
    assert torch.equal(msa_proxy_score(**{**arguments, "q": q, "k": k}, max_k_tiles=3), want)


def test_scores_past_2_31() -> None:
    arguments = case([300, 129], [1, 1])
    want = msa_proxy_score(**arguments, max_k_tiles=3)
    memory = reserve((BEYOND + 8192) * 4, "cuda").view(torch.float32)
    for strides in ((BEYOND // 3, 2, 1), (2, BEYOND // 2, 1), (1, 4, BEYOND)):
        output = memory.as_strided(want.shape, strides)
        msa_proxy_score(**arguments, output=output)
        assert torch.equal(output, want)


def test_nvfp4_keys_and_scales_past_2_31() -> None:
    arguments, _, _ = fp4_case([300, 129], [1, 1], kv_heads=1)
    given = {n: x.cuda() if isinstance(x, Tensor) else x for n, x in arguments.items()}
    small = given["k_fp4"].shape[0]
    pages = BEYOND // 1024 + 12
    k = reserve(pages * 128 * 64, "cuda").view(pages, 1, 128, 64)
    scale = reserve(pages * 1024, "cuda").view(pages, 1024)
    k[pages - small :] = given["k_fp4"]
    scale[pages - small :] = given["k_scale"].view(small, 1024)
    table = torch.where(given["page_table"] < 0, -1, given["page_table"] + (pages - small))
    for bound in (None, 1):  # which do not share a kernel
        want = msa_proxy_score_fp4(**given, max_k_tiles=3, max_seqlen_q=bound)
        far = {**given, "k_fp4": k, "k_scale": scale.view(-1), "page_table": table}
        assert torch.equal(msa_proxy_score_fp4(**far, max_k_tiles=3, max_seqlen_q=bound), want)


@pytest.mark.parametrize("keys", ["bf16", "fp8", "nvfp4"])
def test_rows_of_more_parts_than_fit(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get smaller. A few requests are as long as all might be."""
    tilts: list[float] = []
    slope = score.row_slope
    monkeypatch.setattr(score, "row_slope", lambda parts, tilt: (tilts.append(tilt), slope(parts, tilt))[1])
    g = torch.Generator().manual_seed(5)
    lengths = torch.randint(0, 700, (300,), generator=g).tolist()
    lengths[3], lengths[150], lengths[299] = 16384, 16000, 16383
    tokens = [1] * 300
    options = {"max_k_tiles": 128, "max_seqlen_q": 1}
    if keys == "nvfp4":
        arguments, exact, rows = fp4_case(lengths, tokens, kv_heads=1)
        got = msa_proxy_score_fp4(**move(arguments, "cuda"), **options)
        assert_fp4_scores(got, expected(exact, rows), exact, rows)
    else:
        dtype = FP8 if keys == "fp8" else torch.bfloat16
        assert_same_as_cpu(case(lengths, tokens, q_dtype=dtype, k_dtype=dtype), **options)
    if torch.cuda.get_device_capability() == (9, 0):  # others may have another plan
        assert tilts == [score._TILT]
