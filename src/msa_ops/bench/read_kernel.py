"""A read-only stream and an empty kernel in Triton: the card's read ceiling and the cost of a graph node.

Imported only where triton is. The stream reads 16-byte vectors, folds them with exclusive or and stores one word a
block, so that nothing is optimised away and next to nothing is written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

CONFIGS = ((4096, 8, 4), (8192, 8, 4), (4096, 4, 8), (2048, 4, 16))
"""(words a step, warps, blocks per SM): the best of these is the ceiling."""


# Triton resolves annotations in a kernel's own globals: these stay without.
def _read(source, sink, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, BLOCK)
    folded = tl.zeros((BLOCK,), tl.int32)
    for step in range(tl.program_id(0), steps, tl.num_programs(0)):
        folded ^= tl.load(source + tl.cast(step, tl.int64) * BLOCK + offsets)
    tl.store(sink + tl.program_id(0), tl.xor_sum(folded, 0))


def _empty(sink):  # type: ignore[no-untyped-def]
    pass


_read_jit = triton.jit(_read)
_empty_jit = triton.jit(_empty)


def read_stream(source: Tensor, sink: Tensor, config: tuple[int, int, int], sms: int) -> None:
    """Read all of `source` (int32, a multiple of 8,192 words); `sink` holds at least ``16 * sms`` words."""
    block, warps, per_sm = config
    _read_jit[(per_sm * sms,)](source, sink, source.numel() // block, BLOCK=block, num_warps=warps)


def empty_node(sink: Tensor) -> None:
    """Launch a kernel that does nothing."""
    _empty_jit[(1,)](sink, num_warps=1)
