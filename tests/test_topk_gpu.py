"""The kernels that select blocks: what the compiler made of them, and on a GPU the same ids as on the CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from msa_ops import msa_topk_select
from msa_ops.engines.cuda import compile as compiler
from msa_ops.engines.cuda import plan, programs, topk
from msa_ops.selection import TokenExtents, select_blocks
from test_cuda_compile import c_layout, packed_places, usages
from test_pitfalls_gpu import captured

INF, NAN = math.inf, math.nan
INT32_MAX = 2**31 - 1
DEVICE = "cuda"
MIXED = (9000, 130, 8500, 256, 9000, 300, 8192, 1)
CAPABILITIES = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1))


# --- without a GPU ---


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda x: f"{x[0]}.{x[1]}")
def test_the_kernels_keep_to_their_registers_and_memory(capability: tuple[int, int]) -> None:
    arch = compiler.architecture(capability)
    if capability[0] * 10 + capability[1] not in compiler.supported_architectures():
        pytest.skip(f"NVRTC {compiler.nvrtc_version()} does not know {arch}")
    cubin, log = compiler.compile_program(topk.PROGRAM, arch, "--ptxas-options=-v")
    assert cubin[:4] == b"\x7fELF"
    kernels = usages(log)
    assert set(kernels) == set(topk.PROGRAM.entries)
    for name, usage in kernels.items():
        assert usage.stack == usage.spill_stores == usage.spill_loads == 0, f"{name}: {usage}"
        assert usage.shared <= 48 << 10
    for name, threads in topk._THREADS.items():  # two rows of 8,192 blocks are at work on a multiprocessor at once
        assert kernels[name].registers * min(2 * threads, 1024) <= 65536, f"too few rows are resident: {kernels[name]}"


def test_the_parameter_block_is_the_struct_of_the_kernel() -> None:
    source = compiler.source(topk.PROGRAM.sources)
    fields, size = c_layout(source, "TopkParams")
    assert topk._PARAMS.size == size
    flat = []
    for _, offset, length in fields:
        flat += [(offset + i, 4) for i in (0, 4, 8)] if length == 12 else [(offset, length)]
    assert packed_places(topk._PARAMS) == flat
    with pytest.MonkeyPatch.context() as patch:
        checked = f'{source}\nstatic_assert(sizeof(TopkParams) == {size}, "size");'
        patch.setattr(compiler, "source", lambda _: checked)
        compiler.compile_program(topk.PROGRAM, "sm_80")


def test_values_lie_in_the_fields_of_their_names() -> None:
    source = compiler.source(topk.PROGRAM.sources)
    score = torch.zeros(3, 5, 8)[:, :, 1:7].permute(0, 1, 2)
    output = torch.zeros(6, 3, 9, dtype=torch.int32)[..., :4]
    lengths, offset = torch.zeros(6, dtype=torch.int32)[::3], torch.zeros(4, dtype=torch.int32)[::2]
    block = topk.pack(score, 4, TokenExtents(lengths, 3, True, offset), output, 1, 2)

    def read(block: bytes, name: str) -> int:
        at, length = next((o, n) for field, o, n in c_layout(source, "TopkParams")[0] if field == name)
        return int.from_bytes(block[at : at + min(length, 8)] if length != 12 else block[at : at + 4], "little")

    expected = {
        "score": score.data_ptr(), "output": output.data_ptr(), "extents": lengths.data_ptr(), "q_offset": offset.data_ptr(),
        "score_head": 40, "score_block": 8, "score_token": 1, "output_token": 27, "output_head": 9, "extents_step": 3,
        "q_offset_step": 2, "tokens": 6, "seqlen_q": 3, "rows": 18, "blocks": 5, "topk": 4, "begin": 1, "end": 2,
        "from_lengths": 1, "causal": 1, "has_q_offset": 1,
    }  # fmt: skip
    assert {name: read(block, name) for name in expected} == expected
    block = topk.pack(score, 4, TokenExtents(lengths, 3, False, 77), output, 1, 2)
    assert [read(block, n) for n in ("q_offset", "q_offset_int", "has_q_offset", "causal")] == [0, 77, 1, 0]
    block = topk.pack(score, 4, TokenExtents(lengths, 3, True, None), output, 1, 2)
    assert [read(block, n) for n in ("q_offset", "q_offset_int", "has_q_offset", "causal")] == [0, 0, 0, 1]
    block = topk.pack(score, 4, 5, output, 1, 2)
    assert [read(block, n) for n in ("extents", "extent", "from_lengths", "seqlen_q")] == [0, 5, 0, 1]
    block = topk.pack(score, 4, lengths, output, 1, 2)
    assert [read(block, n) for n in ("extents", "from_lengths", "seqlen_q")] == [lengths.data_ptr(), 0, 1]


@pytest.mark.parametrize(
    "blocks, entry",
    [
        (0, "msa_topk_64"), (64, "msa_topk_64"), (65, "msa_topk_256"), (256, "msa_topk_256"), (257, "msa_topk_1024"),
        (1024, "msa_topk_1024"), (1025, "msa_topk_8192"), (8192, "msa_topk_8192"), (8193, "msa_topk_65536"),
        (65536, "msa_topk_65536"),
    ],
)  # fmt: skip
def test_the_smallest_kernel_that_holds_a_row_is_taken(blocks: int, entry: str) -> None:
    assert topk.entry_for(blocks) == entry
    by_tokens = entry if blocks > 1024 else entry.replace("topk", "topk_tokens")
    assert topk.entry_for(blocks, True) == by_tokens
    by_cluster = "msa_topk_cluster_8192" if entry == "msa_topk_8192" else entry
    assert topk.entry_for(blocks, by_cluster=True) == by_cluster


@pytest.mark.parametrize(
    "tokens, topk_, begin, end, clusters, taken",
    [
        (4, 16, 0, 1, True, True), (5, 16, 0, 1, True, False), (4, 24, 0, 0, True, True), (4, 25, 0, 0, True, False),
        (4, 25, 1, 0, True, True), (4, 128, 52, 52, True, True), (4, 16, 0, 1, False, False), (4, 17, 8, 8, True, True),
        (4, 16, 8, 8, True, False),
    ],
)  # fmt: skip
def test_few_long_rows_are_clusters(
    tokens: int, topk_: int, begin: int, end: int, clusters: bool, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 16 rows, not read by tokens, of which some blocks are to be found, not more than lists have room for."""
    facts = plan.DeviceFacts((9, 0) if clusters else (8, 9), 132, 227 << 10, 228 << 10)
    monkeypatch.setattr(topk, "device_facts", lambda index: facts)
    for score in (torch.zeros(4, tokens, 8192).transpose(1, 2), torch.zeros(4, 8192, tokens)):
        entry = topk.entry_of(score, topk_, begin, end, 0)
        assert entry == ("msa_topk_cluster_8192" if taken else "msa_topk_8192")
    assert topk.entry_of(torch.zeros(1, 8192, 9), 16, 0, 0, 0) == "msa_topk_8192"  # read by tokens


