"""MiniMax-M3 in transformers, decoding on pages: against transformers' own path, the oracle, and batch-1 runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

from compare import ROW_TOLERANCE, assert_rows_close
from msa_ops.cli.demo_model import Choices, build_model
from msa_ops.integrations.transformers import IMPLEMENTATION, MAX_DECODE_TOKENS, MSAPagedCache, enable
from msa_ops.integrations.transformers import attention as attention_module
from msa_ops.integrations.transformers.attention import decode_attention, msa_ops_attention, transformers_attention
from msa_ops.integrations.transformers.cache import SPARSE_LAYER, paged_step
from msa_ops.kv_cache import PagedKVCache
from msa_ops.reference import decode_reference

KV_DTYPES = ("bf16", "fp8", "nvfp4")


def small_config(**changes: Any) -> MiniMaxM3VLTextConfig:
    """One dense and two sparse layers; two blocks are selected, so that selection matters from 257 tokens on."""
    facts: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 32,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "index_n_heads": 2,
        "index_topk_blocks": 2,
        "layer_types": ["full_attention", SPARSE_LAYER, SPARSE_LAYER],
        "mlp_layer_types": ["dense"] * 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return MiniMaxM3VLTextConfig(**{**facts, **changes})


def small_model(device: str, **changes: Any) -> Any:
    return build_model(1, device, small_config(**changes))


def tokens(batch: int, length: int, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 64, (batch, length), generator=generator).to(device)


@torch.inference_mode()
def forward(model: Any, ids: Tensor, cache: Any, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    """Logits ``(batch, tokens, vocab)`` in float32. Versions differ in the cache's keyword, not in its place."""
    logits: Tensor = model(ids, mask, positions, cache, use_cache=cache is not None).logits
    return logits.float()


def prefill(model: Any, ids: Tensor, cache: MSAPagedCache, chunk: int = 256) -> Tensor:
    """Chunked prefill by transformers' path; the last token's logits."""
    for start in range(0, ids.shape[1], chunk):
        logits = forward(model, ids[:, start : start + chunk], cache)
    return logits[:, -1]


def decode(model: Any, cache: MSAPagedCache, length: int, inputs: Tensor, implementation: str) -> Tensor:
    """Logits ``(batch, tokens, vocab)`` of decoding `inputs` one by one from the cache's first `length` tokens."""
    cache.truncate(length)
    model.set_attn_implementation(implementation)
    return torch.cat([forward(model, inputs[:, i : i + 1], cache) for i in range(inputs.shape[1])], dim=1)


