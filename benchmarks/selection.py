#!/usr/bin/env python3
"""Time the selection of blocks, scores with it, and a whole decode step with its parts, in CUDA graphs. Needs an NVIDIA GPU.

    PYTHONPATH=src python3 benchmarks/selection.py [--json FILE] [--commit COMMIT] [--time-budget SECONDS]

Distinct calls in one graph with a cold L2 cache; medians over its replays. Ids are compared with the CPU's before anything
is timed, and a step with its own parts. The preset `step` of ``benchmarks/decode.py`` measures steps beside other
packages; here the selection is taken over the number of blocks and the layout of its scores, and scores over batches and
contexts that are not steps' alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import msa_ops
from msa_ops.bench import environment
from msa_ops.bench.goals import H200_READ_BYTES_PER_S
from msa_ops.bench.measure import Bench, Timing
from msa_ops.contract import BLOCK_SIZE, FP8, HEAD_DIM, SCALES_PER_ROW

HEADS, QUERY_HEADS, TOPK, REPLAYS = 4, 64, 16, 9
BLOCKS = (64, 256, 1024, 8192)
BATCHES = (1, 16, 64)
GOALS = {(256, 1): 3.0, (256, 16): 3.0, (256, 64): 3.0, (8192, 1): 10.0, (8192, 64): 40.0}
"""us at (blocks, batch)."""
SCORE_SHAPES: tuple[tuple[int, int], ...] = (
    (1, 8192), (4, 8192), (1, 131072), (16, 8192), (8, 32768), (64, 8192), (16, 32768), (1, 1 << 20), (256, 8192),
    (16, 131072), (64, 131072),
)  # fmt: skip
"""(batch, context) of equal requests."""
RAGGED = (64, 32768)
"""Batch and longest context of requests of all lengths up to that."""
SCORE_POOL_BYTES = 1 << 31
"""Of index keys, of which the distinct calls of a graph read different pages."""
CHECKED = 64
"""Blocks whose scores are checked before a shape is timed."""
STEP_CONTEXTS = (8192, 131072)
STEP_PAGES = 40_000
NVFP4_FACTOR = 448.0
"""Global factor of NVFP4 keys and queries: six standard deviations use the whole range of their scales."""
_FILL = 1 << 28

Call = Callable[[], object]


class Measurement:
    """Collects records and prints each. `budget`: seconds after which no scores and no step are begun."""

    def __init__(self, device: torch.device, budget: float) -> None:
        self.device = device
        self.bench = Bench(device)
        self.generator = torch.Generator(device).manual_seed(0)
        self.records: list[dict[str, Any]] = []
        self.end = time.monotonic() + budget

    def time(self, calls: Sequence[Call]) -> Timing:
        """us a call."""
        prepared = self.bench.prepare(lambda call: call(), calls)
        return self.bench.time({"": prepared}, REPLAYS)[""]

    def note(self, **fields: Any) -> None:
        self.records.append(fields)
        print("  ".join(f"{n}={v:.2f}" if isinstance(v, float) else f"{n}={v}" for n, v in fields.items()), flush=True)

    def randn(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device, generator=self.generator)

    def scores(self, blocks: int, tokens: int, innermost: str) -> Tensor:
        """``(heads, blocks, tokens)`` with blocks or tokens innermost."""
        if innermost == "blocks":
            return self.randn(HEADS, tokens, blocks).transpose(1, 2)
        return self.randn(HEADS, blocks, tokens)


# --- the selection alone ---


def check_selection(m: Measurement) -> None:
    """Raises `RuntimeError` where ids are not the CPU's."""
    for blocks in BLOCKS:
        for tokens in (1, 16):
            for innermost in ("blocks", "tokens"):
                score = m.scores(blocks, tokens, innermost)
                extent = torch.randint(
                    1, blocks + 1, (tokens,), device=m.device, dtype=torch.int32, generator=m.generator
                )
                for s in (score, (score * 2).round()):  # the second has many equal scores
                    found = msa_ops.msa_topk_select(s, TOPK, extent, None, 1, 1)
                    _same(f"selection of {blocks} blocks", found, s, extent, 1)


