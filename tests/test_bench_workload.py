"""The workload file that others can run: its shapes are the grid's, and its axes are named as the field names them."""

from __future__ import annotations

import json
from pathlib import Path

from msa_ops.bench import workload
from msa_ops.bench.inputs import KV_KINDS
from msa_ops.bench.presets import Axes, jobs_of

FILE = Path(__file__).parents[1] / "benchmarks" / "workloads" / "msa_sparse_decode.json"


def test_the_file_holds_the_shapes_of_the_grid() -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8"))["workloads"]
    shapes = [job.shape for job in jobs_of("grid", Axes(KV_KINDS, None, None, None, 32768), 0)]
    assert [(w["kv_format"], *w["axes"].values()) for w in stored] == [
        (s.kv, s.batch, s.num_qo_heads, s.num_kv_heads, 128, s.topk, s.seqlen_q, s.context) for s in shapes
    ]


def test_the_file_is_what_the_module_writes() -> None:
    """``python -m msa_ops.bench.workload benchmarks/workloads/msa_sparse_decode.json`` makes it anew."""
    assert FILE.read_text(encoding="utf-8") == workload.text()
    assert json.loads(workload.text()) == workload.document()


def test_every_dimension_is_a_declared_axis() -> None:
    document = workload.document()
    axes = document["axes"]
    published = {"batch_size", "num_qo_heads", "num_kv_heads", "head_dim", "topk", "seqlen_q"}
    assert published <= axes.keys()
    for work in document["workloads"]:
        assert published <= work["axes"].keys() <= axes.keys() and work["kv_format"] in document["kv_formats"]
        consts = {name: axis["value"] for name, axis in axes.items() if axis["type"] == "const"}
        assert all(work["axes"].get(name, value) == value for name, value in consts.items())
    tensors = [*document["inputs"].values(), *document["outputs"].values(), *document["kv_formats"].values()]
    for tensor in tensors:
        for size in (
            (*(tensor["shape"] or ()), *tensor.get("scale_shape", ())) if tensor["shape"] != "of kv_formats" else ()
        ):
            names = [word for word in size.split() if word.isidentifier()]
            assert names and set(names) <= axes.keys()
