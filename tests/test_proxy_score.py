"""Index scores against float64 dot products, one key at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import nvfp4_bytes
from msa_ops import msa_proxy_score_fp4, nvfp4_dequantize, nvfp4_quantize, selection
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
    buffer.fill_(NAN)
    assert msa_proxy_score(**args, output=output) is output, "the output says how many blocks there are"
    assert_scores(output[:, :3], expected(arguments, keys))
    assert (output[:, 3:] == -INF).all()


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
    "output": ({"output": torch.zeros(5, 4, 3)}, r"output must be float32 of shape \(4, 4, 3\)"),
    "few blocks": ({"output": torch.zeros(4, 2, 3)}, r"max_k_tiles must lie in 3\.\."),
    "sparse dims": ({"q": GOOD["q"].repeat(1, 1, 2)[..., ::2]}, r"q must have a dense last dim \(stride 1\)"),
    "k pitch": ({"k": torch.zeros(8, 2, 128, 129).bfloat16()[..., :128]}, "k must have rows aligned to 16 bytes"),
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


# --- NVFP4 ---


def fp4_case(
    lengths: list[int], q_tokens: list[int], *, heads: int = 4, kv_heads: int = 2, paged: bool = True, padding: int = 0,
    q_global: float = 0.75, k_global: float = 0.5, seed: int = 0,
) -> tuple[dict[str, Any], dict[str, Any], list[Tensor]]:  # fmt: skip
    """Arguments; what `expected` takes in their place; each request's keys as float64. Scales of no key are NaN."""
    g = torch.Generator().manual_seed(seed)

    def codes(*shape: int) -> Tensor:
        return torch.randint(256, (*shape, 64), dtype=torch.uint8, generator=g)

    def scales(*shape: int) -> Tensor:  # 2^-5 to 1.9, of both signs
        return torch.randint(0x10, 0x40, (*shape, 8), dtype=torch.uint8, generator=g) | (
            torch.randint(2, (*shape, 8), dtype=torch.uint8, generator=g) << 7
        )

    def tiled(rows: Tensor) -> Tensor:
        rows = rows.view(-1, 8)
        return nvfp4_bytes.tile(rows, torch.full((nvfp4_bytes.tiled_size(len(rows)),), 0x7F, dtype=torch.uint8))

    total = sum(q_tokens) + padding
    q, q_rows = codes(total, heads), scales(total, heads)
    if paged:
        counts = [-(-n // 128) for n in lengths]
        order = torch.randperm(sum(counts) + 3, generator=g)
        owned = order.split([*counts, 3])
        k, k_rows = codes(len(order), kv_heads, 128), scales(len(order), kv_heads, 128)
        table = torch.full((len(lengths), max(counts, default=0) + 1), -1, dtype=torch.int32)
        used = torch.zeros(len(order), 128, dtype=torch.bool)
        for b, n in enumerate(lengths):
            table[b, : counts[b]] = owned[b]
            used[owned[b]] = torch.arange(128) < (n - 128 * torch.arange(counts[b])[:, None])
        k_rows[~used[:, None].expand(-1, kv_heads, -1)] = 0x7F
        stored = nvfp4_bytes.values(k, k_rows).transpose(1, 2)  # (pages, tokens, heads, 128)
        keys = [stored[owned[b]].flatten(0, 1)[:n] for b, n in enumerate(lengths)]
        where = {"page_table": table, "seqused_k": torch.tensor(lengths, dtype=torch.int32)}
    else:
        k, k_rows = codes(sum(lengths) + 30, kv_heads), scales(sum(lengths) + 30, kv_heads)
        k_rows[sum(lengths) :] = 0x7F
        keys = list(nvfp4_bytes.values(k, k_rows).split([*lengths, 30])[:-1])
        where = {"cu_seqlens_k": cumulative(lengths)}
    arguments = {
        "q_fp4": q, "k_fp4": k, "q_scale": tiled(q_rows), "k_scale": tiled(k_rows), "q_global_scale": q_global,
        "k_global_scale": k_global, "cu_seqlens_q": cumulative(q_tokens), **where,
    }  # fmt: skip
    exact = {"q": nvfp4_bytes.values(q, q_rows) * (q_global * k_global), "k": k, "cu_seqlens_q": cumulative(q_tokens)}
    return arguments, exact, keys


def fp4_rounding(exact: dict[str, Any], keys: list[Tensor]) -> float:
    """Products are exact; 128 roundings of their sum, which lies below the product of the two norms."""
    longest = max((float(x.norm(dim=-1).max()) for x in keys if len(x)), default=0.0)
    return 128 * 2**-24 * float(exact["q"].norm(dim=-1).max()) * longest


def assert_fp4_scores(got: Tensor, want: Tensor, exact: dict[str, Any], keys: list[Tensor]) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=fp4_rounding(exact, keys))


FP4_LENGTHS, FP4_TOKENS = [300, 0, 128, 1, 517, 130], [1, 2, 1, 1, 4, 0]


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_nvfp4_scores_match_float64(kv_heads: int, paged: bool, device: str) -> None:
    arguments, exact, keys = fp4_case(FP4_LENGTHS, FP4_TOKENS, kv_heads=kv_heads, paged=paged, padding=2)
    got = msa_proxy_score_fp4(**move(arguments, device))
    assert got.shape == (4, 5, 11)
    assert_fp4_scores(got, expected(exact, keys), exact, keys)


@pytest.mark.parametrize("paged", [True, False])
def test_nvfp4_takes_what_the_other_takes(paged: bool, device: str) -> None:
    arguments, exact, keys = fp4_case([300, 129], [1, 2], paged=paged)
    args = move(arguments, device)
    each = msa_proxy_score_fp4(**args)
    one = msa_proxy_score_fp4(**args, reduce_heads=True)
    assert one.shape == (1, 3, 3) and torch.equal(one[0], each.amax(0))
    got = msa_proxy_score_fp4(**args, causal=False, max_seqlen_q=2, max_k_tiles=4)
    assert_fp4_scores(got[:, :3], expected(exact, keys, causal=False), exact, keys)
    assert (got[:, 3] == -INF).all()
    offset = torch.tensor([126, -1], dtype=torch.int32, device=device)
    got = msa_proxy_score_fp4(**args, q_offset=offset)
    assert_fp4_scores(got, expected(exact, keys, offset=[126, -1]), exact, keys)
    output = torch.full((3, 4, 3), NAN, device=device).permute(1, 2, 0)
    assert msa_proxy_score_fp4(**args, output=output) is output
    assert torch.equal(output, each)
    if paged:
        nhd = args["k_fp4"].transpose(1, 2).contiguous().transpose(1, 2)
        assert torch.equal(msa_proxy_score_fp4(**{**args, "k_fp4": nhd}), each)
        args["page_table"][0, 1] = 99
        got = msa_proxy_score_fp4(**args)
        assert (got[:, 1, 0] == -INF).all() and torch.equal(got[:, :, 1:], each[:, :, 1:])


def test_nvfp4_global_scales(device: str) -> None:
    """Both are in the score before the largest is taken, whatever their sign, and may be tensors."""
    for q_global, k_global in ((1.0, 3.0), (-1.0, 0.25), (-2.0, -0.5)):
        arguments, exact, keys = fp4_case([300, 129], [1, 2], q_global=q_global, k_global=k_global)
        args = move(arguments, device)
        got = msa_proxy_score_fp4(**args)
        assert_fp4_scores(got, expected(exact, keys), exact, keys)
        for name in ("q_global_scale", "k_global_scale"):
            args[name] = torch.tensor([args[name]], device=device)
        assert torch.equal(msa_proxy_score_fp4(**args), got)
    arguments["q_global_scale"] = 0.0
    got = msa_proxy_score_fp4(**move(arguments, device))
    assert torch.equal(got == 0, got > -INF) and bool((got == 0).any())


def test_nvfp4_scales_of_either_type_and_rank(device: str) -> None:
    arguments, _, _ = fp4_case([300, 129], [1, 2])
    args = move(arguments, device)
    want = msa_proxy_score_fp4(**args)
    other = {n: args[n].view(FP8).view(-1, 8) for n in ("q_scale", "k_scale")}
    assert torch.equal(msa_proxy_score_fp4(**{**args, **other}), want)


def test_nvfp4_scores_are_those_of_what_the_quantiser_gives(device: str) -> None:
    g = torch.Generator().manual_seed(5)
    q, k = torch.randn(2, 4, 128, generator=g), torch.randn(300, 2, 128, generator=g)
    sf = 448 * 6 / float(torch.maximum(q.abs().amax(), k.abs().amax()))
    (q_codes, q_scale), (k_codes, k_scale) = nvfp4_quantize(q.to(device), sf), nvfp4_quantize(k.to(device), sf)
    got = msa_proxy_score_fp4(
        q_codes, k_codes, q_scale, k_scale, 1 / sf, 1 / sf, cumulative([2]).to(device), cumulative([300]).to(device)
    )
    exact = {
        "q": nvfp4_dequantize(q_codes, q_scale, 1 / sf).double().cpu(), "k": k, "cu_seqlens_q": cumulative([2]),
    }  # fmt: skip
    keys = [nvfp4_dequantize(k_codes, k_scale, 1 / sf).double().cpu()]
    assert_fp4_scores(got, expected(exact, keys), exact, keys)


FP4, _, _ = fp4_case([300, 129], [1, 2])
FP4_BAD = {
    "q dtype": ({"q_fp4": FP4["q_fp4"].view(FP8)}, "q_fp4 must be uint8, two e2m1 codes a byte, got torch.float8"),
    "q shape": ({"q_fp4": FP4["q_fp4"].repeat(1, 1, 2)}, r"q_fp4 must have shape \(total_q, num_index_heads, 64\)"),
    "k shape": ({"k_fp4": FP4["k_fp4"][0]}, r"k_fp4 must have shape \(num_pages, num_kv_heads, 128, 64\), paged"),
    "heads": ({"q_fp4": FP4["q_fp4"][:, :3]}, "q_fp4 must have a multiple of k_fp4's heads, got 3"),
    "pitch": ({"k_fp4": torch.zeros(8, 2, 128, 72, dtype=torch.uint8)[..., :64]}, "k_fp4 must have rows aligned to 16"),
    "scale dtype": ({"k_scale": FP4["k_scale"].int()}, "k_scale must be uint8 or float8_e4m3fn, got torch.int32"),
    "few scales": ({"k_scale": FP4["k_scale"][:-1]}, "k_scale must be contiguous, of rank 1 or 2, and hold at least"),
    "scale rank": ({"q_scale": FP4["q_scale"].view(1, -1, 8)}, "q_scale must be contiguous, of rank 1 or 2"),
    "scale start": ({"q_scale": torch.zeros(1032, dtype=torch.uint8)[8:]}, "q_scale must start on a 16-byte boundary"),
    "global": ({"k_global_scale": torch.ones(2)}, "k_global_scale must be a float or a one-element float32 tensor"),
    "infinite": ({"q_global_scale": INF}, "q_global_scale must be finite in float32"),
    "product": ({"q_global_scale": 1e30, "k_global_scale": 1e30}, r"q_global_scale \* k_global_scale must be finite"),
    "lengths": ({"seqused_k": None}, "paged keys take page_table and seqused_k"),
    "few tiles": ({"max_k_tiles": 2}, r"max_k_tiles must lie in 3\.\."),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FP4_BAD))
def test_bad_nvfp4_arguments_are_refused(name: str) -> None:
    change, message = FP4_BAD[name]
    with pytest.raises(ValueError, match=message):
        msa_proxy_score_fp4(**{**FP4, **change})


@pytest.mark.parametrize("name", ["q_fp4", "k_fp4", "q_scale", "k_scale", "q_global_scale", "k_global_scale"])
def test_nvfp4_arguments_must_be_there(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be a "):
        msa_proxy_score_fp4(**{**FP4, name: None})


def test_nvfp4_output_lies_apart_from_the_scales() -> None:
    memory = torch.zeros(1 << 16)
    for name in ("q_scale", "k_scale"):
        shared = memory.view(torch.uint8)[: FP4[name].numel()]
        shared.copy_(FP4[name])
        with pytest.raises(ValueError, match=f"output must not share memory with {name}"):
            msa_proxy_score_fp4(**{**FP4, name: shared}, output=memory[:36].view(4, 3, 3))
