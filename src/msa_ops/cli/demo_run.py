"""What the demo measures at one context length, on one cache, by transformers' path and by ours."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

from ..contract import BLOCK_SIZE, HEAD_DIM, SCALES_PER_ROW
from ..integrations.transformers.attention import (
    IMPLEMENTATION,
    decode_attention,
    msa_ops_attention,
    transformers_attention,
)
from ..integrations.transformers.cache import MSAPagedCache, paged_step
from .demo_model import Choices, step

REFERENCE = "sdpa"
_RECORDER = "msa_ops_demo_recorder"
_BLOCK_LEFT_OUT = "msa_ops_demo_block_left_out"
NOISE_FACTOR = 2.0
"""Our logits may differ from transformers' sdpa by at most this many times what transformers' own eager path does."""
_ROW_BYTES = {
    "bf16": 2 * HEAD_DIM,
    "fp16": 2 * HEAD_DIM,
    "fp8": HEAD_DIM,
    "nvfp4": HEAD_DIM // 2 + SCALES_PER_ROW,
}


@dataclass(frozen=True, slots=True)
class ContextResult:
    """Results at one context length. Times are medians in milliseconds; bytes are per token, sparse layers only."""

    context: int
    tokens: int
    logit_difference: float
    """Largest difference of a logit, ours against sdpa, over all teacher-forced tokens."""
    reference_difference: float
    """The same for transformers' eager path against its sdpa path: the rounding that bf16 brings along."""
    block_left_out_difference: float
    """The same for our path with one selected block of each head left out: what a small fault would look like."""
    logit_spread: float
    """Standard deviation of the reference's logits."""
    argmax_compared: int
    argmax_equal: int
    differing_choices: int
    """Tokens at which our path by itself would have chosen another block or expert (a near tie)."""
    continuation: bytes
    common_prefix: int
    """Bytes of the continuation that transformers' path, also running freely, wrote too."""
    call_ms_ours: float
    call_ms_transformers: float
    token_ms_ours: float
    token_ms_transformers: float
    kv_bytes_selected: int
    kv_bytes_dense: int

    @property
    def agrees(self) -> bool:
        """Whether our path is as close to sdpa as bf16 allows, and its argmax equal where that decides it."""
        close = self.logit_difference <= NOISE_FACTOR * self.reference_difference
        return math.isfinite(self.logit_difference) and close and self.argmax_equal == self.argmax_compared


