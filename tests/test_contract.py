"""What a checked call means: forms told apart, views read in place, values at the edge of int32, checking mode."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import FLAT_FORMS, INT32_MAX, INT32_MIN, PAGED_FORMS, PLANAR_FORMS, Case, Spec, build
from compare import assert_matches_oracle, assert_same_bits
from msa_ops import MSASparseAttentionWorkspace, msa_sparse_decode_attention
from msa_ops.contract import DecodeCall, DecodeProblem, KVFormat, KVLayout, ScaleLayout, check
from test_pitfalls import everything_used, set_ids

pytestmark = pytest.mark.usefixtures("poisoned_empty")

ALL_FORMS = [
    (form, kv_dtype)
    for kv_dtype in ("bf16", "nvfp4")
    for form in [*PAGED_FORMS, *FLAT_FORMS, *(PLANAR_FORMS if kv_dtype == "nvfp4" else ())]
]


def checked(case: Case, **changes: Any) -> DecodeProblem:
    defaults = {n: p.default for n, p in inspect.signature(msa_sparse_decode_attention).parameters.items()}
    given = dict(zip(("q", "k", "v", "q2k_indices"), case.args, strict=True))
    return check(DecodeCall(**{**defaults, **given, **case.kwargs, **changes}))


# --- the signature and the checked problem ---


def test_signature_is_the_public_one() -> None:
    parameters = inspect.signature(msa_sparse_decode_attention).parameters
    keyword_only = {
        "page_table": None, "seqused_k": None, "cu_seqlens_k": None, "seqlen_q": 1, "causal": True,
        "softmax_scale": None, "return_softmax_lse": False, "k_scale": None, "v_scale": None,
        "k_global_scale": None, "v_global_scale": None, "q_offset": None, "partial_dtype": None,
        "force_fused": None, "workspace": None, "out": None, "lse_out": None,
    }  # fmt: skip
    assert list(parameters) == ["q", "k", "v", "q2k_indices", *keyword_only]
    for name, parameter in parameters.items():
        if name in keyword_only:
            assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default == keyword_only[name], name
        else:
            assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty, name


@pytest.mark.parametrize(
    "kv_dtype, form, kv_format, layout, scales",
    [
        ("bf16", "packed", KVFormat.BF16, KVLayout.PAGED, ScaleLayout.NONE),
        ("fp8", "flat", KVFormat.FP8, KVLayout.FLAT, ScaleLayout.NONE),
        ("nvfp4", "hnd", KVFormat.NVFP4, KVLayout.PAGED, ScaleLayout.TILED),
        ("nvfp4", "flat", KVFormat.NVFP4, KVLayout.FLAT, ScaleLayout.TILED),
        ("nvfp4", "planar", KVFormat.NVFP4, KVLayout.PAGED, ScaleLayout.PLANAR),
    ],
)
def test_forms_are_told_apart_by_dtype_and_rank(
    kv_dtype: str, form: str, kv_format: KVFormat, layout: KVLayout, scales: ScaleLayout
) -> None:
    problem = checked(build(Spec(kv_dtype=kv_dtype, form=form, lengths=(300, 5), seqlen_q=3, group=5, topk=7)))
    assert (problem.kv_format, problem.kv_layout, problem.scale_layout) == (kv_format, layout, scales)
    assert (problem.tokens, problem.batch_size, problem.num_qo_heads, problem.num_kv_heads) == (6, 2, 10, 2)
    assert (problem.group_size, problem.topk, problem.out_dtype) == (5, 7, torch.bfloat16)


def test_global_scales_fold_as_floats_and_stay_as_tensors() -> None:
    case = build(Spec())
    folded = checked(case, softmax_scale=0.5, k_global_scale=0.25, v_global_scale=-3)
    assert (folded.softmax_scale, folded.output_scale) == (0.125, -3.0)
    assert folded.k_global_scale is None and folded.v_global_scale is None
    k, v = torch.tensor(0.25), torch.ones(1, 1)
    kept = checked(case, k_global_scale=k, v_global_scale=v)
    assert (kept.softmax_scale, kept.output_scale) == (128**-0.5, 1.0)
    assert kept.k_global_scale is k and kept.v_global_scale is v


def test_a_checked_problem_is_frozen_and_holds_the_given_tensors() -> None:
    case = build(Spec(form="pool_layer", q_form="fused_qkv", ids_form="token_major"))
    problem = checked(case)
    for name, t in zip(("q", "k", "v", "q2k_indices"), case.args, strict=True):
        assert getattr(problem, name) is t
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.causal = False  # type: ignore[misc]


@pytest.mark.parametrize("form, kv_dtype", ALL_FORMS)
def test_no_input_is_changed_or_kept(form: str, kv_dtype: str, device: str) -> None:
    case = build(Spec(kv_dtype=kv_dtype, form=form, q_form="fused_qkv", k_global_scale=0.3), device)
    tensors = [t for t in (*case.args, *case.kwargs.values()) if isinstance(t, Tensor)]
    storages = [torch.empty(0, dtype=torch.uint8, device=device).set_(t.untyped_storage()) for t in tensors]
    before = [s.clone() for s in storages]
    first = case.run()
    for storage, copy in zip(storages, before, strict=True):
        assert torch.equal(storage, copy)
    assert_same_bits(case.run(), first)


# --- shapes at the edge ---


@pytest.mark.parametrize("form", ["hnd", "flat", "planar"])
def test_no_tokens_give_an_empty_result(form: str, device: str) -> None:
    spec = Spec(kv_dtype="nvfp4" if form == "planar" else "bf16", form=form, lengths=(300, 129))
    case = build(spec, device)
    q, k, v, ids = case.args
    none: dict[str, Any] = dict(case.kwargs)
    for name in ("page_table", "seqused_k"):
        if name in none:
            none[name] = none[name][:0]
    if "cu_seqlens_k" in none:
        none["cu_seqlens_k"] = none["cu_seqlens_k"][:1]
    out, lse = Case(spec, (q[:0], k, v, ids[:, :0]), none, case.keys, case.values).run(seqlen_q=4)
    assert out.shape == (0, 8, 128) and out.dtype == torch.bfloat16
    assert lse.shape == (0, 8) and lse.dtype == torch.float32


def test_an_empty_cache_gives_zeros(device: str) -> None:
    case = build(Spec(lengths=(0, 0)), device)
    q, k, v, ids = case.args
    for changed in (
        Case(case.spec, (q, k[:0], v[:0], ids), case.kwargs, case.keys, case.values),
        Case(case.spec, case.args, {**case.kwargs, "page_table": case.kwargs["page_table"][:, :0]}, k, v),
    ):
        changed.kwargs["seqused_k"] = torch.tensor([300, 1], dtype=torch.int32, device=device)
        ids.fill_(0)
        out, lse = changed.run()
        assert (out == 0).all() and lse.isneginf().all()
    flat = build(Spec(form="flat", lengths=(0, 0)), device)
    flat.args = (flat.args[0], flat.args[1][:0], flat.args[2][:0], flat.args[3].fill_(0))
    flat.kwargs["cu_seqlens_k"] = torch.tensor([0, 3, 9], dtype=torch.int32, device=device)
    out, lse = flat.run()
    assert (out == 0).all() and lse.isneginf().all()


def test_a_page_of_one_may_have_any_stride(device: str) -> None:
    """Strides of dims of size 1 lead nowhere, so that they are not checked."""
    case = build(Spec(lengths=(100,), kv_heads=1, ids="all", topk=1), device)
    q, k, v, ids = case.args
    page = int(case.kwargs["page_table"][0, 0])
    k, v = (t[page : page + 1].as_strided((1, 1, 128, 128), (3, 5, 128, 1)) for t in (k, v))
    case.kwargs["page_table"] = torch.zeros(1, 1, dtype=torch.int32, device=device)
    keys, values = case.keys[page : page + 1], case.values[page : page + 1]
    assert_matches_oracle(Case(case.spec, (q, k, v, ids), case.kwargs, keys, values))


def test_k_and_v_may_be_one_tensor(device: str) -> None:
    case = build(Spec(), device)
    q, k, _, ids = case.args
    assert_matches_oracle(Case(case.spec, (q, k, k, ids), case.kwargs, case.keys, case.keys))


def test_expanded_inputs(device: str) -> None:
    """Stride 0: one query row for all heads, one row of ids for all tokens, one page table row for all requests."""
    case = everything_used(Spec(lengths=(300, 300, 300), kv_heads=2), device)
    q, k, v, ids = case.args
    case.kwargs["page_table"] = case.kwargs["page_table"][:1].expand(3, -1)
    case.kwargs["seqused_k"] = case.kwargs["seqused_k"][:1].expand(3)
    ids = torch.tensor([1, -1, 0, 2], dtype=torch.int32, device=device).expand(2, 3, 4)
    case.args = (q[:, :1].expand(-1, 8, -1), k, v, ids)
    assert case.args[0].stride(1) == 0 and case.kwargs["page_table"].stride(0) == 0
    out, lse = assert_matches_oracle(case)
    assert torch.equal(lse[:, 0], lse[:, 3])
    assert out.shape == (3, 8, 128)


@pytest.mark.parametrize("form", ["hnd", "flat"])
def test_strided_lengths_and_offsets(form: str, device: str) -> None:
    """Every other element of a longer tensor, the rest being other lengths."""
    case = build(Spec(form=form, lengths=(300, 129, 64), seqlen_q=2, q_offset=(200, 60, 63)), device)
    for name in ("seqused_k", "cu_seqlens_k", "q_offset"):
        if name in case.kwargs:
            t = case.kwargs[name]
            wide = torch.full((2 * t.shape[0],), 17, dtype=torch.int32, device=device)
            wide[::2] = t
            case.kwargs[name] = wide[::2]
            assert case.kwargs[name].stride() == (2,)
    assert_matches_oracle(case)


def test_out_next_to_q_in_one_allocation(device: str) -> None:
    case = build(Spec(), device)
    q, k, v, ids = case.args
    room = torch.zeros(2 * q.numel(), dtype=torch.bfloat16, device=device)
    for first, second in ((0, 1), (1, 0)):
        halves = room.view(2, *q.shape)
        halves[first].copy_(q)
        moved = Case(case.spec, (halves[first], k, v, ids), case.kwargs, case.keys, case.values)
        out, _ = assert_matches_oracle(moved, out=halves[second])
        assert out.data_ptr() == halves[second].data_ptr()


# --- values at the edge: engines skip, they do not misread ---


def test_pages_outside_the_cache_are_skipped(device: str) -> None:
    case = set_ids(everything_used(Spec(lengths=(300, 300), topk=4), device), [0, 1, 2])
    pages = case.args[1].shape[0]
    table = case.kwargs["page_table"]
    for page in (-1, -2, pages, pages + 1, INT32_MAX, INT32_MIN):
        table[0, 1] = page
        assert_matches_oracle(case)
    table[0, :] = -1
    out, lse = assert_matches_oracle(case)
    assert (out[0] == 0).all() and lse[0].isneginf().all() and lse[1].isfinite().all()


@pytest.mark.parametrize("length", [INT32_MAX, INT32_MAX - 1, INT32_MAX - 127, 2**30])
def test_lengths_up_to_the_largest_int32(length: int, device: str) -> None:
    """Rounding such a length up to blocks does not wrap; blocks past the table are skipped."""
    case = everything_used(Spec(lengths=(384, 256), topk=8), device)
    table = case.kwargs["page_table"][:, :2]
    case.kwargs.update(page_table=table, seqused_k=torch.tensor([length, 256], dtype=torch.int32, device=device))
    set_ids(case, [0, 1, 2, 3, length // 128, INT32_MAX])
    assert_matches_oracle(case)


@pytest.mark.parametrize("offset", [INT32_MAX, INT32_MAX - 2, INT32_MIN, INT32_MIN + 1])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("form", ["hnd", "flat"])
def test_offsets_up_to_the_ends_of_int32(form: str, as_tensor: bool, offset: int, device: str) -> None:
    """`q_offset + i` does not wrap: far ahead everything is seen, far behind nothing."""
    case = set_ids(everything_used(Spec(form=form, lengths=(300, 129), seqlen_q=4), device), [0, 1, 2])
    given = torch.full((2,), offset, dtype=torch.int32, device=device) if as_tensor else offset
    _, lse = assert_matches_oracle(case, q_offset=given)
    assert lse.isneginf().all() if offset < 0 else lse.isfinite().all()


@pytest.mark.parametrize("length", [-1, -129, INT32_MIN])
def test_negative_lengths_count_as_zero(length: int, device: str) -> None:
    case = set_ids(everything_used(Spec(lengths=(300, 129), seqlen_q=2), device), [0, 1])
    case.kwargs["seqused_k"][0] = length
    for q_offset in (None, 0, 100):
        _, lse = assert_matches_oracle(case, q_offset=q_offset)
        assert lse[:2].isneginf().all() and lse[2:].isfinite().all()


ROW_STARTS = [
    [0, 300, 129],  # the second request has a negative length
    [100, 300, 10_000],  # ends past the cache
    [10_000, 20_000, 20_300],  # begins past the cache
    [400, 700, 700],  # past the end in the middle of a block
    [-100, 200, 300],  # begins before the cache
    [INT32_MIN, 0, INT32_MAX],
]


@pytest.mark.parametrize("starts", ROW_STARTS, ids=str)
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_rows_outside_a_flat_cache_are_skipped(kv_dtype: str, starts: list[int], device: str) -> None:
    case = everything_used(Spec(kv_dtype=kv_dtype, form="flat", lengths=(300, 129), topk=4, causal=False), device)
    # Rows of nobody, before and after, hold NaN: leave them out, so that the cache is all numbers.
    numbers = slice(5, 5 + 429)
    q, k, v, ids = case.args
    case.args = (q, k[numbers], v[numbers], ids)
    case.keys, case.values = case.keys[numbers], case.values[numbers]
    case.kwargs["cu_seqlens_k"] = torch.tensor(starts, dtype=torch.int32, device=device)
    assert_matches_oracle(set_ids(case, [0, 3, 1, 2]))


@pytest.mark.parametrize("starts", [starts for starts in ROW_STARTS if starts[0] >= 0], ids=str)
def test_rows_past_a_flat_nvfp4_cache_are_skipped(starts: list[int], device: str) -> None:
    """Scales count rows from the start of the cache, so that this one keeps its first rows, NaN of nobody, unread."""
    spec = Spec(kv_dtype="nvfp4", form="flat", lengths=(300, 129), topk=4, causal=False)
    case = everything_used(spec, device)
    q, k, v, ids = case.args
    case.args = (q, k[:434], v[:434], ids)
    case.keys, case.values = case.keys[:434], case.values[:434]
    case.kwargs["cu_seqlens_k"] = torch.tensor(
        [min(s + 5, INT32_MAX) for s in starts], dtype=torch.int32, device=device
    )
    assert_matches_oracle(set_ids(case, [0, 3, 1, 2]))


# --- checking mode ---


@pytest.mark.parametrize("form, kv_dtype", ALL_FORMS)
def test_checking_mode_accepts_what_is_normal(
    form: str, kv_dtype: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Junk ids, empty requests, table entries of unselected blocks: all normal, and the result is the same."""
    lengths = (300, 0, 129) if form in FLAT_FORMS else (300, -1, 129)
    case = build(Spec(kv_dtype=kv_dtype, form=form, lengths=lengths, seqlen_q=2, topk=6), device)
    expected = case.run()
    monkeypatch.setenv("MSA_OPS_CHECK", "1")
    assert_same_bits(case.run(), expected)