def _same(what: str, found: Tensor, scores: Tensor, extent: Tensor | None, begin: int) -> None:
    """Raise `RuntimeError` unless `found` is what the CPU selects by these scores."""
    wanted = msa_ops.msa_topk_select(scores.cpu(), TOPK, None if extent is None else extent.cpu(), None, begin, 1)
    if not torch.equal(found.cpu(), wanted):
        raise RuntimeError(f"{what}: ids differ from the CPU's; a wrong result is not timed")


def time_selection(m: Measurement) -> None:
    for blocks in BLOCKS:
        for batch in BATCHES:
            for innermost in ("blocks",) if batch == 1 else ("blocks", "tokens"):
                calls: list[Call] = []
                for _ in range(64 if blocks * batch <= 64 * 1024 else 24):
                    ids = torch.empty(batch, HEADS, TOPK, dtype=torch.int32, device=m.device)
                    scores = m.scores(blocks, batch, innermost)
                    calls.append(partial(msa_ops.msa_topk_select, scores, TOPK, None, ids, 0, 1))
                took, goal = m.time(calls), GOALS.get((blocks, batch))
                verdict = "" if goal is None else "ok" if took.median <= goal else f"OVER {goal}"
                m.note(
                    part="select", blocks=blocks, batch=batch, innermost=innermost, us=took.median, least=took.min,
                    most=took.max, goal=verdict,
                )  # fmt: skip


# --- scores, alone and with the selection behind them ---


def fill(m: Measurement, t: Tensor) -> None:
    """Normal numbers, a part at a time."""
    flat = t.view(-1)
    for first in range(0, flat.numel(), _FILL):
        part = flat[first : first + _FILL]
        part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=m.device, generator=m.generator))


@dataclass(frozen=True)
class Keys:
    """Pages of index keys of one head; with NVFP4 codes their block scales, 128x4 tiled."""

    k: Tensor
    scales: Tensor | None = None

    @property
    def row_bytes(self) -> int:
        return HEAD_DIM * self.k.itemsize if self.scales is None else HEAD_DIM // 2 + SCALES_PER_ROW

    def values(self, pages: Tensor) -> Tensor:
        """Of these pages, in float32."""
        if self.scales is None:
            return self.k[pages, 0].float()
        scales = self.scales.view(len(self.k), -1)[pages].view(-1, SCALES_PER_ROW)
        return msa_ops.nvfp4_dequantize(self.k[pages, 0], scales, 1 / NVFP4_FACTOR)


