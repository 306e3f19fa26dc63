"""Turn one vector file into the arguments of msa_sparse_decode_attention.

args, kwargs, expected_out, expected_lse, meta = load(path, device="cpu")
expected_* are float64 (tokens, heads, 128) and (tokens, heads), computed in float64 from the exact stored values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_VIEW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "nvfp4": torch.uint8}


def _tensor(array: np.ndarray, dtype: str | None, device: str) -> Tensor:
    raw = array.view(np.int16) if array.dtype == np.uint16 else array
    t = torch.from_numpy(np.ascontiguousarray(raw)).to(device)
    return t if dtype is None else t.view(_VIEW[dtype])


def _planar_views(page: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k, k_scale, v, v_scale of pages laid out [K data | K scale | V data | V scale]."""

    def region(start: int, inner: int) -> Tensor:
        shape, strides = (page.shape[0], heads, 128, inner), (page.shape[1], 128 * inner, inner, 1)
        return page.as_strided(shape, strides, start)

    return region(0, 64), region(heads * 8192, 8), region(heads * 9216, 64), region(heads * 17408, 8)


Loaded = tuple[tuple[Tensor, ...], dict[str, Any], Tensor, Tensor, dict[str, Any]]


def load(path: str | Path, device: str = "cpu") -> Loaded:
    z = np.load(path)
    meta = json.loads(bytes(z["meta"]))
    kv_dtype = meta["kv_dtype"]
    q = _tensor(z["q"], meta["q_dtype"], device)
    sel = _tensor(z["q2k_indices"], None, device)
    if meta["token_major"]:
        sel = sel.transpose(0, 1)  # strided view of a (tokens, kv heads, topk) buffer
    kwargs: dict[str, Any] = {
        "seqlen_q": meta["seqlen_q"],
        "causal": meta["causal"],
        "softmax_scale": meta["softmax_scale"],
        "return_softmax_lse": True,
        "k_global_scale": meta["k_global_scale"],
        "v_global_scale": meta["v_global_scale"],
    }
    if meta["kv"] == "planar":
        page = _tensor(z["planar_page"], None, device)
        k, kwargs["k_scale"], v, kwargs["v_scale"] = _planar_views(page, meta["HKV"])
    elif meta["kv"] == "packed":  # K and V are halves of one 2 * head_dim content dim
        kv = _tensor(z["kv"], kv_dtype, device)
        kv = kv.transpose(1, 2) if meta["nhd"] else kv
        k, v = kv[..., :128], kv[..., 128:]
    else:
        k, v = _tensor(z["k"], kv_dtype, device), _tensor(z["v"], kv_dtype, device)
        if meta["nhd"]:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        if "k_scale" in z:
            for name in ("k_scale", "v_scale"):
                kwargs[name] = _tensor(z[name], None, device)
    if meta["scale_dtype"] == "fp8":
        for name in ("k_scale", "v_scale"):
            kwargs[name] = kwargs[name].view(torch.float8_e4m3fn)
    for name in ("page_table", "seqused_k", "cu_seqlens_k", "q_offset"):
        if name in z:
            kwargs[name] = _tensor(z[name], None, device)
    return (q, k, v, sel), kwargs, torch.from_numpy(z["expected_out"]), torch.from_numpy(z["expected_lse"]), meta
