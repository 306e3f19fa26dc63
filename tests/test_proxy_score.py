"""Index scores against float64 dot products, one key at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from msa_ops import selection
from msa_ops.contract import FP8
from msa_ops.selection import msa_proxy_score, msa_topk_select

NAN, INF = math.nan, math.inf
DTYPES = [torch.bfloat16, torch.float16, FP8]


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, NAN).to(dtype)


def case(
    lengths: list[int], q_tokens: list[int], *, heads: int = 4, kv_heads: int = 2, paged: bool = True, padding: int = 0,
    q_dtype: torch.dtype = torch.bfloat16, k_dtype: torch.dtype = torch.bfloat16, seed: int = 0,
) -> tuple[dict[str, Any], list[Tensor]]:  # fmt: skip
    """Arguments, and each request's keys ``(length, kv_heads, 128)``. Every key of no request is NaN."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(q_tokens) + padding, heads, 128, generator=generator).to(q_dtype)
    keys = [torch.randn(n, kv_heads, 128, generator=generator).to(k_dtype) for n in lengths]
    as_bytes = torch.uint8 if k_dtype == FP8 else k_dtype
    arguments: dict[str, Any] = {"q": q, "cu_seqlens_q": cumulative(q_tokens)}
    if not paged:
        flat = [*keys, poison((30, kv_heads, 128), k_dtype)]
        arguments["k"] = torch.cat([x.view(as_bytes) for x in flat]).view(k_dtype)
        arguments["cu_seqlens_k"] = cumulative(lengths)
        return arguments, keys
    counts = [-(-n // 128) for n in lengths]
    pages = torch.randperm(sum(counts) + 3, generator=generator).int()
    table = torch.full((len(lengths), max(counts, default=0) + 1), -1, dtype=torch.int32)
    k = poison((len(pages), kv_heads, 128, 128), k_dtype)
    used = 0
    for b, (n, x) in enumerate(zip(lengths, keys, strict=True)):
        table[b, : counts[b]] = pages[used : used + counts[b]]
        used += counts[b]
        for position in range(n):
            k[table[b, position // 128], :, position % 128].view(as_bytes).copy_(x[position].view(as_bytes))
    arguments.update(k=k, page_table=table, seqused_k=torch.tensor(lengths, dtype=torch.int32))
    return arguments, keys


def cumulative(counts: list[int]) -> Tensor:
    return torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32)


def expected(
    arguments: dict[str, Any], keys: list[Tensor], *, causal: bool = True, offset: list[int] | None = None
) -> Tensor:
    q, starts = arguments["q"].double(), arguments["cu_seqlens_q"].tolist()
    group = q.shape[1] // arguments["k"].shape[1]
    blocks = max((-(-len(x) // 128) for x in keys), default=0)
    out = torch.full((q.shape[1], blocks, q.shape[0]), -INF, dtype=torch.float64)
    for b, x in enumerate(keys):
        count = starts[b + 1] - starts[b]
        first = len(x) - count if offset is None else offset[b]
        for i in range(count):
            for h in range(q.shape[1]):
                seen = max(min(first + i + 1, len(x)), 0) if causal else len(x)
                scores = x[:seen, h // group].double() @ q[starts[b] + i, h]
                for block, part in enumerate(scores.split(128)):
                    if len(part):
                        out[h, block, starts[b] + i] = part.max()
    return out


def assert_scores(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.float32
    # 128 exact products of about N(0, 1) terms summed in fp32: 128 roundings at sums of at most 60.
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=128 * 60 * 2**-24)


def move(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in arguments.items()}


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("k_dtype", DTYPES)
@pytest.mark.parametrize("q_dtype", DTYPES)
def test_scores_match_float64(q_dtype: torch.dtype, k_dtype: torch.dtype, paged: bool, device: str) -> None:
    lengths, tokens = [300, 0, 128, 1, 517, 130], [1, 2, 1, 1, 4, 0]
    arguments, keys = case(lengths, tokens, q_dtype=q_dtype, k_dtype=k_dtype, paged=paged, padding=2)
    got = msa_proxy_score(**move(arguments, device))
    want = expected(arguments, keys)
    assert got.shape == (4, 5, 11)
    assert_scores(got, want)
    assert (want == -INF).sum() > 0


@pytest.mark.parametrize("paged", [True, False])
def test_prefill_in_small_chunks(paged: bool, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    arguments, keys = case([450, 260], [400, 3], heads=2, kv_heads=1, paged=paged)
    whole = msa_proxy_score(**move(arguments, device))
    monkeypatch.setattr(selection, "_CHUNK", 2 * 128 * 50)  # 50 tokens by 1 block
    chunked = msa_proxy_score(**move(arguments, device))
    assert_scores(chunked, expected(arguments, keys))
    assert_scores(whole, expected(arguments, keys))


def test_q_offset_and_non_causal(device: str) -> None:
    arguments, keys = case([300, 200, 40], [2, 3, 1])
    args = move(arguments, device)
    offset = torch.tensor([-1, 126, 1000], dtype=torch.int32, device=device)
    assert_scores(msa_proxy_score(**args, q_offset=offset), expected(arguments, keys, offset=[-1, 126, 1000]))
    assert_scores(msa_proxy_score(**args, q_offset=5), expected(arguments, keys, offset=[5] * 3))
    assert_scores(msa_proxy_score(**args, causal=False), expected(arguments, keys, causal=False))
    assert_scores(msa_proxy_score(**args, causal=False, q_offset=5), expected(arguments, keys, causal=False))


def test_more_query_tokens_than_keys_see_nothing_before_the_first(device: str) -> None:
    arguments, keys = case([2], [5])
    got = msa_proxy_score(**move(arguments, device))
    assert_scores(got, expected(arguments, keys))
    assert (got[:, :, :3] == -INF).all() and got[:, :, 3:].isfinite().all()


def test_reduce_heads_keeps_the_largest_of_all_heads(device: str) -> None:
    arguments, _ = case([300, 129], [1, 2])
    args = move(arguments, device)
    each = msa_proxy_score(**args)
    one = msa_proxy_score(**args, reduce_heads=True)
    assert one.shape == (1, 3, 3)
    assert torch.equal(one[0], each.amax(0))


def test_max_k_tiles_and_output(device: str) -> None:
    arguments, keys = case([300, 129], [1, 2])
    args = move(arguments, device)
    buffer = torch.full((3, 4, 7), NAN, device=device)  # tokens outermost
    output = buffer.permute(1, 2, 0)
    got = msa_proxy_score(**args, max_k_tiles=7, max_seqlen_q=2, output=output, use_fp32_acc=False)
    assert got is output
    assert_scores(got[:, :3], expected(arguments, keys))
    assert (got[:, 3:] == -INF).all()


def test_strided_inputs_are_read_in_place(device: str) -> None:
    arguments, keys = case([300, 129], [1, 2])
    args = move(arguments, device)
    want = msa_proxy_score(**args)
    wide = torch.randn(3, 9, 128, device=device).bfloat16()
    wide[:, 2:6] = args["q"]
    nhd = args["k"].transpose(1, 2).contiguous().transpose(1, 2)
    table = torch.cat((args["page_table"], torch.full_like(args["page_table"], 99)), 1)[
        :, : args["page_table"].shape[1]
    ]
    got = msa_proxy_score(**{**args, "q": wide[:, 2:6], "k": nhd, "page_table": table})
    assert torch.equal(got, want)
    assert_scores(got, expected(arguments, keys))


def test_pages_outside_the_cache_have_no_score(device: str) -> None:
    arguments, keys = case([300, 300], [1, 1])
    arguments["page_table"][0, 1] = 10**6
    arguments["page_table"][1, 0] = -5
    want = expected(arguments, keys)
    want[:, 1, 0] = -INF
    want[:, 0, 1] = -INF
    assert_scores(msa_proxy_score(**move(arguments, device)), want)


def test_a_requests_scores_do_not_depend_on_its_batch(device: str) -> None:
    arguments, _ = case([300, 517, 40], [1, 1, 1])
    args = move(arguments, device)
    whole = msa_proxy_score(**args)
    alone = msa_proxy_score(
        args["q"][1:2], args["k"], cumulative([1]).to(device), page_table=args["page_table"][1:2],
        seqused_k=args["seqused_k"][1:2],
    )  # fmt: skip
    assert torch.equal(alone[:, :, 0], whole[:, :5, 1])


def test_scores_feed_the_selection(device: str) -> None:
    arguments, keys = case([2000, 700], [1, 2], heads=2, kv_heads=2)
    scores = msa_proxy_score(**move(arguments, device))
    got = msa_topk_select(scores, 4, force_end_blocks=1, num_valid_pages=extents(device))
    want = expected(arguments, keys)
    for t, n in enumerate(extents("cpu").tolist()):
        for h in range(2):
            best = want[h, : n - 1, t].topk(3).indices.tolist()
            assert got[t, h].tolist() == sorted([*best, n - 1])


def extents(device: str) -> Tensor:
    return torch.tensor([16, 6, 6], dtype=torch.int32, device=device)


def test_an_empty_batch_gives_an_empty_or_unseen_result(device: str) -> None:
    arguments, _ = case([], [], padding=3)
    assert msa_proxy_score(**move(arguments, device)).shape == (4, 0, 3)
    assert (msa_proxy_score(**move(arguments, device), max_k_tiles=2) == -INF).all()


GOOD, _ = case([300, 129], [1, 2])
FLAT, _ = case([300, 129], [1, 2], paged=False)
BAD = {
    "q dtype": ({"q": GOOD["q"].float()}, "q must be bfloat16, float16 or float8_e4m3fn, got torch.float32"),
    "q shape": ({"q": GOOD["q"][..., :64]}, r"q must have shape \(total_q, num_index_heads, 128\)"),
    "k shape": ({"k": GOOD["k"][0]}, r"k must have shape \(num_pages, num_kv_heads, 128, 128\), paged"),
    "flat k": ({**FLAT, "k": GOOD["k"], "page_table": None, "seqused_k": None}, r"k must have shape \(total_k"),
    "heads": ({"q": GOOD["q"][:, :3]}, "q must have a multiple of k's heads, got 3 index heads and 2 KV heads"),
    "cu dtype": ({"cu_seqlens_q": GOOD["cu_seqlens_q"].long()}, "cu_seqlens_q must be int32"),
    "cu total": ({"cu_seqlens_q": cumulative([1, 3])}, r"cu_seqlens_q must ascend from at least 0 to at most 3"),
    "cu order": ({"cu_seqlens_q": torch.tensor([0, 2, 1], dtype=torch.int32)}, "cu_seqlens_q must ascend"),
    "both": ({"cu_seqlens_k": cumulative([1, 1])}, "paged keys take page_table and seqused_k"),
    "neither": ({**FLAT, "cu_seqlens_k": None, "page_table": None, "seqused_k": None}, "flat keys take cu_seqlens_k"),
    "cu k": ({**FLAT, "cu_seqlens_k": cumulative([300, 160]), "page_table": None, "seqused_k": None}, "at most 459"),
    "table": ({"page_table": GOOD["page_table"].long()}, "page_table must be int32"),
    "lengths": ({"seqused_k": torch.tensor([513, 1], dtype=torch.int32)}, "seqused_k must fit page_table's 4 pages"),
    "few tiles": ({"max_k_tiles": 2}, r"max_k_tiles must lie in 3\.\."),
    "few tokens": ({"max_seqlen_q": 1}, r"max_seqlen_q must lie in 2\.\."),
    "offset": ({"q_offset": torch.zeros(2, dtype=torch.int64)}, "q_offset must be int32"),
    "0-d table": ({"page_table": torch.tensor(0, dtype=torch.int32)}, r"page_table must have shape .*, got \(\)"),
    "1-d table": ({"page_table": GOOD["page_table"][0]}, r"page_table must have shape \(batch, max_pages\), got \(4,\)"),
    "cu shape": ({"cu_seqlens_q": GOOD["cu_seqlens_q"][0]}, r"cu_seqlens_q must have shape \(batch \+ 1,\), got \(\)"),
    "expanded": ({"output": torch.zeros(4, 3, 1).expand(4, 3, 3)}, "output must have memory for each of its elements"),
    "output": ({"output": torch.zeros(4, 4, 3)}, r"output must be float32 of shape \(4, 3, 3\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD))
def test_bad_arguments_are_refused(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        msa_proxy_score(**{**GOOD, **change})


def test_a_pool_without_pages_gives_unseen_blocks(device: str) -> None:
    """Every page id lies outside it."""
    for dtype in DTYPES:
        arguments, _ = case([128], [1], k_dtype=dtype)
        arguments.update(k=torch.empty(0, 2, 128, 128, dtype=dtype), page_table=torch.tensor([[-1]], dtype=torch.int32))
        assert torch.equal(msa_proxy_score(**move(arguments, device)).cpu(), torch.full((4, 1, 1), -INF))


@pytest.mark.parametrize("k_dtype", DTYPES)
def test_autocast_does_not_round_the_products(k_dtype: torch.dtype, device: str) -> None:
    arguments, _ = case([300, 129], [1, 2], k_dtype=k_dtype)
    args = move(arguments, device)
    want = msa_proxy_score(**args)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = msa_proxy_score(**args)
        selected = msa_topk_select(got, 2)
        assert torch.is_autocast_enabled(device)
    assert got.dtype == torch.float32 and torch.equal(got, want)
    assert torch.equal(selected, msa_topk_select(want, 2))


def test_the_output_lies_apart_from_the_inputs() -> None:
    memory = torch.zeros(1 << 19)
    for name in ("q", "k", "page_table"):
        tensor = GOOD[name]
        shared = memory.view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
        shared.copy_(tensor)
        output = memory[:36].view(4, 3, 3)
        with pytest.raises(ValueError, match=f"output must not share memory with {name}, which is read while"):
            msa_proxy_score(**{**GOOD, name: shared}, output=output)
        assert torch.equal(shared.view(torch.uint8), tensor.view(torch.uint8)), "refused before anything was written"
        free = memory[-36:].view(4, 3, 3)
        assert torch.equal(msa_proxy_score(**{**GOOD, name: shared}, output=free), msa_proxy_score(**GOOD))


@pytest.mark.parametrize("name", ["q", "k", "cu_seqlens_q", "page_table", "seqused_k", "output"])
def test_tensors_must_be_strided(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be a strided tensor, got torch.sparse_coo"):
        msa_proxy_score(**{**GOOD, name: torch.zeros(2, 2).to_sparse()})


@pytest.mark.parametrize("name", ["q", "k", "cu_seqlens_q", "page_table", "seqused_k", "output"])
def test_tensors_must_be_tensors(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be a torch.Tensor, got list"):
        msa_proxy_score(**{**GOOD, name: [[0, 1]]})


def test_ints_must_be_ints() -> None:
    for name in ("max_seqlen_q", "max_k_tiles", "q_offset"):
        with pytest.raises(TypeError, match=f"^{name} must be an int, got float"):
            msa_proxy_score(**GOOD, **{name: 3.0})


@pytest.mark.parametrize("name", ["causal", "reduce_heads", "use_fp32_acc"])
def test_flags_must_be_bools(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a bool, got int"):
        msa_proxy_score(**GOOD, **{name: 1})