def make_keys(m: Measurement, name: str) -> Keys:
    """`SCORE_POOL_BYTES` of normal numbers."""
    if name != "nvfp4":
        dtype = {"fp8": FP8, "bf16": torch.bfloat16}[name]
        pages = SCORE_POOL_BYTES // (BLOCK_SIZE * HEAD_DIM * dtype.itemsize)
        k = torch.empty(pages, 1, BLOCK_SIZE, HEAD_DIM, dtype=dtype, device=m.device)
        fill(m, k)
        return Keys(k)
    pages = SCORE_POOL_BYTES // (BLOCK_SIZE * HEAD_DIM // 2)
    k = torch.empty(pages, 1, BLOCK_SIZE, HEAD_DIM // 2, dtype=torch.uint8, device=m.device)
    scales = torch.empty(pages * BLOCK_SIZE, SCALES_PER_ROW, dtype=torch.uint8, device=m.device)
    step = _FILL // (BLOCK_SIZE * HEAD_DIM)
    for first in range(0, pages, step):
        part = k[first : first + step]
        codes, its = msa_ops.nvfp4_quantize(m.randn(*part.shape[:3], HEAD_DIM).bfloat16(), NVFP4_FACTOR)
        part.copy_(codes)
        scales[first * BLOCK_SIZE : (first + len(part)) * BLOCK_SIZE] = its
    return Keys(k, scales)


@dataclass(frozen=True)
class Scores:
    """What one decode step scores and selects. Scores have blocks innermost; `ids` are ``(tokens, KV heads, topk)``."""

    index_q: Tensor
    q_scales: Tensor | None  # of NVFP4 queries
    keys: Keys
    starts: Tensor
    table: Tensor
    lengths: Tensor
    scores: Tensor
    ids: Tensor

    @property
    def paged(self) -> dict[str, Any]:
        return {"page_table": self.table, "seqused_k": self.lengths}

    def score(self) -> None:
        options = {**self.paged, "max_seqlen_q": 1, "max_k_tiles": self.scores.shape[1], "output": self.scores}
        if self.q_scales is None:
            msa_ops.msa_proxy_score(self.index_q, self.keys.k, self.starts, **options)
        else:
            assert self.keys.scales is not None
            msa_ops.msa_proxy_score_fp4(
                self.index_q, self.keys.k, self.q_scales, self.keys.scales, 1 / NVFP4_FACTOR, 1 / NVFP4_FACTOR,
                self.starts, **options,
            )  # fmt: skip

    def select(self) -> None:
        msa_ops.msa_topk_select(self.scores, TOPK, None, self.ids, 0, 1)

    def score_and_select(self) -> None:
        self.score()
        self.select()

    def check_scores(self, m: Measurement) -> None:
        """Raise `RuntimeError` unless scores of some blocks are those of float32 products, and ids the CPU's choice."""
        self.score_and_select()
        _same("scores", self.ids, self.scores, None, 0)
        batch, blocks = self.table.shape
        b, j = (torch.randint(n, (CHECKED,), device=m.device, generator=m.generator) for n in (batch, blocks))
        keys, queries = self.keys.values(self.table[b, j].long()), self.index_q.float()
        if self.q_scales is not None:
            queries = msa_ops.nvfp4_dequantize(self.index_q, self.q_scales, 1 / NVFP4_FACTOR)
        products = queries[b] @ keys.transpose(1, 2)  # (checked, heads, keys)
        seen = j[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=m.device) < self.lengths[b][:, None]
        wanted = products.masked_fill(~seen[:, None], -torch.inf).amax(-1)
        # Either side: HEAD_DIM roundings of sums that lie below the product of the largest norms.
        bound = float(queries.norm(dim=-1).max() * keys.norm(dim=-1).max())
        if not torch.allclose(self.scores[:, j, b].T, wanted, rtol=0, atol=2 * HEAD_DIM * 2**-24 * bound):
            raise RuntimeError("scores: they are not those of the products; a wrong result is not timed")


def make_scores(m: Measurement, keys: Keys, lengths: Tensor, context: int) -> Scores:
    """Of requests that own random pages. Index queries are such as the keys are."""
    batch, blocks = len(lengths), context // BLOCK_SIZE
    kinds: dict[str, Any] = {"dtype": torch.int32, "device": m.device}
    q, q_scales = m.randn(batch, HEADS, HEAD_DIM).bfloat16(), None
    if keys.scales is None:
        q = q.to(keys.k.dtype)
    else:
        q, q_scales = msa_ops.nvfp4_quantize(q, NVFP4_FACTOR)
    return Scores(
        q, q_scales, keys, torch.arange(batch + 1, **kinds),
        torch.randint(len(keys.k), (batch, blocks), generator=m.generator, **kinds), lengths.clone(),
        torch.empty(HEADS, batch, blocks, device=m.device).transpose(1, 2), torch.empty(batch, HEADS, TOPK, **kinds),
    )  # fmt: skip


def time_scores(m: Measurement) -> None:
    """Decoding steps of one token. The bar of both together is floor / 0.95 + 4.5 us."""
    for name in ("fp8", "bf16", "nvfp4"):
        keys = make_keys(m, name)
        for batch, context in (*SCORE_SHAPES, RAGGED):
            if time.monotonic() > m.end:
                print("stopped: the time budget is spent")
                return
            ragged = (batch, context) == RAGGED
            lengths = torch.full((batch,), context, dtype=torch.int32, device=m.device)
            if ragged:
                lengths.random_(1, context + 1, generator=m.generator)
            floor = int(lengths.sum()) * keys.row_bytes / H200_READ_BYTES_PER_S * 1e6
            steps = [make_scores(m, keys, lengths, context) for _ in range(max(2, min(32, int(400 / (3 + floor)))))]
            steps[0].check_scores(m)
            score, both = (m.time(calls) for calls in ([s.score for s in steps], [s.score_and_select for s in steps]))
            bar = floor / 0.95 + 4.5
            m.note(
                part="scores", keys=name, batch=batch, context=context, ragged=ragged, floor=floor, score=score.median,
                both=both.median, least=both.min, most=both.max, bar=bar, held=both.median <= bar,
            )  # fmt: skip


# --- the whole step ---


@dataclass(frozen=True)
class Step(Scores):
    """The tensors of one decode step."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor

    def attend(self) -> None:
        ids = self.ids.transpose(0, 1)
        msa_ops.msa_sparse_decode_attention(self.q, self.k, self.v, ids, **self.paged, out=self.out)

    def step(self) -> None:
        msa_ops.msa_decode_step(
            self.q, self.k, self.v, self.index_q, self.keys.k, topk=TOPK, **self.paged, out=self.out, q2k_out=self.ids,
            score_out=self.scores,
        )  # fmt: skip

    def check(self) -> None:
        """Raise `RuntimeError` unless the step's ids are the CPU's choice by its scores, and its output the attention's."""
        self.step()
        _same("step", self.ids, self.scores, None, 0)
        whole = self.out.clone()
        self.attend()
        if not (torch.equal(self.out, whole) and bool(whole.isfinite().all())):
            raise RuntimeError("step: its output is not that of the attention alone; a wrong result is not timed")


def make_pool(m: Measurement, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V as halves of one packed cache."""
    packed = torch.empty(STEP_PAGES, HEADS, BLOCK_SIZE, 2 * HEAD_DIM, dtype=dtype, device=m.device)
    fill(m, packed)
    return packed[..., :HEAD_DIM], packed[..., HEAD_DIM:]


def make_step(m: Measurement, k: Tensor, v: Tensor, index_keys: Keys, context: int, batch: int) -> Step:
    lengths = torch.full((batch,), context - 5, dtype=torch.int32, device=m.device)
    q = m.randn(batch, QUERY_HEADS, HEAD_DIM).bfloat16()
    return Step(**vars(make_scores(m, index_keys, lengths, context)), q=q, k=k, v=v, out=torch.empty_like(q))


def time_steps(m: Measurement) -> None:
    index_keys = Keys(m.randn(STEP_PAGES, 1, BLOCK_SIZE, HEAD_DIM).bfloat16())
    for kv, dtype in (("bf16", torch.bfloat16), ("fp8", FP8)):
        k, v = make_pool(m, dtype)
        for context in STEP_CONTEXTS:
            for batch in BATCHES:
                if time.monotonic() > m.end:
                    print("stopped: the time budget is spent")
                    return
                count = 16 if batch * context <= 4096 * BLOCK_SIZE else 4
                steps = [make_step(m, k, v, index_keys, context, batch) for _ in range(count)]
                steps[0].check()
                took = {
                    part: m.time([getattr(step, part) for step in steps]).median
                    for part in ("score", "select", "attend", "step")
                }
                index_bytes = batch * context * index_keys.row_bytes
                kv_bytes = batch * HEADS * TOPK * BLOCK_SIZE * 2 * HEAD_DIM * k.itemsize
                floors = {"score_floor": index_bytes, "attend_floor": kv_bytes}
                m.note(
                    part="step", kv=kv, context=context, batch=batch, **took,
                    **{name: nbytes / H200_READ_BYTES_PER_S * 1e6 for name, nbytes in floors.items()},
                )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """0 when it went to its end, 1 without a GPU or for a wrong result, 2 (from the parser) for a bad command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--commit", help="recorded in the JSON where the source is no git checkout")
    parser.add_argument(
        "--time-budget", type=float, default=45.0, metavar="SECONDS", help="begin no scores and no step after it"
    )
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: no CUDA device: use a machine with an NVIDIA GPU", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    facts = environment.short_facts(device, given.commit)
    print(f"{facts['card']}, torch {facts['torch']}, commit {facts['commit']}")
    m = Measurement(device, given.time_budget)
    try:
        check_selection(m)
        time_selection(m)
        time_scores(m)
        time_steps(m)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if given.json:
        given.json.write_text(json.dumps({**facts, "records": m.records}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
