"""The known ways to go wrong that only a launch grid or a CUDA graph can show: 18, 23 and 25 (see test_pitfalls)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cases import Case, Spec, build
from compare import assert_lse_close, assert_matches_oracle, assert_rows_close, assert_same_bits
from msa_ops import MSASparseAttentionWorkspace
from test_pitfalls import everything_used, set_ids

pytestmark = pytest.mark.gpu
combine = pytest.mark.parametrize("combine", [None, "scratch"])


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of one call, captured after one eager call on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def outputs_of(case: Case) -> tuple[Tensor, Tensor]:
    tokens, heads = case.args[0].shape[:2]
    dtype = torch.float16 if case.spec.q_dtype == "fp16" else torch.bfloat16
    out = torch.full((tokens, heads, 128), float("nan"), dtype=dtype, device="cuda")
    return out, torch.full((tokens, heads), float("nan"), device="cuda")


def force_combine(monkeypatch: pytest.MonkeyPatch, combine: str | None) -> None:
    if combine is not None:
        monkeypatch.setenv("MSA_OPS_COMBINE", combine)


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("force_fused", [None, True, False])
def test_more_tokens_than_a_grid_dimension(kv_heads: int, force_fused: bool | None) -> None:
    """18. A grid dimension above 65,535."""
    tokens = 65_535 + 300
    lengths = (70, 1, 0, 130, 128, 7, 200)
    small = build(Spec(lengths=lengths, kv_heads=kv_heads, group=1, topk=2, ids="all"), "cuda")
    assert_matches_oracle(small, force_fused=force_fused)
    expected, expected_lse = small.oracle()
    norms = small.term_norms()
    request = torch.arange(tokens, device="cuda") % 7
    many = Case(
        small.spec,
        (small.args[0][request], *small.args[1:3], small.args[3][:, request].contiguous()),
        {
            **small.kwargs,
            "page_table": small.kwargs["page_table"][request].contiguous(),
            "seqused_k": small.kwargs["seqused_k"][request].contiguous(),
        },
        small.keys,
        small.values,
    )
    out, lse = many.run(force_fused=force_fused)
    # The split may follow the number of tokens, so the bits may differ from the small call's: both are held to the oracle.
    request = request.cpu()
    assert_rows_close(out, expected[request], norms[request])
    assert_lse_close(lse, expected_lse[request])


@combine
def test_an_older_graph_survives_growth_of_the_workspace(combine: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """23. Scratch grown later frees memory that an older graph uses."""
    force_combine(monkeypatch, combine)
    workspace = MSASparseAttentionWorkspace("cuda")
    small = build(Spec(lengths=(5000,), topk=40, ids="all"), "cuda")
    large = build(Spec(lengths=(5000, 4000) * 8, kv_heads=1, topk=40, ids="all", seed=1), "cuda")
    out, lse = outputs_of(small)
    graph = captured(lambda: small.run(out=out, lse_out=lse, force_fused=False, workspace=workspace))
    graph.replay()
    expected = assert_matches_oracle(small, (out.clone(), lse.clone()))
    held = workspace.nbytes
    assert_matches_oracle(large, force_fused=False, workspace=workspace)
    if combine == "scratch":
        assert workspace.nbytes > held, "the larger call was meant to grow the workspace"
    # Whatever growth gave back is taken and overwritten.
    torch.cuda.synchronize()
    taken = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits((out, lse), expected)
    assert all(bool(t.isnan().all()) for t in taken), "the graph wrote into memory that is not its own"


@combine
@pytest.mark.parametrize("force_fused", [None, True, False])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "nvfp4"])
def test_replays_follow_new_lengths_and_ids(
    kv_dtype: str, force_fused: bool | None, combine: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """25. A later replay with shorter lengths reads stale partials."""
    force_combine(monkeypatch, combine)
    spec = Spec(kv_dtype=kv_dtype, lengths=(5000, 3000, 4096), seqlen_q=2, kv_heads=1, topk=40)
    case = everything_used(spec, "cuda")
    set_ids(case, list(range(40)))
    out, lse = outputs_of(case)
    graph = captured(lambda: case.run(out=out, lse_out=lse, force_fused=force_fused))
    for lengths, ids in [
        ([5000, 3000, 4096], list(range(40))),
        ([130, 0, 1], list(range(40))),
        ([1, 2, 4000], [31, 3, -1, 0]),
        ([0, 0, 0], [0]),
        ([5000, 3000, 4096], [20]),
        ([5000, 3000, 4096], [-1]),
    ]:
        case.kwargs["seqused_k"].copy_(torch.tensor(lengths, dtype=torch.int32))
        set_ids(case, ids)
        for t in (out, lse):
            t.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_matches_oracle(case, (out, lse))
