"""Selection against plain sorted lists."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msa_ops import selection
from msa_ops.selection import TokenExtents, msa_topk_select, select_blocks

INF, NAN = math.inf, math.nan


def select_row(scores: list[float], topk: int, extent: int, begin: int, end: int) -> list[int]:
    """One token and head, from the rules."""
    extent = max(0, min(extent, len(scores)))
    forced = list(range(min(begin, extent)))
    forced += [b for b in reversed(range(max(extent - end, 0), extent)) if b not in forced]
    others = [b for b in range(extent) if b not in forced and not math.isnan(scores[b]) and scores[b] != -INF]
    others.sort(key=lambda b: (-scores[b], b))
    chosen = sorted((forced + others)[:topk])
    return chosen + [-1] * (topk - len(chosen))


def expected(max_score: Tensor, topk: int, extent: list[int], begin: int = 0, end: int = 0) -> list[Any]:
    heads, _, tokens = max_score.shape
    rows = max_score.permute(2, 0, 1).tolist()
    return [[select_row(rows[t][h], topk, extent[t], begin, end) for h in range(heads)] for t in range(tokens)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, int, list[int], int, int]:
    heads, blocks, tokens = draw(st.integers(1, 3)), draw(st.integers(0, 12)), draw(st.integers(0, 4))
    value = st.sampled_from([0.0, -0.0, 1.0, 1.0, -1.0, 2.5, 1e-40, -1e-40, INF, -INF, NAN, 3.4e38, -3.4e38])
    values = draw(st.lists(value, min_size=heads * blocks * tokens, max_size=heads * blocks * tokens))
    extent = draw(st.lists(st.integers(-2, 14), min_size=tokens, max_size=tokens))
    score = torch.tensor(values, dtype=torch.float32).view(heads, blocks, tokens)
    forced = st.one_of(st.integers(0, 4), st.just(20))
    return score, draw(st.integers(1, 15)), extent, draw(forced), draw(forced)


@settings(max_examples=400, deadline=None)
@given(cases())
def test_selection_matches_a_sorted_list(case: tuple[Tensor, int, list[int], int, int]) -> None:
    score, topk, extent, begin, end = case
    got = msa_topk_select(
        score, topk, torch.tensor(extent, dtype=torch.int32), force_begin_blocks=begin, force_end_blocks=end
    )
    assert got.dtype == torch.int32 and got.shape == (score.shape[2], score.shape[0], topk)
    assert got.tolist() == expected(score, topk, extent, begin, end)


@pytest.mark.parametrize("topk", [1, 16, 100, 4096])
def test_selection_of_many_blocks(topk: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores with many ties, in chunks of three tokens."""
    monkeypatch.setattr(selection, "_CHUNK", 3 * 2 * 1000)
    score = torch.randint(-50, 50, (2, 1000, 7), generator=torch.Generator().manual_seed(0)).float() / 4
    extent = [1000, 0, 1, 500, 999, 17, 2000]
    valid = torch.tensor(extent, dtype=torch.int32, device=device)
    got = msa_topk_select(score.to(device), topk, valid, force_begin_blocks=1, force_end_blocks=2)
    assert got.tolist() == expected(score, topk, extent, 1, 2)
    assert msa_topk_select(score.to(device), topk, 500).tolist() == expected(score, topk, [500] * 7)
    assert msa_topk_select(score.to(device), topk).tolist() == expected(score, topk, [1000] * 7)


def column(*values: float) -> Tensor:
    return torch.tensor(values).view(1, -1, 1)


def test_equal_scores_go_to_the_lower_block(device: str) -> None:
    score = torch.zeros(2, 300, 5, device=device)
    score[:, ::2] = -0.0
    assert (msa_topk_select(score, 16) == torch.arange(16, device=device)).all()


def test_minus_inf_and_nan_are_not_chosen_and_inf_is() -> None:
    score = column(NAN, -INF, 1.0, INF, -3.4e38, -NAN)
    assert msa_topk_select(score, 1).tolist() == [[[3]]]
    assert msa_topk_select(score, 5).tolist() == [[[2, 3, 4, -1, -1]]]
    assert msa_topk_select(score, 5, force_begin_blocks=1, force_end_blocks=1).tolist() == [[[0, 2, 3, 4, 5]]]


def test_forced_blocks_come_first_and_count_once() -> None:
    score = column(0.0, 1.0, 2.0, 3.0, INF, 9.0)
    assert msa_topk_select(score, 3, 5, force_begin_blocks=1, force_end_blocks=1).tolist() == [[[0, 3, 4]]]
    assert msa_topk_select(score, 3, 5, force_begin_blocks=1, force_end_blocks=2).tolist() == [[[0, 3, 4]]]
    # Begin and end overlap: three blocks exist, two of them forced twice.
    assert msa_topk_select(score, 4, 3, force_begin_blocks=2, force_end_blocks=3).tolist() == [[[0, 1, 2, -1]]]


def test_too_many_forced_blocks_begin_wins_then_the_last_blocks() -> None:
    score = column(*[0.0] * 10)
    assert msa_topk_select(score, 2, force_begin_blocks=3, force_end_blocks=3).tolist() == [[[0, 1]]]
    assert msa_topk_select(score, 4, force_begin_blocks=3, force_end_blocks=3).tolist() == [[[0, 1, 2, 9]]]
    assert msa_topk_select(score, 3, force_begin_blocks=1, force_end_blocks=3).tolist() == [[[0, 8, 9]]]


