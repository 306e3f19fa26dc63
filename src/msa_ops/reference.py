"""The oracle: decode attention in float64, one row at a time. Slow, short and obviously right.

It shares no code with the engines, reads K and V element by element from the definition of each form, and rounds to the
output dtype once. Tests compare everything with it; nothing else should call it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]).double()


def _scale_byte(
    scale: Tensor, page: int, head: int, token: int, s: int, kv_heads: int, paged: bool, is_v: bool
) -> Tensor:
    """The e4m3 byte of group `s` of one row, from the definitions of the two scale layouts."""
    if scale.dim() == 4:
        inner = scale.view(torch.uint8)[page, head].flatten()
        return inner[(token // 4) * 32 + 4 * s + token % 4 if is_v else token * 8 + s]
    row = (page * kv_heads + head) * 128 + token if paged else token * kv_heads + head
    byte = ((row // 128) * 2 + s // 4) * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + s % 4
    return scale.view(torch.uint8).flatten()[byte]


def _row(data: Tensor, scale: Tensor | None, page: int, head: int, token: int, is_v: bool) -> Tensor:
    """One K or V row as 128 float64 values, global scale not applied. `page` is -1 for a flat cache."""
    paged = data.dim() == 4
    raw = data[page, head, token] if paged else data[token, head]
    if scale is None:
        return raw.double()
    codes = torch.stack((raw & 15, raw >> 4), dim=-1).flatten().long()
    bytes_ = torch.stack([_scale_byte(scale, page, head, token, s, data.shape[1], paged, is_v) for s in range(8)])
    return _E2M1[codes] * bytes_.view(torch.float8_e4m3fn).double().repeat_interleave(16)


def decode_reference(
    q: Tensor, k: Tensor, v: Tensor, q2k_indices: Tensor, *, round_output: bool = True, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Output and LSE of the arguments of `msa_sparse_decode_attention`, computed on the CPU in float64.

    With ``round_output`` the output is rounded once to the call's output dtype, else returned as float64. The LSE is
    always float64.
    """
    args = {n: a.cpu() if isinstance(a, Tensor) else a for n, a in kwargs.items()}
    k_scale, v_scale = args.get("k_scale"), args.get("v_scale")
    q, k, v, q2k_indices = q.cpu(), k.cpu(), v.cpu(), q2k_indices.cpu()
    seqlen_q, causal = int(args.get("seqlen_q", 1)), args.get("causal", True)
    scale = args.get("softmax_scale")
    scale = 1 / math.sqrt(128) if scale is None else scale
    k_global, v_global = (1.0 if args.get(n) is None else float(args[n]) for n in ("k_global_scale", "v_global_scale"))
    table, cu = args.get("page_table"), args.get("cu_seqlens_k")
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for t in range(q.shape[0]):
        b, i = divmod(t, seqlen_q)
        start = 0 if cu is None else int(cu[b])
        length = int(args["seqused_k"][b]) if cu is None else int(cu[b + 1]) - start
        offset = args.get("q_offset")
        first = length - seqlen_q if offset is None else int(offset[b]) if isinstance(offset, Tensor) else offset
        limit = min(length, first + i + 1) if causal else length
        for h in range(k.shape[1]):
            keys, values = [], []
            for block in dict.fromkeys(q2k_indices[h, t].tolist()):  # a duplicate counts once
                if not 0 <= block < -(-length // 128) or (table is not None and block >= table.shape[1]):
                    continue
                page = -1 if table is None else int(table[b, block])
                if table is not None and not 0 <= page < k.shape[0]:
                    continue
                for position in range(block * 128, min(block * 128 + 128, limit)):
                    token = position % 128 if table is not None else start + position
                    if table is None and not 0 <= token < k.shape[0]:
                        continue
                    keys.append(_row(k, k_scale, page, h, token, False))
                    values.append(_row(v, v_scale, page, h, token, True))
            if not keys:
                continue
            heads = slice(h * group, (h + 1) * group)
            scores = q[t, heads].double() @ torch.stack(keys).T * (scale * k_global)
            lse[t, heads] = torch.logsumexp(scores, -1)
            out[t, heads] = torch.softmax(scores, -1) @ torch.stack(values) * v_global
    return (
        _round_once(out, torch.float16 if q.dtype == torch.float16 else torch.bfloat16) if round_output else out
    ), lse


def _round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 to fp16 or bf16 with one rounding (torch goes through float32, which rounds twice).

    float32 gets the value rounded to odd: truncated, with the last bit set if anything was cut. Rounding that to a
    format at least two bits shorter equals rounding the float64 itself.
    """
    near = x.float()
    toward_zero = torch.where(near.double().abs() > x.abs(), torch.nextafter(near, torch.zeros_like(near)), near)
    odd = (toward_zero.view(torch.int32) | (toward_zero.double() != x).int()).view(torch.float32)
    return odd.to(dtype)
