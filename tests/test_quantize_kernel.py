"""The quantising kernels without a GPU: what the compiler made of them and their parameters, and arithmetic and addresses by a
NumPy model of them. That the kernels do as the model does is for `test_quantize_gpu.py` to see."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import emulated_quantize as emulated
from emulated_quantize import F32, on_host
from msa_ops import nvfp4
from msa_ops.contract import FP8
from msa_ops.engines.cuda import compile as compiler
from msa_ops.engines.cuda import quantize
from msa_ops.engines.cuda.launch import divisor
from msa_ops.kv_cache import PagedKVCache
from test_cuda_compile import c_layout, c_size, usages

SOURCE = compiler.source(quantize.PROGRAM.sources)
CAPABILITIES = [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1)]
SCALES = [1.0, 0.013, 0.37, 1 / 3, 3.1, 448.0, 2.0**-126, 2.0**126, 1.9999999, 1e-20, 7e25, 0.1, 2.0**-9, 5.5e-3]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def all_finite(dtype: torch.dtype) -> Tensor:
    """Every finite bit pattern of a 16-bit dtype, ascending by magnitude, both signs."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite()]
    return x[x.float().abs().sort(stable=True).indices]


# --- what the compiler made of them ---


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"{c[0]}.{c[1]}")
def test_kernels_stay_in_registers(capability: tuple[int, int]) -> None:
    arch = compiler.architecture(capability)
    if capability[0] * 10 + capability[1] not in compiler.supported_architectures():
        pytest.skip(f"NVRTC {compiler.nvrtc_version()} does not know {arch}")
    cubin, log = compiler.compile_program(quantize.PROGRAM, arch, "--ptxas-options=-v")
    assert cubin[:4] == b"\x7fELF" and "warning" not in log
    kernels = usages(log)
    assert set(kernels) == set(quantize.PROGRAM.entries)
    for name, usage in kernels.items():
        assert usage.stack == usage.spill_stores == usage.spill_loads == usage.shared == 0, (name, usage)
        assert usage.registers <= 64, (name, usage)  # 1,024 threads a multiprocessor


def unpadded(code: str) -> list[int]:
    """Sizes of the values that a format packs."""
    return [
        {"Q": 8, "q": 8, "f": 4, "I": 4, "i": 4}[c]
        for n, c in re.findall(r"(\d*)([Qqfi I])", code)
        for _ in range(int(n or 1))
    ]


def leaves(name: str, at: int = 0) -> list[tuple[int, int]]:
    """(offset, size) of every scalar of a struct, nested ones opened."""
    found = []
    for field, offset, size in c_layout(SOURCE, name)[0]:
        nested = re.search(rf"^  (Side|Divisor|ScaleOrder) [^;]*\b{field}\b", body(name), re.MULTILINE)
        found += leaves(nested[1], at + offset) if nested else [(at + offset, size)]
    return found


def body(name: str) -> str:
    match = re.search(rf"struct {name} {{(.*?)\n}};", SOURCE, re.DOTALL)
    assert match
    return match[1]


