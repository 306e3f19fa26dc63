"""Caller-owned scratch memory."""

from __future__ import annotations

import torch
from torch import Tensor


class MSASparseAttentionWorkspace:
    """Scratch for the routes that store partial results in device memory.

    Only the scratch route (splits that do not fit a thread-block cluster) writes here; every other route needs no
    scratch, and the CPU engine none at all. The workspace grows on demand and never shrinks, and it is tied to a device,
    not to tensors: one workspace serves any sequence of calls on one stream.

    A CUDA graph holds the address of the buffer that it was captured with. Buffers that growth replaced are therefore
    kept alive as long as the workspace: a graph captured earlier stays valid when a later, larger call grows it.

    Args:
        device: where the scratch lives, e.g. ``"cuda"`` or ``"cpu"``.
        nbytes: initial size in bytes.
    """

    def __init__(self, device: torch.device | str | int = "cuda", nbytes: int = 0) -> None:
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._retired: list[Tensor] = []

    @property
    def device(self) -> torch.device:
        """The device of the buffer, with its index."""
        return self._buffer.device

    @property
    def nbytes(self) -> int:
        """Bytes that the workspace holds now."""
        return self._buffer.numel()

    @property
    def buffer(self) -> Tensor:
        """The current scratch, uint8."""
        return self._buffer

    def reserve(self, nbytes: int) -> Tensor:
        """Return a buffer of at least `nbytes` bytes, growing the workspace if it is smaller."""
        if nbytes > self._buffer.numel():
            if self._buffer.numel():
                self._retired.append(self._buffer)
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._buffer.device)
        return self._buffer
