"""MiniMax-M3 in transformers with this package's indexer: the blocks that transformers' own chooses, from the same inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

from msa_ops.integrations.transformers import IMPLEMENTATION, MAX_DECODE_TOKENS, MSAPagedCache, enable
from msa_ops.integrations.transformers import indexer as indexer_module
from msa_ops.integrations.transformers.indexer import MSAIndexer
from test_transformers import assert_same_row, decode, forward, padded, prefill, small_model, tokens


def compare_indexers(model: Any, run: Callable[[], Any]) -> int:
    """Have transformers' indexer choose beside ours, from the same inputs, during `run`; the number of rows compared."""
    compared = 0

    def compare(module: Any, args: tuple[Any, ...], output: Tensor) -> None:
        nonlocal compared
        assert type(module) is MSAIndexer
        hidden_states, rotations, cache, positions = args
        # The second pass writes the same index keys to the same places.
        theirs = MiniMaxM3VLIndexer.forward(module, hidden_states, rotations, cache, positions)
        assert output.dtype == theirs.dtype and output.shape == theirs.shape
        for row, count in enumerate(cache.step_counts(output.shape[0], output.shape[2])):
            rows = (ids[row, :, :count].flatten(0, 1) for ids in (output, theirs))
            for mine, other in zip(*rows, strict=True):
                assert mine.tolist() == sorted(set(other.tolist()) - {-1}) + [-1] * int((other < 0).sum())
                compared += 1

    handles = [m.register_forward_hook(compare) for m in model.modules() if isinstance(m, MiniMaxM3VLIndexer)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return compared


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("topk, local", [(2, 1), (4, 2), (5, 0), (20, 3)])
def test_our_indexer_chooses_transformers_blocks(topk: int, local: int, q_len: int, device: str) -> None:
    """At lengths around a block's border, from random weights: the same sets, in both sparse layers and all heads."""
    model = enable(small_model(device, index_topk_blocks=topk, index_local_blocks=local), indexer="msa_ops")
    ids = tokens(2, 1300, device, seed=3)
    cache = MSAPagedCache(model.config, 1300)
    prefill(model, ids[:, :1270], cache)
    for length in (1270, 1024, 1021, 128, 127, 1):
        cache.truncate(length)
        assert cache.row_lengths(2) == [length] * 2
        steps = [ids[:, length + i * q_len : length + (i + 1) * q_len] for i in range(2)]
        compared = compare_indexers(model, lambda steps=steps: [forward(model, step, cache) for step in steps])
        assert compared == 2 * 2 * 2 * 2 * q_len, "two steps, layers, rows and heads"


def test_our_indexer_keeps_rows_of_a_padded_batch_apart(device: str) -> None:
    """Rows of 417, 3, 130 and 390 tokens, and steps in which they add one, two, three and no tokens."""
    model = enable(small_model(device), indexer="msa_ops")
    lengths = [417, 3, 130, 390]
    ids, mask = padded(lengths, device)
    cache = MSAPagedCache(model.config, 430)
    forward(model, ids, cache, mask)
    new = tokens(4, 6, device, seed=5)
    for step, counts in enumerate(([3, 3, 3, 3], [1, 2, 3, 0])):
        real = torch.arange(3, device=device) < torch.tensor(counts, device=device)[:, None]
        mask = torch.cat([mask, real.long()], dim=1)
        run = functools.partial(forward, model, new[:, 3 * step : 3 * step + 3], cache, mask)
        assert compare_indexers(model, run) == 2 * 2 * sum(counts)
    assert cache.row_lengths(4) == [n + c for n, c in zip([420, 6, 133, 393], [1, 2, 3, 0], strict=True)]


@pytest.mark.parametrize("implementation", [IMPLEMENTATION, "sdpa"])
def test_logits_with_our_indexer_are_those_with_transformers(implementation: str, device: str) -> None:
    """The order of the blocks is ours (ascending); the dense mask does not know it, and neither does a sum but by rounding."""
    model = enable(small_model(device))
    ids = tokens(2, 640, device)
    cache = MSAPagedCache(model.config, 640)
    prefill(model, ids[:, :630], cache)
    theirs = decode(model, cache, 630, ids[:, 630:], implementation)
    assert not any(isinstance(m, MSAIndexer) for m in model.modules())
    enable(model, indexer="msa_ops")
    assert sum(isinstance(m, MSAIndexer) for m in model.modules()) == 2
    ours = decode(model, cache, 630, ids[:, 630:], implementation)
    if implementation == "sdpa":
        assert torch.equal(ours, theirs)
    for a, b in zip(ours.flatten(0, 1), theirs.flatten(0, 1), strict=True):
        assert_same_row(a, b, "bf16")
    enable(model)
    assert not any(isinstance(m, MSAIndexer) for m in model.modules())
    assert torch.equal(decode(model, cache, 630, ids[:, 630:], implementation), theirs)


def test_prefill_and_other_caches_stay_transformers(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable(small_model(device), indexer="msa_ops")
    ids = tokens(1, 320, device)
    made = []
    real = indexer_module.choose_blocks
    monkeypatch.setattr(indexer_module, "choose_blocks", lambda *a: (made.append(a[0].shape[0]), real(*a))[1])
    cache = MSAPagedCache(model.config, 330)
    prefill(model, ids[:, :300], cache)
    forward(model, ids[:, 300 : 300 + MAX_DECODE_TOKENS + 1], cache)
    forward(model, ids, None)
    model.set_attn_implementation("sdpa")
    dynamic = DynamicCache(config=model.config)
    forward(model, ids[:, :300], dynamic)
    forward(model, ids[:, 300:301], dynamic)
    assert made == []
    forward(model, ids[:, 310:312], cache)
    assert made == [2, 2], "two layers, two tokens"


def test_index_keys_lie_in_pages_that_scoring_reads_in_place(device: str) -> None:
    model = enable(small_model(device), indexer="msa_ops")
    cache = MSAPagedCache(model.config, 300)
    ids = tokens(2, 290, device)
    prefill(model, ids, cache)
    layer = cache.layers[1]
    keys = layer.index_keys
    assert keys.pages.shape == (2 * 3, 1, 128, 128) and keys.page_table.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert keys.pages.untyped_storage().data_ptr() == keys.data.untyped_storage().data_ptr()
    assert torch.equal(keys.pages[4, 0, 5], keys.data[1, 128 + 5, 0]) and bool((keys.data[1, :290] != 0).any(-1).all())
    step = layer.index_step()
    assert step.page_table.shape == (2, 3) and step.lengths.tolist() == [290, 290] and step.q_offset is None
    cache.truncate(200)
    forward(model, ids[:, 200:201], cache)
    assert layer.index_step().page_table.tolist() == [[0, 1], [3, 4]]


def test_indexers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"indexer must be 'transformers' or 'msa_ops', got 'flash'"):
        enable(small_model("cpu"), indexer="flash")
    narrow = small_model("cpu", index_head_dim=64)
    with pytest.raises(ValueError, match=r"config.index_head_dim must be 128, got 64"):
        enable(narrow, indexer="msa_ops")
    assert not any(isinstance(m, MSAIndexer) for m in narrow.modules())
    assert enable(narrow) is narrow