class _Recorder:
    """The sparse layers' attention calls of one decode step, kept to be timed one by one."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]]] = []

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Any:
        if kwargs.get("block_indices") is not None:
            self.calls.append((module, query, key, value, mask, kwargs))
        return msa_ops_attention(module, query, key, value, mask, **kwargs)


def _block_left_out(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """`msa_ops_attention` with a deliberate fault: each head misses the lowest-scored of its selected blocks."""
    ids = kwargs.get("block_indices")
    if ids is not None:
        last = (ids >= 0).sum(dim=-1, keepdim=True) - 1
        kwargs["block_indices"] = ids.scatter(-1, last, -1)
    return msa_ops_attention(module, query, key, value, mask, **kwargs)


@dataclass(frozen=True, slots=True)
class _Work:
    """Something to time, and what to do before it, untimed."""

    run: Callable[[], None]
    prepare: Callable[[], None] = lambda: None


class Measurement:
    """Runs both paths from one cache state, a context of `length` tokens whose next token is `first`."""

    def __init__(
        self, model: MiniMaxM3VLForCausalLM, cache: MSAPagedCache, length: int, first: int, tokens: int
    ) -> None:
        self.model, self.cache, self.length, self.first, self.tokens = model, cache, length, first, tokens
        self.device = model.device
        self.choices = Choices(model)

    def run(self, progress: Callable[[str], None]) -> ContextResult:
        """All of it; `progress` is told each stage as it begins. The cache ends as it was: `length` tokens."""
        progress("transformers decodes")
        with self.choices.record():
            written, reference = self._decode(REFERENCE, None)
        forced = [self.first, *written[:-1]]
        progress("ours, teacher-forced")
        with self.choices.impose():
            _, ours = self._decode(IMPLEMENTATION, forced)
        differing = len(self.choices.differing_steps)
        progress("transformers' eager path, for its rounding")
        with self.choices.impose():
            _, eager = self._decode("eager", forced)
        progress("ours with one block left out, for contrast")
        AttentionInterface.register(_BLOCK_LEFT_OUT, _block_left_out)
        with self.choices.impose():
            _, faulty = self._decode(_BLOCK_LEFT_OUT, forced)
        progress("ours writes on")
        continuation, _ = self._decode(IMPLEMENTATION, None)
        progress("timing")
        call_ours, call_theirs, selected, dense = self._time_calls()
        token_ours, token_theirs = self._time_tokens()
        self.cache.truncate(self.length)
        difference = _largest_difference(ours, reference)
        top = reference.topk(2, dim=-1).values
        decided = top[:, 0] - top[:, 1] > 2 * difference
        # NaN logits are a difference of infinity: nothing is decided then, and `agrees` is False.
        return ContextResult(
            context=self.length,
            tokens=self.tokens,
            logit_difference=difference,
            reference_difference=_largest_difference(eager, reference),
            block_left_out_difference=_largest_difference(faulty, reference),
            logit_spread=float(reference.std()),
            argmax_compared=int(decided.sum()),
            argmax_equal=int((ours.argmax(-1) == reference.argmax(-1))[decided].sum()),
            differing_choices=differing,
            continuation=bytes(continuation),
            common_prefix=_common_prefix(continuation, written),
            call_ms_ours=call_ours,
            call_ms_transformers=call_theirs,
            token_ms_ours=token_ours,
            token_ms_transformers=token_theirs,
            kv_bytes_selected=selected,
            kv_bytes_dense=dense,
        )

    def _decode(self, implementation: str, forced: list[int] | None) -> tuple[list[int], Tensor]:
        """Decode `tokens` tokens from the snapshot, greedily or with the given inputs: chosen tokens, logits."""
        self.cache.truncate(self.length)
        self.model.set_attn_implementation(implementation)
        written, logits, token = [], [], self.first
        for i in range(self.tokens):
            logits.append(step(self.model, self._input(token if forced is None else forced[i]), self.cache))
            token = int(logits[-1].argmax())
            written.append(token)
        return written, torch.stack(logits)

    def _input(self, token: int) -> Tensor:
        return torch.tensor([[token]], device=self.device)

    def _time_calls(self) -> tuple[float, float, int, int]:
        """ms per sparse layer's attention, ours and transformers', on the tensors of one real step; bytes per token."""
        recorder = _Recorder()
        AttentionInterface.register(_RECORDER, recorder)
        self.cache.truncate(self.length)
        self.model.set_attn_implementation(_RECORDER)
        step(self.model, self._input(self.first), self.cache)

        def ours() -> None:
            for _, query, key, _, _, kwargs in recorder.calls:
                at = paged_step(key)
                assert at is not None
                decode_attention(query, kwargs["block_indices"], at, kwargs["scaling"])

        def theirs() -> None:
            for module, query, key, value, mask, kwargs in recorder.calls:
                transformers_attention(module, query, key, value, mask, **kwargs)

        times = self._alternate([_Work(ours), _Work(theirs)], repeats=15)
        layers = len(recorder.calls)
        row = 2 * _ROW_BYTES[self.cache.kv_dtype]
        keys = self.length + 1
        selected = sum(_selected_keys(call[5]["block_indices"], keys) for call in recorder.calls)
        dense = sum(keys * call[2].shape[1] for call in recorder.calls)
        return times[0] / layers, times[1] / layers, selected * row, dense * row

    def _time_tokens(self) -> tuple[float, float]:
        """ms per token of the whole model, ours and transformers', from the same cache state."""

        def prepare(implementation: str) -> None:
            self.cache.truncate(self.length)
            self.model.set_attn_implementation(implementation)

        def run() -> None:
            step(self.model, self._input(self.first), self.cache)

        works = [_Work(run, functools.partial(prepare, name)) for name in (IMPLEMENTATION, REFERENCE)]
        ours, theirs = self._alternate(works, repeats=11)
        return ours, theirs

    def _alternate(self, works: list[_Work], repeats: int) -> list[float]:
        """Median ms of each work, taken in turns so that a slow moment of the machine meets all of them."""
        times: list[list[float]] = [[] for _ in works]
        for repeat in range(repeats + 2):
            for work, kept in zip(works, times, strict=True):
                work.prepare()
                self._synchronise()
                start = time.perf_counter()
                work.run()
                self._synchronise()
                if repeat >= 2:
                    kept.append((time.perf_counter() - start) * 1e3)
        return [statistics.median(kept) for kept in times]

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _largest_difference(a: Tensor, b: Tensor) -> float:
    difference = (a - b).abs().max()
    return float(difference) if bool(difference.isfinite()) else float("inf")


def _selected_keys(block_indices: Tensor, keys: int) -> int:
    """Keys, summed over KV heads, in the selected blocks of a step that sees `keys` keys."""
    ids = block_indices[block_indices >= 0]
    return int((keys - ids * BLOCK_SIZE).clamp(max=BLOCK_SIZE).sum())


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
