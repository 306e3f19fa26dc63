"""Inputs of preset step: an index cache beside the KV cache, index queries, block scores, and what results must be.

Index queries and keys are fp8 beside an fp8 or NVFP4 cache, bf16 beside a bf16 one. There is one index query head for
every KV head and one index KV head, as in MiniMax-M3. Index keys lie in the KV cache's pages: one table serves both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..contract import BLOCK_SIZE, FP8, HEAD_DIM
from .inputs import Call, Pool, Shape, make_calls

_CHUNK_BYTES = 1 << 28
_FILL_ELEMENTS = 1 << 27
SCORE_TOLERANCE = 5e-4
"""Of the norms' product. Float32 sums are far closer; fp8 tensor-core products on compute capability 9.0 are summed in
about 13 bits."""


def index_dtype(kv: str) -> torch.dtype:
    return torch.bfloat16 if kv == "bf16" else FP8


def index_page_bytes(kv: str) -> int:
    return BLOCK_SIZE * HEAD_DIM * index_dtype(kv).itemsize


@dataclass(frozen=True)
class StepPool:
    """A KV pool and the index cache ``(pages, 1, 128, 128)`` of the same pages."""

    kv: Pool
    index_k: Tensor


@dataclass(frozen=True)
class StepCall:
    """One decode step. `call` is its attention, with ids of its own for the attention alone.

    `extents` ``(tokens,)`` int32 are the blocks that each token sees a key of, for sides that want them ready. `scores` is the
    input of the selection alone. `score_out` ``(index heads, blocks, tokens)`` and `ids_out`
    ``(KV heads, tokens, topk)`` are results; their strides are those that a side asks for.
    """

    call: Call
    index_q: Tensor
    index_k: Tensor
    cu_seqlens_q: Tensor
    extents: Tensor
    scores: Tensor
    score_out: Tensor
    ids_out: Tensor

    @property
    def shape(self) -> Shape:
        return self.call.shape

    def with_buffers(self, *, scores_by_token: bool, ids_by_head: bool) -> StepCall:
        """The same inputs with results of a side's own, in its layout: scores with blocks innermost or with tokens, ids
        with heads outermost or with tokens."""
        device = self.index_q.device
        return replace(
            self,
            call=replace(self.call, out=torch.empty_like(self.call.out)),
            scores=_scores(self.shape, device, scores_by_token).copy_(self.scores),
            score_out=_scores(self.shape, device, scores_by_token),
            ids_out=_ids(self.shape, device, ids_by_head),
        )

    def inputs(self) -> tuple[Tensor, ...]:
        """What a side reads and may not change; the caches are too large to be compared."""
        return *self.call.inputs(), self.index_q, self.cu_seqlens_q, self.extents, self.scores

    def poison(self) -> None:
        """Fill the results with what no side writes."""
        self.call.out.fill_(torch.nan)
        self.score_out.fill_(torch.nan)
        self.ids_out.fill_(-7)


def _scores(shape: Shape, device: torch.device, by_token: bool) -> Tensor:
    heads, blocks, tokens = shape.num_kv_heads, shape.max_pages, shape.tokens
    if not by_token:
        return torch.empty(heads, blocks, tokens, device=device)
    padded = -(-blocks // 16) * 16  # rows of whole 64-byte lines
    return torch.empty(heads, tokens, padded, device=device)[..., :blocks].transpose(1, 2)


def _ids(shape: Shape, device: torch.device, by_head: bool) -> Tensor:
    heads, tokens = shape.num_kv_heads, shape.tokens
    if by_head:
        return torch.empty(heads, tokens, shape.topk, dtype=torch.int32, device=device)
    return torch.empty(tokens, heads, shape.topk, dtype=torch.int32, device=device).transpose(0, 1)


def make_index(kv: str, pages: int, generator: torch.Generator) -> Tensor:
    """Index keys with normal values."""
    cache = torch.empty(pages, 1, BLOCK_SIZE, HEAD_DIM, dtype=index_dtype(kv), device=generator.device)
    flat = cache.view(-1)
    for start in range(0, flat.numel(), _FILL_ELEMENTS):
        part = flat[start : start + _FILL_ELEMENTS]
        part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=generator.device, generator=generator))
    return cache


def make_step_calls(shape: Shape, pool: StepPool, count: int, generator: torch.Generator) -> list[StepCall]:
    """`count` steps of one shape with distinct queries, scores and page tables."""
    device, heads = generator.device, shape.num_kv_heads
    found = []
    for call in make_calls(shape, pool.kv, count, generator):
        index_q = torch.randn(shape.tokens, heads, HEAD_DIM, device=device, generator=generator)
        found.append(
            StepCall(
                call,
                index_q.to(index_dtype(shape.kv)),
                pool.index_k,
                torch.arange(0, shape.tokens + 1, shape.seqlen_q, dtype=torch.int32, device=device),
                (_own_blocks(shape, call.seqused_k, torch.arange(shape.tokens, device=device)) + 1).int(),
                torch.randn(heads, shape.max_pages, shape.tokens, device=device, generator=generator),
                _scores(shape, device, False),
                _ids(shape, device, False),
            )
        )
    return found


# --- bytes ---


def index_bytes(shape: Shape) -> int:
    """Bytes of the index keys that a step must read. A page that several requests share counts for each of them."""
    return sum(shape.request_lengths) * HEAD_DIM * index_dtype(shape.kv).itemsize


def part_bytes(part: str, call: StepCall) -> int:
    """Bytes that a part must move at the least. Scores that pass from one part to the next may stay in L2."""
    shape = call.shape
    if part == "select":
        return 4 * shape.num_kv_heads * shape.tokens * (shape.max_pages + shape.topk)
    attend = call.call.unique_bytes if part in ("attend", "step") else 0
    return attend + (0 if part == "attend" else index_bytes(shape))


# --- what results must be ---


def own_blocks(call: StepCall, tokens: Tensor) -> Tensor:
    """``(len(tokens),)``: the block that holds each token, which the selection must keep."""
    return _own_blocks(call.shape, call.call.seqused_k, tokens)


def _own_blocks(shape: Shape, lengths: Tensor, tokens: Tensor) -> Tensor:
    last = lengths[tokens // shape.seqlen_q].long() - shape.seqlen_q + tokens % shape.seqlen_q
    return last // BLOCK_SIZE


def exact_scores(call: StepCall, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """float64 ``(index heads, len(tokens), blocks)`` scores of the chosen tokens, ``-inf`` where a block has no visible
    key, and how far a result may be from them, ``(index heads, len(tokens), 1)``."""
    shape, n = call.shape, tokens.numel()
    request = tokens // shape.seqlen_q
    last = call.call.seqused_k[request].long() - shape.seqlen_q + tokens % shape.seqlen_q
    q = call.index_q[tokens].float().double()
    raw = call.index_k.view(torch.uint8) if call.index_k.dtype == FP8 else call.index_k
    step = max(1, _CHUNK_BYTES // (n * BLOCK_SIZE * HEAD_DIM * 8))
    parts, longest = [], torch.zeros(n, dtype=torch.float64, device=q.device)
    for start in range(0, shape.max_pages, step):
        pages = call.call.page_table[request, start : start + step].long()
        k = raw[pages, 0].view(call.index_k.dtype).float().double().flatten(1, 2)  # (n, keys, 128)
        longest = torch.maximum(longest, k.norm(dim=-1).amax(-1))
        position = start * BLOCK_SIZE + torch.arange(k.shape[1], device=q.device)
        score = (q @ k.transpose(1, 2)).masked_fill((position > last[:, None])[:, None], -math.inf)
        parts.append(torch.unflatten(score, -1, (-1, BLOCK_SIZE)).amax(-1))
    tolerance = SCORE_TOLERANCE * q.norm(dim=-1) * longest[:, None]
    return torch.cat(parts, -1).transpose(0, 1), tolerance.transpose(0, 1)[..., None]


def score_fault(found: Tensor, exact: Tensor, tolerance: Tensor, own: Tensor) -> str:
    """Why `found` ``(heads, tokens, blocks)`` is not `exact`, or nothing. A token's own block, which some sides mark as
    chosen by its score, is left out."""
    blocks = torch.arange(exact.shape[-1], device=exact.device)
    asked = (exact > -math.inf) & (blocks != own[:, None])
    error = torch.where(asked, (found.double() - exact).abs(), 0.0)
    if bool((error <= tolerance).all()):  # false for NaN
        return ""
    return f"a score is off by {float(error.nan_to_num(math.inf).max()):.3g}"


def selection_fault(ids: Tensor, scores: Tensor, own: Tensor, tolerance: Tensor | float = 0.0) -> str:
    """Why `ids` ``(heads, tokens, topk)`` are not the best blocks by `scores` ``(heads, tokens, blocks)`` with each
    token's own block, or nothing. Blocks whose scores differ by `tolerance` or less may stand for each other."""
    blocks, topk = scores.shape[-1], ids.shape[-1]
    live = ids != -1
    if bool((live & ((ids < 0) | (ids >= blocks))).any()):
        return "an id is neither a block nor -1"
    visible = scores > -math.inf
    count = torch.zeros(scores.shape, dtype=torch.int32, device=scores.device)
    count.scatter_add_(-1, ids.long().clamp(min=0), live.int())
    chosen, mine = count > 0, torch.arange(blocks, device=scores.device) == own[:, None]
    if bool((count > 1).any()):
        return "a block is chosen twice"
    if bool((chosen & ~visible).any()):
        return "a block without a visible key is chosen"
    if bool((live.sum(-1) != visible.sum(-1).clamp(max=topk)).any()):
        return "there are fewer ids than there could be"
    if bool((mine & ~chosen).any()):
        return "a token's own block is not chosen"
    worst = torch.where(chosen & ~mine, scores, math.inf).amin(-1, keepdim=True)
    best_left = torch.where(visible & ~chosen, scores, -math.inf).amax(-1, keepdim=True)
    return "a better block is left out" if bool((worst < best_left - tolerance).any()) else ""
