"""How sizes are written on command lines and in tables: ``64/4`` heads, ``32K`` keys, the bytes of a row of a cache."""

from __future__ import annotations

import re

from ..contract import SCALES_PER_ROW, KVFormat
from ..engines.cuda.plan import ROW_BYTES

_UNITS = {"": 0, "K": 10, "M": 20}
_LIMIT = 2**31


def split_heads(heads: str, option: str = "--heads") -> tuple[int, int]:
    """``"64/4"`` as query heads and KV heads. Raises `ValueError`, naming the option."""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", heads.strip(), re.ASCII)
    query, kv = (int(match[1]), int(match[2])) if match else (0, 0)
    if min(query, kv) < 1 or query % kv:
        raise ValueError(f"{option} takes QUERY/KV heads with QUERY a multiple of KV, such as 64/4, got {heads!r}")
    return query, kv


def numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Positive numbers separated by commas. Raises `ValueError`, naming the option."""
    if text is None:
        return None
    if not all(re.fullmatch(r"\d{1,9}", part, re.ASCII) and int(part) > 0 for part in text.split(",")):
        raise ValueError(f"{option} takes positive numbers separated by commas, got {text!r}")
    return tuple(int(part) for part in text.split(","))


def parse_sizes(option: str, text: str | None) -> tuple[int, ...] | None:
    """Numbers that may end in K (1,024) or M (1,048,576), each once. Raises `ValueError`, naming the option."""
    if text is None:
        return None
    found = []
    for part in str(text).split(","):
        match = re.fullmatch(r"(\d{1,12})([KM]?)", part.strip().upper(), re.ASCII)
        value = int(match[1]) << _UNITS[match[2]] if match else 0
        if not 0 < value < _LIMIT:
            raise ValueError(f"{option} takes positive numbers such as 8192, 8K or 1M, below 2^31, got {text!r}")
        found.append(value)
    return tuple(dict.fromkeys(found))


def parse_size(option: str, text: str) -> int:
    """The one size of `parse_sizes`. Raises `ValueError`, naming the option."""
    found = parse_sizes(option, text)
    if found is None or len(found) > 1:
        raise ValueError(f"{option} takes one length, got {text!r}")
    return found[0]


def size(tokens: int) -> str:
    """``32768`` as ``32K``, ``1048576`` as ``1M``: what `parse_sizes` reads."""
    for letter in ("M", "K"):
        if tokens % (1 << _UNITS[letter]) == 0:
            return f"{tokens >> _UNITS[letter]}{letter}"
    return str(tokens)


def row_bytes(kv: KVFormat) -> int:
    """Bytes of one K (or V) row of a cache, block scales included."""
    return ROW_BYTES[kv] + (SCALES_PER_ROW if kv is KVFormat.NVFP4 else 0)