@pytest.mark.parametrize(
    "name, packed",
    [
        ("RowsParams", [quantize._ROWS]),
        ("Side", [quantize._SIDE]),
        ("WriteParams", [quantize._SIDE, quantize._SIDE, quantize._TAIL]),
    ],
)
def test_parameters_lie_where_the_kernel_reads_them(name: str, packed: list) -> None:
    assert sum(p.size for p in packed) == c_layout(SOURCE, name)[1] == c_size(SOURCE, name)[0]
    ours, base = [], 0
    for p in packed:
        at = base
        for size in unpadded(p.format):
            at = -(-at // size) * size
            ours.append((at, size))
            at += size
        base += p.size
    assert ours == leaves(name)


def test_the_compiler_agrees_on_sizes_and_shapes() -> None:
    checks = "".join(
        f'static_assert({condition}, "");'
        for condition in (
            f"sizeof(RowsParams) == {quantize._ROWS.size}",
            f"sizeof(Side) == {quantize._SIDE.size}",
            f"sizeof(WriteParams) == {2 * quantize._SIDE.size + quantize._TAIL.size}",
            f"THREADS == {quantize._THREADS}",
            f"2 * WARPS * WARP_ROWS == {quantize._ROWS_PER_BLOCK}",
            f"WARPS * WARP_ROWS == {quantize._TOKENS_PER_BLOCK}",
            f"SCALE_BYTES == {quantize._SCALE_BYTES}",
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "source", lambda _: SOURCE + checks)
        compiler.compile_program(quantize.PROGRAM, "sm_80")
        patch.setattr(compiler, "source", lambda _: SOURCE + 'static_assert(sizeof(Side) == 1, "no");')
        with pytest.raises(compiler.KernelCompileError):
            compiler.compile_program(quantize.PROGRAM, "sm_80")


# --- addresses ---


def test_scale_orders_are_the_layouts() -> None:
    token, s = (x.flatten() for x in torch.meshgrid(torch.arange(128), torch.arange(8), indexing="ij"))

    def offsets(order: quantize.ScaleOrder) -> Tensor:
        high = token >> order.token_bits
        low = token - (high << order.token_bits)
        return low * order.low_token + high * order.high_token + s % 4 * order.low_s + s // 4 * order.high_s

    assert torch.equal(offsets(quantize.LINEAR), token * 8 + s)
    assert torch.equal(offsets(quantize.PLANAR_V), (token // 4) * 32 + 4 * s + token % 4)
    assert torch.equal(offsets(quantize.TILED), nvfp4.tiled_scale_offsets(torch.arange(128)).flatten())


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Rows of 128 in up to four leading dims, permuted, sliced, expanded."""
    sizes = draw(st.lists(st.integers(1, 5), max_size=4))
    x = torch.arange(max(1, int(np.prod(sizes))) * 128 * 2, dtype=torch.int32).view(*sizes, 256)
    if draw(st.booleans()):
        x = x[..., :128]
    else:
        x = x.reshape(-1)[: x.numel() // 2].view(*sizes, 128)
    x = x.permute(*draw(st.permutations(range(len(sizes)))), len(sizes))
    if sizes and draw(st.booleans()):
        x = x[: draw(st.integers(1, x.shape[0]))]
    if draw(st.booleans()):
        x = x.unsqueeze(0).expand(draw(st.integers(1, 3)), *x.shape)
    return x


@given(views())
def test_collapsed_dims_reach_every_row(x: Tensor) -> None:
    dims = quantize.collapse(x)
    if dims is None:
        assert x.dim() > 4
        return
    (_, outer), (middle_size, middle), (inner_size, inner) = dims
    first = [int(row[0]) for row in x.reshape(-1, 128)]
    for row, want in enumerate(first):
        if divisor(inner_size)[1]:
            rest, i = divmod(row, inner_size)
            offset = rest // middle_size * outer + rest % middle_size * middle + i * inner
        else:
            offset = row * inner
        assert offset + x.storage_offset() == want


def test_what_memory_allows_is_one_dim() -> None:
    assert quantize.collapse(torch.empty(3, 4, 5, 128)) == [(1, 0), (1, 0), (1, 128)]
    assert quantize.collapse(torch.empty(128)) == [(1, 0), (1, 0), (1, 0)]
    assert quantize.collapse(torch.empty(3, 128, 4, 128).transpose(1, 2)) == [(3, 65536), (4, 128), (128, 512)]
    assert quantize.collapse(torch.empty(6, 4, 256)[..., :128]) == [(1, 0), (1, 0), (1, 256)]
    assert quantize.collapse(torch.empty(2, 3, 4, 5, 128).permute(3, 2, 1, 0, 4)) is None


# --- arithmetic ---


def test_fma_rounds_once() -> None:
    """The emulation's own multiply-add, where two roundings go wrong, and against exact arithmetic."""
    up, one = F32(1 + 2**-23), F32(1)
    assert emulated.fma(up, up, -one) == F32(2**-22 + 2**-46)
    assert emulated.fma(F32(1 + 2**-12), F32(1 + 2**-12), F32(2**-60)) == F32(1 + 2**-11 + 2**-23)
    random = np.random.default_rng(0)
    a, b, c = (F32(1) + random.integers(0, 2**23, 500).astype(F32) / F32(2**23) for _ in range(3))
    c *= np.exp2(random.integers(-60, 30, 500)).astype(F32) * random.choice([-1, 1], 500).astype(F32)
    got = emulated.fma(a, b, c)
    for i in range(500):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        near = [got[i], np.nextafter(got[i], F32(-np.inf)), np.nextafter(got[i], F32(np.inf))]
        errors = [abs(Fraction(float(n)) - exact) for n in near]
        assert errors[0] == min(errors)
        if errors.count(errors[0]) > 1:
            assert int(emulated.bits(got[i])) % 2 == 0


def groups_of(x: Tensor) -> np.ndarray:
    return x.float().reshape(-1, 16).numpy()


def assert_nvfp4_as_torch(x: Tensor, factor: float) -> None:
    """`x`: ``(rows, 128)``."""
    want_codes, want_scales = nvfp4.quantize_rows(x, torch.tensor(factor, dtype=torch.float32))
    for ulps in (-1, 0, 1):  # of the approximate reciprocal
        codes, scales, finite = emulated.quantize_nvfp4(groups_of(x), factor, ulps)
        assert np.array_equal(scales, want_scales.view(-1).numpy())
        assert np.array_equal(codes, want_codes.view(-1, 8).numpy())
        assert np.array_equal(finite, x.reshape(-1, 16).isfinite().all(-1).numpy())


def rows_of(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % 128)).view(-1, 128)


@pytest.mark.parametrize("factor", [1.0, 0.37, 448 * 6 / 3.1, 3e-3, 1e-30, 1e-45, 2.0**-126, 2e30, 3e38])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_nvfp4_of_every_finite_value(dtype: torch.dtype, factor: float) -> None:
    ascending = all_finite(dtype)
    shuffled = ascending[torch.randperm(ascending.numel(), generator=torch.Generator().manual_seed(0))]
    for x in (ascending, shuffled):
        assert_nvfp4_as_torch(rows_of(x), factor)


def ties() -> Tensor:
    """For each scale s, groups whose largest element is 6 s, with every midpoint of two codes and its neighbours."""
    scales = torch.arange(1, 0x7F, dtype=torch.uint8).view(FP8).float()
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    exact = scales[:, None] * middles
    groups = torch.zeros(len(scales), 2, 16)
    groups[:, 0, :7], groups[:, 0, 8:15] = torch.nextafter(exact, torch.tensor(0.0)), -exact
    groups[:, 1, :7], groups[:, 1, 8:15] = torch.nextafter(exact, torch.tensor(1e9)), exact
    groups[:, :, 15] = 6 * scales[:, None]
    return rows_of(groups.flatten())


def scale_ties() -> Tensor:
    """Groups whose largest element is 6 times a midpoint of two scales, or a neighbour of that; past the largest too."""
    scales = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    middles = torch.cat([(scales[1:] + scales[:-1]) / 2, torch.tensor([464.0, 1e6, 1e30, 3e38])]) * 6
    middles = middles[middles.isfinite()]
    largest = torch.stack(
        [middles, torch.nextafter(middles, torch.tensor(0.0)), torch.nextafter(middles, torch.tensor(3e38))]
    )
    generator = torch.Generator().manual_seed(1)
    groups = torch.rand(3, len(middles), 16, generator=generator) * largest[..., None]
    groups[..., 3] = -largest
    return rows_of(groups.flatten())


@pytest.mark.parametrize("factor", [1.0, 3.0, 0.1])
def test_nvfp4_at_every_tie(factor: float) -> None:
    assert_nvfp4_as_torch(ties(), factor)
    assert_nvfp4_as_torch(scale_ties(), factor)


def test_nvfp4_of_random_floats() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-(2**31), 2**31, (400, 128), generator=generator, dtype=torch.int32).view(torch.float32)
    x[~x.isfinite()] = 0
    spread = torch.exp2(torch.randint(-30, 30, (400, 8, 1), generator=generator).float())
    y = (torch.randn(400, 8, 16, generator=generator) * spread).view(400, 128)
    for factor in (1.0, 123.4, 1e-3, 1e-38):
        assert_nvfp4_as_torch(x, factor)
        assert_nvfp4_as_torch(y, factor)


def test_nvfp4_of_what_is_not_finite() -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(3))
    x[0, 5], x[1, 20], x[1, 21], x[2, 127] = float("nan"), float("inf"), -float("inf"), -float("nan")
    x[3, 0], x[3, 1] = float("inf"), float("nan")
    assert_nvfp4_as_torch(x, 2.0)
    codes, scales = nvfp4.quantize_rows(x, torch.tensor(2.0))
    nan = torch.zeros(4, 8, dtype=torch.bool)
    nan[0, 0] = nan[2, 7] = nan[3, 0] = True
    assert torch.equal(scales == 0x7F, nan)
    assert (torch.unflatten(codes, -1, (8, 8))[nan] == 0).all()
    assert scales[1, 1] == 0x7E and codes[1, 10] == 0xF7, "inf saturates"


def test_one_float_divides_to_a_tie_and_others_stay_away() -> None:
    """What the kernel's comment says of quotients near a midpoint: 2^-28 or more from where they would be rounded to it."""
    midpoints = {s: [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] for s in range(8, 16)}
    midpoints[6] = [m + 0.5 for m in range(16)]
    closest = []
    for s, t in ((F32(s), F32(t)) for s, ts in midpoints.items() for t in ts):
        tie = s * t
        assert tie / s == t
        for outwards in (F32(0), F32(np.inf)):
            quotient = Fraction(float(np.nextafter(tie, outwards))) / Fraction(float(s))
            border = (Fraction(float(t)) + Fraction(float(np.nextafter(t, outwards)))) / 2
            assert (quotient > border) == (outwards > 0)
            closest.append(abs(quotient - border) / Fraction(float(t)))
    assert min(closest) >= Fraction(1, 2**28)


def fp8_of_torch(x: Tensor, scale: float) -> np.ndarray:
    """The rule of the CPU's cache."""
    divided = x.float() / torch.tensor(scale, dtype=torch.float32)
    return divided.clamp(-448, 448).to(FP8).view(torch.uint8).numpy()


@pytest.mark.parametrize("scale", SCALES)
def test_fp8_of_every_finite_value(scale: float) -> None:
    numbers = quantize.fp8_divisor(scale)
    for x in (all_finite(torch.bfloat16), all_finite(torch.float16)):
        assert np.array_equal(emulated.fp8_bytes(x.float().numpy(), numbers), fp8_of_torch(x, scale))
    special = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0, 3.4e38, -1e-45])
    assert np.array_equal(emulated.fp8_bytes(special.numpy(), numbers), fp8_of_torch(special, scale))
    nan = emulated.fp8_bytes(np.array([np.nan], F32), numbers)
    assert nan[0] & 0x7F == 0x7F


