"""`warmup`, `explain` and the NVFP4 status functions: what they say, and that it is true."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import msa_ops
from cases import Spec, build
from msa_ops import MSASparseAttentionWorkspace, explain, warmup

FP8 = torch.float8_e4m3fn


def explained(spec: Spec, device: str = "cpu", **changes: Any) -> msa_ops.Explanation:
    case = build(spec, device)
    return explain(*case.args, **{**case.kwargs, **changes})


# --- warmup ---


def test_warming_up_the_cpu_does_nothing() -> None:
    assert warmup("cpu") == ()
    assert warmup(torch.device("cpu"), (torch.bfloat16, torch.uint8)) == ()
    assert msa_ops.msa_decode_nvfp4_specialized_warmup("cpu") == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where torch sees no GPU")
def test_without_a_gpu_the_default_is_the_cpu_and_cuda_is_refused() -> None:
    assert warmup() == ()
    for device in ("cuda", "cuda:0", 0):
        with pytest.raises(RuntimeError, match=r"device cuda.* needs an NVIDIA GPU .*device='cpu'"):
            warmup(device)


@pytest.mark.parametrize(
    "device, error, message",
    [
        ("meta", ValueError, "device must be a cpu or cuda device, got meta"),
        ("nonsense", ValueError, "device must name a cpu or cuda device, got 'nonsense'"),
        (1.5, TypeError, "device must be a torch.device, a str, an int or None, got float"),
        (True, TypeError, "got bool"),
    ],
)
def test_a_bad_device_is_named(device: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        warmup(device)


def test_a_bad_dtype_is_named() -> None:
    with pytest.raises(ValueError, match=r"kv_dtypes must be of bfloat16.*got torch\.float64"):
        warmup("cpu", (torch.bfloat16, torch.float64))
    with pytest.raises(TypeError, match=r"kv_dtypes must be a sequence.*pass \(torch\.float16,\)"):
        warmup("cpu", torch.float16)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_warming_up_a_gpu_loads_what_it_names() -> None:
    names = warmup("cuda", (FP8,))
    assert names and all(name.startswith("fp8-") for name in names)
    assert set(names) <= set(msa_ops.msa_decode_nvfp4_specialized_stats()["variants"])
    assert set(names) < set(warmup()), "without dtypes: every KV format"


@pytest.mark.gpu
def test_nvfp4_is_warmed_up_by_itself() -> None:
    names = msa_ops.msa_decode_nvfp4_specialized_warmup("cuda")
    assert names == warmup("cuda", (torch.uint8,)) and all(name.startswith("nvfp4-") for name in names)
    before = msa_ops.msa_decode_nvfp4_specialized_stats()
    assert set(names) <= set(before["nvfp4_variants"])
    build(Spec(kv_dtype="nvfp4"), "cuda").run()
    after = msa_ops.msa_decode_nvfp4_specialized_stats()
    assert sum(after["calls"].values()) == sum(before["calls"].values()) + 1
    assert after["nvfp4_variants"] == before["nvfp4_variants"], "a call loads nothing that the warm-up did not"


@pytest.mark.gpu
def test_a_device_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"device must be one of the \d+ CUDA devices.*cuda:99"):
        warmup("cuda:99")


# --- stats ---


def test_stats_say_where_nvfp4_runs_and_what_capture_needs() -> None:
    stats = msa_ops.msa_decode_nvfp4_specialized_stats()
    assert stats["engines"] == {"cpu": True, "cuda": True}
    assert stats["nvfp4_variants"] == ()
    assert set(stats["calls"]) == {"none", "cluster", "scratch"}
    for words in (
        "one eager call",
        "warmup(device)",
        "lengths",
        "block scales",
    ):
        assert words in stats["cuda_graph"]
    build(Spec(kv_dtype="nvfp4"), "cpu").run()
    assert msa_ops.msa_decode_nvfp4_specialized_stats() == stats, "calls on the CPU are not counted"


# --- explain ---


def test_a_call_on_the_cpu_is_explained() -> None:
    e = explained(Spec(topk=33))
    assert (e.engine, e.route, e.splits, e.blocks, e.variant, e.scratch_bytes) == ("cpu", "segments", 3, 0, None, 0)
    assert (e.force_fused, e.partial_dtype, e.workspace) == ("not given",) * 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        e.engine = "cuda"  # type: ignore[misc]


@pytest.mark.parametrize(
    "hint, value",
    [
        ("force_fused", True),
        ("force_fused", False),
        ("partial_dtype", FP8),
        ("workspace", MSASparseAttentionWorkspace("cpu")),
    ],
)
def test_a_hint_without_effect_is_said_to_have_none(hint: str, value: Any) -> None:
    case = build(Spec())
    e = explain(*case.args, **case.kwargs, **{hint: value})
    effects = {n: getattr(e, n) for n in ("force_fused", "partial_dtype", "workspace")}
    assert effects.pop(hint).startswith("no effect")
    assert set(effects.values()) == {"not given"}
    # And it is true.
    for plain, hinted in zip(case.run(), case.run(**{hint: value}), strict=True):
        assert torch.equal(plain, hinted)


def test_explaining_takes_and_refuses_what_the_call_does() -> None:
    case = build(Spec())
    assert explain(*case.args, **case.kwargs, return_softmax_lse=True).engine == "cpu"
    with pytest.raises(ValueError, match=r"page_table must be int32, got int64"):
        explain(*case.args, **{**case.kwargs, "page_table": case.kwargs["page_table"].long()})
    with pytest.raises(TypeError, match="unexpected keyword"):
        explain(*case.args, **case.kwargs, page_tabel=None)


ROW_BYTES = {"bf16": 512, "fp16": 512, "fp8": 256, "nvfp4": 144}
"""K and V of one key, block scales included."""


@pytest.mark.parametrize("q_dtype, kv_dtype", [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8"), ("bf16", "nvfp4")])
def test_kv_bytes_of_distinct_selections_are_exact(q_dtype: str, kv_dtype: str) -> None:
    """Requests with pages of their own, each token with blocks of its own: every bound meets."""
    spec = Spec(q_dtype=q_dtype, kv_dtype=kv_dtype, lengths=(512, 512), topk=3, kv_heads=2)
    assert explained(spec).kv_bytes == 2 * 3 * 128 * 2 * ROW_BYTES[kv_dtype]


def test_kv_bytes_never_exceed_the_table_or_the_cache() -> None:
    spec = Spec(lengths=(300, 129), topk=64, seqlen_q=4, kv_heads=2)
    case = build(spec)
    width, pages = case.kwargs["page_table"].shape[1], case.args[1].shape[0]
    assert explained(spec).kv_bytes == min(2 * width, pages) * 128 * 2 * 512
    flat = build(Spec(form="flat", lengths=(300, 129), topk=64))
    assert explain(*flat.args, **flat.kwargs).kv_bytes == flat.args[1].shape[0] * 2 * 512
    small = build(Spec(form="flat", lengths=(3000, 1290), topk=2))
    assert explain(*small.args, **small.kwargs).kv_bytes == 2 * 2 * 128 * 2 * 512


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["hnd", "planar"])
def test_nvfp4_on_a_gpu_has_a_plan(form: str) -> None:
    e = explained(Spec(kv_dtype="nvfp4", form=form), "cuda")
    assert e.engine == "cuda" and e.variant is not None and e.variant.startswith("nvfp4-")


@pytest.mark.gpu
def test_a_call_on_a_gpu_is_explained() -> None:
    split = explained(
        Spec(lengths=(9000,), topk=32, kv_heads=1), "cuda", force_fused=False, partial_dtype=torch.float16
    )
    assert split.engine == "cuda" and split.splits > 1 and split.blocks == split.splits
    assert split.force_fused.startswith("as many blocks an item")
    assert split.variant is not None and split.variant.startswith("bf16-")
    if split.route == "scratch":
        assert split.partial_dtype == "partial results are stored as float16" and split.scratch_bytes > 0
    else:
        assert split.route == "cluster" and split.partial_dtype.startswith("no effect") and split.scratch_bytes == 0
    whole = explained(Spec(lengths=(9000,), topk=32, kv_heads=1), "cuda", force_fused=True)
    assert (whole.route, whole.splits, whole.blocks) == ("none", 1, 1)
    assert whole.force_fused.startswith("one block an item")


@pytest.mark.gpu
def test_scratch_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSA_OPS_COMBINE", "scratch")
    spec = Spec(lengths=(9000,), topk=32, kv_heads=1, group=4)
    sizes = {}
    for dtype, size in ((None, 4), (torch.float32, 4), (torch.bfloat16, 2), (FP8, 1)):
        e = explained(spec, "cuda", partial_dtype=dtype)
        assert e.route == "scratch" and e.splits > 1
        assert e.scratch_bytes == e.splits * 16 * (128 * size + 8)
        sizes[size] = e.scratch_bytes
    assert sizes[1] < sizes[2] < sizes[4]
    workspace = MSASparseAttentionWorkspace("cuda")
    e = explained(spec, "cuda", workspace=workspace, force_fused=True)
    assert e.workspace == f"holds the {e.scratch_bytes} bytes of partial results"
    assert e.force_fused.startswith("overridden by MSA_OPS_COMBINE")