def test_rows_are_read_together_where_tokens_lie_innermost() -> None:
    score = torch.zeros(2, 40, 9)
    assert topk.reads_by_tokens(score) and topk.reads_by_tokens(score[:, 3:, 1:])
    assert not topk.reads_by_tokens(score[..., :7])  # fewer tokens than a sector
    assert not topk.reads_by_tokens(torch.zeros(2, 9, 40).transpose(1, 2))
    assert not topk.reads_by_tokens(torch.zeros(2, 40, 18)[..., ::2])
    assert not topk.reads_by_tokens(torch.zeros(2, 1, 9).expand(2, 40, 9))


def test_the_program_is_listed() -> None:
    assert topk.PROGRAM in programs.all_programs()


# --- on a GPU ---

KINDS: dict[str, Callable[[torch.Generator, tuple[int, ...]], Tensor]] = {
    "normal": lambda g, s: torch.randn(s, generator=g) * 4,
    "ties": lambda g, s: torch.randint(-3, 4, s, generator=g) / 4,
    "equal": lambda g, s: torch.full(s, -2.5),
    "zeros of both signs": lambda g, s: torch.where(torch.rand(s, generator=g) < 0.5, 0.0, -0.0),
    "two values": lambda g, s: (torch.randint(0, 2, s, generator=g).int() + 0x3F800000).view(torch.float32),
    "low bits": lambda g, s: (torch.randint(0, 4096, s, generator=g).int() + 0x3F7FF800).view(torch.float32),
    "ascending": lambda g, s: torch.arange(s[1]).float().view(1, -1, 1).expand(s).clone(),
    "descending": lambda g, s: -torch.arange(s[1]).float().view(1, -1, 1).expand(s).clone(),
    "mostly -inf": lambda g, s: torch.randn(s, generator=g).masked_fill(torch.rand(s, generator=g) < 0.97, -INF),
    "-inf": lambda g, s: torch.full(s, -INF),
    "NaN": lambda g, s: torch.full(s, NAN),
    "inf": lambda g, s: torch.full(s, INF),
    "any bits": lambda g, s: torch.randint(-(2**31), 2**31 - 1, s, generator=g).int().view(torch.float32),
    "special": lambda g, s: torch.tensor(
        [0.0, -0.0, 1.0, 1.0, -1.0, 2.5, 1e-40, -1e-40, 1e-45, INF, -INF, NAN, -NAN, 3.4e38, -3.4e38, 1.1754944e-38]
    )[torch.randint(0, 16, s, generator=g)],
}  # fmt: skip