def test_fp8_divisor_takes_the_scale_apart() -> None:
    for scale in [*SCALES, *(float(x) for x in np.random.default_rng(4).uniform(1e-6, 1e6, 200))]:
        power, mantissa, high, low = quantize.fp8_divisor(scale)
        assert 1 <= mantissa < 2 and Fraction(mantissa) / Fraction(power) == Fraction(float(F32(scale)))
        assert high == float(F32(1) / F32(mantissa))
        assert abs(Fraction(high) + Fraction(low) - 1 / Fraction(mantissa)) < Fraction(1, 2**48)


def test_the_corrected_quotient_is_division() -> None:
    """At dividends that bring the quotient as close to the middle of two floats as any do, and at random ones."""
    random = np.random.default_rng(5)
    mantissas = np.concatenate([2**24 - 1 - np.arange(4), 2**23 + np.arange(4), random.integers(2**23, 2**24, 3000)])
    middle = random.integers(2**24, 2**25, (len(mantissas), 64)) | 1
    product = mantissas[:, None].astype(object) * middle.astype(object)  # 48 or 49 bits
    hard = np.array([[int(p) >> max(0, int(p).bit_length() - 24) for p in row] for row in product], np.int64)
    hard = np.clip(hard + random.integers(-1, 2, hard.shape), 2**23, 2**24 - 1)
    easy = random.integers(2**23, 2**24, hard.shape)
    for dividends in (hard, easy):
        x = (dividends.astype(np.float64) / 2**20).astype(F32)
        m = (mantissas[:, None] / 2**23).astype(F32)
        high = (1 / m.astype(np.float64)).astype(F32)
        low = (1 / m.astype(np.float64) - high).astype(F32)
        near = emulated.times(x, high, low)
        assert np.array_equal(emulated.fma(emulated.fma(-near, m, x), high, near), x / m)