def record_calls(model: Any, run: Callable[[], Any]) -> list[dict[str, Any]]:
    """The attention calls that the sparse layers make during `run`, which then uses this package's path."""
    calls = []

    def recorder(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        if kwargs.get("block_indices") is not None:
            calls.append({"module": module, "q": query, "k": key, "v": value, "mask": mask, "kwargs": kwargs})
        return msa_ops_attention(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("recorder_of_tests", recorder)
    model.set_attn_implementation("recorder_of_tests")
    run()
    return calls


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_sparse_layers_call_is_right(kv_dtype: str, q_len: int, device: str) -> None:
    """The call that a real step makes, against the oracle on the pages and against transformers' own attention."""
    model = enable(small_model(device))
    cache = MSAPagedCache(model.config, 700, kv_dtype=kv_dtype)
    ids = tokens(1, 600 + q_len, device)
    prefill(model, ids[:, :600], cache)
    calls = record_calls(model, lambda: forward(model, ids[:, 600:], cache))
    assert len(calls) == 2
    for call in calls:
        query, kwargs = call["q"], call["kwargs"]
        step = paged_step(call["k"])
        assert step is not None
        ids_of_blocks = kwargs["block_indices"]
        assert ids_of_blocks.shape == (1, 2, q_len, 2) and (600 + q_len + 127) // 128 > 2, (
            "selection must leave blocks out"
        )
        out = decode_attention(query, ids_of_blocks, step, kwargs["scaling"])
        expected, _ = decode_reference(
            query[0].transpose(0, 1),
            q2k_indices=ids_of_blocks[0].to(torch.int32),
            seqlen_q=q_len,
            round_output=False,
            **step.arguments(),
        )
        assert_rows_close(out[0], expected)
        theirs, _ = transformers_attention(call["module"], query, call["k"], call["v"], call["mask"], **kwargs)
        # sdpa as a second witness: it rounds its scores and probabilities too, so it is a little farther off.
        error = (theirs[0].cpu().double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(error.max()) < 4 * ROW_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_logits_are_as_close_to_sdpa_as_transformers_eager_path_is(kv_dtype: str, device: str) -> None:
    """The whole model, experts included, with the reference's tokens, blocks and experts imposed on every run."""
    model = enable(small_model(device, mlp_layer_types=["dense", "sparse", "sparse"]))
    cache = MSAPagedCache(model.config, 700, kv_dtype=kv_dtype)
    ids = tokens(1, 624, device)
    model.set_attn_implementation("sdpa")
    prefill(model, ids[:, :600], cache)
    choices, inputs = Choices(model), ids[:, 600:]
    with choices.record():
        reference = decode(model, cache, 600, inputs, "sdpa")

    def difference(implementation: str) -> float:
        with choices.impose():
            return float((decode(model, cache, 600, inputs, implementation) - reference).abs().max())

    def left_out(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        if kwargs.get("block_indices") is not None:
            kwargs["block_indices"] = kwargs["block_indices"][..., :1]
        return msa_ops_attention(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("left_out_of_tests", left_out)
    rounding = difference("eager")
    assert 0 < difference(IMPLEMENTATION) <= 2 * rounding
    assert difference("left_out_of_tests") > 4 * rounding, "the comparison would not notice a missing block"


def test_pages_of_one_row_are_read_in_place_by_both_paths(device: str) -> None:
    """bf16, batch 1: what transformers' path gets are views of the pages, and they hold the request's tokens."""
    model = enable(small_model(device))
    cache = MSAPagedCache(model.config, 700)
    ids = tokens(1, 301, device)
    model.set_attn_implementation("sdpa")
    prefill(model, ids[:, :300], cache)
    calls = record_calls(model, lambda: forward(model, ids[:, 300:], cache))
    for layer, call in enumerate(calls):
        arguments = cache.pool.arguments(cache.requests, layer=layer)
        held_k, held_v = cache.pool.read(cache.requests[0], layer=layer)
        for name, held in (("k", held_k), ("v", held_v)):
            dense, pages = call[name], arguments[name]
            assert dense.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr()
            assert dense.data_ptr() == pages.data_ptr()
            assert torch.equal(dense[0].transpose(0, 1).float(), held)


@pytest.mark.parametrize("batch, kv_dtype", [(1, "fp8"), (1, "nvfp4"), (2, "bf16")])
def test_our_decode_step_makes_no_dense_copy(
    batch: int, kv_dtype: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dense copy that transformers' path needs is never made in a decode step of ours."""
    model = enable(small_model(device))
    cache = MSAPagedCache(model.config, 400, kv_dtype=kv_dtype)
    ids = tokens(batch, 303, device)
    prefill(model, ids[:, :300], cache)

    def read(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the cache was copied")

    monkeypatch.setattr(PagedKVCache, "read", read)
    decode(model, cache, 300, ids[:, 300:302], IMPLEMENTATION)
    with pytest.raises(AssertionError, match="the cache was copied"):
        decode(model, cache, 300, ids[:, 300:302], "sdpa")
    with pytest.raises(ValueError, match=r"earlier forward pass failed.*truncate"):
        forward(model, ids[:, 302:], cache)
    decode(model, cache, 300, ids[:, 300:302], IMPLEMENTATION)


ROW_TOLERANCE_OF_LOGITS = {"bf16": 0.02, "fp8": 0.05, "nvfp4": 0.12}
"""Largest ``norm(logits - own) / norm(own)`` of a row. Matrix products of another shape round otherwise in bf16 (seen:
up to 0.009), and where such a value is then quantised it may fall to the next code (seen: 0.023 and 0.08). A row that
is one token longer or shorter is off by 0.23 and more."""


def assert_same_row(logits: Tensor, own: Tensor, kv_dtype: str) -> None:
    assert float((logits - own).norm() / own.norm()) < ROW_TOLERANCE_OF_LOGITS[kv_dtype]


def padded(lengths: list[int], device: str) -> tuple[Tensor, Tensor]:
    """Right-padded ids and their mask."""
    ids = tokens(len(lengths), max(lengths), device)
    mask = torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
    return ids.masked_fill(~mask, 0), mask.long()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("implementation", [IMPLEMENTATION, "sdpa"])
def test_each_row_of_a_padded_batch_equals_its_own_run(implementation: str, kv_dtype: str, device: str) -> None:
    """Rows of 417, 3, 130 and 384 tokens, prefilled together and decoded six tokens on."""
    lengths = [417, 3, 130, 384]
    model = enable(small_model(device))
    model.set_attn_implementation(implementation)
    ids, mask = padded(lengths, device)
    new = tokens(4, 6, device, seed=5)
    cache = MSAPagedCache(model.config, 430, kv_dtype=kv_dtype)
    first = forward(model, ids, cache, mask)
    steps = []
    for i in range(6):
        mask = torch.cat([mask, mask.new_ones(4, 1)], dim=1)
        steps.append(forward(model, new[:, i : i + 1], cache, mask))
    assert cache.row_lengths(4) == [n + 6 for n in lengths]
    together = torch.cat(steps, dim=1)
    for row, length in enumerate(lengths):
        alone = MSAPagedCache(model.config, 430, kv_dtype=kv_dtype)
        own_first = forward(model, ids[row : row + 1, :length], alone)
        own = torch.cat([forward(model, new[row : row + 1, i : i + 1], alone) for i in range(6)], dim=1)
        assert_same_row(first[row, :length], own_first[0], kv_dtype)
        assert_same_row(together[row], own[0], kv_dtype)


def test_the_content_of_padding_never_matters(device: str) -> None:
    """The logits of real tokens are the same bits whatever the padding holds."""
    lengths = [200, 37, 130]
    model = enable(small_model(device))
    results = []
    for filler in (0, 63):
        ids, mask = padded(lengths, device)
        ids = torch.where(mask.bool(), ids, filler)
        cache = MSAPagedCache(model.config, 256)
        logits = forward(model, ids, cache, mask)
        grown = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
        step = forward(model, tokens(3, 1, device, seed=3), cache, grown)
        results.append([*(logits[row, :n] for row, n in enumerate(lengths)), step])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rows_may_add_different_numbers_of_tokens_in_a_decode_step(device: str) -> None:
    """A step of up to three tokens in which a row has one, two, three or none, as after speculative decoding."""
    model = enable(small_model(device))
    ids = tokens(4, 300, device)
    cache = MSAPagedCache(model.config, 310)
    forward(model, ids, cache)
    new = tokens(4, 3, device, seed=7)
    counts = [1, 2, 3, 0]
    mask = torch.cat([torch.ones(4, 300), torch.arange(3) < torch.tensor(counts)[:, None]], dim=1).to(device)
    logits = forward(model, new, cache, mask)
    assert cache.row_lengths(4) == [301, 302, 303, 300]
    for row, count in enumerate(counts):
        alone = MSAPagedCache(model.config, 310)
        forward(model, ids[row : row + 1], alone)
        if count:
            own = forward(model, new[row : row + 1, :count], alone)
            assert_same_row(logits[row, :count], own[0], "bf16")


@pytest.mark.parametrize("indexer", ["transformers", "msa_ops"])
@pytest.mark.parametrize("starts, counts", [((383, 200), (1, 2)), ((383, 200), (0, 3)), ((100, 1), (5, 300))])
def test_padding_may_reach_beyond_the_last_block(
    starts: tuple[int, int], counts: tuple[int, int], indexer: str, device: str
) -> None:
    """A row's padding would lie in a block after those of the longest row."""
    model = enable(small_model(device), indexer=indexer)
    ids, mask = padded(list(starts), device)
    cache = MSAPagedCache(model.config, 430)
    forward(model, ids, cache, mask)
    new = tokens(2, max(3, *counts), device, seed=5)
    real = torch.arange(new.shape[1], device=device) < torch.tensor(counts, device=device)[:, None]
    logits = forward(model, new, cache, torch.cat([mask, real.long()], dim=1))
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        alone = MSAPagedCache(model.config, 430)
        forward(model, ids[row : row + 1, :start], alone)
        if count:
            own = forward(model, new[row : row + 1, :count], alone)
            assert_same_row(logits[row, :count], own[0], "bf16")


def test_left_padding_is_refused_with_the_remedy(device: str) -> None:
    model = enable(small_model(device))
    ids, mask = padded([20, 9], device)
    message = r"attention_mask is left-padded \(row 1.*Pad on the right: tokenizer.padding_side = 'right'"
    with pytest.raises(ValueError, match=message):
        forward(model, ids, MSAPagedCache(model.config, 64), mask.flip(1))
    with pytest.raises(ValueError, match=message):
        forward(model, ids, None, mask.flip(1))
    plain = small_model(device)
    plain.set_attn_implementation(IMPLEMENTATION)
    with pytest.raises(ValueError, match=message):
        forward(plain, ids, MSAPagedCache(plain.config, 64), mask.flip(1))


def test_a_padded_batch_needs_enable_to_decode(device: str) -> None:
    """Without the step preparation, padding would be stored; the step after it is refused."""
    model = small_model(device)
    model.set_attn_implementation(IMPLEMENTATION)
    ids, mask = padded([20, 9], device)
    cache = MSAPagedCache(model.config, 64)
    forward(model, ids, cache, mask)
    with pytest.raises(ValueError, match=r"attention_mask pads a batch.*enable\(model\)"):
        forward(model, ids[:, :1], cache, torch.cat([mask, mask.new_ones(2, 1)], dim=1))


def test_the_implementation_alone_decodes_rows_of_equal_length(device: str) -> None:
    """`set_attn_implementation` without `enable` gives the same bits."""
    ids = tokens(2, 303, device)
    outputs = []
    for prepare in (enable, lambda m: m.set_attn_implementation(IMPLEMENTATION)):
        model = small_model(device)
        prepare(model)
        cache = MSAPagedCache(model.config, 310, kv_dtype="fp8")
        prefill(model, ids[:, :300], cache)
        outputs.append(torch.cat([forward(model, ids[:, i : i + 1], cache) for i in range(300, 303)], dim=1))
    assert torch.equal(*outputs)


def test_without_a_cache_it_is_transformers_path(device: str) -> None:
    model = enable(small_model(device))
    ids = tokens(2, 150, device)
    ours = forward(model, ids, None)
    model.set_attn_implementation("sdpa")
    assert torch.equal(ours, forward(model, ids, None))


def test_another_cache_is_refused_when_it_holds_a_past(device: str) -> None:
    model = enable(small_model(device))
    ids = tokens(1, 21, device)
    cache = DynamicCache(config=model.config)
    forward(model, ids[:, :20], cache)
    with pytest.raises(ValueError, match="these 21 keys come from another cache: pass past_key_values=MSAPagedCache"):
        forward(model, ids[:, 20:], cache)


@pytest.mark.parametrize("kv_dtype", ["bf16", "nvfp4"])
def test_generate_decodes_through_the_pages(kv_dtype: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` gives the tokens of a hand-written greedy loop, each sparse decode step through the public call."""
    model = enable(small_model(device))
    ids = tokens(2, 200, device)
    cache = MSAPagedCache(model.config, 220, kv_dtype=kv_dtype)
    token = prefill(model, ids, cache).argmax(-1, keepdim=True)
    expected = [token]
    for _ in range(7):
        token = forward(model, token, cache)[:, -1].argmax(-1, keepdim=True)
        expected.append(token)
    seen = []
    real = attention_module.msa_sparse_decode_attention
    monkeypatch.setattr(
        attention_module, "msa_sparse_decode_attention", lambda *a, **k: (seen.append(a[0].shape[0]), real(*a, **k))[1]
    )
    fresh = MSAPagedCache(model.config, 220, kv_dtype=kv_dtype)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, **{keyword: fresh}
    )
    assert torch.equal(written[:, 200:], torch.cat(expected, dim=1))
    assert seen == [2] * (7 * 2), "seven decode steps, two sparse layers, two rows"
    assert fresh.get_seq_length() == 207


def test_short_passes_decode_on_the_pages_and_long_ones_do_not(device: str) -> None:
    """Where the line lies between decode and prefill, and that both sides of it agree (all blocks are selected)."""
    model = enable(small_model(device))
    ids = tokens(1, 220, device)
    cache = MSAPagedCache(model.config, 230)
    prefill(model, ids[:, :200], cache)
    made = []
    real = attention_module.msa_sparse_decode_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            attention_module, "msa_sparse_decode_attention", lambda *a, **k: (made.append(1), real(*a, **k))[1]
        )
        short = forward(model, ids[:, 200 : 200 + MAX_DECODE_TOKENS], cache)
        assert len(made) == 2
        cache.truncate(200)
        long = forward(model, ids[:, 200 : 200 + MAX_DECODE_TOKENS + 1], cache)
        assert len(made) == 2
    assert_same_row(short, long[:, :MAX_DECODE_TOKENS], "bf16")


def test_a_snapshot_is_a_length(device: str) -> None:
    """Decoding again from the same length, after truncate or crop, gives the same bits."""
    model = enable(small_model(device))
    ids = tokens(1, 395, device)
    cache = MSAPagedCache(model.config, 400, kv_dtype="nvfp4")
    prefill(model, ids[:, :383], cache)
    first = decode(model, cache, 383, ids[:, 383:], IMPLEMENTATION)
    again = decode(model, cache, 383, ids[:, 383:], IMPLEMENTATION)
    assert torch.equal(first, again)
    cache.crop(-12)
    assert cache.get_seq_length() == 383 and cache.pool.length(cache.requests[0]) == 383
    assert torch.equal(forward(model, ids[:, 383:384], cache), first[:, :1])
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.pool.num_free_pages == cache.pool.num_pages
    prefill(model, ids[:, :383], cache)
    assert torch.equal(decode(model, cache, 383, ids[:, 383:], IMPLEMENTATION), first)


def test_enable_twice_prepares_once() -> None:
    model = enable(enable(small_model("cpu")))
    assert len(model.model._forward_pre_hooks) == 1


def test_configurations_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(ValueError, match=r"config.head_dim must be 128, got 64"):
        enable(small_model("cpu", head_dim=64, index_head_dim=64))
    with pytest.raises(ValueError, match=r"config.index_block_size must be 128, got 64"):
        enable(small_model("cpu", index_block_size=64))
    with pytest.raises(ValueError, match=r"config.index_n_heads must equal num_key_value_heads = 2.*got 4"):
        enable(small_model("cpu", index_n_heads=4))
    with pytest.raises(ValueError, match=r"model must contain a transformers MiniMaxM3VLTextModel, got Linear"):
        enable(torch.nn.Linear(1, 1))


def test_cache_errors_name_what_is_wrong() -> None:
    config = small_config()
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        MSAPagedCache(config, 0)
    with pytest.raises(ValueError, match="kv_dtype must be bf16, fp16, fp8 or nvfp4, got 'int4'"):
        MSAPagedCache(config, 128, kv_dtype="int4")
    with pytest.raises(ValueError, match=r"v_global_scale must be in 2\^-126\.\.2\^126"):
        MSAPagedCache(config, 128, kv_dtype="nvfp4", v_global_scale=1e39)
    with pytest.raises(ValueError, match="k_global_scale belongs to an fp8 or nvfp4 cache"):
        MSAPagedCache(config, 128, k_global_scale=2.0)
    model = enable(small_model("cpu"))
    cache = MSAPagedCache(model.config, 20)
    ids = tokens(2, 21, "cpu")
    with pytest.raises(ValueError, match="max_length = 20 tokens a row are too few for 21: make a larger cache"):
        forward(model, ids, cache)
    forward(model, ids[:, :20], cache)
    with pytest.raises(ValueError, match="max_length = 20 tokens a row are too few for 21"):
        forward(model, ids[:, 20:], cache)
    assert cache.row_lengths(2) == [20, 20], "a refused step changes nothing"
    cache.truncate(10)
    with pytest.raises(ValueError, match="holds a batch of 2, got 1 rows"):
        forward(model, ids[:1, :1], cache)
    with pytest.raises(ValueError, match="length must not be negative, got -1"):
        cache.truncate(-1)
    with pytest.raises(ValueError, match="tokens_to_remove must not be positive, got 3"):
        cache.crop(3)
    with pytest.raises(NotImplementedError, match="beam search"):
        cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(NotImplementedError, match="repeat rows"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(NotImplementedError, match="select rows"):
        cache.batch_select_indices(torch.tensor([0]))


def test_masks_and_positions_that_contradict_the_cache_are_refused() -> None:
    model = enable(small_model("cpu"))
    ids = tokens(1, 12, "cpu")

    def start() -> MSAPagedCache:
        cache = MSAPagedCache(model.config, 20)
        forward(model, ids[:, :10], cache)
        return cache

    with pytest.raises(
        ValueError, match=r"attention_mask must have a 1 for each token in the cache: it holds \[10\].*\[9\]"
    ):
        forward(model, ids[:, 10:11], start(), torch.tensor([[1] * 9 + [0, 1]]))
    with pytest.raises(ValueError, match="attention_mask must have each row's real tokens before its padding"):
        forward(model, ids[:, 10:12], start(), torch.tensor([[1] * 10 + [0, 1]]))
    with pytest.raises(
        ValueError, match=r"attention_mask must be \(batch, past \+ 1 tokens\) for a batch of 1, got \(2, 11\)"
    ):
        forward(model, ids[:, 10:11], start(), torch.ones(2, 11))
    with pytest.raises(ValueError, match=r"attention_mask must be None or \(batch, tokens\).*got \(1, 1, 1, 11\)"):
        forward(model, ids[:, 10:11], start(), torch.ones(1, 1, 1, 11, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"position_ids must continue.*row 0 is at \[10\], got \[4\]"):
        forward(model, ids[:, 10:11], start(), None, torch.tensor([[4]]))
    with pytest.raises(ValueError, match=r"position_ids must be \(batch, tokens\) = \(1, 1\), got \(1, 2\)"):
        forward(model, ids[:, 10:11], start(), None, torch.tensor([[10, 11]]))
    forward(model, ids[:, 10:11], start(), torch.ones(1, 11), torch.tensor([[10]]))


def test_models_whose_dtype_or_gradients_do_not_fit_are_refused() -> None:
    ids = tokens(1, 11, "cpu")
    with pytest.raises(ValueError, match=r"the model must be bfloat16 or float16, got torch.float32"):
        forward(enable(small_model("cpu").float()), ids, MSAPagedCache(small_config(), 20))
    half = enable(small_model("cpu").half())
    with pytest.raises(
        ValueError, match=r"kv_dtype must be fp16, fp8 or nvfp4 for a model in torch.float16, got 'bf16'"
    ):
        forward(half, ids, MSAPagedCache(small_config(), 20))
    cache = MSAPagedCache(small_config(), 20, kv_dtype="fp16")
    assert forward(half, ids, cache).isfinite().all() and forward(half, ids[:, :1], cache).isfinite().all()
    with pytest.raises(ValueError, match=r"MSAPagedCache keeps no gradients.*torch.inference_mode\(\)"):
        half(ids, None, None, MSAPagedCache(small_config(), 20), use_cache=True)


def test_dropout_is_refused_in_a_decode_step() -> None:
    model = enable(small_model("cpu", attention_dropout=0.5))
    cache = MSAPagedCache(model.config, 20)
    ids = tokens(1, 11, "cpu")
    forward(model, ids[:, :10], cache)
    model.train()
    with pytest.raises(ValueError, match=r"dropout must be 0 in a decode step, got 0.5: call model.eval\(\)"):
        forward(model, ids[:, 10:], cache)