def test_checking_mode_is_off_unless_asked_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = set_ids(everything_used(Spec(lengths=(300, 129), topk=3), device), [0, 1, 2])
    case.kwargs["page_table"][0, 0] = -5
    for value in (None, "0", ""):
        if value is None:
            monkeypatch.delenv("MSA_OPS_CHECK", raising=False)
        else:
            monkeypatch.setenv("MSA_OPS_CHECK", value)
        assert_matches_oracle(case)
    monkeypatch.setenv("MSA_OPS_CHECK", "1")
    with pytest.raises(ValueError, match=r"page_table\[0\] names page -5"):
        case.run()


# --- hints, modes, workspace ---


@pytest.mark.parametrize("partial_dtype", [None, torch.float32])
@pytest.mark.parametrize("force_fused", [None, True, False])
def test_hints_are_taken(partial_dtype: torch.dtype | None, force_fused: bool | None, device: str) -> None:
    workspace = MSASparseAttentionWorkspace(device)
    case = build(Spec(lengths=(3000, 2000), topk=24, ids="ascending"), device)
    assert_matches_oracle(case, partial_dtype=partial_dtype, force_fused=force_fused, workspace=workspace)


@pytest.mark.parametrize("partial_dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_low_precision_partials_are_a_hint(partial_dtype: torch.dtype, device: str) -> None:
    """Where partials are stored, they carry the rounding that was asked for, and no more; on the CPU they are not."""
    case = build(Spec(lengths=(3000, 2000), topk=24, ids="ascending"), device)
    out, lse = case.run(partial_dtype=partial_dtype, force_fused=False)
    expected, expected_lse = case.oracle()
    size = torch.maximum(expected.norm(dim=-1), case.term_norms())
    # Half a unit in the last place of the partials, and the usual tolerance on top.
    bound = torch.finfo(partial_dtype).eps / 2 + 4e-3
    assert ((out.cpu().double() - expected).norm(dim=-1) <= bound * size).all()
    assert ((lse.cpu().double() - expected_lse).abs() <= bound).all()
    if device == "cpu":
        assert_matches_oracle(case, (out, lse))


def test_inputs_that_require_grad_under_no_grad(device: str) -> None:
    case = build(Spec(), device)
    expected = case.run()
    q, k, v, ids = case.args
    case.args = (q.clone().requires_grad_(), k, v, ids)
    with torch.no_grad():
        assert_same_bits(case.run(), expected)
    with torch.inference_mode():
        got = case.run()
    assert not got[0].requires_grad
    assert_same_bits(got, expected)
    case.args = (torch.nn.Parameter(q, requires_grad=False), k, v, ids)
    assert_same_bits(case.run(), expected)


def test_inference_tensors(device: str) -> None:
    expected = build(Spec(), device).run()
    with torch.inference_mode():
        case = build(Spec(), device)
    assert case.args[0].is_inference()
    assert_same_bits(case.run(), expected)


def test_int_scales_are_numbers(device: str) -> None:
    case = build(Spec(kv_dtype="fp8", lengths=(60,)), device)
    scaled = {"softmax_scale": 0, "k_global_scale": 2, "v_global_scale": 3}
    assert_matches_oracle(case, **scaled)


def test_a_workspace_grows_and_keeps_what_a_graph_may_hold() -> None:
    workspace = MSASparseAttentionWorkspace("cpu", nbytes=64)
    assert (workspace.nbytes, workspace.device) == (64, torch.device("cpu"))
    first = workspace.reserve(10)
    assert first.data_ptr() == workspace.buffer.data_ptr() and workspace.nbytes == 64
    pointer = first.data_ptr()
    del first
    second = workspace.reserve(1 << 20)
    assert second.numel() >= 1 << 20 and second.data_ptr() == workspace.buffer.data_ptr()
    # The first buffer lives: nothing new may be put where it lies.
    assert all(torch.empty(64, dtype=torch.uint8).data_ptr() != pointer for _ in range(64))
    assert workspace.reserve(5).data_ptr() == second.data_ptr(), "a workspace never shrinks"