def test_narrowing_without_the_instruction_is_torchs() -> None:
    """e4m3: every midpoint and its neighbours, and all that saturates. (Torch's own rounding is tested with NVFP4.)"""
    values = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat(
        [values, middles, torch.nextafter(middles, torch.tensor(0.0)), torch.nextafter(middles, torch.tensor(1e9))]
    )
    x = torch.cat([x, torch.tensor([448.0, 463.9, 464.0, 480.0, 512.0, 1024.0]), torch.rand(10_000) * 600])
    want = x.clamp(max=448).to(FP8).view(torch.uint8).numpy()
    assert np.array_equal(emulated.narrow_e4m3(x.numpy()), want)


# --- the engine's Python, with launches on the host ---

INPUTS = {
    "contiguous": lambda x: x,
    "one row": lambda x: x[0, 0],
    "a row of no leading dims": lambda x: x[0, 0, 0],
    "NHD": lambda x: x.transpose(1, 2),
    "halves of a row": lambda x: torch.cat((x, x), -1)[..., 128:],
    "not on 16 bytes": lambda x: torch.cat((x.flatten(), x.flatten()))[1 : x.numel() + 1].view(x.shape),
    "columns": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "expanded": lambda x: x[:, :1].expand(x.shape),
    "five dims": lambda x: x[:, :, :4].unsqueeze(1).expand(3, 2, 2, 4, 128).permute(3, 1, 2, 0, 4),
    "129 rows": lambda x: x.reshape(-1, 128)[:129],
}


