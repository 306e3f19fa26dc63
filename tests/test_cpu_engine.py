"""What is peculiar to the CPU engine: segments, chunks, bounded memory, widening, independence of its surroundings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from msa_ops import msa_sparse_decode_attention
from msa_ops.engines import cpu
from msa_ops.engines.cpu import gather
from msa_ops.reference import decode_reference

FP8 = torch.float8_e4m3fn
ROW_TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def _call(
    lengths: list[int], topk: int, *, kv_heads: int = 2, group: int = 2, dtype: torch.dtype = torch.bfloat16
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """A paged call with ids drawn from every block of each request, as many as there are, -1 after them."""
    generator = torch.Generator().manual_seed(0)
    blocks = [-(-n // 128) for n in lengths]
    columns = max(1, *blocks)
    table = torch.randperm(columns * len(lengths), generator=generator).int().view(len(lengths), columns)
    ids = torch.full((kv_heads, len(lengths), topk), -1, dtype=torch.int32)
    for h in range(kv_heads):
        for b, n in enumerate(blocks):
            chosen = torch.randperm(n, generator=generator)[:topk].sort().values
            ids[h, b, : len(chosen)] = chosen.int()
    inner = 64 if dtype == torch.uint8 else 128
    shape = (table.numel(), kv_heads, 128, inner)
    q = _random((len(lengths), kv_heads * group, 128), torch.bfloat16, 1)
    kwargs: dict[str, Any] = {"page_table": table, "seqused_k": torch.tensor(lengths, dtype=torch.int32)}
    if dtype == torch.uint8:
        for i, name in enumerate(("k_scale", "v_scale")):
            generator = torch.Generator().manual_seed(4 + i)
            kwargs[name] = torch.randint(0x30, 0x40, (shape[0] * kv_heads * 128, 8), generator=generator).to(dtype)
    return (q, _random(shape, dtype, 2), _random(shape, dtype, 3), ids), kwargs


def _run(args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    result = msa_sparse_decode_attention(*args, return_softmax_lse=True, **kwargs)
    assert isinstance(result, tuple)
    return result


def _assert_matches_reference(args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
    out, lse = _run(args, kwargs)
    want, want_lse = decode_reference(*args, round_output=False, **kwargs)
    some = torch.isfinite(want_lse)
    error = (out.double() - want).norm(dim=-1)[some] / want.norm(dim=-1)[some]
    assert float(error.max()) <= ROW_TOLERANCE[out.dtype]
    assert torch.equal(out[~some], torch.zeros_like(out[~some]))
    assert torch.equal(torch.isfinite(lse), some)
    torch.testing.assert_close(lse[some].double(), want_lse[some], rtol=0, atol=1e-4)


@pytest.mark.parametrize("topk", [1, 15, 16, 17, 31, 32, 33, 64, 65])
def test_selections_around_segment_and_chunk_boundaries(topk: int) -> None:
    _assert_matches_reference(*_call([topk * 128 - 5, 40 * 128, 77], topk, kv_heads=1))


def test_segments_of_many_different_lengths_in_one_call() -> None:
    lengths = [0, 1, 127, 128, 129, 2047, 2048, 2049, 2175, 300, 300, 4097]
    _assert_matches_reference(*_call(lengths, topk=18))


@pytest.mark.parametrize("chunk", [16, 17, 48])
def test_the_size_of_a_chunk_changes_no_bit(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args, kwargs = _call([2048, 2500, 2048, 5000, 100], topk=16)
    out, lse = _run(args, kwargs)
    monkeypatch.setattr(cpu, "_CHUNK_BLOCKS", chunk)
    monkeypatch.setattr(cpu, "_MAX_CHUNK_BLOCKS", chunk)
    again, lse_again = _run(args, kwargs)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


def test_planning_few_tokens_at_a_time_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    args, kwargs = _call([2048, 2500, 2048, 5000, 100, 0], topk=17)
    out, lse = _run(args, kwargs)
    monkeypatch.setattr(cpu, "_PLANNED_IDS", 1)
    again, lse_again = _run(args, kwargs)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("blocks", [600, 4096])
def test_topk_4096(blocks: int) -> None:
    # Every page stands in the table equally often, so the result is attention over the pages, once each.
    pages = 8
    args, kwargs = _call([pages * 128], topk=pages)
    q, k, v, _ = args
    want, want_lse = decode_reference(*args, round_output=False, **kwargs)
    columns = torch.arange(4096, dtype=torch.int32)
    ids = torch.where(columns < blocks, columns, -1).flip(0).expand(2, 1, 4096)
    long = {
        "page_table": (kwargs["page_table"][:, columns % pages]).contiguous(),
        "seqused_k": torch.tensor([blocks * 128], dtype=torch.int32),
    }
    out, lse = _run((q, k, v, ids), long)
    assert blocks % pages == 0
    error = (out.double() - want).norm(dim=-1) / want.norm(dim=-1)
    assert float(error.max()) <= ROW_TOLERANCE[out.dtype]
    torch.testing.assert_close(lse.double(), want_lse + math.log(blocks // pages), rtol=0, atol=1e-4)


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, torch.uint8], ids=["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("group", [1, 4, 5, 16])
def test_bits_of_a_request_depend_on_nothing_else(dtype: torch.dtype, group: int, two_threads: None) -> None:
    lengths = [1, 3, 77, 130, 259, 1001, 1001, 2047, 2048, 2048, 2048, 3001]
    (q, k, v, ids), kwargs = _call(lengths, topk=17, group=group, dtype=dtype)
    out, lse = _run((q, k, v, ids), kwargs)
    torch.set_num_threads(1)
    for b in range(len(lengths)):
        one = {**kwargs, "page_table": kwargs["page_table"][b : b + 1], "seqused_k": kwargs["seqused_k"][b : b + 1]}
        alone, alone_lse = _run((q[b : b + 1], k, v, ids[:, b : b + 1]), one)
        assert torch.equal(alone[0], out[b]) and torch.equal(alone_lse[0], lse[b]), f"length {lengths[b]}"


@pytest.mark.parametrize("topk", [3, 24])
@pytest.mark.parametrize("group", [1, 7, 40])
def test_one_segment_alone_is_computed_as_among_others_by_several_threads(
    group: int, topk: int, two_threads: None
) -> None:
    """torch's attention multiplies the matrices of a single segment by all threads together, in another order."""
    lengths = [topk * 128] * 3
    for seed in range(6):
        (q, k, v, ids), kwargs = _call(lengths, topk=topk, kv_heads=1, group=group)
        q = _random(tuple(q.shape), q.dtype, seed)
        out, lse = _run((q, k, v, ids), kwargs)
        for b in range(len(lengths)):
            one = {**kwargs, "page_table": kwargs["page_table"][b : b + 1], "seqused_k": kwargs["seqused_k"][b : b + 1]}
            alone, alone_lse = _run((q[b : b + 1], k, v, ids[:, b : b + 1]), one)
            assert torch.equal(alone[0], out[b]) and torch.equal(alone_lse[0], lse[b])


