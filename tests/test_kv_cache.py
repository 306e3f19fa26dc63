"""The paged cache: what is stored, sharing and copy-on-write, exhaustion, and the arguments of the attention call."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from msa_ops import contract
from msa_ops.contract import FP8
from msa_ops.kv_cache import (
    SUPPORTS_PACKED_KV,
    OutOfPagesError,
    PagedKVCache,
    packed_kv_views,
    supports_packed_kv,
)
from msa_ops.nvfp4 import nvfp4_dequantize, nvfp4_quantize
from msa_ops.reference import decode_reference

FORMS = [
    *((f, layout) for f in ("bf16", "fp16", "fp8") for layout in ("hnd", "nhd", "packed", "packed_nhd")),
    ("nvfp4", "planar"),
    ("nvfp4", "tiled"),
]
K_SCALE, V_SCALE = 0.013, 0.37
HEADS = 2


def make(form: tuple[str, str], device: str = "cpu", num_pages: int = 12, **kwargs: int) -> PagedKVCache:
    """A cache whose every byte is NaN until it is written."""
    scales = {"k_global_scale": K_SCALE, "v_global_scale": V_SCALE} if form[0] in ("fp8", "nvfp4") else {}
    cache = PagedKVCache(num_pages, HEADS, kv_format=form[0], layout=form[1], device=device, **scales, **kwargs)
    for layer in range(cache.num_layers):
        for name, tensor in cache.arguments([], layer=layer).items():
            if name in ("k", "v", "k_scale", "v_scale"):
                (tensor if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.view(torch.uint8)).fill_(
                    float("nan") if tensor.dtype.is_floating_point and tensor.dtype != FP8 else 0xFF
                )
    return cache


def rows(tokens: int, seed: int, device: str = "cpu", *lead: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(*lead, tokens, HEADS, 128, generator=generator).bfloat16().to(device) for _ in range(2))
    return k, v


def stored(form: str, x: Tensor, scale: float) -> Tensor:
    """What the attention call should see of `x`, from the definition of the format."""
    if form == "nvfp4":
        return nvfp4_dequantize(*nvfp4_quantize(x, 1 / scale), scale)
    if form == "fp8":
        return (x.float() / torch.tensor(scale, device=x.device)).clamp(-448, 448).to(FP8).float() * scale
    return x.to(torch.float16 if form == "fp16" else torch.bfloat16).float()


def assert_holds(cache: PagedKVCache, request: int, k: Tensor, v: Tensor, layer: int = 0) -> None:
    got_k, got_v = cache.read(request, layer=layer)
    form = cache.kv_format.value
    assert cache.length(request) == len(k)
    assert torch.equal(got_k, stored(form, k, cache.k_global_scale))
    assert torch.equal(got_v, stored(form, v, cache.v_global_scale))


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_tokens_appended_to_a_batch_are_what_the_call_sees(form: tuple[str, str], device: str) -> None:
    cache = make(form, device)
    requests = [cache.add_request() for _ in range(3)]
    whole = {r: rows(0, 0, device) for r in requests}
    for seed, counts in enumerate([(5, 130, 0), (1, 1, 1), (122, 126, 1), (0, 3, 200)]):
        k, v = rows(sum(counts), seed, device)
        cache.append(requests, k, v, counts)
        for r, new_k, new_v in zip(requests, k.split(counts), v.split(counts), strict=True):
            whole[r] = torch.cat((whole[r][0], new_k)), torch.cat((whole[r][1], new_v))
    for r in requests:
        assert_holds(cache, r, *whole[r])
    assert cache.num_free_pages == 12 - 1 - 3 - 2
    # The same through the oracle's own reading of the bytes; slots not written hold NaN.
    q = torch.randn(3, 2 * HEADS, 128, generator=torch.Generator().manual_seed(9))
    q = q.to(torch.float16 if form[0] == "fp16" else torch.bfloat16)
    ids = torch.arange(3, dtype=torch.int32).expand(HEADS, 3, 3).contiguous()
    arguments = cache.arguments(requests)
    out, _ = decode_reference(q, arguments.pop("k"), arguments.pop("v"), ids, round_output=False, **arguments)
    for t, r in enumerate(requests):
        keys, values = (x.double().cpu() for x in cache.read(r))
        for h in range(2 * HEADS):
            p = torch.softmax(keys[:, h // 2] @ q[t, h].double() / 128**0.5, 0)
            # fp32 products with the global scale are rounded in `read`, hence not exact.
            torch.testing.assert_close(out[t, h], p @ values[:, h // 2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_arguments_pass_the_checks_of_the_call(form: tuple[str, str], device: str) -> None:
    cache = make(form, device, num_layers=3)
    requests = [cache.add_request(), cache.add_request()]
    k, v = rows(300, 1, device, 3)
    cache.append(requests, k, v, [150, 150])
    for layer in range(3):
        kwargs = cache.arguments(requests, layer=layer, max_pages=5)
        q = torch.zeros(2, HEADS, 128, dtype=torch.float16 if form[0] == "fp16" else torch.bfloat16, device=device)
        ids = torch.zeros(HEADS, 2, 1, dtype=torch.int32, device=device)
        unset = dict.fromkeys(contract.DecodeCall._fields)
        unset.update(seqlen_q=1, causal=True, return_softmax_lse=False, q=q, q2k_indices=ids, **kwargs)
        problem = contract.check(contract.DecodeCall(**unset))
        assert problem.kv_format == cache.kv_format
        assert problem.scale_layout.value == (form[1] if form[0] == "nvfp4" else "none")
        assert kwargs["page_table"].tolist() == [[0, 1, -1, -1, -1], [2, 3, -1, -1, -1]]
        assert kwargs["seqused_k"].tolist() == [150, 150]
        assert kwargs["k"].storage_offset() >= (layer > 0)
        for i, r in enumerate(requests):
            assert_holds(cache, r, k[layer, i * 150 :][:150], v[layer, i * 150 :][:150], layer)
    assert ("k_global_scale" in kwargs) == (form[0] in ("fp8", "nvfp4"))


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_appending_touches_only_the_new_slots(form: tuple[str, str], device: str) -> None:
    cache = make(form, device, num_pages=3)
    request = cache.add_request()
    cache.append([request], *rows(131, 1, device), [131])
    before = [t.view(torch.uint8).clone() for t in cache._pool._pages]
    cache.append([request], *rows(2, 2, device), [2])
    head_row = {"bf16": 256, "fp16": 256, "fp8": 128, "nvfp4": 64 + 8}[form[0]]
    changed = sum(int((t.view(torch.uint8) != b).sum()) for t, b in zip(cache._pool._pages, before, strict=True))
    assert 0 < changed <= 2 * 2 * HEADS * head_row
    old = [t.view(torch.uint8).clone() for t in cache._pool._pages]
    cache.append([request], *rows(0, 3, device), [0])
    assert all(torch.equal(t.view(torch.uint8), o) for t, o in zip(cache._pool._pages, old, strict=True))


def test_write_stores_layer_by_layer_what_extend_made_room_for(device: str) -> None:
    cache = make(("nvfp4", "planar"), device, num_layers=2)
    requests = [cache.add_request(), cache.add_request()]
    k, v = rows(140, 4, device, 2)
    cache.extend(requests, [3, 137])
    assert [cache.length(r) for r in requests] == [3, 137]
    for layer in (1, 0):
        cache.write(layer, k[layer], v[layer])
    for layer in (0, 1):
        assert_holds(cache, requests[0], k[layer, :3], v[layer, :3], layer)
        assert_holds(cache, requests[1], k[layer, 3:], v[layer, 3:], layer)


@pytest.mark.parametrize(
    "form", [("bf16", "nhd"), ("fp8", "packed"), ("nvfp4", "planar"), ("nvfp4", "tiled")], ids="-".join
)
def test_a_fork_shares_pages_until_one_side_appends(form: tuple[str, str], device: str) -> None:
    cache = make(form, device, num_layers=2)
    parent = cache.add_request()
    k, v = rows(300, 5, device, 2)
    cache.append([parent], k, v, [300])
    children = [cache.fork(parent), cache.fork(parent, 256), cache.fork(parent, 200), cache.fork(parent, 0)]
    assert cache.num_free_pages == 9
    assert [cache.length(c) for c in children] == [300, 256, 200, 0]
    assert cache.arguments([*children, parent])["page_table"].tolist() == [
        [0, 1, 2], [0, 1, -1], [0, 1, -1], [-1, -1, -1], [0, 1, 2],
    ]  # fmt: skip
    # Parent and first child share a partly filled page: one copy is needed, not two; the third child needs one too.
    new_k, new_v = rows(40, 6, device, 2)
    cache.append([parent, *children], new_k, new_v, [8] * 5)
    assert cache.num_free_pages == 9 - 1 - 1 - 1 - 1
    for layer in (0, 1):
        for i, (request, length) in enumerate(zip([parent, *children], [300, 300, 256, 200, 0], strict=True)):
            tail = slice(8 * i, 8 * i + 8)
            want = (torch.cat((x[layer, :length], new[layer, tail])) for x, new in ((k, new_k), (v, new_v)))
            assert_holds(cache, request, *want, layer)


def test_freeing_returns_pages_when_the_last_owner_goes() -> None:
    cache = make(("bf16", "hnd"), num_pages=4)
    parent = cache.add_request()
    cache.append([parent], *rows(256, 1), [256])
    child = cache.fork(parent)
    cache.append([child], *rows(1, 2), [1])
    cache.free(parent)
    assert cache.num_free_pages == 1
    k, v = cache.read(child)
    assert len(k) == 257 and k.isfinite().all() and v.isfinite().all()
    cache.free(child)
    assert cache.num_free_pages == 4
    with pytest.raises(ValueError, match=f"request {parent} is not in the cache"):
        cache.length(parent)


def test_truncate_drops_tokens_and_their_pages() -> None:
    cache = make(("fp8", "hnd"), num_pages=4)
    request = cache.add_request()
    k, v = rows(400, 1)
    cache.append([request], k, v, [400])
    kept = cache.fork(request)
    cache.truncate(request, 130)
    assert cache.num_free_pages == 0 and cache.length(request) == 130
    cache.free(kept)
    assert cache.num_free_pages == 2
    new_k, new_v = rows(5, 2)
    cache.append([request], new_k, new_v, [5])
    assert_holds(cache, request, torch.cat((k[:130], new_k)), torch.cat((v[:130], new_v)))


def test_truncating_one_side_of_a_fork_leaves_the_other(device: str) -> None:
    cache = make(("nvfp4", "tiled"), device)
    request = cache.add_request()
    k, v = rows(200, 1, device)
    cache.append([request], k, v, [200])
    other = cache.fork(request)
    cache.truncate(request, 150)
    cache.append([request], *rows(50, 2, device), [50])
    assert_holds(cache, other, k, v)


def snapshot(cache: PagedKVCache, requests: list[int]) -> list[object]:
    return [
        [(cache.length(r), cache.arguments([r])["page_table"].tolist()) for r in requests],
        cache.num_free_pages,
        [t.view(torch.uint8).clone().flatten().tolist() for t in cache._pool._pages],
    ]


def test_running_out_of_pages_changes_nothing() -> None:
    cache = make(("nvfp4", "planar"), num_pages=4)
    first, second = cache.add_request(), cache.add_request()
    cache.append([first, second], *rows(200, 1), [130, 70])
    shared = cache.fork(second)
    before = snapshot(cache, [first, second, shared])
    # One copy for the shared page is possible, one new page more is not.
    with pytest.raises(OutOfPagesError, match="appending 180 tokens needs 2 pages, and 1 of 4 are free: free requests"):
        cache.append([shared, first], *rows(180, 2), [10, 170])
    assert snapshot(cache, [first, second, shared]) == before
    cache.append([shared, first], *rows(136, 2), [10, 126])
    assert cache.num_free_pages == 0
    with pytest.raises(OutOfPagesError):
        cache.extend([first], [1])
    cache.free(second)
    cache.append([first], *rows(1, 3), [1])
    assert cache.length(first) == 257


def filled(value: float) -> Tensor:
    return torch.full((1, HEADS, 128), value)


BAD_APPENDS = {
    "NaN": (lambda c, r: c.append([r], filled(float("nan")), filled(1.0), [1]), "k must be finite"),
    "inf": (lambda c, r: c.append([r], filled(1.0), filled(float("inf")), [1]), "v must be finite"),
    "tokens": (lambda c, r: c.append([r], *rows(2, 0), [3]), r"k must have shape \(3, 2, 128\), got \(2, 2, 128\)"),
    "dtype": (lambda c, r: c.append([r], *(x.double() for x in rows(1, 0)), [1]), "k must be bfloat16"),
    "twice": (lambda c, r: c.append([r, r], *rows(2, 0), [1, 1]), "requests must be distinct"),
    "negative": (lambda c, r: c.extend([r], [-1]), "counts must not be negative"),
    "counts": (lambda c, r: c.extend([r], [1, 2]), "counts must have one entry per request"),
    "unknown": (lambda c, r: c.append([r, 99], *rows(2, 0), [1, 1]), "request 99 is not in the cache"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD_APPENDS))
def test_a_refused_append_changes_nothing(name: str) -> None:
    cache = make(("nvfp4", "tiled"), num_pages=2)
    request = cache.add_request()
    cache.append([request], *rows(3, 1), [3])
    before = snapshot(cache, [request])
    call, message = BAD_APPENDS[name]
    with pytest.raises(ValueError, match=message):
        call(cache, request)
    assert snapshot(cache, [request]) == before


BAD_TYPES = {
    "append": (lambda c, a, b: c.append([a, b], *rows(4, 0), [3, 1.0]), r"counts\[1\] must be an int, got float"),
    "extend": (lambda c, a, b: c.extend([a, b], [3, 1.0]), r"counts\[1\] must be an int, got float"),
    "bool": (lambda c, a, b: c.extend([a], [True]), r"counts\[0\] must be an int, got bool"),
    "request": (lambda c, a, b: c.extend([a, float(b)], [1, 1]), r"requests\[1\] must be an int, got float"),
    "no sequence": (lambda c, a, b: c.extend(a, [1]), "requests must be a sequence of ints, got int"),
    "fork": (lambda c, a, b: c.fork(a, 3.0), "tokens must be an int, got float"),
    "truncate": (lambda c, a, b: c.truncate(a, 1.0), "length must be an int, got float"),
    "free": (lambda c, a, b: c.free([a]), "request must be an int, got list"),
    "layer": (lambda c, a, b: c.arguments([a], layer=0.0), "layer must be an int, got float"),
    "max_pages": (lambda c, a, b: c.arguments([a], max_pages=4.0), "max_pages must be an int, got float"),
    "k": (lambda c, a, b: c.append([a], [0.0], rows(1, 0)[1], [1]), "k must be a torch.Tensor, got list"),
    "sparse": (lambda c, a, b: c.append([a], rows(1, 0)[0], filled(0.0).to_sparse(), [1]), "v must be a strided tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD_TYPES))
def test_wrong_types_change_nothing(name: str) -> None:
    """Not even where one request shares a partly filled page, which adding to it would copy."""
    cache = make(("bf16", "hnd"))
    first = cache.add_request()
    cache.append([first], *rows(130, 1), [130])
    second = cache.fork(first)
    before = snapshot(cache, [first, second])
    call, message = BAD_TYPES[name]
    with pytest.raises(TypeError, match=message):
        call(cache, first, second)
    assert snapshot(cache, [first, second]) == before and len(cache._requests) == 2
    k, v = rows(1, 2)
    cache.append([first], k, v, [1])
    assert_holds(cache, first, *(torch.cat((x, y)) for x, y in zip(rows(130, 1), (k, v), strict=True)))


def test_counts_and_requests_may_be_any_ints_read_once() -> None:
    numpy = pytest.importorskip("numpy")
    cache = make(("bf16", "hnd"))
    requests = [cache.add_request() for _ in range(3)]
    k, v = rows(6, 1)
    cache.append((r for r in requests), k, v, numpy.array([1, 2, 3]))
    assert [cache.length(r) for r in requests] == [1, 2, 3]
    assert all(type(cache.length(r)) is int for r in requests)
    assert cache.arguments(r for r in requests[:1])["seqused_k"].tolist() == [1]
    assert cache.arguments(r for r in requests)["seqused_k"].tolist() == [1, 2, 3]
    assert cache.arguments([])["seqused_k"].tolist() == []
    assert_holds(cache, requests[2], k[3:], v[3:])


@pytest.mark.parametrize("kv_format", ["fp8", "nvfp4"])
def test_global_scales_have_normal_reciprocals(kv_format: str) -> None:
    """What a cache takes it can store, zeros included; the rest is refused when the cache is made."""
    for scale in (0.0, -1.0, 1e-46, 1e-40, 2.0**-127, 2.0**127, 1e39, 10**400, float("inf"), float("nan")):
        for name in ("k_global_scale", "v_global_scale"):
            with pytest.raises(ValueError, match=rf"{name} must be in 2\^-126\.\.2\^126, normal in float32"):
                PagedKVCache(1, 1, kv_format=kv_format, **{name: scale})
    for wrong in ("1", True, None):
        with pytest.raises(TypeError, match="k_global_scale must be a float, got"):
            PagedKVCache(1, 1, kv_format=kv_format, k_global_scale=wrong)  # type: ignore[arg-type]
    for scale in (2.0**-126, 2.0**126, 3):
        cache = PagedKVCache(1, 1, kv_format=kv_format, k_global_scale=scale, v_global_scale=scale)
        request = cache.add_request()
        x = torch.zeros(1, 1, 128)
        x[..., 0] = 1.5 * scale
        cache.append([request], x, -x, [1])
        k, v = cache.read(request)
        assert torch.equal(k, x) and torch.equal(v, -x)
    assert type(cache.k_global_scale) is float


BAD_USES = {
    "format": (lambda: PagedKVCache(1, 1, kv_format="int8"), "kv_format must be bf16, fp16, fp8 or nvfp4"),
    "float32": (lambda: PagedKVCache(1, 1, kv_format=torch.float32), "kv_format must be bf16"),
    "layout": (lambda: PagedKVCache(1, 1, kv_format="nvfp4", layout="hnd"), "layout must be one of planar, tiled"),
    "planar bf16": (lambda: PagedKVCache(1, 1, layout="planar"), "layout must be one of hnd, nhd, packed, packed_nhd"),
    "scale": (lambda: PagedKVCache(1, 1, k_global_scale=0.5), "k_global_scale belongs to an fp8 or nvfp4 cache"),
    "negative scale": (lambda: PagedKVCache(1, 1, kv_format="fp8", v_global_scale=-1.0), "v_global_scale must be in"),
    "no pages": (lambda: PagedKVCache(0, 1), "num_pages must be at least 1"),
    "layer": (lambda: PagedKVCache(1, 1).arguments([], layer=1), r"layer must lie in 0\.\.0, got 1"),
    "write": (lambda: PagedKVCache(1, HEADS).write(0, *rows(1, 0)), "call extend first"),
    "packed": (lambda: packed_kv_views(torch.zeros(2, 128, 4, 256)), r"\(num_pages, num_kv_heads, 128, 256\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD_USES))
def test_bad_use_is_refused(name: str) -> None:
    call, message = BAD_USES[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_narrow_page_table_and_bad_lengths_are_refused() -> None:
    cache = make(("bf16", "hnd"))
    request = cache.add_request()
    cache.append([request], *rows(129, 1), [129])
    with pytest.raises(ValueError, match="max_pages must be at least 2"):
        cache.arguments([request], max_pages=1)
    for call in (cache.fork, cache.truncate):
        with pytest.raises(ValueError, match=r"must lie in 0\.\.129 \(the request's tokens\), got 130"):
            call(request, 130)


def test_freeing_a_request_cancels_its_write() -> None:
    cache = make(("bf16", "hnd"))
    request = cache.add_request()
    cache.extend([request], [1])
    cache.free(request)
    with pytest.raises(ValueError, match="call extend first"):
        cache.write(0, *rows(1, 0))


def test_room_is_not_made_again_before_every_layer_is_written() -> None:
    """Otherwise the tokens of the first `extend` could never be stored, and calls would read arbitrary bytes."""
    cache = make(("bf16", "hnd"), num_layers=2)
    request, other = cache.add_request(), cache.add_request()
    k, v = rows(3, 1, "cpu", 2)
    cache.extend([request], [3])
    cache.write(1, k[1], v[1])
    before = cache.num_free_pages, cache.length(request), cache.length(other)
    for add in (
        lambda: cache.extend([other], [1]),
        lambda: cache.extend([request], [0]),
        lambda: cache.append([other], *rows(1, 2, "cpu", 2), [1]),
    ):
        with pytest.raises(ValueError, match=r"the 3 tokens of the last extend .* no write for layers \[0\]: write"):
            add()
    assert (cache.num_free_pages, cache.length(request), cache.length(other)) == before
    cache.write(0, k[0], v[0])
    cache.extend([other], [0])
    cache.extend([request], [200])
    cache.truncate(request, 3)
    cache.append([request], *(x[:, :1] for x in (k, v)), [1])
    for layer in (0, 1):
        assert_holds(cache, request, *(torch.cat((x[layer], x[layer, :1])) for x in (k, v)), layer)


def test_fp8_saturates() -> None:
    cache = PagedKVCache(1, 1, kv_format="fp8", k_global_scale=0.5)
    request = cache.add_request()
    x = torch.zeros(1, 1, 128)
    x[..., 0], x[..., 1], x[..., 2], x[..., 3] = 1e6, -float("inf"), 100.0, float("nan")
    cache.append([request], x, x, [1])
    k, v = cache.read(request)
    assert k[0, 0, :3].tolist() == [224.0, -224.0, 96.0]
    assert v[0, 0, :2].tolist() == [448.0, -448.0]
    assert k.isnan().nonzero().tolist() == v.isnan().nonzero().tolist() == [[0, 0, 3]]


def test_one_table_serves_all_layers_until_something_changes() -> None:
    cache = make(("bf16", "hnd"), num_layers=2)
    request = cache.add_request()
    cache.append([request], *rows(128, 0, "cpu", 2), [128])
    first = cache.arguments([request])
    assert cache.arguments([request], layer=1)["page_table"] is first["page_table"]
    cache.extend([request], [1])
    second = cache.arguments([request])
    assert first["seqused_k"].tolist() == [128] and second["seqused_k"].tolist() == [129]
    assert second["page_table"].tolist() == [[0, 1]]
    assert cache.arguments([request, request])["seqused_k"].tolist() == [129, 129]


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_keeps_every_request_right(seed: int) -> None:
    """Against a dictionary of plain tensors; pages are counted from the tables."""
    rng = random.Random(seed)
    cache = make(("bf16", "packed_nhd"), num_pages=20)
    model: dict[int, tuple[Tensor, Tensor]] = {}
    for step in range(150):
        action = rng.choice(["add", "append", "append", "append", "fork", "free", "truncate"])
        if action == "add" or not model:
            model[cache.add_request()] = rows(0, 0)
            continue
        request = rng.choice(list(model))
        length = len(model[request][0])
        if action == "append":
            batch = rng.sample(list(model), rng.randint(1, len(model)))
            counts = [rng.choice([0, 1, 5, 128, 150]) for _ in batch]
            k, v = rows(sum(counts), step)
            try:
                cache.append(batch, k, v, counts)
            except OutOfPagesError:
                continue
            for r, new_k, new_v in zip(batch, k.split(counts), v.split(counts), strict=True):
                model[r] = torch.cat((model[r][0], new_k)), torch.cat((model[r][1], new_v))
        elif action == "fork":
            tokens = rng.randint(0, length)
            model[cache.fork(request, tokens)] = tuple(x[:tokens] for x in model[request])
        elif action == "free":
            cache.free(request)
            del model[request]
        else:
            tokens = rng.randint(0, length)
            cache.truncate(request, tokens)
            model[request] = tuple(x[:tokens] for x in model[request])
        owned = {int(p) for r in model for p in cache.arguments([r])["page_table"].flatten() if p >= 0}
        assert cache.num_free_pages == 20 - len(owned)
    for r, (k, v) in model.items():
        assert_holds(cache, r, k, v)


def test_packed_kv_is_supported_here(device: str) -> None:
    assert SUPPORTS_PACKED_KV
    assert supports_packed_kv(device)
    assert supports_packed_kv(torch.device(device))
    assert not supports_packed_kv("meta")


def test_packed_views_are_the_halves_of_the_cache() -> None:
    cache = torch.randn(3, 128, 2, 256)
    k, v = packed_kv_views(cache, nhd=True)
    assert k.shape == v.shape == (3, 2, 128, 128)
    assert torch.equal(k[1, 1, 5], cache[1, 5, 1, :128]) and torch.equal(v[1, 1, 5], cache[1, 5, 1, 128:])
    assert v.storage_offset() == 128 and v.data_ptr() == cache.data_ptr() + 512
