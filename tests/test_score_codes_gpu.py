"""Scores of NVFP4 keys by products of their codes, bit for bit: a group's product is exact, and a key's eight are added in
turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import nvfp4_bytes
from msa_ops import msa_proxy_score_fp4
from msa_ops.engines.cuda import score
from msa_ops.engines.cuda.launch import device_facts
from test_pitfalls_gpu import captured
from test_proxy_score import cumulative

pytestmark = pytest.mark.gpu
INF = float("inf")
LENGTHS = [9000, 130, 0, 1, 128, 1500, 257, 8192, 77]


@pytest.fixture(autouse=True)
def multiplied() -> None:
    facts = device_facts(torch.cuda.current_device())
    if score._row_width(score.OPERANDS["nvfp4"], 4, True, facts.shared_per_multiprocessor) != score.CODE_COLUMNS:
        pytest.skip("this GPU has too little shared memory for the kernels that multiply codes")


class Case:
    """A paged cache with one KV head, of as many pages as its requests need and some more, whose bytes would show."""

    def __init__(
        self, lengths: list[int], tokens: list[int], heads: int, seed: int = 0, scales: Tensor | None = None
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.lengths, self.tokens, self.heads = lengths, tokens, heads
        # Of both signs, and with all mantissas.
        self.scales = torch.tensor([*range(0x20, 0x50), *range(0xA0, 0xD0)]) if scales is None else scales
        counts = [-(-n // 128) for n in lengths]
        pages = torch.randperm(sum(counts) + 2, generator=g)
        self.q, self.q_rows = self._bytes(g, sum(tokens), heads)
        self.k, self.k_rows = self._bytes(g, len(pages), 128)
        table = torch.full((len(lengths), max(counts) + 1), -1)
        for b, own in enumerate(pages.split([*counts, 2])[:-1]):
            table[b, : counts[b]] = own
            if lengths[b] % 128:
                self.k_rows[own[-1], lengths[b] % 128 :] = 0x7F  # NaN
        self.k_rows[pages[-2:]] = 0x7F
        self.table = table

    def _bytes(self, g: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(256, (*shape, 64), dtype=torch.uint8, generator=g)
        return codes, self.scales[torch.randint(len(self.scales), (*shape, 8), generator=g)].to(torch.uint8)

    def arguments(self, factor: float | Tensor = 0.375, device: str = "cuda") -> dict[str, Any]:
        def tiled(rows: Tensor) -> Tensor:
            rows = rows.view(-1, 8)
            fill = torch.full((nvfp4_bytes.tiled_size(len(rows)),), 0x7F, dtype=torch.uint8)
            return nvfp4_bytes.tile(rows, fill).to(device)

        return {
            "q_fp4": self.q.to(device), "k_fp4": self.k[:, None].to(device), "q_scale": tiled(self.q_rows),
            "k_scale": tiled(self.k_rows), "q_global_scale": factor, "k_global_scale": 1.0,
            "cu_seqlens_q": cumulative(self.tokens).to(device), "page_table": self.table.int().to(device),
            "seqused_k": torch.tensor(self.lengths, dtype=torch.int32, device=device),
        }  # fmt: skip

    def expected(
        self, blocks: int, factor: float = 0.375, *, reduce_heads: bool = False, causal: bool = True,
        q_offset: int | None = None,
    ) -> Tensor:  # fmt: skip
        """``(heads, blocks, tokens)``, float32."""
        out = torch.full((self.heads, blocks, sum(self.tokens)), -INF)
        first = 0
        for b, (n, tokens) in enumerate(zip(self.lengths, self.tokens, strict=True)):
            rows = slice(first, first + tokens)
            first += tokens
            if n == 0 or tokens == 0:
                continue
            pages = self.table[b, : -(-n // 128)]
            keys = self.products(
                self.q[rows], self.q_rows[rows], self.k[pages].view(-1, 64), self.k_rows[pages].view(-1, 8), factor
            )
            position = torch.arange(tokens) + (n - tokens if q_offset is None else q_offset)
            limit = (position + 1).clamp(0, n) if causal else torch.full((tokens,), n)
            unseen = torch.arange(keys.shape[-1]) >= limit[:, None, None]
            best = keys.masked_fill(unseen, -INF).unflatten(-1, (-1, 128)).amax(-1)  # (tokens, heads, blocks)
            best = best * abs(factor)
            best = best.masked_fill(torch.arange(best.shape[-1]) * 128 >= limit[:, None, None], -INF)[..., :blocks]
            out[:, : best.shape[-1], rows] = best.permute(1, 2, 0)
        return out.amax(0, keepdim=True) if reduce_heads else out

    @staticmethod
    def products(q: Tensor, q_rows: Tensor, k: Tensor, k_rows: Tensor, factor: float) -> Tensor:
        """``(tokens, heads, keys)``: each addition rounded once: float64 holds what is added exactly."""

        def values(codes: Tensor) -> Tensor:
            return nvfp4_bytes.E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()].unflatten(-1, (8, 16))

        exact = torch.einsum("thgd,kgd->thkg", values(q), values(k))
        exact = exact * nvfp4_bytes.E4M3[q_rows.long()][:, :, None] * (-1.0 if factor < 0 else 1.0)
        scales, total = nvfp4_bytes.E4M3[k_rows.long()], torch.zeros(exact.shape[:-1])
        for group in range(8):
            total = (exact[..., group] * scales[:, group] + total.double()).float()
        return total


def assert_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("heads, tokens", [(4, 1), (3, 1), (2, 1), (1, 1), (2, 2), (1, 4), (1, 3)])
def test_bits(way: str, heads: int, tokens: int) -> None:
    """Some requests have no tokens, or more than is promised; some blocks that tokens see are not wanted."""
    case = Case([*LENGTHS, 300, 513], [tokens] * len(LENGTHS) + [0, tokens + 6], heads)
    for options in (
        {}, {"reduce_heads": True}, {"causal": False}, {"q_offset": -3}, {"q_offset": 2**31 - 1}, {"q_offset": 200},
    ):  # fmt: skip
        for blocks in (40, 73):
            before = score.calls.copy()
            got = msa_proxy_score_fp4(**case.arguments(), **options, max_k_tiles=blocks, max_seqlen_q=tokens)
            assert {entry.split()[1] for entry in score.calls - before} == {f"msa_score_{way}_{score.CODE_COLUMNS}"}
            assert_same(got, case.expected(blocks, **options))


@pytest.mark.parametrize("factor", [-0.375, 0.0, 2.0**100, -(2.0**-120)])
def test_factors(way: str, factor: float) -> None:
    case = Case([700, 130], [1, 1], 4)
    want = case.expected(6, factor)
    for given in (factor, torch.tensor([factor], device="cuda")):
        assert_same(msa_proxy_score_fp4(**case.arguments(given), max_k_tiles=6, max_seqlen_q=1), want)
    both = case.arguments(torch.tensor([-factor], device="cuda")) | {
        "k_global_scale": torch.tensor([-1.0], device="cuda")
    }
    assert_same(msa_proxy_score_fp4(**both, max_k_tiles=6, max_seqlen_q=1), want)


def test_every_scale(way: str) -> None:
    """Subnormal ones, the largest, both signs; and NaN, which makes its block NaN."""
    numbers = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F])
    case = Case([5000, 3000], [1, 1], 4, scales=numbers)
    assert set(case.k_rows.unique().tolist()) == {*numbers.tolist(), 0x7F}
    assert_same(msa_proxy_score_fp4(**case.arguments(), max_k_tiles=40, max_seqlen_q=1), case.expected(40))
    if torch.cuda.get_device_capability() < (8, 9):
        return  # scales are widened by integer operations, which know no NaN
    case = Case([5120] * 8, [1] * 8, 4)
    for page in case.table[:, ::3].flatten().tolist():
        case.k_rows[page, 77, page % 8] = 0x7F if page % 2 else 0xFF
    case.q_rows[3, 2, 5] = 0x7F
    got = msa_proxy_score_fp4(**case.arguments(), max_k_tiles=40, max_seqlen_q=1)
    assert bool(got[:, ::3].isnan().all() and got[2, :, 3].isnan().all())
    assert bool(got[:2, 1::3].isfinite().all())
    assert_same(got, case.expected(40))


def test_pages_outside_the_cache_and_any_strides(way: str) -> None:
    """Tokens 192 bytes apart, pages with gaps, every second entry of a wider table, queries that are apart."""
    case = Case([5000, 300, 1], [1, 1, 1], 4)
    want = case.expected(41)
    given = case.arguments()
    k, q, table = given["k_fp4"], given["q_fp4"], given["page_table"]
    apart = torch.full((len(k), 130, 3, 64), 0x77, dtype=torch.uint8, device="cuda")
    apart[:, 1:129, 1] = k[:, 0]
    wide = torch.full((3, 2 * table.shape[1]), 10**9, dtype=torch.int32, device="cuda")
    wide[:, ::2] = table
    queries = torch.full((3, 9, 64), 0x77, dtype=torch.uint8, device="cuda")
    queries[:, 1::2] = q
    given |= {"k_fp4": apart[:, 1:129, 1:2].transpose(1, 2), "page_table": wide[:, ::2], "q_fp4": queries[:, 1::2]}
    assert_same(msa_proxy_score_fp4(**given, max_k_tiles=41, max_seqlen_q=1), want)
    for block, page in ((0, -1), (3, 10**9), (4, len(k)), (5, -(2**31)), (39, -1)):
        wide[:, 2 * block] = page
        want[:, block] = -INF
    assert_same(msa_proxy_score_fp4(**given, max_k_tiles=41, max_seqlen_q=1), want)


def test_tokens_of_all_pages_side_by_side_and_one_request_without_a_bound(way: str) -> None:
    """A token's keys of all pages are neighbours; one request's tokens need no bound to be few."""
    case = Case([3000], [1], 4)
    given = case.arguments()
    k = given["k_fp4"]
    given["k_fp4"] = k.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    assert given["k_fp4"].stride() == (64, 64, 64 * len(k), 1)
    before = score.calls.copy()
    assert_same(msa_proxy_score_fp4(**given, max_k_tiles=24), case.expected(24))
    assert {entry.split()[1] for entry in score.calls - before} == {f"msa_score_{way}_{score.CODE_COLUMNS}"}


def test_more_tokens_than_promised_and_no_pages(way: str) -> None:
    """A thread block begins the next tokens after a row whose last blocks had nothing to copy."""
    case = Case([5000, 900, 5000], [7, 3, 1], 4)
    given, want = case.arguments(), case.expected(41)
    for block in (1, 6, 7, 36, 37, 38, 39):
        given["page_table"][:, block] = -1 if block % 2 else 10**9
        want[:, block] = -INF
    assert_same(msa_proxy_score_fp4(**given, max_k_tiles=41, max_seqlen_q=1), want)


def test_replays_follow_lengths() -> None:
    case = Case([9000] * 4, [1] * 4, 4)
    given = case.arguments()
    output = torch.full((4, 71, 4), 7.0, device="cuda")
    graph = captured(lambda: msa_proxy_score_fp4(**given, max_seqlen_q=1, output=output))
    for lengths in ([1, 128, 0, 129], [130, 3000, 8999, 257], [9000] * 4, [0] * 4, [5000, 1, 9000, 4096]):
        given["seqused_k"].copy_(torch.tensor(lengths, dtype=torch.int32))
        case.lengths = lengths
        graph.replay()
        assert_same(output, case.expected(71))
