"""Ways in which implementations of this operation have gone wrong, one test or more for each of the 26 known ones.

Numbers in docstrings count them. 17 (offsets past 2^31) is in test_large_offsets.py; what needs a CUDA graph or a
launch grid (18, 23, 25) is in test_pitfalls_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import nvfp4_bytes
from cases import DTYPE_PAIRS, DTYPES, INT32_MAX, Case, Spec, build
from compare import assert_lse_close, assert_matches_oracle, assert_rows_close, assert_same_bits, bits
from msa_ops import msa_sparse_decode_attention
from msa_ops.reference import decode_reference

pytestmark = pytest.mark.usefixtures("poisoned_empty")
fused = pytest.mark.parametrize("force_fused", [None, True, False])


def set_ids(case: Case, ids: list[int] | list[list[int]]) -> Case:
    """The same ids for every head and token, or one list a token; short lists get a tail of -1."""
    rows = ids if isinstance(ids[0], list) else [ids] * case.spec.tokens
    topk = case.spec.topk
    filled = torch.tensor([[*row, *[-1] * (topk - len(row))] for row in rows], dtype=torch.int32)  # type: ignore[misc]
    case.args[3].copy_(filled.expand_as(case.args[3]))
    return case


def everything_used(spec: Spec, device: str) -> Case:
    """A case whose every slot below the length holds numbers, whatever ids are set later."""
    longest = max(*spec.lengths, 1)
    whole = replace(spec, ids="all", topk=-(-longest // 128), causal=False, q_offset=None)
    case = build(whole, device)
    ids = torch.full((spec.kv_heads, spec.tokens, spec.topk), -1, dtype=torch.int32, device=device)
    case.args = (*case.args[:3], ids)
    case.kwargs["causal"] = spec.causal
    if isinstance(spec.q_offset, tuple):
        case.kwargs["q_offset"] = torch.tensor(spec.q_offset, dtype=torch.int32, device=device)
    else:
        case.kwargs["q_offset"] = spec.q_offset
    case.spec = spec
    return case


def by_hand(device: str, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """One request over one KV head, all of its blocks selected; held against the oracle."""
    length = k.shape[0]
    ids = torch.arange(-(-length // 128), dtype=torch.int32, device=device)[None, None]
    cu = torch.tensor([0, length], dtype=torch.int32, device=device)
    args = (q.to(device), k[:, None].to(device), v[:, None].to(device), ids)
    kwargs["cu_seqlens_k"] = cu
    result = msa_sparse_decode_attention(*args, return_softmax_lse=True, **kwargs)
    assert isinstance(result, tuple)
    expected, expected_lse = decode_reference(*args, round_output=False, **kwargs)
    assert_rows_close(result[0], expected)
    assert_lse_close(result[1], expected_lse)
    return result


@fused
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "nvfp4"])
def test_empty_requests_in_a_batch_are_zero(kv_dtype: str, force_fused: bool | None, device: str) -> None:
    """1. Length 0 in a merge: (-inf) - (-inf)."""
    case = build(Spec(kv_dtype=kv_dtype, lengths=(0, 5, -7, 300, 0), topk=16), device)
    case.args[3][:, 0] = torch.arange(16, dtype=torch.int32)  # ids that a length of 0 makes invalid
    out, lse = assert_matches_oracle(case, force_fused=force_fused)
    for b in (0, 2, 4):
        assert torch.equal(bits(out[b]), torch.zeros_like(bits(out[b]))), "not +0 to the bit"
        assert lse[b].isneginf().all()


@fused
@pytest.mark.parametrize("valid", [0, 1, 3])
def test_more_slots_than_valid_blocks(valid: int, force_fused: bool | None, device: str) -> None:
    """2. More chunks than valid blocks: unwritten scratch times 0."""
    case = set_ids(everything_used(Spec(lengths=(400, 390), topk=64), device), list(range(valid)) or [-1])
    assert_matches_oracle(case, force_fused=force_fused)


def test_minus_one_is_no_table_index(device: str) -> None:
    """3. -1 used as a table index: the entry before, or the last one, must not be read."""
    case = everything_used(Spec(lengths=(300, 300), topk=3), device)
    table = case.kwargs["page_table"]
    table[:, 3:] = table[:, :1]  # real pages, where -1 and -2 would lead
    for ids in ([-1, 0, 1], [0, -1, 1], [0, 1, -1], [-2, -1, -1]):
        assert_matches_oracle(set_ids(case, ids))


@pytest.mark.parametrize("form", ["packed", "packed_nhd", "flat_packed"])
@pytest.mark.parametrize("q_dtype, kv_dtype", DTYPE_PAIRS)
def test_halves_of_a_packed_cache(form: str, q_dtype: str, kv_dtype: str, device: str) -> None:
    """4. Packed fp8 with token stride 256 read as 128."""
    case = build(Spec(q_dtype=q_dtype, kv_dtype=kv_dtype, form=form, lengths=(300, 129)), device)
    assert case.args[1].stride(-2 if "nhd" not in form and case.spec.paged else 0) >= 2 * case.args[1].shape[-1]
    assert_matches_oracle(case)


@fused
@pytest.mark.parametrize("ids", [[1], [1, 0], [0, 1], [1, -1, 0]], ids=str)
def test_block_ahead_of_the_first_tokens(ids: list[int], force_fused: bool | None, device: str) -> None:
    """5. A block wholly masked for the first tokens of a request given weight 1."""
    case = set_ids(everything_used(Spec(lengths=(130, 256), seqlen_q=8, topk=4), device), ids)
    out, lse = assert_matches_oracle(case, force_fused=force_fused)
    if ids == [1]:
        assert (out[:6] == 0).all() and lse[:6].isneginf().all() and lse[6:].isfinite().all()


@fused
def test_ids_are_bounded_by_their_own_request(force_fused: bool | None, device: str) -> None:
    """6. A batch-wide bound on ids."""
    lengths = (9000, 130, 8500, 256, 9000, 300, 8192, 1)
    case = everything_used(Spec(lengths=lengths, kv_heads=1, topk=16), device)
    # The whole table names readable pages: an id past a short request leads to another's numbers.
    table = case.kwargs["page_table"]
    counts = torch.tensor([-(-n // 128) for n in lengths], device=device)
    unused = torch.arange(table.shape[1], device=device)[None] >= counts[:, None]
    table[unused] = table[0, 0]
    rows = []
    for n in counts.tolist():
        rows.append([0, n - 1, n, n + 1, 64, 65, 66, 67, 70, 71, 72, 1, 2, 3, n - 2, -1])
    assert_matches_oracle(set_ids(case, rows), force_fused=force_fused)


@pytest.mark.parametrize("q_dtype, kv_dtype", DTYPE_PAIRS)
def test_nan_past_the_end_of_the_last_block(q_dtype: str, kv_dtype: str, device: str) -> None:
    """7. NaN bytes past the end times 0."""
    for form in ("nhd", "flat"):
        spec = Spec(q_dtype=q_dtype, kv_dtype=kv_dtype, form=form, lengths=(1, 127, 129, 200), ids="all", topk=2)
        out, lse = assert_matches_oracle(build(spec, device))
        assert out.isfinite().all() and lse.isfinite().all()


@fused
def test_leading_slots_with_nothing_to_attend(force_fused: bool | None, device: str) -> None:
    """8. A first chunk all masked poisons the accumulator: holes first, then blocks ahead, then the keys."""
    case = everything_used(Spec(lengths=(700, 700), seqlen_q=2, topk=24, q_offset=(100, 300)), device)
    for ids in ([*[-1] * 20, 0], [5, 4, 3, 0], [*[INT32_MAX] * 8, 5, 5, 5, 4, 3, *[-1] * 8, 2, 1, 0]):
        assert_matches_oracle(set_ids(case, ids), force_fused=force_fused)


@pytest.mark.parametrize("above", [11, 25, 60])
@pytest.mark.parametrize("where", [0, 130, 383])
def test_one_key_far_above_the_rest(above: float, where: int, device: str) -> None:
    """9. A fixed-exponent softmax that overflows when q is parallel to k."""
    g = torch.Generator().manual_seed(1)
    q = torch.randn(1, 1, 128, generator=g).bfloat16()
    k = torch.randn(384, 128, generator=g) * 0.05
    k[where] = q[0, 0].float() * above * 128**0.5 / q.float().norm() ** 2
    by_hand(device, q, k.bfloat16(), torch.randn(384, 128, generator=g).bfloat16())


@pytest.mark.parametrize("level", [-18, -34, -90])
@pytest.mark.parametrize("q_dtype, kv_dtype", [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8")])
def test_every_score_far_below_zero(level: float, q_dtype: str, kv_dtype: str, device: str) -> None:
    """10. A running maximum that starts at 0: all scores below -17 vanish."""
    g = torch.Generator().manual_seed(2)
    q = (torch.ones(1, 2, 128) + torch.randn(1, 2, 128, generator=g) * 0.1).to(DTYPES[q_dtype])
    k = torch.full((300, 128), level / 128**0.5) + torch.randn(300, 128, generator=g) * 0.2
    v = torch.randn(300, 128, generator=g)
    _, lse = by_hand(device, q, k.to(DTYPES[kv_dtype]), v.to(DTYPES[kv_dtype]))
    assert (lse < -10).all()


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 2e5, 1e30])
def test_query_rows_of_any_size(size: float, kv_dtype: str, device: str) -> None:
    """11. q cast to fp8 without a scale: small rows vanish, large ones overflow."""
    spec = Spec(kv_dtype=kv_dtype, lengths=(300, 100), q_size=size, softmax_scale=0.05 / size)
    assert_matches_oracle(build(spec, device))


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "nvfp4"])
def test_query_rows_of_different_sizes_in_one_call(kv_dtype: str, device: str) -> None:
    """11. A power of two per row, not per call: large rows next to small ones keep their scores."""
    case = build(Spec(kv_dtype=kv_dtype, lengths=(300, 100, 200), kv_heads=1, group=3, topk=3, ids="all"), device)
    sizes = torch.tensor([1e-9, 1.0, 2e5], device=device)[None, :, None]
    case.args[0].copy_((case.args[0].float() * sizes).bfloat16())
    for scale in (0.05 / 1e-9, 0.05, 0.05 / 2e5):
        # At one scale only one size has scores that are neither all 0 nor too far apart for float32: compare it.
        row = int((sizes.flatten() * scale - 0.05).abs().argmin())
        out, lse = case.run(softmax_scale=scale)
        expected, expected_lse = case.oracle(softmax_scale=scale)
        assert_rows_close(out[:, row], expected[:, row])
        assert_lse_close(lse[:, row], expected_lse[:, row])
        assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "nvfp4"])
def test_small_entries_beside_a_large_one_keep_their_bits(kv_dtype: str, device: str) -> None:
    """11. Entries within 2^24 of the row's largest count, here where K is 0 at the largest."""
    case = build(Spec(kv_dtype=kv_dtype, lengths=(300, 100), ids="all", topk=3), device)
    q, k, v, ids = case.args
    q.copy_((q.float() * 2.0**-5).clamp(-1, 1))
    q[q.abs() < 2.0**-7] = 2.0**-7
    q[..., 5] = 2.0**17
    used = ~case.keys.isnan()
    case.keys = torch.where(used & (torch.arange(128) == 5), torch.zeros_like(case.keys), case.keys)
    if kv_dtype == "nvfp4":  # element 5 is the high nibble of byte 2
        k[..., 2] &= 0x0F
    else:
        raw = k.view(torch.int16 if kv_dtype == "bf16" else torch.uint8)
        raw[..., 5] = torch.where(used[..., 5].to(device), torch.zeros_like(raw[..., 5]), raw[..., 5])
    case.args = (q, k, v, ids)
    assert_matches_oracle(case, softmax_scale=128**-0.5 * 2.0**5)


