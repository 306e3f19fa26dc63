"""Checks of arguments that the functions beside the attention call share."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import Tensor

from .contract import _PLAIN_TENSORS


def require_int(name: str, value: object) -> int:
    """`value` as an int. Raises `TypeError` for bools, floats and whatever else is no integer; NumPy's ints are."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise TypeError(f"{name} must be an int, got {type(value).__name__}")


def check_destination(name: str, output: Tensor, inputs: Mapping[str, object]) -> None:
    """Raise `ValueError` unless each element of `output` has memory of its own, outside that of the inputs.

    The inputs may be anything: what is no tensor is passed over. Ranges from the first to the last element are compared,
    so an output woven between the rows of an input is refused too.
    """
    if torch.compiler.is_compiling() or type(output) not in _PLAIN_TENSORS or output.numel() == 0:
        return  # a tensor that is only traced has no address
    reach = 1
    for stride, size in sorted((s, n) for n, s in zip(output.shape, output.stride(), strict=True) if n > 1):
        if stride < reach:
            raise ValueError(
                f"{name} must have memory for each of its elements, got shape {tuple(output.shape)} with strides "
                f"{output.stride()}: an expanded tensor is no destination"
            )
        reach += (size - 1) * stride
    start, end = _range(output)
    for other, tensor in inputs.items():
        if type(tensor) in _PLAIN_TENSORS and isinstance(tensor, Tensor) and tensor.numel():
            first, last = _range(tensor)
            if start < last and first < end:
                raise ValueError(f"{name} must not share memory with {other}, which is read while {name} is written")


def _range(t: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the byte after the last."""
    elements = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
    return t.data_ptr(), t.data_ptr() + elements * t.element_size()