def test_scores_beyond_a_tokens_extent_do_not_matter(device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    score = torch.randn(2, 40, 6, generator=generator)
    extent = torch.tensor([0, 1, 5, 20, 39, 40], dtype=torch.int32)
    poisoned = score.clone()
    for t, n in enumerate(extent.tolist()):
        poisoned[:, n:, t] = torch.tensor([INF, NAN] * 20)[: 40 - n]
    a, b = (
        msa_topk_select(s.to(device), 8, extent.to(device), force_begin_blocks=1, force_end_blocks=1)
        for s in (score, poisoned)
    )
    assert torch.equal(a, b)


def test_output_may_be_a_view_of_the_attention_calls_buffer(device: str) -> None:
    score = torch.randn(3, 9, 5, generator=torch.Generator().manual_seed(4)).to(device)
    want = msa_topk_select(score, 12)
    buffer = torch.full((3, 8, 20), 77, dtype=torch.int32, device=device)
    view = buffer[:, :5, 2:14].transpose(0, 1)
    assert msa_topk_select(score, 12, output=view) is view
    assert torch.equal(buffer[:, :5, 2:14], want.transpose(0, 1))
    assert (buffer[:, 5:] == 77).all() and (buffer[:, :, :2] == 77).all() and (buffer[:, :, 14:] == 77).all()
    token_major = torch.full((5, 3, 12), 77, dtype=torch.int32, device=device)
    assert torch.equal(msa_topk_select(score, 12, output=token_major), want)
    # Scores with other strides, as a score buffer with tokens outermost has.
    assert torch.equal(msa_topk_select(score.permute(2, 0, 1).contiguous().permute(1, 2, 0), 12), want)


@pytest.mark.parametrize("given", ["none", "int", "tensor"])
@pytest.mark.parametrize("causal", [True, False])
def test_extents_follow_the_positions(causal: bool, given: str) -> None:
    """From lengths, as a whole step has them; key by key."""
    lengths, seqlen_q = (9000, 130, 256, 257, 1, 0, -7), 3
    each = (8999, -1, 0, 126, 5, 5, 5)
    offset = {"none": None, "int": 254, "tensor": torch.tensor(each, dtype=torch.int32)}[given]
    values = TokenExtents(torch.tensor(lengths, dtype=torch.int32), seqlen_q, causal, offset).values()
    expected = []
    for b, i in itertools.product(range(len(lengths)), range(seqlen_q)):
        length = max(lengths[b], 0)
        position = {"none": length - seqlen_q, "int": 254, "tensor": each[b]}[given] + i
        seen = sum(1 for key in range(length) if not causal or key <= position)
        expected.append(-(-seen // 128))
    assert values.tolist() == expected
    score = torch.randn(2, 40, len(expected), generator=torch.Generator().manual_seed(5))
    got = torch.full((len(expected), 2, 6), 77, dtype=torch.int32)
    select_blocks(score, 6, TokenExtents(torch.tensor(lengths, dtype=torch.int32), seqlen_q, causal, offset), got, 1, 1)
    assert torch.equal(got, msa_topk_select(score, 6, values.int(), None, 1, 1))


SCORE = torch.zeros(2, 4, 3)
BAD_SELECT = {
    "dtype": ({"max_score": SCORE.half()}, "max_score must be float32 of shape"),
    "rank": ({"max_score": SCORE[0]}, "max_score must be float32 of shape"),
    "topk 0": ({"topk": 0}, r"topk must lie in 1\.\.4096, got 0"),
    "topk big": ({"topk": 4097}, r"topk must lie in 1\.\.4096, got 4097"),
    "pages": ({"num_valid_pages": 5}, r"num_valid_pages must lie in 0\.\.4, got 5"),
    "negative pages": ({"num_valid_pages": -1}, r"num_valid_pages must lie in 0\.\.4, got -1"),
    "pages dtype": ({"num_valid_pages": torch.zeros(3, dtype=torch.int64)}, "num_valid_pages must be int32"),
    "pages shape": ({"num_valid_pages": torch.zeros(2, dtype=torch.int32)}, r"num_valid_pages must have shape \(3,\)"),
    "begin": ({"force_begin_blocks": -1}, "force_begin_blocks must lie in"),
    "end": ({"force_end_blocks": -1}, "force_end_blocks must lie in"),
    "output dtype": ({"output": torch.zeros(3, 2, 2)}, "output must be int32"),
    "output shape": ({"output": torch.zeros(2, 3, 2, dtype=torch.int32)}, r"output must have shape \(3, 2, 2\)"),
    "output expanded": ({"output": torch.zeros(1, 2, 2, dtype=torch.int32).expand(3, 2, 2)}, "output must have memory"),
    "output in max_score": ({"output": SCORE.view(torch.int32).flatten()[:12].view(3, 2, 2)}, "share memory with max_sc"),
    "output strides": ({"output": torch.zeros(3, 2, 4, dtype=torch.int32)[..., ::2]}, "output must have a dense"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD_SELECT))
def test_bad_selection_arguments_are_refused(name: str) -> None:
    change, message = BAD_SELECT[name]
    with pytest.raises(ValueError, match=message):
        msa_topk_select(**{"max_score": SCORE, "topk": 2, **change})


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match="topk must be an int, got float"):
        msa_topk_select(SCORE, 2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="max_score must be a torch"):
        msa_topk_select([0.0], 2)  # type: ignore[arg-type]
    for name in ("max_score", "num_valid_pages", "output"):
        with pytest.raises(TypeError, match=f"{name} must be a strided tensor, got torch.sparse_coo"):
            msa_topk_select(**{"max_score": SCORE, "topk": 2, name: SCORE.to_sparse()})  # type: ignore[arg-type]