def to_gpu(t: Tensor) -> Tensor:
    return t.to(DEVICE)


def assert_same_ids(
    score: Tensor, topk_: int, extent: int | Tensor | TokenExtents | None = None, begin: int = 0, end: int = 0
) -> Tensor:
    """Ids of the kernel and of the CPU, which `test_selection.py` holds against sorted lists. `score` is on the CPU."""
    heads, blocks, tokens = score.shape
    want, got = (torch.full((tokens, heads, topk_), -7, dtype=torch.int32) for _ in range(2))
    extent = blocks if extent is None else extent
    select_blocks(score, topk_, extent, want, begin, end)
    got = to_gpu(got)
    if isinstance(extent, TokenExtents):
        offset = extent.q_offset
        offset = to_gpu(offset) if isinstance(offset, Tensor) else offset
        extent = TokenExtents(to_gpu(extent.lengths), extent.seqlen_q, extent.causal, offset)
    elif isinstance(extent, Tensor):
        extent = to_gpu(extent)
    score = to_gpu(score)
    ways = (0, 1 << 20) if 1024 < blocks <= 8192 else (topk.MOST_CLUSTERS,)  # a thread block's rows, and a cluster's
    for most in ways:
        got.fill_(-7)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(topk, "MOST_CLUSTERS", most)
            patch.setattr(topk, "_LISTED", INT32_MAX)  # also what its lists do not hold, which it then searches
            entry = topk.entry_of(score, topk_, begin, end, score.device.index)
            before = topk.calls[entry]
            select_blocks(score, topk_, extent, got, begin, end)
        assert topk.calls[entry] == before + 1, "the kernel was not taken"
        wrong = (got.cpu() != want).any(-1).nonzero().tolist()
        assert not wrong, f"row {wrong[0]}: {got[tuple(wrong[0])].tolist()} instead of {want[tuple(wrong[0])].tolist()}"
    return got


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_every_length_of_row(kind: str) -> None:
    """Both sides of every border between kernels, tiles and warps."""
    generator = torch.Generator().manual_seed(1)
    for blocks in (
        0,
        1,
        2,
        31,
        32,
        33,
        63,
        64,
        65,
        200,
        255,
        256,
        257,
        1000,
        1023,
        1024,
        1025,
        2048,
        5000,
        8191,
        8192,
        8193,
    ):
        score = KINDS[kind](generator, (2, blocks, 3))
        for topk_ in (1, 16, 33, 128):
            assert_same_ids(score, topk_)
        assert_same_ids(score, 16, None, 1, 1)
        if 0 < blocks <= 300:  # thread blocks of eight tokens, the last not full, one of two heads
            assert_same_ids(KINDS[kind](generator, (3, blocks, 11)), 16, None, 0, 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "blocks, equal",
    [
        (blocks, equal)
        for blocks in (64, 256, 1024, 8192, 20_000)
        for equal in (14, 16, 31, 32, 33, 64, 127, 128, 129, 500)
    ],
)
def test_as_many_equal_scores_at_the_border_as_are_listed_and_more(blocks: int, equal: int) -> None:
    """Both sides of what is ranked by counting and what is searched; equal ones neighbours, spread, and all in one group."""
    score = torch.randn(1, blocks, 9, generator=torch.Generator().manual_seed(14)) - 9
    if equal <= blocks:
        score[:, :equal, 0] = 1.0
        score[:, torch.randperm(blocks, generator=torch.Generator().manual_seed(15))[:equal], 1] = 1.0
        score[:, ::32, 2] = torch.arange(score[:, ::32].shape[1]) * 1.0
        score[:, 3::32, 3] = 2.0
        score[:, -equal:, 4] = INF
    for topk_ in (1, 15, 16, 31, 32, 33):
        assert_same_ids(score, topk_)
        assert_same_ids(score[..., :2], topk_, None, 2, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_rows_as_long_as_they_may_be(kind: str) -> None:
    generator = torch.Generator().manual_seed(2)
    for blocks, topk_ in ((16384, 100), (50_001, 16), (65_536, 16), (65_536, 4096)):
        assert_same_ids(KINDS[kind](generator, (1, blocks, 1)), topk_, None, 2, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_extents_and_forced_blocks_of_every_kind(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    for _ in range(60):
        blocks = (draw(0, 40), draw(0, 256), draw(0, 1100), draw(0, 9000))[draw(0, 3)]
        heads, tokens = draw(1, 3), (draw(1, 5), draw(8, 11))[draw(0, 1)]  # eight tokens or more are read together
        score = list(KINDS.values())[draw(0, len(KINDS) - 1)](generator, (heads, blocks, tokens))
        if draw(0, 1):
            score = score.transpose(1, 2).contiguous().transpose(1, 2)
        each = torch.tensor([draw(-2, blocks + 2) for _ in range(tokens)], dtype=torch.int32)
        extent = (None, draw(0, blocks), each)[draw(0, 2)]
        forced = (
            (0, 1),
            (draw(0, 4), draw(0, 4)),
            (draw(0, blocks + 2), draw(0, blocks + 2)),
            (INT32_MAX, 3),
            (3, INT32_MAX),
        )
        assert_same_ids(score, (draw(1, 16), draw(1, 300))[draw(0, 1)], extent, *forced[draw(0, 4)])


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [None, 300, torch.tensor([5, -1, 8498, 255, 0, 299, 9999, 0], dtype=torch.int32)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_extents_worked_out_from_lengths(seqlen_q: int, causal: bool, offset: int | Tensor | None) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor(MIXED, dtype=torch.int32)
    for blocks in (71, 60, 300, 2000):
        score = torch.randn(2, blocks, len(MIXED) * seqlen_q, generator=generator)
        assert_same_ids(score, 16, TokenExtents(lengths, seqlen_q, causal, offset), 1, 1)
    empty = torch.tensor([0, -1, -(2**31), INT32_MAX] * 2, dtype=torch.int32)
    assert_same_ids(score, 16, TokenExtents(empty, seqlen_q, causal, offset), 1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [50, 200, 700, 3000, 9000])
def test_any_strides_of_scores_and_ids(blocks: int) -> None:
    generator = torch.Generator().manual_seed(4)
    score = torch.randn(3, blocks, 5, generator=generator)
    want = msa_topk_select(score, 12, force_end_blocks=1)
    for order in itertools.permutations(range(3)):
        back = [order.index(i) for i in range(3)]
        scores = to_gpu(score.permute(order).contiguous()).permute(back)
        wide = to_gpu(torch.full((3, 2 * blocks + 1, 7), NAN))
        wide[:, 1::2, 1:6] = to_gpu(score)
        for given in (scores, wide[:, 1::2, 1:6]):
            by_token = to_gpu(torch.full((7, 3, 20), -7, dtype=torch.int32))
            by_head = to_gpu(torch.full((3, 7, 20), -7, dtype=torch.int32))
            for buffer, view in (
                (by_token, by_token[1:6, :, 3:15]),
                (by_head, by_head[:, 1:6, 3:15].transpose(0, 1)),
            ):
                msa_topk_select(given, 12, output=view, force_end_blocks=1)
                assert torch.equal(view.cpu(), want)
                assert int((buffer == -7).sum()) == buffer.numel() - view.numel(), "memory beside the view was written"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 1023, 4098])
def test_many_rows(tokens: int) -> None:
    """More rows than the device holds at once, the last thread block not full; tokens innermost, and blocks."""
    generator = torch.Generator().manual_seed(5)
    extent = torch.randint(0, 140, (tokens,), generator=generator).int()
    score = torch.randint(-9, 9, (3, 130, tokens), generator=generator).float()
    for given in (score, score.transpose(1, 2).contiguous().transpose(1, 2)):
        assert_same_ids(given, 16, extent, 0, 1)
    if tokens < 300:
        assert_same_ids(torch.randn(3, 1500, tokens, generator=generator), 16, extent, 0, 1)


@pytest.mark.gpu
def test_more_blocks_than_the_kernel_holds_are_selected_all_the_same() -> None:
    score = torch.randn(2, 65_537, 2, generator=torch.Generator().manual_seed(6))
    before = sum(topk.calls.values())
    assert torch.equal(msa_topk_select(score.cuda(), 16, 65_537).cpu(), msa_topk_select(score, 16))
    assert sum(topk.calls.values()) == before


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [200, 1000, 8192, 20_000])
def test_no_allocation_no_wait_and_the_same_bits(blocks: int) -> None:
    score = torch.randint(-50, 50, (4, blocks, 8), device="cuda").float()
    extent = torch.full((8,), blocks - 3, dtype=torch.int32, device="cuda")
    output = torch.empty(8, 4, 16, dtype=torch.int32, device="cuda")
    first = msa_topk_select(score, 16, extent, output, 0, 1).clone()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            msa_topk_select(score, 16, extent, output, 0, 1)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert torch.equal(output, first)
    for _ in range(100):
        assert torch.equal(msa_topk_select(score, 16, extent, None, 0, 1), first)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [100, 900, 4000, 10_000])
