"""The quantising kernels on a GPU: the bytes of the CPU, wherever they are written, without a synchronisation.

Arithmetic and addresses are looked at more closely, without a GPU, in test_quantize_kernel.py, whose inputs these tests share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from compare import ROW_TOLERANCE
from msa_ops import msa_sparse_decode_attention, nvfp4
from msa_ops.contract import FP8
from msa_ops.engines.cuda import quantize
from msa_ops.kv_cache import PagedKVCache
from msa_ops.nvfp4 import nvfp4_planar_pages, nvfp4_planar_views, nvfp4_planar_write, nvfp4_quantize
from msa_ops.reference import decode_reference
from test_pitfalls_gpu import captured
from test_quantize_kernel import CACHES, DTYPES, INPUTS, SCALES, all_finite, rows_of, scale_ties, ties

pytestmark = pytest.mark.gpu

FACTORS = [1.0, 0.37, 448 * 6 / 3.1, 3e-3, 1e-30, 1e-45, 2.0**-126, 2e30, 3e38]
NAN, INF = float("nan"), float("inf")


def equal(on_gpu: tuple[Tensor, ...], on_cpu: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a.cpu(), b) for a, b in zip(on_gpu, on_cpu, strict=True))


def launches() -> int:
    return sum(quantize.calls.values())


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def random_floats(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-(2**31), 2**31, (rows, 128), generator=generator, dtype=torch.int32).view(torch.float32)
    x[~x.isfinite()] = 0
    return x


# --- nvfp4_quantize ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_bytes_of_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.randint(-14, 9, (1000, 8, 1), generator=generator).float())
    inputs = [(torch.randn(1000, 8, 16, generator=generator) * spread).view(1000, 128).to(dtype)]
    if dtype == torch.float32:
        inputs += [random_floats(2000), ties(), scale_ties()]
    else:
        ascending = all_finite(dtype)
        shuffled = ascending[torch.randperm(ascending.numel(), generator=generator)]
        inputs += [rows_of(ascending), rows_of(shuffled)]
    for x in inputs:
        for factor in [*FACTORS, 3.0, 0.1]:
            before = launches()
            assert equal(nvfp4_quantize(x.cuda(), factor), nvfp4_quantize(x, factor)), factor
            assert launches() == before + 1


@pytest.mark.parametrize("view", INPUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_strides(dtype: torch.dtype, view: str, poisoned_empty: None) -> None:
    x = torch.randn(3, 2, 45, 128, generator=torch.Generator().manual_seed(6)).to(dtype)
    want = nvfp4_quantize(INPUTS[view](x), 100.0)
    for factor in (100.0, torch.tensor([100.0], device="cuda"), torch.tensor([1.0, 100.0], device="cuda")[1]):
        assert equal(nvfp4_quantize(INPUTS[view](x.cuda()), factor), want)


@pytest.mark.parametrize("rows", [0, 1, 31, 64, 127, 128, 129, 1000])
def test_padding_rows_have_scales_of_0(rows: int, poisoned_empty: None) -> None:
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)).bfloat16()
    codes, scales = nvfp4_quantize(x.cuda(), 10.0)
    assert equal((codes, scales), nvfp4_quantize(x, 10.0))
    assert scales.shape == (-(-rows // 128) * 128, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_nvfp4_cannot_hold_are_refused(dtype: torch.dtype) -> None:
    for bad in (NAN, INF, -INF, -NAN):
        for row, column in ((0, 0), (77, 63), (200, 127)):
            x = torch.ones(201, 128, device="cuda", dtype=dtype)
            x[row, column] = bad
            with pytest.raises(ValueError, match="x must be finite to be quantised to NVFP4, got NaN or inf"):
                nvfp4_quantize(x, 1.0)
    x = torch.ones(3, 128, device="cuda", dtype=dtype)
    for bad in (0.0, -1.0, NAN, INF):
        with pytest.raises(ValueError, match="global_sf must be positive and finite in float32, got"):
            nvfp4_quantize(x, bad)
        with pytest.raises(ValueError, match="global_sf must be positive and finite in float32, got"):
            nvfp4_quantize(x, torch.tensor(bad, device="cuda"))
        with pytest.raises(ValueError, match="global_sf must be positive and finite in float32, got"):
            nvfp4_quantize(x[:0], torch.tensor(bad, device="cuda"))
    with pytest.raises(ValueError, match="global_sf must be on x's device cuda:0, got cpu"):
        nvfp4_quantize(x, torch.tensor(1.0))


def test_the_kernel_itself_does_not_synchronise_and_reports_faults() -> None:
    x, factor = torch.ones(300, 128, device="cuda"), torch.tensor(2.0, device="cuda")
    x[299, 127] = NAN
    quantize.load(x.device)
    with no_synchronisation():
        faults = quantize.quantize_rows(x, factor)[2]
    assert faults.tolist() == [1, 0]


def test_quantising_is_captured() -> None:
    """The check that reads back is left out; values that are not finite follow the rule of caches."""
    x, factor = torch.randn(130, 4, 128, device="cuda").half(), torch.tensor(50.0, device="cuda")
    results: list[tuple[Tensor, Tensor]] = []
    graph = captured(lambda: results.append(nvfp4_quantize(x, factor)))
    for seed in (1, 2):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        factor.fill_(10.0 * seed)
        graph.replay()
        assert equal(results[-1], nvfp4_quantize(x.cpu(), 10.0 * seed))
    x[0, 0, 3], x[1, 2, 127] = INF, NAN
    graph.replay()
    codes, scales = nvfp4.quantize_rows(x.cpu(), factor.cpu())
    assert equal(results[-1], (codes, nvfp4.nvfp4_scales_to_tiled(scales)))


def test_more_than_2_31_bytes_of_input() -> None:
    rows = 2**31 // 256 + 1000
    if torch.cuda.mem_get_info()[0] < 6 * rows * 256:
        pytest.skip("needs 13 GB of free device memory")
    x = torch.empty(rows, 128, dtype=torch.bfloat16, device="cuda")
    x[:-5000], x[-5000:] = 1.0, torch.randn(5000, 128, device="cuda")
    codes, scales = nvfp4_quantize(x, 100.0)
    whole = rows // 128 * 128 - 4096
    want = nvfp4_quantize(x[whole:].cpu(), 100.0)
    assert equal((codes[whole:], scales[whole:]), want)
    assert equal((codes[:128], scales[:128]), nvfp4_quantize(torch.ones(128, 128), 100.0))


# --- caches ---


def caches(form: tuple[str, str], heads: int = 2, layers: int = 1, **scales: float) -> list[PagedKVCache]:
    """One on the GPU and one on the CPU, poisoned."""
    scales = scales or {"k_global_scale": 0.013, "v_global_scale": 0.37}
    made = []
    for device in ("cuda", "cpu"):
        made.append(
            PagedKVCache(12, heads, kv_format=form[0], layout=form[1], num_layers=layers, device=device, **scales)
        )
        for pages in made[-1]._pool._pages:
            pages.fill_(0xA5)
    return made


def assert_same_bytes(gpu: PagedKVCache, cpu: PagedKVCache) -> None:
    for ours, want in zip(gpu._pool._pages, cpu._pool._pages, strict=True):
        assert torch.equal(ours.cpu(), want)


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("form", CACHES, ids="-".join)
def test_a_cache_holds_the_bytes_of_the_cpus(form: tuple[str, str], heads: int) -> None:
    """Appends of every dtype, layer by layer too, to forks that share a page, from slices of a projection."""
    both = caches(form, heads, layers=2)
    generator = torch.Generator().manual_seed(heads)
    requests = [[cache.add_request() for _ in range(3)] for cache in both]
    for dtype, counts in zip(
        [*DTYPES, torch.bfloat16], [(5, 130, 0), (1, 1, 1), (122, 26, 1), (0, 3, 200)], strict=True
    ):
        k, v = (torch.randn(2, sum(counts), heads, 128, generator=generator).to(dtype) for _ in range(2))
        for cache, own in zip(both, requests, strict=True):
            cache.append(own, k.to(cache.device), v.to(cache.device), counts)
    projected = torch.randn(9, heads + 2, 256, generator=generator).half()
    for cache, own in zip(both, requests, strict=True):
        own.append(cache.fork(own[0], 100))
        cache.extend([own[3], own[1]], [4, 5])
        x = projected.to(cache.device)
        k, v = x[:, 1 : heads + 1, :128], x[:, 1 : heads + 1, 128:]
        cache.write(1, k, v.float())
        cache.write(0, v, k)
    assert_same_bytes(*both)


@pytest.mark.parametrize("form", [("fp8", "nhd"), ("nvfp4", "planar"), ("nvfp4", "tiled")], ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_is_stored_as_on_the_cpu(dtype: torch.dtype, form: tuple[str, str]) -> None:
    if dtype == torch.float32:
        x = torch.cat((random_floats(500), ties(), scale_ties()))
    else:
        x = rows_of(all_finite(dtype))
    x = x[: len(x) // 2 * 2].view(-1, 2, 128)
    for scale in SCALES:
        both = caches(form, k_global_scale=scale, v_global_scale=1 / scale)
        for cache in both:
            there = x.to(cache.device)
            cache.append([cache.add_request()], there, there.flip(0), [len(x)])
        assert_same_bytes(*both)


@pytest.mark.parametrize("form", CACHES, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_follow_the_rule(dtype: torch.dtype, form: tuple[str, str]) -> None:
    gpu = caches(form)[0]
    x = torch.randn(6, 2, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 0, 5], x[1, 1, 20], x[2, 0, 127], x[3, 1, 0], x[3, 1, 1] = INF, -INF, NAN, INF, NAN
    request = gpu.add_request()
    gpu.append([request], x.cuda(), x.cuda(), [6])
    k, v = (t.cpu() for t in gpu.read(request))
    for got, scale in ((k, 0.013), (v, 0.37)):
        if form[0] == "fp8":
            want = (x.float() / torch.tensor(scale)).clamp(-448, 448).to(FP8).float() * scale
        else:
            codes, scales = nvfp4.quantize_rows(x, torch.tensor(1 / scale, dtype=torch.float64).float())
            want = nvfp4.dequantize_rows(codes, scales, scale)
            assert int(want.isnan().sum()) == 32
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_bad_values_are_refused_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSA_OPS_CHECK", "1")
    gpu = caches(("nvfp4", "planar"))[0]
    request = gpu.add_request()
    good, bad = torch.ones(1, 2, 128, device="cuda"), torch.full((1, 2, 128), NAN, device="cuda")
    with pytest.raises(ValueError, match="v must be finite"):
        gpu.append([request], good, bad, [1])
    assert gpu.length(request) == 0
    pages = nvfp4_planar_pages(2, 2, device="cuda").fill_(0xA5)
    slot = torch.tensor([3], device="cuda")
    for call, message in (
        (lambda: nvfp4_planar_write(pages, slot, bad, good), "k must be finite"),
        (lambda: nvfp4_planar_write(pages, slot + 256, good, good), r"slots must lie in 0\.\.255"),
        (lambda: nvfp4_planar_write(pages, slot.repeat(2), *(2 * [good.repeat(2, 1, 1)])), "slots must be distinct"),
        (
            lambda: nvfp4_planar_write(pages, slot, good, good, v_global_sf=torch.zeros(1, device="cuda")),
            "v_global_sf must be positive",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert bool((pages == 0xA5).all())
    with (
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises(ValueError, match="MSA_OPS_CHECK=1 reads device values"),
    ):
        nvfp4_planar_write(pages, slot, good, good)


@pytest.mark.parametrize(
    "form", [("bf16", "nhd"), ("fp8", "packed"), ("nvfp4", "planar"), ("nvfp4", "tiled")], ids="-".join
)
def test_appending_does_not_synchronise(form: tuple[str, str]) -> None:
    scales = {} if form[0] == "bf16" else {"k_global_scale": 0.5}
    cache = PagedKVCache(12, 2, kv_format=form[0], layout=form[1], device="cuda", **scales)
    request = cache.add_request()
    k = torch.randn(130, 2, 128, device="cuda").bfloat16()

    def use() -> None:
        cache.append([request], k, k, [130])
        fork = cache.fork(request)
        cache.append([fork, request], k[:2], k[:2], [1, 1])  # copies a page
        cache.arguments([fork, request])
        cache.free(fork)
        cache.truncate(request, 0)

    use()
    with no_synchronisation():
        use()


@pytest.mark.parametrize("form", CACHES, ids="-".join)
def test_a_capture_writes_and_keeps_no_books(form: tuple[str, str]) -> None:
    gpu, cpu = caches(form)
    requests = [cache.add_request() for cache in (gpu, cpu)]
    k, v = (torch.zeros(131, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    gpu.extend([requests[0]], [131])
    graph = captured(lambda: gpu.write(0, k, v))
    for seed in (1, 2):
        k.copy_(torch.randn(k.shape, generator=torch.Generator().manual_seed(seed)))
        v.copy_(k.flip(0))
        graph.replay()
    cpu.append([requests[1]], k.cpu(), v.cpu(), [131])
    assert_same_bytes(gpu, cpu)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="append cannot be captured"):
        gpu.append([requests[0]], k, v, [131])
    assert gpu.length(requests[0]) == 131 and gpu.num_free_pages == 10
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="arguments of a batch"):
        gpu.arguments([requests[0]], max_pages=7)


def test_a_write_waits_for_its_stream_and_what_follows_for_it() -> None:
    gpu, cpu = caches(("nvfp4", "planar"))
    source = torch.randn(200, 2, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    ready, k = source.cuda(), torch.zeros(200, 2, 128, dtype=torch.bfloat16, device="cuda")
    requests = [cache.add_request() for cache in (gpu, cpu)]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        gpu.extend([requests[0]], [200])
        torch.cuda._sleep(20_000_000)  # about 10 ms
        k.copy_(ready)
        gpu.write(0, k, k)
        kept = gpu._pool._pages[0].clone()
        k.zero_()
    stream.synchronize()
    cpu.append([requests[1]], source, source, [200])
    assert torch.equal(kept.cpu(), cpu._pool._pages[0])


@pytest.mark.parametrize("form", [("fp8", "hnd"), ("nvfp4", "planar"), ("nvfp4", "tiled")], ids="-".join)
def test_a_cache_of_more_than_2_31_bytes(form: tuple[str, str]) -> None:
    pages = 18_000 if form[0] == "fp8" else 34_000  # of 8 heads: 2.3 GB of K
    if torch.cuda.mem_get_info()[0] < 8 * 10**9:
        pytest.skip("needs 8 GB of free device memory")
    cache = PagedKVCache(pages, 8, kv_format=form[0], layout=form[1], device="cuda", k_global_scale=0.1)
    cache._free.reverse()  # the last page first
    request = cache.add_request()
    k, v = torch.randn(2, 130, 8, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    cache.append([request], k.cuda(), v.cuda(), [130])
    assert cache.arguments([request])["page_table"].tolist() == [[pages - 1, pages - 2]]
    small = PagedKVCache(2, 8, kv_format=form[0], layout=form[1], k_global_scale=0.1)
    other = small.add_request()
    small.append([other], k, v, [130])
    for got, want in zip(cache.read(request), small.read(other), strict=True):
        assert torch.equal(got.cpu(), want)


# --- nvfp4_planar_write ---


@pytest.mark.parametrize("heads", [1, 2, 5])
@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_planar_pages_of_a_pool(wide: torch.dtype, heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    pools = [torch.full((4, 2, heads * nvfp4.PLANAR_BYTES_PER_HEAD), 0xA5, dtype=torch.uint8) for _ in range(2)]
    pools[1] = pools[1].cuda()
    slots = torch.randperm(4 * 128, generator=generator)[:70].to(wide)
    k, v = (torch.randn(75, heads, 128, generator=generator).bfloat16() for _ in range(2))
    nvfp4_planar_write(pools[0][:, 1], slots, k[:70], v[:70].float(), k_global_sf=300.0, v_global_sf=7.0)
    outside = torch.tensor([-1, 512, -(2**31), 2**31 - 1, -512], dtype=wide)
    strided = torch.cat((slots, outside)).repeat_interleave(2).cuda()[::2]
    factor = torch.tensor([7.0], device="cuda")
    nvfp4_planar_write(pools[1][:, 1], strided, k.cuda(), v.cuda().float(), k_global_sf=300.0, v_global_sf=factor)
    assert torch.equal(pools[1].cpu(), pools[0])


def test_replays_of_a_write_follow_slots_values_and_factors() -> None:
    """A decode step: one token a request, slots and values changed in place between replays, idle rows at slot -1."""
    generator = torch.Generator().manual_seed(5)
    gpu, cpu = (nvfp4_planar_pages(4, 2, device=device).fill_(0xA5) for device in ("cuda", "cpu"))
    slots = torch.zeros(6, dtype=torch.int64, device="cuda")
    k, v = (torch.zeros(6, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    factor = torch.ones((), device="cuda")
    graph = captured(lambda: nvfp4_planar_write(gpu, slots, k, v, k_global_sf=factor, v_global_sf=20.0))
    gpu.fill_(0xA5)
    for step in range(8):
        live = torch.randperm(6, generator=generator)[: 6 - step % 3]
        at = torch.full((6,), -1)
        at[live] = torch.randperm(512, generator=generator)[: len(live)]
        new_k, new_v = torch.randn(2, 6, 2, 128, generator=generator).bfloat16()
        slots.copy_(at), k.copy_(new_k), v.copy_(new_v), factor.fill_(step + 1.0)
        graph.replay()
        nvfp4_planar_write(cpu, at[live], new_k[live], new_v[live], k_global_sf=step + 1.0, v_global_sf=20.0)
        assert torch.equal(gpu.cpu(), cpu)


def test_pages_off_their_boundaries_are_refused() -> None:
    slot, k = torch.tensor([0], device="cuda"), torch.zeros(1, 1, 128, device="cuda")
    memory = torch.zeros(3 * 18432 + 64, dtype=torch.uint8, device="cuda")
    for pages in (memory[8 : 8 + 18432].view(1, 18432), memory.as_strided((2, 18432), (18440, 1))):
        with pytest.raises(ValueError, match="pages must start on 16-byte boundaries on CUDA"):
            nvfp4_planar_write(pages, slot, k, k)
    nvfp4_planar_write(memory.as_strided((2, 18432), (18448, 1)), slot + 128, k + 1, k + 1)
    assert nvfp4_planar_views(memory.as_strided((2, 18432), (18448, 1)), 1).k[1, 0, 0].tolist() == [0x77] * 64


# --- into the attention ---


@pytest.mark.parametrize("form", CACHES, ids="-".join)
def test_what_is_appended_is_attended(form: tuple[str, str]) -> None:
    gpu, cpu = caches(form)
    generator = torch.Generator().manual_seed(9)
    counts = [300, 129, 517]
    k, v = (torch.randn(sum(counts), 2, 128, generator=generator).bfloat16() for _ in range(2))
    own = [[cache.add_request() for _ in counts] for cache in (gpu, cpu)]
    gpu.append(own[0], k.cuda(), v.cuda(), counts)
    cpu.append(own[1], k, v, counts)
    q = torch.randn(3, 16, 128, generator=generator).bfloat16()
    ids = torch.arange(5, dtype=torch.int32).expand(2, 3, 5).contiguous()
    arguments = cpu.arguments(own[1])
    want, _ = decode_reference(q, arguments.pop("k"), arguments.pop("v"), ids, round_output=False, **arguments)
    attend: Callable[..., Tensor] = msa_sparse_decode_attention  # type: ignore[assignment]
    out = attend(q.cuda(), q2k_indices=ids.cuda(), **gpu.arguments(own[0])).cpu().double()
    error = ((out - want).norm(dim=-1) / want.norm(dim=-1)).max()
    assert float(error) <= ROW_TOLERANCE[torch.bfloat16]