@pytest.mark.parametrize("view", INPUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_strides(dtype: torch.dtype, view: str, poisoned_empty: None) -> None:
    x = INPUTS[view](torch.randn(3, 2, 45, 128, generator=torch.Generator().manual_seed(6)).to(dtype))
    want = nvfp4.nvfp4_quantize(x, 100.0)
    for factor in (100.0, torch.tensor([100.0])):
        with on_host():
            codes, scales, faults = quantize.quantize_rows(x, factor)
        assert torch.equal(codes, want[0]) and torch.equal(scales, want[1])
        assert codes.is_contiguous() and scales.is_contiguous() and faults.tolist() == [0, 0]


def test_faults_are_reported() -> None:
    x = torch.ones(130, 128)
    for bad, factor, want in (
        (float("nan"), 1.0, [1, 0]),
        (float("inf"), torch.tensor(1.0), [1, 0]),
        (1.0, torch.tensor(0.0), [0, 1]),
        (1.0, torch.tensor(float("nan")), [0, 1]),
        (-float("inf"), torch.tensor(-1.0), [1, 1]),
        (1.0, torch.tensor(float("inf")), [0, 1]),
    ):
        x[129, 127] = bad
        with on_host():
            assert quantize.quantize_rows(x, factor)[2].tolist() == want


CACHES = [
    *(("fp8", layout) for layout in ("hnd", "nhd", "packed", "packed_nhd")),
    ("nvfp4", "planar"),
    ("nvfp4", "tiled"),
]


def poisoned_cache(form: tuple[str, str], heads: int, layers: int) -> PagedKVCache:
    cache = PagedKVCache(
        9, heads, kv_format=form[0], layout=form[1], num_layers=layers, k_global_scale=0.013, v_global_scale=0.37
    )
    for pages in cache._pool._pages:
        pages.fill_(0xA5)
    return cache


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("form", CACHES, ids="-".join)
def test_a_cache_holds_the_bytes_of_the_cpus(form: tuple[str, str], heads: int) -> None:
    caches = [poisoned_cache(form, heads, 2) for _ in range(2)]
    generator = torch.Generator().manual_seed(7)
    requests = [[cache.add_request() for _ in range(3)] for cache in caches]
    for dtype, counts in zip(itertools.cycle(DTYPES), [(5, 130, 0), (1, 1, 1), (122, 26, 1)]):
        k, v = (torch.randn(2, sum(counts), heads, 128, generator=generator).to(dtype) for _ in range(2))
        caches[0].append(requests[0], k, v, counts)
        with on_host():
            caches[1].append(requests[1], k, v, counts)
    packed = torch.randn(2, 4, heads + 2, 256, generator=generator).half()  # of a projection to q, k and v
    k, v = packed[:, :, 1 : heads + 1, :128], packed[:, :, 1 : heads + 1, 128:].float()
    caches[0].append(requests[0], k, v, [4, 0, 0])
    with on_host():
        caches[1].append(requests[1], k, v, [4, 0, 0])
    for ours, want in zip(caches[1]._pool._pages, caches[0]._pool._pages, strict=True):
        assert torch.equal(ours, want)
        assert (ours != 0xA5).any() and (ours == 0xA5).any()


@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_planar_pages_of_a_pool(wide: torch.dtype) -> None:
    """Slots in any order and of any stride, those outside left out, page strides of a pool of layers."""
    generator = torch.Generator().manual_seed(8)
    pools = [torch.full((4, 2, 2 * nvfp4.PLANAR_BYTES_PER_HEAD), 0xA5, dtype=torch.uint8) for _ in range(2)]
    slots = torch.randperm(4 * 128, generator=generator)[:70].to(wide)
    k, v = (torch.randn(70, 2, 128, generator=generator).bfloat16() for _ in range(2))
    nvfp4.nvfp4_planar_write(pools[0][:, 1], slots, k, v, k_global_sf=300.0, v_global_sf=torch.tensor(7.0))
    outside = torch.tensor([-1, 512, -(2**31), 2**31 - 1, -512], dtype=wide)
    ours = torch.cat((slots, outside)).repeat_interleave(2)[::2]
    more_k, more_v = (torch.cat((x, torch.randn(5, 2, 128).bfloat16())) for x in (k, v))
    views = nvfp4.nvfp4_planar_views(pools[1][:, 1], 2)
    with on_host():
        quantize.write_nvfp4(
            ours,
            (more_k, 300.0, views.k, quantize.planar_scales(views.k_scale, quantize.LINEAR)),
            (more_v, torch.tensor(7.0), views.v, quantize.planar_scales(views.v_scale, quantize.PLANAR_V)),
        )
    assert torch.equal(pools[0], pools[1])


def test_writing_no_tokens_launches_nothing() -> None:
    cache = poisoned_cache(("fp8", "hnd"), 2, 1)
    request = cache.add_request()
    with on_host():
        cache.append([request], torch.empty(0, 2, 128), torch.empty(0, 2, 128), [0])
    assert all((pages == 0xA5).all() for pages in cache._pool._pages)
