"""The shapes of each preset, most telling first."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..contract import BLOCK_SIZE
from .goals import NOISE, ONE_LONG_LIMIT, RAGGED_LIMIT, SEPARATE_LIMIT
from .inputs import Call, Shape
from .sizes import split_heads

PRESETS = ("grid", "ragged", "spec", "step", "model", "accuracy", "host")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HEADS = ("64/4", "16/1")
EXTRA_HEADS = ("32/2", "8/1")
LONGEST = 131072
# MiniMax-M3: 57 layers attend sparsely, with 64 query and 4 KV heads.
MODEL_LAYERS = 57
MODEL_HEADS = (64, 4)
TP_SIZES = (1, 2, 4, 8)
MODEL_CONTEXTS = (8192, 32768, 131072, 524288, 1048576)
MODEL_BATCHES = (1, 32)
# A decode step with its indexer: what is read grows with the context.
STEP_CONTEXTS = (8192, 131072, 1048576)
STEP_BATCHES = (1, 16, 64)
BY_CONTEXT = ("model", "step")
"""Presets whose rows differ in their context, of which they take several."""


@dataclass(frozen=True)
class Job:
    """One row to measure. With a `baseline` our own time on that other form of the same work is measured beside it."""

    preset: str
    shape: Shape
    label: str = ""
    baseline: str = ""
    baseline_shape: Shape | None = None
    limit: float = 0.0
    in_grid: bool = True
    tp: int = 0
    """Tensor-parallel size in preset model, else 0."""
    layers: int = 0
    """Layers of the model that make this call in one step, else 0."""


@dataclass(frozen=True)
class Axes:
    """What was chosen on the command line; `None` takes the preset's own values."""

    kvs: tuple[str, ...]
    batches: tuple[int, ...] | None
    heads: tuple[str, ...] | None
    seqlens_q: tuple[int, ...] | None
    context: int
    topk: int = 16
    overlap: bool = False
    extra: bool = False
    contexts: tuple[int, ...] | None = None
    tps: tuple[int, ...] | None = None


def jobs_of(preset: str, axes: Axes, seed: int) -> list[Job]:
    """The rows of one preset, those of one (heads, KV format) together, since they share a pool."""
    if preset == "model":
        return list(_model(axes))
    makers = {"grid": _grid, "ragged": _ragged, "spec": _spec, "step": _step, "accuracy": _accuracy}
    heads = axes.heads or (HEADS + EXTRA_HEADS if axes.extra else HEADS)
    if preset not in ("grid",) and axes.heads is None:
        heads = HEADS[:1] if not axes.extra else HEADS
    jobs = []
    for pair in heads:
        for kv in axes.kvs:
            base = Shape(kv, 1, *split_heads(pair), context=axes.context, topk=axes.topk, overlap=axes.overlap)
            jobs += list(makers[preset](base, axes, seed))
    return jobs


def _grid(base: Shape, axes: Axes, _: int) -> Iterator[Job]:
    for seqlen_q in axes.seqlens_q or (1, 4):
        for batch in axes.batches or BATCHES:
            shape = replace(base, batch=batch, seqlen_q=seqlen_q)
            in_grid = shape.heads in HEADS and batch in BATCHES and seqlen_q in (1, 4) and not axes.overlap
            yield Job("grid", shape, in_grid=in_grid)


def _ragged(base: Shape, axes: Axes, seed: int) -> Iterator[Job]:
    # A context below the default (a trial run) shrinks the longest request alike.
    longest = LONGEST if base.context >= 32768 else 4 * base.context
    for batch in axes.batches or (64, 16, 128, 256):
        base = replace(base, batch=batch, seqlen_q=1, overlap=False)
        lengths = ragged_lengths(batch, longest, seed)
        yield _against_even(replace(base, lengths=lengths), "ragged", RAGGED_LIMIT)
        one_long = (longest, *(BLOCK_SIZE,) * (batch - 1))
        yield _against_even(replace(base, lengths=one_long), "one long", ONE_LONG_LIMIT)


def ragged_lengths(batch: int, longest: int, seed: int) -> tuple[int, ...]:
    """Lengths from 1 to `longest`, more of them short than long, in random order; over 8 valid blocks in the mean."""
    steps = [(i / max(1, batch - 1)) ** 0.7 for i in range(batch)]
    lengths = [max(1, round(longest**step)) for step in steps] if batch > 1 else [longest]
    random.Random(seed).shuffle(lengths)
    return tuple(lengths)


def _against_even(shape: Shape, label: str, limit: float) -> Job:
    """The same number of blocks evenly spread over as many requests of the usual context."""
    total = sum(min(shape.topk, -(-n // BLOCK_SIZE)) for n in shape.request_lengths)
    even = tuple(total // shape.batch + (i < total % shape.batch) for i in range(shape.batch))
    return Job("ragged", shape, label, "even", replace(shape, lengths=None, blocks=even), limit)


def _spec(base: Shape, axes: Axes, _: int) -> Iterator[Job]:
    for seqlen_q in axes.seqlens_q or ((4, 2, 8) if not axes.extra else (4, 2, 8, 3, 5, 6, 7)):
        for batch in axes.batches or (1, 8, 32, 128):
            shape = replace(base, batch=batch, seqlen_q=seqlen_q, overlap=True)
            limit = SEPARATE_LIMIT + NOISE
            yield Job("spec", shape, "", "separate" if seqlen_q > 1 else "", None, limit)


def separate_requests(call: Call) -> Call:
    """The same tokens with seqlen_q 1: one request each, with its own copy of the table row and its own length."""
    shape, n = call.shape, call.shape.seqlen_q
    lengths = tuple(length - n + i + 1 for length in shape.request_lengths for i in range(n))
    rows = replace(shape, batch=shape.tokens, seqlen_q=1, overlap=False, lengths=lengths, blocks=None)
    return replace(
        call,
        shape=rows,
        page_table=call.page_table.repeat_interleave(n, 0),
        seqused_k=call.seqused_k.new_tensor(lengths),
    )


def _step(base: Shape, axes: Axes, _: int) -> Iterator[Job]:
    """One job a shape; measuring it gives a row for each part of the step."""
    for batch in axes.batches or STEP_BATCHES:
        for context in axes.contexts or STEP_CONTEXTS:
            for seqlen_q in axes.seqlens_q or (1,):
                shape = replace(base, batch=batch, context=context, seqlen_q=seqlen_q, overlap=False)
                yield Job("step", shape, in_grid=False)


def _accuracy(base: Shape, axes: Axes, _: int) -> Iterator[Job]:
    for batch in axes.batches or (1, 16, 256):
        for seqlen_q in axes.seqlens_q or (1,):
            yield Job("accuracy", replace(base, batch=batch, seqlen_q=seqlen_q))


def model_heads(tp: int) -> tuple[int, int]:
    """Query and KV heads of one rank. With more ranks than KV heads each rank keeps a copy of one."""
    return MODEL_HEADS[0] // tp, max(1, MODEL_HEADS[1] // tp)


def _model(axes: Axes) -> Iterator[Job]:
    """One rank's call in each sparse layer. TP 4 and 8 have one KV head each and so share a pool."""
    for kv in axes.kvs:
        for tp in axes.tps or TP_SIZES:
            for batch in axes.batches or MODEL_BATCHES:
                for context in axes.contexts or MODEL_CONTEXTS:
                    for seqlen_q in axes.seqlens_q or (1,):
                        shape = Shape(kv, batch, *model_heads(tp), seqlen_q, context, axes.topk, axes.overlap)
                        yield Job("model", shape, f"TP {tp}", in_grid=False, tp=tp, layers=MODEL_LAYERS)
