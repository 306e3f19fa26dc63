"""The decoding-step kernels of the index scores without a GPU: their own sources, run on the host (device_code.h).

Threads run in any order that their barriers allow, and copies arrive as early or late as they may.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import device_code
import nvfp4_bytes
from device_code import ARRIVALS, DeviceError, Kernels
from msa_ops import msa_proxy_score_fp4, proxy_score, selection
from msa_ops.contract import FP8
from msa_ops.engines.cuda import score
from msa_ops.selection import ScoreProblem, msa_proxy_score
from test_proxy_score import assert_fp4_scores, assert_scores, expected, fp4_case, fp4_rounding
from test_proxy_score import case as unscaled_case
from test_score_codes_gpu import Case, assert_same

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fibers are glibc's"),
    pytest.mark.skipif(
        device_code.compiler() is None, reason="no C++ compiler: neither $CXX nor c++ nor g++ is on PATH"
    ),
]
INF = float("inf")
SHARED = 228 << 10
READ = (
    "q",
    "q_scale",
    "q_global",
    "k",
    "k_scale",
    "k_global",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "page_table",
    "seqused_k",
    "q_offset",
)
LENGTHS = [700, 130, 0, 1, 128, 257, 77]
Build = Callable[..., Kernels]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`device_code.build` of the row kernels of some operands, once for each session."""
    folder = tmp_path_factory.mktemp("device_code")

    @lru_cache(None)
    def built(operands: str, arch: int = 900, edit: tuple[str, str] | None = None) -> Kernels:
        name = f"{operands}-{arch}-{len(list(folder.iterdir()))}"
        return device_code.build(score.PROGRAMS[operands, True], folder / name, arch, edit)

    return built


@dataclass
class Host:
    """Where the ops' calls are run. Of each the order and the arrival of copies differ, and they are the same every time."""

    build: Build
    arch: int = 900
    edit: tuple[str, str] | None = None
    arrivals: str | None = None  # None: each in turn
    before: dict[str, Tensor] = field(default_factory=dict)
    """What stood in tensors of the call, by their names in `ScoreProblem`, while the kernel before still ran."""
    left_alone: dict[str, int] = field(default_factory=dict)
    """Bytes at the end of tensors of the call that nothing may read."""
    runs: list[str] = field(default_factory=list)
    hints: dict[str, int] = field(default_factory=dict)
    """How often threads of the last call have asked L2 for a line of a tensor."""

    def score_blocks(self, problem: ScoreProblem, seqlen_q: int | None, blocks: int, _: None) -> Tensor:
        """In place of `selection.score_blocks`."""
        tokens, heads = problem.q.shape[:2]
        output = torch.full((1 if problem.reduce_heads else heads, blocks, tokens), 7.0)
        seed = len(self.runs)
        sms = (132, 1)[seed % 2]  # of one, not all thread blocks settle early what to begin with
        plan = score.plan_for(problem, seqlen_q, output, sms, SHARED)
        self.runs.append(plan.entry)
        tensors = {name: getattr(problem, name) for name in READ}
        kernels = self.build(score.operands_of(problem.q.dtype, problem.k.dtype), self.arch, self.edit)
        tensors = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
        assert self.before.keys() | self.left_alone.keys() <= tensors.keys()
        hints = kernels.launch(
            plan,
            score.pack(problem, plan, output),
            [(x, self.before.get(n), self.left_alone.get(n, 0)) for n, x in tensors.items()],
            self.arrivals or ARRIVALS[seed % 3],
            seed,
        )
        self.hints = dict(zip(tensors, hints, strict=True))
        return output