def _peak_bytes(args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> int:
    """Most bytes that torch's allocator handed out during the call and had not got back."""
    out = torch.empty_like(args[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        msa_sparse_decode_attention(*args, out=out, **kwargs)
    held = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert peak > 0
    return peak


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, torch.uint8], ids=["bf16", "fp8", "nvfp4"])
def test_memory_is_bounded_whatever_the_cache_and_the_call(dtype: torch.dtype) -> None:
    # 8 heads of 200 blocks: 105 MB a request as float32, for K alone.
    args, kwargs = _call([200 * 128] * 2, topk=200, kv_heads=8, dtype=dtype)
    small = _peak_bytes(args, kwargs)
    assert small <= 64 << 20
    k, v = (torch.cat((t, t)) for t in args[1:3])
    if dtype == torch.uint8:
        kwargs = {**kwargs, **{n: torch.cat((kwargs[n], kwargs[n])) for n in ("k_scale", "v_scale")}}
    assert _peak_bytes((args[0], k, v, args[3]), kwargs) == small


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, torch.uint8], ids=["bf16", "fp8", "nvfp4"])
def test_memory_is_bounded_with_many_threads(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # Chunks grow with threads.
    args, kwargs = _call([200 * 128], topk=200, kv_heads=2, dtype=dtype)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 256)
    assert _peak_bytes(args, kwargs) <= 64 << 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, torch.uint8], ids=["bf16", "fp8", "nvfp4"])
