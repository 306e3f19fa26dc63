"""Numbers near the ends of their formats: the output is right wherever it, and every scaled score, fits its dtype.

Products of q and K, sums before they are divided, and powers of two from widening all reach further than the result.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compare import ROW_TOLERANCE
from msa_ops import msa_sparse_decode_attention
from msa_ops.merge import merge_attention_states
from msa_ops.reference import decode_reference

FP8 = torch.float8_e4m3fn


def run(q: Tensor, k: Tensor, v: Tensor, device: str, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Output and LSE, on the CPU, of every token attending every key of one flat request."""
    blocks = -(-k.shape[0] // 128)
    ids = torch.arange(blocks, dtype=torch.int32).expand(k.shape[1], q.shape[0], blocks).contiguous()
    kwargs = {"cu_seqlens_k": torch.tensor([0, k.shape[0]], dtype=torch.int32), "seqlen_q": q.shape[0], **kwargs}
    kwargs = {n: a.to(device) if isinstance(a, Tensor) else a for n, a in kwargs.items()}
    args = [t.to(device) for t in (q, k, v, ids)]
    result = msa_sparse_decode_attention(*args, causal=False, return_softmax_lse=True, **kwargs)
    assert isinstance(result, tuple)
    return result[0].cpu(), result[1].cpu()


def assert_like_oracle(q: Tensor, k: Tensor, v: Tensor, device: str, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Rows within the usual tolerance; LSE within 1e-4, or within 1e-6 of its size."""
    out, lse = run(q, k, v, device, **kwargs)
    blocks = -(-k.shape[0] // 128)
    ids = torch.arange(blocks, dtype=torch.int32).expand(k.shape[1], q.shape[0], blocks)
    cu = torch.tensor([0, k.shape[0]], dtype=torch.int32)
    kwargs = {"cu_seqlens_k": cu, "seqlen_q": q.shape[0], **kwargs}
    want, want_lse = decode_reference(q, k, v, ids, round_output=False, causal=False, **kwargs)
    assert want.isfinite().all() and want_lse.isfinite().all()
    error = (out.double() - want).norm(dim=-1)
    assert (error <= ROW_TOLERANCE[out.dtype] * want.norm(dim=-1)).all(), (error / want.norm(dim=-1)).max()
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-4)
    return out, lse


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def full(value: float, keys: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full((keys, 1, 128), value).to(dtype)


# --- scores ---


@pytest.mark.parametrize("hidden", ["last", "first"])
def test_a_segment_whose_products_overflow_downwards_has_no_weight(hidden: str, device: str) -> None:
    k = full(-2.0, 2176)
    far = slice(2048, None) if hidden == "last" else slice(0, 2048)
    k[far] = -3e36  # 128 products: -3.8e38, past float32; the scaled score is -3.4e37
    v = torch.ones_like(k)
    v[far] = 7.0
    out, lse = run(torch.ones(1, 1, 128).bfloat16(), k, v, device)
    assert torch.equal(out, torch.ones_like(out))
    keys = 2048 if hidden == "last" else 128
    torch.testing.assert_close(lse, torch.full((1, 1), math.log(keys) - 256 / math.sqrt(128)), rtol=0, atol=1e-4)


# Unscaled products past float32 are beyond what the CUDA engine promises (docs/semantics.md); the CPU engine has them right.


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("keys", [1, 300, 2176])
def test_products_past_float32_with_scaled_scores_inside_it(keys: int, sign: int) -> None:
    k = full(sign * 3e36, keys)
    v = random(1, 1, 128).bfloat16().expand(keys, 1, 128).contiguous()
    out, lse = run(torch.ones(1, 1, 128).bfloat16(), k, v, "cpu")
    torch.testing.assert_close(out[0].float(), v[0].float(), rtol=2**-8, atol=0)
    want = float(k[0, 0, 0]) * math.sqrt(128)
    torch.testing.assert_close(lse, torch.full((1, 1), want), rtol=1e-6, atol=0)


def test_partial_sums_past_float32_that_cancel() -> None:
    q = torch.ones(1, 1, 128).bfloat16()
    k = full(0.0, 300)
    k[:, 0, :64] = -3e38
    k[:, 0, 64:] = 3e38
    k[150:, 0, 127] = 0.0  # ahead by -3e38: far from the rest
    assert_like_oracle(q, k, random(300, 1, 128).bfloat16(), "cpu")


@pytest.mark.parametrize("size", [2.0**-133, 1e-30, 513.0, 2e5, 1e30])
def test_queries_of_any_size_with_the_keys_that_suit_them(size: float, device: str) -> None:
    q = (random(2, 2, 128, seed=1).sign() * size).bfloat16()
    k = (random(700, 1, 128, seed=2) * (0.1 / size if 0.1 / size < 1e38 else 3e37)).bfloat16()
    assert_like_oracle(q, k, random(700, 1, 128, seed=3).bfloat16(), device)


def test_a_large_query_changes_no_bit_of_its_neighbours(device: str) -> None:
    q, k, v = random(3, 2, 128).bfloat16(), random(2300, 2, 128, seed=1).bfloat16(), random(2300, 2, 128).bfloat16()
    before = run(q, k, v, device)
    q[1] *= 2**20
    after = run(q, k, v, device)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


# Finite scores past float32 are beyond what the kernel promises; the CPU engine still has them right.


@pytest.mark.parametrize("sign", [1, -1])
def test_scaled_scores_past_float32_leave_the_output_right_on_the_cpu(sign: int) -> None:
    out, lse = run(full(3e38, 1), full(sign * 3e38, 2176), full(0.5, 2176), "cpu")
    assert torch.equal(out, torch.full_like(out, 0.5))
    assert torch.equal(lse, torch.full_like(lse, sign * math.inf))


@pytest.mark.parametrize("score", [1e5, 1e7, 1e30, -1e7])
def test_segments_with_large_equal_scores_keep_their_shares_on_the_cpu(score: float) -> None:
    k = full(score / 128, 2048 + 512, torch.bfloat16)
    v = full(1.0, 2048 + 512)
    v[2048:] = 6.0  # a fifth of the keys
    out, _ = run(torch.ones(1, 1, 128).bfloat16(), k, v, "cpu", softmax_scale=1.0)
    assert torch.equal(out, torch.full_like(out, 2.0))


def test_infinite_keys_give_what_the_oracle_gives_on_the_cpu() -> None:
    q, v = torch.ones(1, 1, 128).bfloat16(), random(2176, 1, 128).bfloat16()
    k = full(-math.inf, 2176)
    out, lse = run(q, k, v, "cpu")
    assert out.isnan().all() and lse.isneginf().all()
    k[2048:] = 0.25
    out, lse = run(q, k, v, "cpu")
    torch.testing.assert_close(out[0, 0].float(), v[2048:, 0].float().mean(0), rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(128) + 32 / math.sqrt(128)), rtol=0, atol=1e-4)


def test_merging_large_equal_states_is_a_mean(device: str) -> None:
    out_a, out_b = torch.full((3, 4), 2.0, device=device), torch.full((3, 4), 4.0, device=device)
    lse = torch.tensor([1e8, -3e37, 1e30], device=device)
    merged, _ = merge_attention_states(out_a, lse, out_b, lse)
    assert torch.equal(merged, torch.full_like(merged, 3.0))


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8", "nvfp4"])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_an_attended_nan_is_nan_and_not_an_empty_token(kind: str, where: str, device: str) -> None:
    k, v, scales = form(kind)
    q = query(kind)
    if where == "query":
        q[0, 1, 5] = math.nan
    elif kind == "nvfp4":
        scales["k_scale" if where == "key" else "v_scale"][2, 0] = 0x7F
    else:
        t = k if where == "key" else v
        t.view(torch.uint8 if kind == "fp8" else torch.int16)[2] = 0x7F if kind == "fp8" else 0x7FFF
    if (
        device == "cuda"
        and kind in ("fp8", "nvfp4")
        and where != "query"
        and torch.cuda.get_device_capability() < (8, 9)
    ):
        pytest.skip("without a conversion instruction the byte counts as 480 (docs/semantics.md)")
    out, lse = run(q, k, v, device, **scales)
    rows = [1] if where == "query" else [0, 1, 2, 3]
    for row in range(4):
        assert bool(out[0, row].isnan().any()) == (row in rows)
        assert bool(lse[0, row].isnan()) == (row in rows and where != "value")


@pytest.mark.parametrize("kind", ["fp16", "fp8"])
def test_many_small_weights_beside_a_large_one_keep_their_share(kind: str, device: str) -> None:
    """One key 2^25 times as heavy as each of 131,071: in fp16 their weights round to 0 unless they are taken larger. Its
    value is 0, because a matrix instruction aligns what it adds to the largest: beside it 2^-25 would be lost there."""
    keys = 1 << 17
    k = torch.zeros(keys, 1, 128)
    k[0, 0, 0] = 1.0
    q = torch.zeros(1, 1, 128).half()
    q[0, 0, 0] = 25.0
    v = torch.ones(keys, 1, 128)
    v[0] = 0.0
    dtype = torch.float16 if kind == "fp16" else FP8
    assert_like_oracle(q, k.to(dtype), v.to(dtype), device, force_fused=True, softmax_scale=math.log(2.0))


@pytest.mark.parametrize("kind", ["fp16", "fp8"])
@pytest.mark.parametrize("steps", range(5))
def test_scores_that_rise_where_float32_is_coarse(steps: int, kind: str, device: str) -> None:
    """Scores of 2^26 in log2 units, where neighbours lie 8 apart: weights may not outgrow fp16 before the base is raised."""
    q, k = torch.zeros(1, 1, 128), torch.zeros(512, 1, 128)
    q[..., 0], q[..., 1] = 1.0, 2.0**-14
    k[..., 0] = 1.0
    k[128:, :, 1] = steps * 2.0**-9
    dtype = torch.float16 if kind == "fp16" else FP8
    v = torch.ones(512, 1, 128).to(dtype)
    scale = 2.0**26 / math.log2(math.e)
    out, lse = run(q.half(), k.to(dtype), v, device, softmax_scale=scale, force_fused=True)
    assert torch.equal(out, torch.ones_like(out)) and bool(lse.isfinite().all())


# --- values ---


@pytest.mark.parametrize("keys, value", [(2048, 1e36), (128, 1e37), (2, 3e38), (2176, 3.3895e38), (2176, -3.3895e38)])
def test_sums_of_values_past_float32(keys: int, value: float, device: str) -> None:
    v = full(value, keys)
    out, _ = run(torch.ones(1, 1, 128).bfloat16(), full(0.5, keys), v, device)
    torch.testing.assert_close(out[0].float(), v[0].float(), rtol=2**-8, atol=0)


def test_large_values_of_one_head_change_no_bit_of_another(device: str) -> None:
    q, k, v = random(2, 4, 128).bfloat16(), random(2300, 2, 128, seed=1).bfloat16(), random(2300, 2, 128).bfloat16()
    before = run(q, k, v, device)
    v[:, 1] = 3e38
    after = run(q, k, v, device)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, :2], b[:, :2])
    torch.testing.assert_close(before[1], after[1], rtol=0, atol=1e-4)
    assert after[0].isfinite().all()


# --- scales ---


def cache(kind: str, keys: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """K or V of about unit size, and its block scales."""
    if kind != "nvfp4":
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": FP8}[kind]
        return random(keys, 1, 128, seed=seed).to(dtype), {}
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (keys, 1, 64), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0x28, 0x38, (-(-keys // 128) * 128, 8), dtype=torch.uint8, generator=generator)
    return codes, {"scale": scale}


def form(kind: str, keys: int = 300) -> tuple[Tensor, Tensor, dict[str, Any]]:
    (k, ks), (v, vs) = cache(kind, keys, 1), cache(kind, keys, 2)
    return k, v, {"k_scale": ks["scale"], "v_scale": vs["scale"]} if ks else {}


def query(kind: str, size: float = 1.0) -> Tensor:
    return (random(1, 4, 128, seed=5) * size).to(torch.float16 if kind == "fp16" else torch.bfloat16)


KINDS = ["bf16", "fp16", "fp8", "nvfp4"]


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e32, 1e38, -1e38, 3.4e38])
def test_large_score_scales_with_small_queries(scale: float, kind: str, tensor: bool, device: str) -> None:
    """Scores are of size 1, by the scale in one factor or in two."""
    if kind == "fp16":
        k, v, scales = form(kind)
        k, q = k * 6e-8, query(kind, 6e-8)
        scale = math.copysign(1e13, scale)
    else:
        k, v, scales = form(kind)
        q = query(kind, 0.1 / abs(scale))
    if tensor:
        scales.update(softmax_scale=0.5, k_global_scale=torch.tensor([scale]))
    else:
        scales.update(softmax_scale=scale)
    assert_like_oracle(q, k, v, device, **scales)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e32, 1e38, -3e38])
def test_large_score_scales_with_zero_keys(scale: float, kind: str, device: str) -> None:
    k, v, scales = form(kind)
    k = k.view(torch.uint8).zero_().view(k.dtype)
    _, lse = assert_like_oracle(query(kind), k, v, device, softmax_scale=scale, **scales)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(300)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "nvfp4"])
def test_small_score_scales_with_large_queries(kind: str, device: str) -> None:
    k, v, scales = form(kind)
    assert_like_oracle(query(kind, 1e34), k, v, device, softmax_scale=1e-35, **scales)


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("scale", [1e33, 1e37, -1e37, 1e-38, 1e-30])
def test_output_scales_of_any_size(scale: float, kind: str, tensor: bool, device: str) -> None:
    k, v, scales = form(kind)
    scales["v_global_scale"] = torch.tensor([scale]) if tensor else scale
    # bf16 below 1.2e-38 has fewer bits: rows there are held to its smallest step.
    out, _ = run(query(kind), k, v, device, **scales)
    plain, _ = run(query(kind), k, v, device, **{**scales, "v_global_scale": 1.0})
    want = plain.double() * scale
    torch.testing.assert_close(out.double(), want, rtol=2**-6, atol=2.0**-132)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_the_largest_output_scale_with_values_that_suit_it(kind: str, device: str) -> None:
    k, v, scales = form(kind)
    if kind == "fp8":
        v = full(2.0**-9, 300, FP8)
        want = 2.0**-9
    else:
        v = torch.full_like(v, 0x11)  # 0.5
        scales["v_scale"] = torch.full_like(scales["v_scale"], 0x38)  # 1.0
        want = 0.5
    out, _ = run(query(kind), k, v, device, v_global_scale=3e38, **scales)
    torch.testing.assert_close(out.double(), torch.full_like(out, want).double() * 3e38, rtol=2**-8, atol=0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("lengths", [(0, 300, 2300), (300, 0), (0,)])
def test_a_token_without_keys_is_zero_whatever_the_output_scale(
    lengths: tuple[int, ...], value: float, device: str
) -> None:
    k, v, ids = random(2600, 1, 128).bfloat16(), random(2600, 1, 128).bfloat16(), torch.arange(18, dtype=torch.int32)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    args = [random(len(lengths), 2, 128).bfloat16(), k, v, ids.expand(1, len(lengths), 18).contiguous()]
    result = msa_sparse_decode_attention(
        *(t.to(device) for t in args),
        cu_seqlens_k=cu.to(device),
        v_global_scale=torch.tensor([value], device=device),
        return_softmax_lse=True,
    )
    out, lse = (t.cpu() for t in result)
    for b, length in enumerate(lengths):
        assert bool((out[b] == 0).all()) == (length == 0)
        assert bool(out[b].isfinite().all()) == (length == 0)
        assert bool(lse[b].isneginf().all()) == (length == 0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_token_without_keys_is_zero_whatever_the_key_scale(value: float, device: str) -> None:
    q, k = random(1, 2, 128).bfloat16(), random(128, 1, 128).bfloat16()
    out, lse = run(q, k, k, device, cu_seqlens_k=torch.tensor([0, 0]).int(), k_global_scale=torch.tensor([value]))
    assert bool((out == 0).all()) and bool(lse.isneginf().all())