@pytest.fixture
def host(build: Build, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """All calls of the test run here."""
    here = Host(build)
    for module in (proxy_score, selection):
        monkeypatch.setattr(module, "score_blocks", here.score_blocks)
    score.make_plan.cache_clear()
    yield here
    score.make_plan.cache_clear()


def scores(given: dict[str, Any], blocks: int, tokens: int = 1, **options: Any) -> Tensor:
    return msa_proxy_score_fp4(**given, **options, max_k_tiles=blocks, max_seqlen_q=tokens)


def order_of_sums(case: Case, factor: float) -> float:
    """By how much scores of widened keys may differ from those of codes, which are added in another order."""
    queries = {"q": nvfp4_bytes.values(case.q, case.q_rows)}
    seen = [nvfp4_bytes.values(case.k, case.k_rows).flatten(0, 1).nan_to_num()]
    return 2 * fp4_rounding(queries, seen) * factor


# --- products of codes, bit for bit ---


@pytest.mark.parametrize("heads, tokens", [(4, 1), (3, 1), (2, 1), (1, 1), (2, 2), (1, 4), (1, 3)])
def test_bits(host: Host, way: str, heads: int, tokens: int) -> None:
    """Some requests have no tokens, or more than is promised; some blocks that tokens see are not wanted."""
    case = Case([*LENGTHS, 300, 513], [tokens] * len(LENGTHS) + [0, tokens + 6], heads)
    given = case.arguments(device="cpu")
    for options in ({}, {"reduce_heads": True}, {"causal": False}, {"q_offset": -3}, {"q_offset": 200}):
        for blocks in (8, 4):
            assert_same(scores(given, blocks, tokens, **options), case.expected(blocks, **options))
    assert set(host.runs) == {f"msa_score_{way}_{score.CODE_COLUMNS}"}


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_offsets_of_each_request(host: Host, way: str, arrivals: str) -> None:
    host.arrivals = arrivals
    case = Case([700, 300, 129], [2, 2, 2], 2)
    given, offsets = case.arguments(device="cpu"), [500, -1, 2**31 - 1]
    got = scores(given, 7, 2, q_offset=torch.tensor(offsets, dtype=torch.int32))
    for b, offset in enumerate(offsets):
        rows = slice(2 * b, 2 * b + 2)
        assert_same(got[..., rows], case.expected(7, q_offset=offset)[..., rows])


@pytest.mark.parametrize("factor", [-0.375, 0.0, 2.0**100, -(2.0**-120)])
def test_factors(host: Host, way: str, factor: float) -> None:
    case = Case([700, 130], [1, 1], 4)
    for given in (factor, torch.tensor([factor])):
        assert_same(scores(case.arguments(given, "cpu"), 6), case.expected(6, factor))


@pytest.mark.parametrize("factor", [2.0**100, 2.0**-120])
def test_large_and_small_factors_of_widened_codes(host: Host, way: str, factor: float) -> None:
    """Powers of two that widening brings in, multiplied with a large one first, would be infinite."""
    case = Case([700, 130], [1, 1], 8)
    got, want = scores(case.arguments(factor, "cpu"), 6), case.expected(6, factor)
    torch.testing.assert_close(got, want, rtol=0, atol=order_of_sums(case, factor))


@pytest.mark.parametrize("arch", [800, 900])
def test_every_scale(host: Host, way: str, arch: int) -> None:
    """Subnormal ones, the largest, both signs. Before 8.9 they are widened by integer operations, which know no NaN."""
    host.arch = arch
    numbers = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F])
    case = Case([900, 640], [1, 1], 4, scales=numbers)
    assert set(case.k_rows.unique().tolist()) == {*numbers.tolist(), 0x7F}
    assert_same(scores(case.arguments(device="cpu"), 8), case.expected(8))
    if arch == 800:
        return
    for page in case.table[1, :5:2].tolist():
        case.k_rows[page, 77, page % 8] = 0x7F if page % 2 else 0xFF
    case.q_rows[0, 2, 5] = 0x7F
    got = scores(case.arguments(device="cpu"), 8)
    assert bool(got[:, :5:2, 1].isnan().all() and got[2, :, 0].isnan().all() and got[:2, 1::2, 0].isfinite().all())
    assert_same(got, case.expected(8))


def test_pages_outside_the_cache_any_strides_and_more_tokens_than_promised(host: Host, way: str) -> None:
    """Tokens 192 bytes apart, pages with gaps, every second entry of a wider table, queries that are apart."""
    case = Case([1400, 300, 1], [6, 3, 1], 4)
    want = case.expected(12)
    given = case.arguments(device="cpu")
    k, q, table = given["k_fp4"], given["q_fp4"], given["page_table"]
    apart = torch.full((len(k), 130, 3, 64), 0x77, dtype=torch.uint8)
    apart[:, 1:129, 1] = k[:, 0]
    wide = torch.full((3, 2 * table.shape[1]), 10**9, dtype=torch.int32)
    wide[:, ::2] = table
    queries = torch.full((10, 9, 64), 0x77, dtype=torch.uint8)
    queries[:, 1::2] = q
    given |= {"k_fp4": apart[:, 1:129, 1:2].transpose(1, 2), "page_table": wide[:, ::2], "q_fp4": queries[:, 1::2]}
    for pages in ({}, {0: -1, 3: 10**9, 9: len(k)}, {4: -(2**31), 8: -1, 10: -1}):
        for block, page in pages.items():
            wide[:, 2 * block] = page
            want[:, block] = -INF
        for _ in ARRIVALS:
            assert_same(scores(given, 12), want)
    host.edit = ("last >= BLOCK_KEYS - 1 && p.k_row == ROW_BYTES", "last >= BLOCK_KEYS - 1")
    host.build("nvfp4", host.arch, host.edit)
    with pytest.raises(AssertionError):
        assert_same(scores(given, 12), want)