def test_replays_follow_scores_and_extents(blocks: int) -> None:
    generator = torch.Generator().manual_seed(7)
    score = torch.empty(2, blocks, 4, device="cuda")
    extent = torch.empty(4, dtype=torch.int32, device="cuda")
    output = torch.empty(4, 2, 16, dtype=torch.int32, device="cuda")
    score.zero_(), extent.zero_()
    graph = captured(lambda: msa_topk_select(score, 16, extent, output, 1, 1))
    for _ in range(5):
        scores = torch.randn(2, blocks, 4, generator=generator)
        extents = torch.randint(0, blocks + 1, (4,), generator=generator).int()
        score.copy_(scores), extent.copy_(extents), output.fill_(-7)
        graph.replay()
        assert torch.equal(output.cpu(), msa_topk_select(scores, 16, extents, None, 1, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [100, 900, 4000, 10_000])
def test_it_waits_for_what_its_stream_did_before(blocks: int) -> None:
    """The kernel may start while the one before it runs: it reads nothing early, and what follows does not overtake it."""
    generator = torch.Generator().manual_seed(8)
    right = torch.randn(4, blocks, 16, generator=generator)
    expected = msa_topk_select(right, 16, force_end_blocks=1)
    given, score = right.cuda(), torch.zeros(4, blocks, 16, device="cuda")
    output = torch.empty(16, 4, 16, dtype=torch.int32, device="cuda")
    other = torch.empty_like(output)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        score.copy_(given)
        msa_topk_select(score, 16, None, output, 0, 1)
        # Its ids are the next selection's scores, that one's are overwritten: three kernels that may overlap.
        msa_topk_select(output.float().permute(1, 2, 0), 16, None, other)
        score.zero_()
    stream.synchronize()
    assert torch.equal(output.cpu(), expected)
    assert torch.equal(other.cpu(), msa_topk_select(expected.float().permute(1, 2, 0), 16))


@pytest.mark.gpu
def test_selections_in_a_row_read_what_the_one_before_wrote() -> None:
    """Two kernels back to back, each reading extents that the other wrote: dependent launch all the way."""
    score = torch.randn(1, 300, 1, generator=torch.Generator().manual_seed(9)).cuda()

    def chain(each: Callable[[], None]) -> list[int]:
        ids = torch.full((1, 1, 2), 299, dtype=torch.int32, device="cuda")
        seen = torch.empty(40, 1, 1, 2, dtype=torch.int32, device="cuda")
        for step in seen:
            msa_topk_select(score, 2, ids[0, 0, 1:], step)  # below the larger of the two ids before
            ids = step
            each()
        return seen.flatten().tolist()

    assert chain(lambda: None) == chain(torch.cuda.synchronize)


@pytest.mark.gpu
def test_under_torch_compile_the_ids_are_the_same() -> None:
    score = torch.randn(2, 300, 4, generator=torch.Generator().manual_seed(10)).cuda()
    call = torch.compile(lambda s: msa_topk_select(s, 16, None, None, 0, 1), backend="aot_eager")
    assert torch.equal(call(score), msa_topk_select(score, 16, None, None, 0, 1))


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 40 << 30:
        pytest.skip("needs 40 GiB of free device memory")
    far = 2**31 + 64
    base = torch.empty(far + 2**20, device="cuda")
    score = base.as_strided((2, 300, 2), (far, 2, 1))
    score.copy_(torch.randn(2, 300, 2, generator=torch.Generator().manual_seed(11)))
    ids = torch.empty(far + 64, dtype=torch.int32, device="cuda").as_strided((2, 2, 16), (far, 16, 1))
    want = msa_topk_select(score.cpu(), 16)
    assert torch.equal(msa_topk_select(score, 16, output=ids).cpu(), want)
    far_blocks = base.as_strided((1, 3000, 1), (0, 716_200, 0))
    far_blocks.copy_(torch.randn(1, 3000, 1, generator=torch.Generator().manual_seed(12)))
    assert torch.equal(msa_topk_select(far_blocks, 16).cpu(), msa_topk_select(far_blocks.cpu(), 16))


@pytest.mark.gpu
def test_every_device_is_served() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    score = torch.randn(2, 300, 4, generator=torch.Generator().manual_seed(13))
    for index in range(2):
        assert torch.equal(msa_topk_select(score.to(f"cuda:{index}"), 16).cpu(), msa_topk_select(score, 16))


def test_architectures_of_the_tests_are_those_of_the_plans() -> None:
    assert set(CAPABILITIES) <= set(plan.SHARED_PER_BLOCK)
