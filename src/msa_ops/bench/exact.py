"""A vectorised float64 check on the device, fast enough to run before every timing.

It is itself tested against `msa_ops.reference`, the oracle, and handles what the benchmark's inputs hold: a paged
cache, causal right-aligned tokens, ids that are distinct within a token and -1 where there is none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import BLOCK_SIZE, FP8, HEAD_DIM
from ..reference import _E2M1, _round_once
from .inputs import Call

_CHUNK_BYTES = 1 << 29


def exact_output(call: Call, tokens: Tensor) -> Tensor:
    """Exact output of the chosen tokens, float64 ``(len(tokens), num_qo_heads, 128)``."""
    keys = call.shape.topk * BLOCK_SIZE
    chunk = max(1, _CHUNK_BYTES // (call.shape.num_kv_heads * keys * HEAD_DIM * 8))
    return torch.cat([_exact(call, part) for part in torch.split(tokens, chunk)])


def _exact(call: Call, tokens: Tensor) -> Tensor:
    shape, pool = call.shape, call.pool
    n, heads = tokens.numel(), shape.num_kv_heads
    ids = call.q2k_indices[:, tokens].long()  # (heads, n, topk)
    request = tokens // shape.seqlen_q
    pages = call.page_table[request[None, :, None], ids.clamp(min=0)].long()
    head = torch.arange(heads, device=ids.device)[:, None, None].expand_as(pages)
    length = call.seqused_k[request].long()
    last = length - shape.seqlen_q + tokens % shape.seqlen_q
    position = ids[..., None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=ids.device)
    seen = (ids[..., None] >= 0) & (position <= last[None, :, None, None]) & (position < length[None, :, None, None])
    k = _rows(pool.k, pool.k_scale, pages, head, False).reshape(heads, n, -1, HEAD_DIM)
    v = _rows(pool.v, pool.v_scale, pages, head, True).reshape(heads, n, -1, HEAD_DIM)
    q = call.q[tokens].double().view(n, heads, -1, HEAD_DIM).transpose(0, 1)  # (heads, n, group, 128)
    scale = HEAD_DIM**-0.5 * (1.0 if pool.k_global_scale is None else pool.k_global_scale)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen.reshape(heads, n, 1, -1), -torch.inf)
    out = torch.softmax(scores, -1).nan_to_num(0.0) @ v  # a token that sees nothing gives 0
    if pool.v_global_scale is not None:
        out = out * pool.v_global_scale
    return out.transpose(0, 1).flatten(1, 2)


def _rows(data: Tensor, scale: Tensor | None, pages: Tensor, head: Tensor, is_v: bool) -> Tensor:
    """K or V of the selected blocks, float64 ``(heads, n, topk, 128, 128)``; page and head index together."""
    if scale is None:
        # Indexing fp8 tensors is not implemented on every device; their bytes are.
        if data.dtype == FP8:
            return data.view(torch.uint8)[pages, head].view(FP8).to(torch.float32).double()
        return data[pages, head].double()
    raw = data[pages, head]
    codes = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2).long()
    factors = _block_scales(scale, pages, head, data.shape[1], is_v)
    return _E2M1.to(data.device)[codes] * factors.repeat_interleave(16, dim=-1)


def _block_scales(scale: Tensor, pages: Tensor, head: Tensor, heads: int, is_v: bool) -> Tensor:
    """The float64 scales ``(heads, n, topk, 128, 8)`` of the selected blocks, from either scale layout."""
    if scale.dim() != 4:  # 128x4 tiles: byte (s//4, token%32, token//32, s%4) of one block's 1,024
        tiles = scale.view(-1, 2, 32, 4, 4)[pages * heads + head]
        scales = tiles.movedim((-2, -3, -4, -1), (-4, -3, -2, -1)).flatten(-4, -3).flatten(-2)
    elif is_v:  # byte (token//4, s, token%4)
        inner = scale[pages, head].reshape(*pages.shape, 32, 8, 4)
        scales = inner.transpose(-1, -2).flatten(-3, -2)
    else:
        scales = scale[pages, head]
    return scales.contiguous().view(FP8).to(torch.float32).double()


def relative_error(out: Tensor, exact: Tensor) -> float:
    """Largest ``|out - exact| / |exact|`` over the 128-element rows, in the 2-norm; a NaN anywhere gives NaN."""
    error = (out.double() - exact).norm(dim=-1)
    size = exact.norm(dim=-1)
    ratio = torch.where(size > 0, error / size, torch.where(error > 0, torch.inf, error))
    return float(ratio.max()) if not bool(ratio.isnan().any()) else float("nan")


def error_against_rounding(out: Tensor, exact: Tensor) -> dict[str, float]:
    """Errors as multiples of those of the exact result rounded once to out's dtype: root mean square and largest."""
    error, rounding = out.double() - exact, _round_once(exact, out.dtype).double() - exact
    return {
        "rms": _multiple(error.square().mean().sqrt(), rounding.square().mean().sqrt()),
        "max": _multiple(error.abs().max(), rounding.abs().max()),
    }


def _multiple(error: Tensor, rounding: Tensor) -> float:
    """0 where a result that needs no rounding, as of one key, is met exactly."""
    return 0.0 if float(error) == 0 else float(error / rounding)
