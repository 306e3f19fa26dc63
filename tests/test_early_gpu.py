"""What a kernel asks L2 for before the previous one has ended follows ids, lengths and pages as they are then; what it reads
follows them as that one has left them. Here a selection writes all three, over whatever stood there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cases import INT32_MAX, INT32_MIN
from msa_ops import (
    msa_proxy_score,
    msa_proxy_score_fp4,
    msa_sparse_decode_attention,
    msa_topk_select,
    nvfp4_quantize,
)
from msa_ops.bench.inputs import Shape, make_calls, make_pool
from msa_ops.bench.peers import ours
from msa_ops.contract import BLOCK_SIZE, FP8, HEAD_DIM
from msa_ops.engines.cuda import launch, score
from msa_ops.engines.cuda.prepared import forget
from msa_ops.selection import ScoreProblem
from test_pitfalls_gpu import captured

pytestmark = pytest.mark.gpu
Runs = Callable[[Callable[[], None]], Callable[[], object]]
PAGES, CONTEXT = 300, 4096
WIDTH = CONTEXT // BLOCK_SIZE
LONGEST = 8192
# What each kind of tensor may hold before it is written: values that pass some checks of an early read, and fail others.
STALE = {
    "ids": (0, WIDTH - 1, WIDTH, -1, INT32_MIN, INT32_MAX, None),
    "lengths": (INT32_MAX, 0, CONTEXT, -1, INT32_MIN, None),
    "pages": (0, -1, PAGES - 1, PAGES, INT32_MAX, INT32_MIN, None),
    "starts": (0, INT32_MAX, -1, LONGEST, INT32_MIN, None),
    "queries": (0, 1, INT32_MAX, -1, INT32_MIN, None),
    "offsets": (INT32_MAX, -1, 0, CONTEXT, INT32_MIN, None),
}
"""None: any int32."""


class Selected:
    """An int32 tensor that a selection writes: `wanted`, rows of ascending numbers below `blocks`."""

    def __init__(self, wanted: Tensor, blocks: int) -> None:
        self.values = torch.empty_like(wanted)
        flat = wanted.flatten(0, -2) if wanted.dim() > 1 else wanted[:, None]
        assert bool((flat >= 0).all() and (flat < blocks).all() and (flat.diff(dim=-1) > 0).all())
        self.topk = flat.shape[-1]
        scores = torch.full((1, len(flat), blocks), -1.0, device="cuda")
        scores[0].scatter_(1, flat.long(), 1.0)
        self.scores = scores.transpose(1, 2)

    def write(self) -> None:
        output = self.values.view(-1, 1, self.topk)
        msa_topk_select(self.scores, self.topk, output=output)


def ascending(rows: int, width: int, below: int, generator: torch.Generator) -> Tensor:
    """Random distinct numbers, sorted."""
    random = torch.rand(rows, below, device="cuda", generator=generator)
    return random.topk(width, dim=1).indices.sort(dim=1).values.int()


@pytest.fixture(params=["eager", "graph"])
def runs(request: pytest.FixtureRequest) -> Runs:
    """What makes of a sequence of calls one that may be run again and again."""
    return (lambda calls: calls) if request.param == "eager" else (lambda calls: captured(calls).replay)


def written_before(call: Callable[[], object], selected: dict[str, Selected], last: str) -> Callable[[], None]:
    """Writes all of `selected`, that of the name `last` in the end, and then calls."""
    order = [s for name, s in selected.items() if name != last] + [selected[last]]

    def sequence() -> None:
        for s in order:
            s.write()
        call()

    return sequence


def assert_stale_values_do_not_count(
    selected: dict[str, Selected], run: Callable[[], object], result: Tensor, generator: torch.Generator
) -> None:
    """Whatever stands where the selections are going to write."""
    run()
    want = result.clone()
    kinds = [STALE[name] for name in selected]
    for turn in range(3 * max(map(len, kinds))):  # the lists differ in length, or are shifted: many combinations
        values = [kind[(turn + turn // len(kind) * place) % len(kind)] for place, kind in enumerate(kinds)]
        for s, value in zip(selected.values(), values, strict=True):
            if value is None:
                s.values.random_(INT32_MIN, INT32_MAX, generator=generator)
            else:
                s.values.fill_(value)
        result.fill_(torch.nan)
        run()
        assert torch.equal(result, want), values


def on_an_h200() -> bool:
    facts = launch.device_facts(torch.cuda.current_device())
    return facts.capability == (9, 0) and facts.multiprocessors == 132


@pytest.mark.parametrize(
    "kv, batch, early",
    [
        ("fp8", 1, True), ("fp8", 17, True), ("fp8", 70, True), ("fp8", 4, False), ("bf16", 1, True), ("bf16", 2, True),
        ("bf16", 40, False), ("nvfp4-planar", 40, True), ("nvfp4-tiled", 40, True), ("nvfp4-tiled", 1, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("last", ["ids", "lengths", "pages"])
def test_attention_reads_what_the_kernel_before_wrote(
    kv: str, batch: int, early: bool, last: str, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[bool] = []
    real = launch._plan
    monkeypatch.setattr(launch, "_plan", lambda *given: plans.append(real(*given).early) or real(*given))
    generator = torch.Generator("cuda").manual_seed(0)
    call = make_calls(Shape(kv, batch, 64, 4, context=CONTEXT), make_pool(kv, PAGES, 4, generator), 1, generator)[0]
    lengths = torch.randint(1, CONTEXT + 1, (batch,), generator=generator, device="cuda").int()
    selected = {
        "ids": Selected(ascending(batch * 4, 16, WIDTH, generator).view(batch, 4, 16), WIDTH),
        "lengths": Selected(lengths, LONGEST),
        "pages": Selected(ascending(batch, WIDTH, PAGES, generator), PAGES),
    }
    call = dataclasses.replace(
        call, q2k_indices=selected["ids"].values.transpose(0, 1), seqused_k=selected["lengths"].values,
        page_table=selected["pages"].values,
    )  # fmt: skip
    sequence = written_before(lambda: ours().run(call), selected, last)
    forget()
    sequence()
    torch.cuda.synchronize()
    assert plans and (not on_an_h200() or set(plans) == {early})
    ours().run(call)
    alone = call.out.clone()
    assert bool(alone.isfinite().all()) and bool(alone.any())
    assert_stale_values_do_not_count(selected, runs(sequence), call.out, generator)
    assert torch.equal(call.out, alone)


def plans_of_scores(monkeypatch: pytest.MonkeyPatch) -> list[score.ScorePlan]:
    """A list that the plans of all calls from now on go to."""
    plans: list[score.ScorePlan] = []
    real = score.pack

    def noting(problem: ScoreProblem, plan: score.ScorePlan, output: Tensor) -> bytes:
        plans.append(plan)
        return real(problem, plan, output)

    monkeypatch.setattr(score, "pack", noting)
    return plans


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize(
    "batch, apart, kind, early, hinting",
    [
        (1, False, "one", 32, 32),
        (8, True, "one", 256, 256),
        (8, False, "one", 256, 256),
        (12, False, "one", 384, 132),
        (100, False, "row", 396, 132),
    ],
)
@pytest.mark.parametrize("last", ["lengths", "pages", "queries", "offsets"])
def test_scores_read_what_the_kernel_before_wrote(
    dtype: torch.dtype,
    batch: int,
    apart: bool,
    kind: str,
    early: int,
    hinting: int,
    last: str,
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`apart`: keys do not lie side by side. `early`: thread blocks that settle early what to begin with, of which `hinting`
    ask L2 for it where they do."""
    plans = plans_of_scores(monkeypatch)
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda").to(dtype)

    q, k = randn(batch, 4, HEAD_DIM), randn(PAGES, 1, BLOCK_SIZE, HEAD_DIM * (2 if apart else 1))[..., :HEAD_DIM]
    lengths = torch.randint(1, CONTEXT + 1, (batch,), generator=generator, device="cuda").int()
    selected = {
        "lengths": Selected(lengths, LONGEST),
        "pages": Selected(ascending(batch, WIDTH, PAGES, generator), PAGES),
        "queries": Selected(torch.arange(batch + 1, dtype=torch.int32, device="cuda")[None], LONGEST),
        "offsets": Selected(lengths - 1, LONGEST),
    }
    output = torch.empty(4, WIDTH, batch, device="cuda")

    def scores() -> None:
        msa_proxy_score(
            q, k, selected["queries"].values[0], page_table=selected["pages"].values, seqused_k=selected["lengths"].values,
            max_seqlen_q=1, max_k_tiles=WIDTH, q_offset=selected["offsets"].values, output=output,
        )  # fmt: skip

    sequence = written_before(scores, selected, last)
    sequence()
    torch.cuda.synchronize()
    assert plans and {p.kind for p in plans} <= {"one", "row"}
    assert not on_an_h200() or {(p.kind, p.early, p.hinting) for p in plans} == {(kind, early, hinting)}
    scores()
    alone = output.clone()
    seen = torch.arange(WIDTH, device="cuda")[:, None] * BLOCK_SIZE < lengths
    assert torch.equal(alone > -torch.inf, seen.expand_as(alone))
    assert_stale_values_do_not_count(selected, runs(sequence), output, generator)
    assert torch.equal(output, alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("batch", [1, 20])
@pytest.mark.parametrize("last", ["ids", "starts"])
def test_a_flat_cache(dtype: torch.dtype, batch: int, last: str, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the requests' keys start is written just before, for scores and attention alike."""
    plans = plans_of_scores(monkeypatch)
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda").to(dtype)

    rows = LONGEST - 1
    q, k, v, index_k = (
        randn(batch, 16, HEAD_DIM),
        randn(rows, 1, HEAD_DIM),
        randn(rows, 1, HEAD_DIM),
        randn(rows, 1, HEAD_DIM),
    )
    blocks = -(-rows // BLOCK_SIZE)
    selected = {
        "ids": Selected(ascending(batch, 16, 24 if batch == 1 else 16, generator).view(batch, 1, 16), blocks),
        "starts": Selected(ascending(1, batch + 1, rows, generator), LONGEST),
    }
    ids, starts = selected["ids"].values.transpose(0, 1), selected["starts"].values[0]
    tokens = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    result = torch.empty(batch, 16 * HEAD_DIM + 4 * blocks, device="cuda")

    def attend() -> None:
        out = msa_sparse_decode_attention(q, k, v, ids, cu_seqlens_k=starts)
        assert isinstance(out, Tensor)
        result[:, : 16 * HEAD_DIM] = out.view(batch, -1)

    def scores() -> None:
        found = msa_proxy_score(q[:, :4], index_k, tokens, starts, max_seqlen_q=1, max_k_tiles=blocks)
        result[:, 16 * HEAD_DIM :] = found.permute(2, 0, 1).reshape(batch, -1)

    def both() -> None:
        attend()
        selected["starts"].values.fill_(-5)
        selected["starts"].write()
        scores()

    sequence = written_before(both, selected, last)
    sequence()
    torch.cuda.synchronize()
    attend()
    scores()
    alone = result.clone()
    assert plans and (
        not on_an_h200() or {(p.early, p.hinting) for p in plans} == {(64, 64) if batch == 1 else (396, 132)}
    )
    seen = torch.arange(blocks, device="cuda") * BLOCK_SIZE < starts.diff()[:, None]
    assert torch.equal(alone[:, 16 * HEAD_DIM :].view(batch, 4, blocks) > -torch.inf, seen[:, None].expand(-1, 4, -1))
    assert bool(alone[:, : 16 * HEAD_DIM].isfinite().all()) and bool(alone[:, : 16 * HEAD_DIM].any())
    assert_stale_values_do_not_count(selected, runs(sequence), result, generator)
    assert torch.equal(result, alone)


@pytest.mark.parametrize(
    "keys, heads, tokens, promised, batch, flat",
    [
        ("nvfp4", 4, 1, 1, 1, False), ("nvfp4", 4, 1, 1, 40, False), ("nvfp4", 1, 3, 3, 9, False),
        ("nvfp4", 3, 1, 1, 200, False), ("nvfp4", 4, 1, 1, 20, True),
        ("nvfp4", 16, 1, 1, 9, False), ("nvfp4", 4, 3, 1, 9, False), ("fp8", 16, 1, 1, 1, False), ("fp8", 4, 3, 3, 40, False),
        ("fp8", 4, 3, 1, 40, False), ("fp8", 32, 1, 1, 9, False), ("fp8", 8, 3, 3, 12, True), ("fp8", 8, 3, 1, 12, True),
        ("bf16", 16, 1, 1, 40, False), ("bf16", 4, 3, 3, 20, True), ("bf16", 4, 3, 1, 20, True), ("bf16", 8, 4, 4, 12, False),
        ("bf16", 8, 4, 1, 12, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("last", ["lengths", "queries"])
def test_scores_of_other_forms(
    keys: str, heads: int, tokens: int, promised: int, batch: int, flat: bool, last: str, runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """NVFP4, of which a thread block has two or four blocks of keys; more query operands; more tokens than are promised,
    which a thread block goes through in turn; flat caches. The kernels that begin early serve all of these."""
    plans = plans_of_scores(monkeypatch)
    generator = torch.Generator("cuda").manual_seed(0)
    rows = LONGEST - 1
    k = torch.randn(
        (rows, 1, HEAD_DIM) if flat else (PAGES, 1, BLOCK_SIZE, HEAD_DIM), generator=generator, device="cuda"
    )
    q = torch.randn(batch * tokens, heads, HEAD_DIM, generator=generator, device="cuda")
    lengths = torch.randint(tokens, CONTEXT + 1, (batch,), generator=generator, device="cuda").int()
    starts = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device="cuda")
    selected = {
        "lengths": Selected(ascending(1, batch + 1, rows, generator) if flat else lengths, LONGEST),
        "queries": Selected(starts[None], LONGEST),
    }
    if not flat:
        selected["pages"] = Selected(ascending(batch, WIDTH, PAGES, generator), PAGES)
    blocks = -(-rows // BLOCK_SIZE) if flat else WIDTH
    output = torch.empty(heads, blocks, batch * tokens, device="cuda")
    if flat:
        where = {"cu_seqlens_k": selected["lengths"].values[0]}
    else:
        where = {"page_table": selected["pages"].values, "seqused_k": selected["lengths"].values}
    options = {**where, "max_seqlen_q": promised, "max_k_tiles": blocks, "output": output}
    if keys == "nvfp4":
        (q4, q_scale), (k4, k_scale) = nvfp4_quantize(q, 448.0), nvfp4_quantize(k, 448.0)

        def scores() -> None:
            msa_proxy_score_fp4(q4, k4, q_scale, k_scale, 1 / 448, 1 / 448, selected["queries"].values[0], **options)
    else:
        dtype = FP8 if keys == "fp8" else torch.bfloat16
        typed_q, typed_k = q.to(dtype), k.to(dtype)

        def scores() -> None:
            msa_proxy_score(typed_q, typed_k, selected["queries"].values[0], **options)

    sequence = written_before(scores, selected, last)
    sequence()
    torch.cuda.synchronize()
    assert plans and (not on_an_h200() or all(p.kind and p.early for p in plans))
    if on_an_h200() and plans[0].columns == score.CODE_COLUMNS:  # 528 fit at once
        assert {(p.early, p.hinting) for p in plans} == {
            (min(p.workers, 528), p.workers if p.kind == "one" and p.workers <= 264 else min(p.workers, 132))
            for p in plans
        }
    scores()
    alone = output.clone()
    assert bool(alone.isfinite().any()) and not bool(alone.isnan().any())
    assert_stale_values_do_not_count(selected, runs(sequence), output, generator)
    assert torch.equal(output, alone)


@pytest.mark.parametrize("keys", ["nvfp4", "fp8"])
@pytest.mark.parametrize("batch", [1, 20, 100])
def test_queries_are_read_when_the_kernel_before_has_written_them(
    keys: str, batch: int, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And, of NVFP4, their scales. No byte is NaN. Each third and fourth one is 0, of scales those of groups 2, 3, 6, 7."""
    plans = plans_of_scores(monkeypatch)
    generator = torch.Generator("cuda").manual_seed(0)
    allowed = torch.arange(LONGEST, device="cuda")
    allowed = allowed[(allowed & 0x7F) != 0x7F]

    def written(rows: int) -> Selected:
        """Rows of 64 bytes, of which each fourth and the one before are 0."""
        return Selected(allowed[ascending(rows, 16, len(allowed), generator).long()].int(), LONGEST)

    def bytes_of(s: Selected, *shape: int) -> Tensor:
        return s.values.view(torch.uint8).view(shape)

    k = torch.randn(PAGES, 1, BLOCK_SIZE, HEAD_DIM, generator=generator, device="cuda")
    table = ascending(batch, WIDTH, PAGES, generator)
    lengths = torch.randint(1, CONTEXT + 1, (batch,), generator=generator, device="cuda").int()
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    output = torch.empty(4, WIDTH, batch, device="cuda")
    where = {"page_table": table, "seqused_k": lengths}
    options = {**where, "max_seqlen_q": 1, "max_k_tiles": WIDTH, "output": output}
    if keys == "nvfp4":
        k4, k_scale = nvfp4_quantize(k, 448.0)
        tiles = -(-batch * 4 // 128)
        selected = {"queries": written(batch * 4), "scales": written(tiles * 16)}
        q4 = bytes_of(selected["queries"], batch, 4, 64)
        q_scale = bytes_of(selected["scales"], tiles * 1024).view(FP8)

        def scores() -> None:
            msa_proxy_score_fp4(q4, k4, q_scale, k_scale, 1 / 448, 1 / 448, starts, **options)
    else:
        selected = {"queries": written(batch * 8)}
        q, typed_k = bytes_of(selected["queries"], batch, 4, HEAD_DIM).view(FP8), k.to(FP8)

        def scores() -> None:
            msa_proxy_score(q, typed_k, starts, **options)

    for last in selected:
        sequence = written_before(scores, selected, last)
        sequence()
        torch.cuda.synchronize()
        assert plans and (not on_an_h200() or all(p.kind and p.early for p in plans))
        scores()
        alone = output.clone()
        seen = torch.arange(WIDTH, device="cuda")[:, None] * BLOCK_SIZE < lengths
        assert torch.equal(alone > -torch.inf, seen.expand_as(alone)) and bool(
            alone.amax() > alone[alone.isfinite()].amin()
        )
        run = runs(sequence)
        for stale in (0, 0x01010101, 0x35353535, 0x70707070):
            for s in selected.values():
                s.values.fill_(stale)
            output.fill_(torch.nan)
            run()
            assert torch.equal(output, alone), (last, stale)
