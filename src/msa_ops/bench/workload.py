"""The grid's shapes in the field's benchmark-definition style, so that others can run the same.

The axes, inputs and constraints read as FlashInfer's published definitions of this operation do, for a paged cache.
``python -m msa_ops.bench.workload FILE`` writes it.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from ..contract import BLOCK_SIZE, HEAD_DIM
from .inputs import KV_KINDS, Shape
from .presets import Axes, jobs_of

_CONST = {"head_dim": HEAD_DIM, "page_size": BLOCK_SIZE, "topk": 16}
_VAR = {
    "batch_size": "Requests.",
    "seqlen_q": "Query tokens of each request, right-aligned: 1, or more for speculative decoding.",
    "num_qo_heads": "Query heads; a whole multiple of num_kv_heads.",
    "num_kv_heads": "KV heads.",
    "seqlen_k": "Keys of each request.",
    "total_q": "batch_size * seqlen_q.",
    "max_pages": "Columns of the page table.",
    "num_pages": "Pages of the pool: far more than any cache of the device holds, pages of a request at random places.",
}
_ROWS = ["num_pages", "num_kv_heads", "page_size"]
_KV_FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16", "shape": [*_ROWS, "head_dim"], "layout": "halves of one (..., 2 * head_dim) cache"},
    "fp8": {"dtype": "float8_e4m3fn", "shape": [*_ROWS, "head_dim"], "layout": "halves of one (..., 2 * head_dim) cache"},
    "nvfp4-planar": {
        "dtype": "uint8", "shape": [*_ROWS, "head_dim / 2"], "scale_shape": [*_ROWS, "head_dim / 16"],
        "layout": "pages of [K data | K scales | V data | V scales]",
    },
    "nvfp4-tiled": {
        "dtype": "uint8", "shape": [*_ROWS, "head_dim / 2"],
        "scale_shape": ["num_pages * num_kv_heads * page_size * head_dim / 16"], "layout": "scales in 128x4 tiles",
    },
}  # fmt: skip


def document() -> dict[str, Any]:
    """The definition and one workload per shape of the grid."""
    axes: dict[str, Any] = {name: {"type": "var", "description": text} for name, text in _VAR.items()}
    axes |= {name: {"type": "const", "value": value} for name, value in _CONST.items()}
    query = ["total_q", "num_qo_heads", "head_dim"]
    return {
        "name": "msa_sparse_decode_attention_paged",
        "description": "Block-sparse decode attention: each query token attends to the top-k KV blocks that were selected "
        "for it and its KV head, causally; K and V lie in a paged cache.",
        "op_type": "msa_sparse",
        "tags": ["stage:decode", "sparse:topk"],
        "axes": axes,
        "inputs": {
            "q": {"shape": query, "dtype": "bfloat16"},
            "k": {"shape": "of kv_formats", "dtype": "of kv_formats"},
            "v": {"shape": "of kv_formats", "dtype": "of kv_formats"},
            "q2k_indices": {
                "shape": ["num_kv_heads", "total_q", "topk"], "dtype": "int32",
                "description": "Ascending block ids, each token's own block among them.",
            },
            "page_table": {"shape": ["batch_size", "max_pages"], "dtype": "int32"},
            "seqused_k": {"shape": ["batch_size"], "dtype": "int32", "description": "seqlen_k for every request."},
            "seqlen_q": {"shape": None, "dtype": "int32"},
        },
        "outputs": {"output": {"shape": query, "dtype": "bfloat16"}},
        "constraints": ["total_q == batch_size * seqlen_q", "max_pages == seqlen_k / page_size"],
        "kv_formats": _KV_FORMATS,
        "workloads": [_workload(job.shape) for job in jobs_of("grid", Axes(KV_KINDS, None, None, None, 32768), 0)],
    }  # fmt: skip


def _workload(shape: Shape) -> dict[str, Any]:
    return {
        "kv_format": shape.kv,
        "axes": {
            "batch_size": shape.batch, "num_qo_heads": shape.num_qo_heads, "num_kv_heads": shape.num_kv_heads,
            "head_dim": HEAD_DIM, "topk": shape.topk, "seqlen_q": shape.seqlen_q, "seqlen_k": shape.context,
        },
    }  # fmt: skip


def text() -> str:
    """`document` as JSON, a workload a line."""
    whole = document()
    lines = ",\n".join("    " + json.dumps(workload) for workload in whole.pop("workloads"))
    return json.dumps(whole, indent=2)[:-2] + ',\n  "workloads": [\n' + lines + "\n  ]\n}\n"


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(text(), encoding="utf-8")