def test_unused_table_columns_do_not_matter(device: str) -> None:
    """12. A result that depends on the page table's unused columns."""
    case = build(Spec(lengths=(300, 129, 0), topk=5), device)
    expected = assert_matches_oracle(case)
    table = case.kwargs["page_table"]
    columns = torch.arange(table.shape[1], device=device)[None]
    unused = columns >= torch.tensor([[3], [2], [0]], device=device)
    for value in (0, 1, -1, INT32_MAX, -(2**31)):
        table[unused] = value
        assert_same_bits(case.run(), expected)


@pytest.mark.parametrize("which", [["k"], ["v"], ["k_scale"], ["v_scale"], ["k", "v", "k_scale", "v_scale"]], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_a_planar_region_is_found_by_its_own_strides(which: list[str], kv_heads: int, device: str) -> None:
    """13. A planar view made `.contiguous()`: right shape, wrong bytes, where the page is guessed from one view."""
    case = build(Spec(kv_dtype="nvfp4", form="planar_pool", kv_heads=kv_heads, k_global_scale=0.3), device)
    in_place = assert_matches_oracle(case)
    q, k, v, ids = case.args
    case.args = (q, k.contiguous() if "k" in which else k, v.contiguous() if "v" in which else v, ids)
    for name in ("k_scale", "v_scale"):
        if name in which:
            case.kwargs[name] = case.kwargs[name].contiguous()
    assert_same_bits(case.run(), in_place)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_every_layer_of_a_pool_gives_its_own_result(kv_dtype: str, device: str) -> None:
    """14. A storage offset that is dropped."""
    base = build(Spec(kv_dtype=kv_dtype, lengths=(300, 60), ids="ascending"), device)
    g = torch.Generator().manual_seed(3)
    pool = torch.randn(4, 2, *base.keys.shape, generator=g).to(DTYPES[kv_dtype]).to(device)
    assert base.args[1].stride() == pool[0, 0].stride()
    for layer in (0, 3, 1):
        case = replace_kv(base, pool[layer, 0], pool[layer, 1])
        assert case.args[1].storage_offset() == layer * pool.stride(0)
        assert_matches_oracle(case)


def replace_kv(case: Case, k: Tensor, v: Tensor) -> Case:
    q, _, _, ids = case.args
    return Case(case.spec, (q, k, v, ids), case.kwargs, k.cpu().double(), v.cpu().double())


def test_the_element_size_comes_from_the_dtype(device: str) -> None:
    """15. A bf16 cache read as fp8 bytes, or the other way, here with the same shape and the same bytes."""
    base = build(Spec(lengths=(300, 60), ids="ascending"), device)
    g = torch.Generator().manual_seed(4)
    wide = torch.randn(2, *base.keys.shape, generator=g).bfloat16().to(device)
    narrow = wide.view(torch.uint8)[..., :128] & 0x77  # bytes of the same memory, none of them an e4m3 NaN
    narrow = narrow.contiguous().view(torch.float8_e4m3fn)
    assert_matches_oracle(replace_kv(base, wide[0], wide[1]))
    scale = 0.002  # e4m3 numbers up to 240 here
    assert_matches_oracle(replace_kv(base, narrow[0], narrow[1]), softmax_scale=scale)
    with pytest.raises(ValueError, match=r"view\(torch.float8_e4m3fn\)"):
        replace_kv(base, narrow[0].view(torch.uint8), narrow[1].view(torch.uint8)).run()
    with pytest.raises(ValueError, match="v must have k's dtype"):
        replace_kv(base, wide[0], narrow[1]).run()


@pytest.mark.parametrize("q_dtype, kv_dtype", DTYPE_PAIRS)
@pytest.mark.parametrize(
    "changes",
    [
        {"softmax_scale": 0.3},
        {"softmax_scale": -0.05},
        {"softmax_scale": 0.0},
        {"k_global_scale": 0.4},
        {"k_global_scale": -0.4},
        {"v_global_scale": 0.4},
        {"v_global_scale": 0.0},
        {"causal": False},
        {"q_offset": 70},
        {"q_offset": -1},
        {"q_offset": (70, 10)},
    ],
    ids=str,
)
def test_no_argument_is_ignored(changes: dict[str, Any], q_dtype: str, kv_dtype: str, device: str) -> None:
    """16. Arguments accepted and ignored: each changes the result, to the right one, for every dtype pair."""
    spec = Spec(q_dtype=q_dtype, kv_dtype=kv_dtype, lengths=(200, 60), seqlen_q=3, topk=2, ids="all")
    case = everything_used(spec, device)
    set_ids(case, [1, 0])
    before, before_lse = case.run()
    for tensors in (False, True):
        asked = {n: as_tensor(n, a, device) if tensors else a for n, a in changes.items()}
        if isinstance(asked.get("q_offset"), tuple):
            asked["q_offset"] = as_tensor("q_offset", asked["q_offset"], device)
        out, lse = assert_matches_oracle(case, **asked)
        assert not torch.equal(out, before)
        assert torch.equal(lse, before_lse) == ("v_global_scale" in changes)


def as_tensor(name: str, value: Any, device: str) -> Any:
    """What the call takes as a tensor, as one."""
    if name.endswith("global_scale"):
        return torch.tensor([value], dtype=torch.float32, device=device)
    if name == "q_offset":
        return torch.tensor(value if isinstance(value, tuple) else [value] * 2, dtype=torch.int32, device=device)
    return value


def test_offset_has_no_effect_without_causal(device: str) -> None:
    """16. With `causal=False` there is no position."""
    case = set_ids(everything_used(Spec(lengths=(200, 60), seqlen_q=3, topk=2, causal=False), device), [0, 1])
    expected = assert_matches_oracle(case)
    assert_same_bits(case.run(q_offset=10), expected)
    assert_same_bits(case.run(q_offset=torch.tensor([-5, 3], dtype=torch.int32, device=device)), expected)


@pytest.mark.parametrize("name", ["seqused_k", "page_table", "cu_seqlens_k"])
def test_int64_lengths_are_refused(name: str, device: str) -> None:
    """16. int64 lengths."""
    case = build(Spec(form="flat" if name == "cu_seqlens_k" else "hnd"), device)
    with pytest.raises(ValueError, match=rf"{name} must be int32, got int64: pass {name}.to\(torch.int32\)"):
        case.run(**{name: case.kwargs[name].long()})


@pytest.mark.parametrize("topk", [1, 5, 12, 15, 17, 24, 31, 33, 64])
@pytest.mark.parametrize("form", ["hnd", "flat"])
def test_any_topk_reads_its_own_row(topk: int, form: str, device: str) -> None:
    """19. A top-k other than 16 that reads past the row: valid ids lie behind every row here."""
    case = build(Spec(form=form, lengths=(600, 300), seqlen_q=2, topk=topk, ids_form="padded"), device)
    assert case.args[3].stride(1) == topk + 5
    assert_matches_oracle(case)


def test_largest_topk(device: str) -> None:
    """19. 4,096 slots, most of them holes and duplicates."""
    case = build(Spec(lengths=(600,), topk=4096), device)
    assert_matches_oracle(case)


@pytest.mark.parametrize("scale_dtype", ["uint8", "fp8"])
@pytest.mark.parametrize("kv_heads", [1, 3, 4, 8])
def test_planar_v_scales_are_interleaved(kv_heads: int, scale_dtype: str, device: str) -> None:
    """20. V scales swizzled, read as linear: one value and one scale of each (token, group) must meet."""
    spec = Spec(kv_dtype="nvfp4", form="planar", kv_heads=kv_heads, lengths=(130, 60), scale_dtype=scale_dtype)
    case = build(spec, device)
    right = assert_matches_oracle(case)
    linear = case.kwargs["v_scale"].view(torch.uint8)
    if device == "cpu":
        wrong = nvfp4_bytes.interleave_v_scales(linear.contiguous()).view(case.kwargs["v_scale"].dtype)
        assert not torch.equal(case.run(v_scale=wrong)[0].nan_to_num(), right[0])


@pytest.mark.parametrize("form", ["hnd", "nhd", "flat"])
@pytest.mark.parametrize("start", [4, 8, 12])
def test_tiled_scales_may_start_on_any_word(start: int, form: str, device: str) -> None:
    """20. Scales that are copied 16 bytes at a time from where they are not."""
    spec = Spec(
        kv_dtype="nvfp4", form=form, lengths=(300, 129, 64), kv_heads=2, ids="all", scale_rank=2, scale_start=start
    )
    case = build(spec, device)
    assert case.kwargs["k_scale"].data_ptr() % 16 == start
    assert_matches_oracle(case)


@pytest.mark.parametrize("form", ["hnd", "nhd", "flat"])
def test_tokens_equal_to_heads(form: str, device: str) -> None:
    """21. A shape guessed from sizes when tokens == heads."""
    for ids_form in ("plain", "token_major"):
        spec = Spec(form=form, lengths=(300, 129, 64, 200), kv_heads=4, group=1, topk=4, ids_form=ids_form)
        case = build(spec, device)
        assert case.args[3].shape == (4, 4, 4)
        assert_matches_oracle(case)


@pytest.mark.parametrize("form", ["hnd", "nhd"])
def test_as_many_heads_as_keys_in_a_page(form: str, device: str) -> None:
    """21. (pages, 128, 128, 128): which dim is heads is not guessed."""
    assert_matches_oracle(build(Spec(form=form, lengths=(3,), kv_heads=128, group=1, topk=1, ids="all"), device))


def test_calls_of_different_kinds_take_turns(device: str) -> None:
    """22. A compile cache keyed without dtype, strides or causal mode."""
    specs = [
        Spec(q_dtype=q_dtype, kv_dtype=kv_dtype, form=form, causal=causal, seqlen_q=2, topk=2)
        for q_dtype, kv_dtype in DTYPE_PAIRS
        for form in ("hnd", "nhd", "packed", "flat")
        for causal in (True, False)
    ]
    for spec in specs:
        assert_matches_oracle(build(spec, device))
    for spec in reversed(specs[::3]):
        assert_matches_oracle(build(spec, device))


@fused
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "nvfp4"])
def test_runs_repeat_to_the_bit(kv_dtype: str, force_fused: bool | None, device: str) -> None:
    """24. Results that differ from run to run."""
    case = build(Spec(kv_dtype=kv_dtype, lengths=(900, 0, 513, 700), topk=16, ids="ascending"), device)
    first = case.run(force_fused=force_fused)
    for _ in range(5):
        assert_same_bits(case.run(force_fused=force_fused), first)


@fused
def test_out_as_a_prefix_leaves_the_tail_alone(force_fused: bool | None, device: str) -> None:
    """26. `out=` as a prefix slice: the tail stays untouched, and the head is written whole, empty rows included."""
    case = build(Spec(lengths=(300, 0, 129), seqlen_q=2), device)
    big = torch.full((case.spec.tokens + 3, 8, 128), 7.0, dtype=torch.bfloat16, device=device)
    big_lse = torch.full((case.spec.tokens + 3, 8), 7.0, device=device)
    n = case.spec.tokens
    out, lse = case.run(out=big[1 : n + 1], lse_out=big_lse[1 : n + 1], force_fused=force_fused)
    assert out.data_ptr() == big[1].data_ptr() and lse.data_ptr() == big_lse[1].data_ptr()
    assert_matches_oracle(case, (out, lse))
    for t in (big, big_lse):
        assert (t[0] == 7).all() and (t[n + 1 :] == 7).all()