@pytest.mark.parametrize(
    "edit",
    [
        ("has_page(p, page) ? run.highest", "true ? run.highest"),
        ("all_seen & Copier::side_by_side(p, copier.last)", "all_seen & p.k_row == ROW_BYTES"),
    ],
)
def test_pages_outside_the_cache_between_others(
    host: Host, edit: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Of keys that lie side by side, before and behind blocks that are there."""
    monkeypatch.setattr(score, "_row_parts", lambda *_: ("row", 1))
    case = Case([1500, 300], [1, 1], 4)
    given = case.arguments(device="cpu")
    table = given["page_table"]
    for pages in ({4: -1, 9: 10**9}, {0: -1, 1: 10**9, 5: len(case.k)}):
        want = case.expected(12)
        want[:, list(pages), 0] = -INF
        given["page_table"] = table.clone()
        given["page_table"][0, list(pages)] = torch.tensor(list(pages.values()), dtype=torch.int32)
        for _ in ARRIVALS:
            assert_same(scores(given, 12), want)
    host.edit = edit
    host.build("nvfp4", host.arch, host.edit)
    with pytest.raises((DeviceError, AssertionError)):
        assert_same(scores(given, 12), want)


@pytest.mark.parametrize(
    "heads, edit",
    [
        (4, ("min(key + 8 * set + 32 * i, last)", "key + 8 * set + 32 * i")),
        (4, ("last >= BLOCK_KEYS - 1 && p.k_row == ROW_BYTES", "last >= 0 && p.k_row == ROW_BYTES")),
        (8, ("first + min(own + row(i), last) * (i64)p.k_row", "first + (own + row(i)) * (i64)p.k_row")),
    ],
)
def test_keys_that_no_token_sees_are_not_read(host: Host, way: str, heads: int, edit: tuple[str, str]) -> None:
    ends_with_the_last_key(host, Case([300, 129], [1, 1], heads), edit)


def test_keys_that_no_token_sees_are_not_read_behind_a_whole_block(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the warp's two blocks all keys of the first are seen."""
    monkeypatch.setattr(score, "_row_parts", lambda *_: ("row", 1))
    edit = ("Copier::side_by_side(p, Copier::last_seen(p, same, next, page_ahead))", "true")
    ends_with_the_last_key(host, Case([7 * 128 - 84, 129], [1, 1], 4), edit)


def ends_with_the_last_key(host: Host, case: Case, edit: tuple[str, str]) -> None:
    """The cache ends with the last key of the first request, in the middle of a page; the edited kernel reads on."""
    given, end, blocks = case.arguments(device="cpu"), len(case.k) - 1, -(-case.lengths[0] // 128)
    last = int(case.table[0, blocks - 1])
    order = torch.arange(end + 1)
    order[[last, end]] = order[[end, last]]
    given["k_fp4"], given["k_scale"] = given["k_fp4"][order], given["k_scale"].view(-1, 1024)[order].flatten()
    given["page_table"] = torch.where(case.table < 0, -1, order[case.table]).int()
    host.left_alone = {"k": (blocks * 128 - case.lengths[0]) * 64}
    bound = 0.0 if case.heads == 4 else order_of_sums(case, 0.375)
    for _ in ARRIVALS:
        torch.testing.assert_close(scores(given, blocks + 1), case.expected(blocks + 1), rtol=0, atol=bound)
    host.edit = edit
    host.build("nvfp4", host.arch, host.edit)
    with pytest.raises(DeviceError):
        scores(given, blocks + 1)


def stale(now: Tensor, values: list[int], seed: int) -> Tensor:
    """Some elements as they were before."""
    g = torch.Generator().manual_seed(seed)
    other = torch.tensor(values, dtype=now.dtype)[torch.randint(len(values), now.shape, generator=g)]
    return torch.where(torch.rand(now.shape, generator=g) < 0.5, other, now)


def other_bytes(now: Tensor, seed: int) -> Tensor:
    return torch.randint(256, now.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def guess(host: Host, given: dict[str, Any], seed: int) -> None:
    """Lengths, tokens, pages and queries were others, and all numbers are possible."""
    host.before = {
        "seqused_k": stale(given["seqused_k"], [0, 1, 128, 300, 1000, -7, 2**31 - 1], seed),
        "cu_seqlens_q": stale(given["cu_seqlens_q"], [0, 1, 2, 3, -5, 10**9], seed),
        "page_table": stale(given["page_table"], [-1, 0, 1, 2, len(given["k_fp4"]), 10**9], seed),
        "q": other_bytes(given["q_fp4"], seed),
        "q_scale": other_bytes(given["q_scale"].view(torch.uint8), seed),
    }


def test_stale_guesses(host: Host, way: str) -> None:
    for seed in range(12):
        case = Case([700, 300, 0, 129], [1, 1, 1, 2 + seed % 3], 4 - seed % 2, seed)
        given = case.arguments(device="cpu")
        guess(host, given, seed)
        for options in ({}, {"reduce_heads": True}, {"q_offset": 250}):
            assert_same(scores(given, 7, **options), case.expected(7, **options))


@pytest.mark.parametrize("lengths", [[1], [129, 1000, 300, 0, 640, 257]])
def test_the_queries_of_each_request_are_asked_for_once(host: Host, way: str, lengths: list[int]) -> None:
    """By the heads' rows, and of scales two lines; however few blocks the request has."""
    case, asked = Case(lengths, [1] * len(lengths), 3), len(lengths) - lengths.count(0)
    assert_same(scores(case.arguments(device="cpu"), 8), case.expected(8))
    assert (host.hints["q"], host.hints["q_scale"]) == (3 * asked, 2 * asked)


def test_global_scales_that_the_kernel_before_writes(host: Host, way: str) -> None:
    case = Case([700, 130], [1, 1], 4)
    given = case.arguments(torch.tensor([-0.375]), "cpu") | {"k_global_scale": torch.ones(1)}
    host.before = {"q_global": torch.tensor([5.0]), "k_global": torch.tensor([torch.nan])}
    for _ in ARRIVALS:
        assert_same(scores(given, 6), case.expected(6, -0.375))


def test_tokens_of_three_heads_whose_scores_are_all_below_zero(host: Host, way: str) -> None:
    """The fourth pair of the products is nobody's."""
    case = Case([1] * 40, [1] * 40, 3)
    want = case.expected(1, reduce_heads=True)
    assert bool((want < 0).any())
    assert_same(scores(case.arguments(device="cpu"), 1, reduce_heads=True), want)
    host.edit = ("run.heads == 3 && (lane & 3) == 3", "false")
    host.build("nvfp4", host.arch, host.edit)
    with pytest.raises(AssertionError):
        assert_same(scores(case.arguments(device="cpu"), 1, reduce_heads=True), want)


# --- widened keys, against float64 ---


@pytest.mark.parametrize("arch", [800, 900])
@pytest.mark.parametrize(
    "heads, tokens, paged", [(4, 1, False), (8, 1, True), (5, 3, True), (16, 2, True), (8, 4, False)]
)
def test_widened_codes(host: Host, way: str, heads: int, tokens: int, paged: bool, arch: int) -> None:
    host.arch = arch
    counts = [tokens, tokens, 1, tokens + 2]
    arguments, exact, keys = fp4_case([300, 0, 1, 129], counts, heads=heads, kv_heads=1, paged=paged, padding=2)
    want = expected(exact, keys)
    if paged:
        arguments["page_table"][3, 1] = 10**9
        want[:, 1, -tokens - 4 : -2] = -INF
        guess(host, arguments, heads)
    assert_fp4_scores(scores(arguments, 3, tokens), want, exact, keys)
    assert_fp4_scores(scores(arguments, 3, tokens, reduce_heads=True), want.amax(0, keepdim=True), exact, keys)
    columns = next(n for n in (8, 16, 32) if heads * tokens <= n)
    assert set(host.runs) == {f"msa_score_{way}_{columns}"}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("heads", [4, 12])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize("k_dtype", [torch.bfloat16, torch.float16, FP8])
def test_other_formats(
    host: Host, way: str, q_dtype: torch.dtype, k_dtype: torch.dtype, heads: int, paged: bool
) -> None:  # fmt: skip
    arguments, keys = unscaled_case(
        [300, 0, 1, 129], [1, 1, 1, 3], heads=heads, kv_heads=1, paged=paged, padding=2, q_dtype=q_dtype, k_dtype=k_dtype,
    )  # fmt: skip
    want = expected(arguments, keys)
    assert_scores(msa_proxy_score(**arguments, max_k_tiles=3, max_seqlen_q=1), want)
    assert set(host.runs) == {f"msa_score_{way}_{8 if heads == 4 else 16}"}


# --- that all this can fail ---

MUTANTS: dict[str, tuple[tuple[str, str] | None, type[Exception] | None]] = {
    "none": (None, None),
    "a set is begun with too soon": (
        ("wait_for_copies<AHEAD - 1>();", "wait_for_copies<AHEAD>();"),
        DeviceError,
    ),
    "other lanes' copies are not waited for": (
        ("__syncwarp(); // the other lanes' copies; and all have", "// and all have"),
        DeviceError,
    ),
    "a lane meets others elsewhere": (
        (
            "__syncwarp(); // the other lanes' copies; and all have",
            "if (threadIdx.x % 32 != 3) __syncwarp(); // and all have",
        ),
        DeviceError,
    ),
    "a barrier that some threads pass by": (
        ("barrier_sync<T::THREADS_EACH>", "if (warp % N > 0) barrier_sync<T::THREADS_EACH>"),
        DeviceError,
    ),
    "guesses are not checked": (("!(request == run.request && page == guessed_page)", "false"), AssertionError),
    "copies by a guess go on": (("wait_for_copies<0>(); // to where others go", ""), DeviceError),
    "pages are not checked": (
        ("has_page(p, page) ? run.highest - block * BLOCK_KEYS - 1 : -1", "BLOCK_KEYS"),
        DeviceError,
    ),
    "the last sets are never asked for": (("if (set < OWN || more)", "if (more)"), AssertionError),
    "the last sets are never asked for, straight": (("lane, set < OWN || more);", "lane, more);"), AssertionError),
    "the next block is begun a set too soon": (("set == OWN && more", "set == OWN - 1 && more"), AssertionError),
    "the next block is begun a set too soon, straight": (
        ("set == OWN && !ONE", "set == OWN - 1 && !ONE"),
        DeviceError,
    ),
    "the page of another block": (
        ("page_ahead = page_in_share(next + T::COUNT);", "page_ahead = page_in_share(next);"),
        AssertionError,
    ),
    "the page ahead of a guess that failed": (
        ("if (BY_SETS && anew) page_ahead", "if (tile > 0) page_ahead"),
        AssertionError,
    ),
    "straight where one token sees less": (
        ("all_seen & Copier::side_by_side", "Copier::side_by_side"),
        AssertionError,
    ),
    "the block before counts": (
        ("    best = NEG_INF;\n", "    if (block < T::COUNT) best = NEG_INF;\n"),
        AssertionError,
    ),
    "queries are read before the wait": (
        (
            "  }\n\n  DEVICE_MEMBER void load(const ScoreParams &p, const Run &) {",
            "now(p); } DEVICE_MEMBER void load(const ScoreParams &, const Run &) {} void now(const ScoreParams &p) {",
        ),
        AssertionError,
    ),
    "scales far away are asked for": (("(lane - 30) * 4", "(lane - 30) * 4000"), DeviceError),
    "the last blocks of a row are nobody's": ((" + (n > 0))", ")"), AssertionError),
    "parts of one request for another": (("number - slot * p.row_requests.value", "number - slot"), AssertionError),
    "a wrong constant": (
        ("NEGATIVE = {0xfdfeff00u, 0xf4f8fafcu}", "NEGATIVE = {0xfdfeff00u, 0xf4f8fafbu}"),
        AssertionError,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(host: Host, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host.edit, kind_of_error = MUTANTS[name]
    host.build("nvfp4", host.arch, host.edit)  # what is wrong here is nothing that is caught
    caught: set[type[Exception]] = set()
    for way in (("one", 6), ("row", 1), ("row", 2), ("row", 3)):
        monkeypatch.setattr(score, "_row_parts", lambda *_, way=way: way)
        score.make_plan.cache_clear()
        for seed in range(6):
            case = Case([1500, 300, 0, 129, 640], [1, 1, 1, 2, 2], 4 - seed % 3, seed)
            # NaN, which the second of two tokens alone sees; of two heads both are scored together.
            case.k_rows[case.table[4, 4], 127] = 0x7F
            given = case.arguments(device="cpu")
            guess(host, given, seed)
            try:
                assert_same(scores(given, 12), case.expected(12))
            except (AssertionError, DeviceError) as error:
                caught.add(type(error))
    assert kind_of_error in caught if kind_of_error else not caught