def test_rows_computed_in_float64(dtype: torch.dtype) -> None:
    """Queries and scale that float32 is not trusted with, scores as usual: several segments, empty rows, bounded memory."""
    (q, k, v, ids), kwargs = _call([0, 40 * 128 - 5, 77, 2048], topk=40, dtype=dtype)
    q, kwargs = q * 2.0**110, {**kwargs, "softmax_scale": 2.0**-110 / math.sqrt(128)}
    _assert_matches_reference((q, k, v, ids), kwargs)
    assert _peak_bytes((q, k, v, ids), kwargs) <= 64 << 20


def test_flat_rows_outside_the_cache_are_skipped_at_both_ends() -> None:
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(400, 2, 128, generator=generator).bfloat16() for _ in range(2))
    q = torch.randn(4, 4, 128, generator=generator).bfloat16()
    ids = torch.arange(20, dtype=torch.int32).expand(2, 4, 20)
    for bounds in ([-300, -100, 150, 390, 900], [0, 128, 399, 400, 401], [-2500, 300, 200, 400, 400]):
        _assert_matches_reference((q, k, v, ids), {"cu_seqlens_k": torch.tensor(bounds, dtype=torch.int32)})


def test_flat_cache_shorter_than_a_block() -> None:
    generator = torch.Generator().manual_seed(4)
    k, v = (torch.randn(50, 1, 128, generator=generator).half() for _ in range(2))
    q = torch.randn(2, 3, 128, generator=generator).half()
    ids = torch.zeros(1, 2, 1, dtype=torch.int32)
    _assert_matches_reference((q, k, v, ids), {"cu_seqlens_k": torch.tensor([0, 20, 50], dtype=torch.int32)})


def test_widening_e4m3_is_exact_for_every_byte() -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    wide = torch.empty(256)
    gather.widen_e4m3(raw, torch.empty(256, dtype=torch.int16), wide)
    want = raw.view(FP8).float()
    assert torch.equal(torch.isnan(wide), torch.isnan(want)) and int(torch.isnan(wide).sum()) == 2
    number = ~torch.isnan(want)
    assert torch.equal((wide * 2.0**8)[number].view(torch.int32), want[number].view(torch.int32))


def test_widening_e2m1_is_exact_for_every_pair_of_codes() -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    wide = torch.empty(512)
    gather.widen_e2m1(raw, torch.empty(256, dtype=torch.int32), torch.empty(256, dtype=torch.int32), wide)
    value = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    value = torch.cat((value, -value))
    want = torch.stack((value[(raw & 15).long()], value[(raw >> 4).long()]), dim=-1).flatten()
    assert torch.equal((wide * 2.0**14).view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("which", [1, 2], ids=["k", "v"])
def test_a_float8_nan_that_is_attended_is_seen_by_its_head_alone(byte: int, which: int) -> None:
    args, kwargs = _call([256, 256], topk=2, dtype=FP8)
    clean, _ = _run(args, kwargs)
    args[which].view(torch.uint8)[int(kwargs["page_table"][1, 0]), 0, 5, 9] = byte
    out, _ = _run(args, kwargs)
    assert torch.isnan(out[1, :2]).any(dim=-1).all()
    assert torch.equal(out[0], clean[0]) and torch.equal(out[1, 2:], clean[1, 2:])


def test_strides_without_a_common_step_are_indexed_right() -> None:
    # Pages of 3 * 128 * 144 + 16 elements, heads of 128 * 144: the greatest common divisor is 16 elements.
    pages, heads, token, head = 5, 3, 144, 128 * 144
    page = heads * head + 16
    storage = torch.arange(pages * page + 8, dtype=torch.int32)
    t = storage.as_strided((pages, heads, 128, 128), (page, head, token, 1), 8)
    source = gather.Indexed.of(t)
    place, at = torch.tensor([[4, 0], [3, 1]]), torch.tensor([[2], [1]])
    got = source.items.index_select(0, source.index(place, at).flatten())
    assert torch.equal(got, torch.stack((t[4, 2], t[0, 2], t[3, 1], t[1, 1])))


def test_surrounding_torch_settings_change_no_bit() -> None:
    args, kwargs = _call([300, 2048], topk=16, dtype=FP8)
    out, lse = _run(args, kwargs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = _run(args, kwargs)
    torch.set_default_dtype(torch.float64)
    try:
        other_default = _run(args, kwargs)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        inference = _run(args, kwargs)
    for again, lse_again in (under_autocast, other_default, inference):
        assert torch.equal(out, again) and torch.equal(lse, lse_again)
