"""The kernel of the index scores without a GPU: what the compiler made of it, its parameters, how calls are cut."""

from __future__ import annotations

import re
import struct
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import nvfp4_bytes
from msa_ops.contract import BLOCK_SIZE, FP8
from msa_ops.engines.cuda import compile as compiler
from msa_ops.engines.cuda import programs, score, topk
from msa_ops.selection import ScoreProblem
from test_cuda_compile import QUARTERS, REGISTERS, c_layout, c_size, packed_places, usages

SOURCE = compiler.source(score.PROGRAMS["bf16", False].sources)
# All formats of 9.0; elsewhere those that the registers or the conversions of that generation trouble most.
SPREAD = {
    (9, 0): ("bf16", "bf16-fp16q", "fp16", "fp8", "nvfp4"),
    (8, 0): ("bf16", "fp8", "nvfp4"), (8, 6): ("nvfp4",), (8, 7): ("fp8",), (8, 9): ("fp8",),
    (10, 0): ("fp8", "nvfp4"), (10, 3): ("nvfp4",), (10, 7): ("fp8",), (11, 0): ("fp8",),
    (12, 0): ("bf16", "nvfp4"), (12, 1): ("fp8",),
}  # fmt: skip
SMS, SHARED = 132, 228 << 10


# --- what the compiler made of it ---


@pytest.mark.parametrize("rows", [False, True], ids=["stream", "row"])
@pytest.mark.parametrize(
    "capability, name",
    [(c, n) for c, names in SPREAD.items() for n in names],
    ids=lambda x: x if isinstance(x, str) else f"{x[0]}.{x[1]}",
)
def test_the_kernels_keep_to_their_registers_and_memory(capability: tuple[int, int], name: str, rows: bool) -> None:
    program, operands = score.PROGRAMS[name, rows], score.OPERANDS[name]
    arch = compiler.architecture(capability)
    if capability[0] * 10 + capability[1] not in compiler.supported_architectures():
        pytest.skip(f"NVRTC {compiler.nvrtc_version()} does not know {arch}")
    cubin, log = compiler.compile_program(program, arch, "--ptxas-options=-v")
    assert cubin[:4] == b"\x7fELF" and "warning" not in log
    kernels = usages(log)
    rooms = {"one_": operands.one, "row_": operands.row} if rows else {"": operands.stream}
    assert set(kernels) == set(program.entries)
    assert len(kernels) == sum(map(len, rooms.values()))
    for kind, residents in rooms.items():
        for columns, resident in zip(operands.row_columns if rows else score.COLUMNS, residents, strict=True):
            usage = kernels[f"msa_score_{kind}{columns}"]
            assert usage.stack == usage.spill_stores == usage.spill_loads == 0, (kind, columns, usage)
            held = operands.held(resident, capability == (9, 0) or not rows)
            held -= capability == (10, 7) and columns == 64
            most = REGISTERS // QUARTERS // held // 32 // 8 * 8  # of four warps a block, each quarter has one
            assert usage.registers <= most, f"{held} blocks are not resident: {usage}"
            if rows:  # what 9.0 has; elsewhere fewer may be resident
                assert (usage.shared + 1024) * resident <= 228 << 10, (kind, columns, usage)
                assert usage.shared <= 48 << 10, (kind, columns, usage)
                most_shared = operands.row_shared(kind.rstrip("_"), columns)
                assert most_shared - 1024 <= usage.shared <= most_shared, (kind, columns, usage)
            else:  # what 8.6, 8.9 and 12.x have; two operands a query take twice the room: there a block less is resident
                assert usage.shared * (resident if name != "bf16-fp16q" else 2) <= 99 << 10, (columns, usage)


@pytest.mark.parametrize("entry", ["msa_topk_64", "msa_topk_256", "msa_topk_1024", "msa_topk_cluster_8192"])
def test_a_thread_block_of_the_selection_finds_room_beside_rows_of_codes(entry: str) -> None:
    """Of those with four warps a thread block. Others, by tokens or for longer rows without clusters, have more: they wait."""
    operands = score.OPERANDS["nvfp4"]
    scores, selection = (
        usages(compiler.compile_program(program, "sm_90", "--ptxas-options=-v")[1])
        for program in (score.PROGRAMS["nvfp4", True], topk.PROGRAM)
    )
    residents = [(scores["msa_score_row_4"], score._THREADS)] * operands.row[0] + [
        (selection[entry], topk._THREADS[entry])
    ]
    assert sum(-(-usage.registers // 8) * 8 * threads for usage, threads in residents) <= REGISTERS
    assert sum(usage.shared + 1024 for usage, _ in residents) <= SHARED


def test_python_and_the_kernel_name_the_same_things() -> None:
    checks = "".join(
        f'static_assert({condition}, "");'
        for condition in (
            f"sizeof(ScoreParams) == {score._PARAMS.size}",
            f"THREADS == {score._THREADS}",
            *(f"KV_{name.upper()} == {i} && QUERY_{name.upper()} == {i}" for i, name in enumerate(score._FORMATS)),
        )
    )
    real, program = compiler.source, score.PROGRAMS["bf16", False]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "source", lambda names: real(names) + checks)
        compiler.compile_program(program, "sm_80")
        patch.setattr(compiler, "source", lambda names: real(names) + 'static_assert(THREADS == 1, "");')
        with pytest.raises(compiler.KernelCompileError):
            compiler.compile_program(program, "sm_80")
    for name, operands in score.OPERANDS.items():  # a number that the kernel does not know would have no effect
        for rows in (False, True):
            source = compiler.source(score.PROGRAMS[name, rows].sources)
            kinds = ("ONE_", "ROW_") if rows else ("",)
            for columns in operands.row_columns if rows else score.COLUMNS:
                if columns == score.CODE_COLUMNS:
                    assert all(f"BOUNDS(ROOM_{kind}4)" in source for kind in kinds)
                else:
                    assert f"({columns})" in source and all(f"ROOM_{kind}##COLUMNS" in source for kind in kinds)


@pytest.mark.parametrize("name", score.OPERANDS)
def test_a_block_of_keys_is_what_python_counts_it_as(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = score.OPERANDS[name]
    sources = tuple(n for n in score.PROGRAMS[name, False].sources if n != "score.cu")
    text = compiler.source(sources) + (
        f"static_assert(ROW_BYTES == {operands.row_bytes} && TEAMS == {operands.together});"
        f"static_assert(QUERY_PARTS == {operands.query_parts} && BLOCK_KEYS == {BLOCK_SIZE});"
    )
    monkeypatch.setattr(compiler, "source", lambda _: text)
    compiler.compile_program(score.PROGRAMS[name, False], "sm_80")
    text += "static_assert(TEAMS == 3);"
    with pytest.raises(compiler.KernelCompileError):
        compiler.compile_program(score.PROGRAMS[name, False], "sm_80")


def test_codes_are_shared_as_python_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    operands, program = score.OPERANDS["nvfp4"], score.PROGRAMS["nvfp4", True]
    one, row = (operands.at_once(kind, score.CODE_COLUMNS) for kind in ("one", "row"))
    text = compiler.source(program.sources) + (
        f"static_assert(PAIRS == {score.CODE_COLUMNS} && CodeScorer<2>::T::COUNT == {one});"
        f"static_assert(CodeScorer<1>::T::COUNT == {row} && CodeScorer<2>::ONE && !CodeScorer<1>::ONE);"
    )
    monkeypatch.setattr(compiler, "source", lambda _: text)
    compiler.compile_program(program, "sm_80")
    text += "static_assert(PAIRS == 2);"
    with pytest.raises(compiler.KernelCompileError):
        compiler.compile_program(program, "sm_80")


def test_programs_are_told_apart_by_the_formats() -> None:
    programs_ = score.PROGRAMS.values()
    assert len({p.name for p in programs_}) == len({(p.defines, p.sources) for p in programs_}) == 10
    for q, k, name in (
        (torch.bfloat16, torch.bfloat16, "bf16"), (torch.float16, torch.bfloat16, "bf16-fp16q"),
        (FP8, torch.bfloat16, "bf16"), (torch.bfloat16, torch.float16, "fp16"), (torch.float16, torch.float16, "fp16"),
        (torch.bfloat16, FP8, "fp8"), (FP8, FP8, "fp8"), (torch.uint8, torch.uint8, "nvfp4"),
    ):  # fmt: skip
        assert score.operands_of(q, k) == name
        assert [score.PROGRAMS[name, rows].name for rows in (False, True)] == [f"score-{name}", f"score-{name}-row"]


# --- the parameter block ---


def test_every_value_lies_where_the_kernel_reads_it() -> None:
    fields, size = c_layout(SOURCE, "ScoreParams")
    assert score._PARAMS.size == size == c_size(SOURCE, "ScoreParams")[0]
    flat = []
    for _, offset, length in fields:
        flat += [(offset + i, 4) for i in (0, 4, 8)] if length == 12 else [(offset, length)]
    assert packed_places(score._PARAMS) == flat


def read(block: bytes, *names: str) -> list[int | float]:
    """Values of a parameter block by their names; of a divisor the number."""
    found: list[int | float] = []
    fields = {field: (offset, length) for field, offset, length in c_layout(SOURCE, "ScoreParams")[0]}
    for name in names:
        at, length = fields[name]
        code = "f" if name in ("factor", "requests_per_worker") else "q" if length == 8 else "i"
        found.append(struct.unpack_from(code, block, at)[0])
    return found


def int32(n: int, step: int = 1) -> Tensor:
    return torch.zeros(n * step, dtype=torch.int32)[::step]


def test_values_lie_in_the_fields_of_their_names() -> None:
    q = torch.zeros(7, 9, 128, dtype=torch.float16)[:, 1:7]
    k = torch.zeros(5, 128, 3, 128, dtype=torch.bfloat16).transpose(1, 2)
    starts, lengths, offset, table = (
        int32(5, 2),
        int32(4, 3),
        int32(4, 5),
        torch.zeros(4, 24, dtype=torch.int32)[:, ::2],
    )
    output = torch.zeros(11, 7, 10)[:10].permute(2, 0, 1)[:6]
    p = ScoreProblem(q, k, starts, None, table, lengths, offset, True, False)
    plan = score.plan_for(p, 2, output, SMS, SHARED)
    block = score.pack(p, plan, output)
    expected = {
        "q": q.data_ptr(), "k": k.data_ptr(), "q_scale": 0, "k_scale": 0, "q_global": 0, "k_global": 0,
        "query_starts": starts.data_ptr(), "lengths": lengths.data_ptr(), "table": table.data_ptr(),
        "q_offset": offset.data_ptr(), "out": output.data_ptr(), "q_token": 9 * 256, "q_head": 256,
        "k_page": 3 * 128 * 256, "k_head": 256, "k_row": 3 * 256, "query_starts_step": 2, "lengths_step": 3,
        "table_row": 24, "table_column": 2, "q_offset_step": 5, "out_head": 1, "out_block": 70, "out_token": 10,
        "most_keys": 12 * 128, "batch": 4, "total_q": 7, "blocks": 10, "pages": 5, "table_width": 12, "kv_heads": 3,
        "group": 2, "query_type": 1, "q_offset_int": 0, "has_q_offset": 1, "causal": 1, "paged": 1, "reduce": 0,
        "workers": plan.workers, "tile_tokens": plan.tile_tokens, "tile_heads": plan.tile_heads,
        "head_tiles": plan.head_tiles, "grain": plan.grain, "fill_blocks": plan.fill_blocks,
        "fill_shift": plan.fill_shift, "fill_splits": plan.fill_splits, "keys_stay": plan.keys_stay, "factor": 1.0,
        "row_requests": 4, "row_step": score.row_slope(max(plan.parts, 1), plan.tilt)[0],
        "row_bend": score.row_slope(max(plan.parts, 1), plan.tilt)[1], "row_blocks": plan.row_blocks,
        "early": plan.early, "hinting": plan.hinting, "requests_per_worker": pytest.approx(4 / plan.workers),
    }  # fmt: skip
    assert list(expected.values()) == read(block, *expected)
    assert set(expected) == {field for field, _, _ in c_layout(SOURCE, "ScoreParams")[0]}

    flat = torch.zeros(300, 3, 64, dtype=torch.uint8)
    codes = torch.zeros(7, 6, 64, dtype=torch.uint8)
    scales = torch.zeros(1024, dtype=torch.uint8), torch.zeros(8192, dtype=torch.uint8)
    factor = torch.ones(1)
    p = ScoreProblem(codes, flat, starts, int32(5), None, None, -3, False, True, *scales, 0.25, None, factor)
    block = score.pack(p, score.plan_for(p, 2, output[:1], SMS, SHARED), output[:1])
    expected = {
        "q_scale": scales[0].data_ptr(), "k_scale": scales[1].data_ptr(), "q_global": 0, "k_global": factor.data_ptr(),
        "table": 0, "q_offset": 0, "q_token": 6 * 64, "q_head": 64, "k_page": 0, "k_head": 64, "k_row": 3 * 64,
        "lengths_step": 1, "most_keys": 300, "pages": 0, "table_width": 0, "query_type": 3, "q_offset_int": -3,
        "has_q_offset": 1, "causal": 0, "paged": 0, "reduce": 1, "factor": 0.25,
    }  # fmt: skip
    assert list(expected.values()) == read(block, *expected)
    p = ScoreProblem(codes, flat, starts, int32(5), None, None, None, False, True, *scales)
    block = score.pack(p, score.plan_for(p, 2, output[:1], SMS, SHARED), output[:1])
    assert read(block, "has_q_offset", "q_offset_int") == [0, 0]


def test_tokens_too_far_apart_are_refused() -> None:
    try:
        storage = torch.empty((1 << 31) + 128, dtype=torch.uint8)  # never touched
    except RuntimeError as error:
        pytest.skip(f"this machine does not even reserve 2 GiB: {error}")
    k, q = storage.view(FP8).as_strided((2, 1, 128), (1 << 31, 128, 1)), torch.zeros(1, 1, 128, dtype=FP8)
    p = ScoreProblem(q, k, int32(2), int32(2), None, None, None, True, False)
    output = torch.zeros(1, 1, 1)
    with pytest.raises(ValueError, match="k must have tokens less than 2 GiB apart, got a stride of 2147483648 bytes"):
        score.pack(p, score.plan_for(p, None, output, SMS, SHARED), output)


# --- the plan ---


def plan(**changes: Any) -> score.ScorePlan:
    shape: dict[str, Any] = {
        "total_q": 1, "batch": 1, "heads": 4, "kv_heads": 1, "blocks": 64, "key_blocks": 64, "seqlen_q": 1,
        "reduce_heads": False, "blocks_innermost": False, "paged": True, "operands": "bf16", "sms": SMS, "shared": SHARED,
    }  # fmt: skip
    return score.make_plan(**{**shape, **changes})


@pytest.mark.parametrize(
    "heads, kv_heads, seqlen_q, columns, tokens, per_group, head_tiles",
    [
        (4, 1, 1, 8, 2, 4, 1), (4, 1, 2, 8, 2, 4, 1), (4, 1, 3, 16, 4, 4, 1), (4, 1, 8, 32, 8, 4, 1),
        (4, 1, 9, 64, 16, 4, 1), (4, 1, 4000, 64, 16, 4, 1), (4, 4, 1, 8, 8, 1, 1), (5, 1, 1, 8, 1, 5, 1),
        (5, 1, 2, 16, 3, 5, 1), (64, 1, 1, 64, 1, 64, 1), (70, 1, 1, 64, 1, 64, 2), (130, 1, 3, 64, 1, 64, 3),
    ],
)  # fmt: skip
def test_tiles(
    heads: int, kv_heads: int, seqlen_q: int, columns: int, tokens: int, per_group: int, head_tiles: int
) -> None:
    p = plan(heads=heads, kv_heads=kv_heads, seqlen_q=seqlen_q, total_q=3 * seqlen_q, batch=3)
    assert (p.columns, p.tile_tokens, p.tile_heads, p.head_tiles) == (columns, tokens, per_group, head_tiles)
    row = kv_heads == head_tiles == 1 and seqlen_q <= tokens and columns < 64
    assert p.entry == (f"msa_score_one_{columns}" if row else f"msa_score_{columns}")
    assert p.keys_stay == (seqlen_q > tokens or head_tiles > 1)


@pytest.mark.parametrize("batch, tokens, workers", [(1, 9, 64), (16, 9, 384), (64, 9, 384), (3, 200, 351)])
def test_a_call_fills_the_gpu_once(batch: int, tokens: int, workers: int) -> None:
    """As many thread blocks as are resident at once, less those that fill; equal requests are not cut across borders."""
    p = plan(batch=batch, total_q=batch * tokens, seqlen_q=tokens, blocks=64, key_blocks=64)
    assert (p.kind, p.workers) == ("", workers)
    assert p.workers + p.fill_blocks <= SMS * score.OPERANDS["bf16"].stream[score.COLUMNS.index(p.columns)]


@given(
    st.integers(1, 5000), st.integers(0, 300), st.integers(1, 9), st.integers(1, 3),
    st.one_of(st.integers(1, 70_000), st.integers(1, 1 << 24)), st.one_of(st.integers(0, 70_000), st.integers(0, 1 << 24)),
    st.one_of(st.none(), st.integers(0, 6000)), st.booleans(), st.booleans(), st.integers(1, 200),
    st.sampled_from(sorted(score.OPERANDS)), st.booleans(), st.sampled_from([100, 164, 228]),
)  # fmt: skip
def test_any_plan_can_be_launched(
    total_q: int, batch: int, group: int, kv_heads: int, blocks: int, key_blocks: int, seqlen_q: int | None,
    reduce_heads: bool, innermost: bool, sms: int, operands: str, paged: bool, shared: int,
) -> None:  # fmt: skip
    p = plan(
        total_q=total_q, batch=batch, heads=group * kv_heads, kv_heads=kv_heads, blocks=blocks,
        key_blocks=min(key_blocks, blocks), seqlen_q=seqlen_q, reduce_heads=reduce_heads, blocks_innermost=innermost, sms=sms,
        operands=operands, paged=paged, shared=shared << 10,
    )  # fmt: skip
    assert p.tile_tokens * p.tile_heads <= p.columns and p.tile_heads * p.head_tiles >= group
    o = score.OPERANDS[operands]
    most = max(score._MOST_WAVES * sms * o.row[o.row_columns.index(p.columns)], batch) if p.kind else sms * 4
    assert 0 <= p.workers <= most and 1 <= p.fill_blocks <= sms
    assert (p.workers > 0) == (batch > 0 and key_blocks > 0)
    assert 1 << p.fill_shift <= 128 and p.fill_splits >= 1
    # What the kernel counts in 32 bits: the units of all requests together.
    apart = 1 if reduce_heads else kv_heads * p.head_tiles
    tiles = total_q // p.tile_tokens + batch
    assert tiles * apart * -(-min(key_blocks, blocks) >> p.grain) < 1 << 31
    if p.kind:
        assert p.parts * batch == p.workers and p.parts <= p.row_blocks == min(key_blocks, blocks)
        rounds = -(-p.row_blocks // o.at_once(p.kind, p.columns))
        assert p.parts <= rounds and (p.kind == "one" or p.parts * rounds <= score._ROUNDS_TIMES_PARTS)
        assert p.tilt == 0 or (p.kind == "row" and p.parts > 1)
    else:
        assert p.parts == 0 and p.workers**2 < 1 << 31


@pytest.mark.parametrize("operands", score.OPERANDS)
def test_where_each_block_of_keys_has_a_thread_block(operands: str) -> None:
    """Up to one and a half times as many as fit at once; beyond that a row's thread blocks share it."""
    o = score.OPERANDS[operands]
    most = 3 * (SMS * o.one[0] - 1) // 2 * o.together

    def kind(blocks: int, **changes: Any) -> tuple[str, int]:
        p = plan(**{"blocks": blocks, "key_blocks": blocks, "operands": operands, "blocks_innermost": True, **changes})
        return p.kind, p.parts

    assert len(o.one) == len(o.row) == len(o.row_columns) and len(o.stream) == len(score.COLUMNS)
    assert kind(64) == ("one", 64 // o.together)
    assert kind(1) == ("one", 1)
    assert kind(most // 16, batch=16, total_q=16)[0] == "one"
    assert kind(most // 16 + 16, batch=16, total_q=16)[0] == "row"
    assert kind(8, batch=64, total_q=128, seqlen_q=2) == ("one", 8 // o.together)
    assert kind(64, seqlen_q=None)[0] == "one"
    for changes in (
        {"total_q": 40, "batch": 2, "seqlen_q": 20}, {"heads": 8, "kv_heads": 2}, {"heads": 70}, {"batch": 0},
        {"heads": 8, "kv_heads": 2, "reduce_heads": True}, {"key_blocks": 0}, {"heads": 64},
        {"total_q": 4, "batch": 4, "seqlen_q": None},  # one request may have all tokens
    ):  # fmt: skip
        assert kind(4, **changes) == ("", 0), changes
    assert plan(heads=32, operands="bf16-fp16q").kind == "" and plan(heads=32).kind == "one"


def test_thread_blocks_that_settle_early_what_to_begin_with_and_ask_l2_for_it() -> None:
    """Three a multiprocessor settle it; where codes are multiplied, all that fit. All ask, up to two a multiprocessor, each
    with blocks of keys of its own; else one."""
    for changes, early, hinting in (
        ({}, 64, 64), ({"blocks": 2 * SMS, "key_blocks": 2 * SMS}, 2 * SMS, 2 * SMS),
        ({"blocks": 300, "key_blocks": 300}, 300, SMS), ({"blocks": 400, "key_blocks": 400}, 3 * SMS, SMS),
        ({"operands": "fp8", "batch": 8, "total_q": 8}, 3 * SMS, SMS),
        ({"operands": "nvfp4", "batch": 8, "total_q": 8}, 256, 256),
        ({"operands": "nvfp4", "batch": 16, "total_q": 16}, 512, SMS),
        ({"operands": "nvfp4", "batch": 24, "total_q": 24}, 4 * SMS, SMS),
        ({"operands": "nvfp4", "batch": 24, "total_q": 24, "shared": 130 << 10}, 4 * SMS, SMS),
        ({"operands": "nvfp4", "batch": 64, "total_q": 64, "shared": 130 << 10}, 3 * SMS, SMS),
        ({"blocks": 8192, "key_blocks": 8192}, 3 * SMS, SMS),
        ({"heads": 8, "kv_heads": 2}, 0, 0),
    ):  # fmt: skip
        p = plan(**changes)
        assert (p.early, p.hinting) == (early, hinting), changes


def test_codes_are_multiplied_for_up_to_four_token_head_pairs_of_a_paged_cache() -> None:
    """Where thread blocks share rows a warp has a block of keys."""
    long = {"operands": "nvfp4", "batch": 64, "total_q": 64, "blocks": 8192, "key_blocks": 8192}
    for changes, columns in (
        ({}, 4), ({"heads": 1, "seqlen_q": 4, "total_q": 256}, 4), ({"heads": 3}, 4), ({"heads": 5}, 8),
        ({"seqlen_q": 2, "total_q": 128}, 8), ({"paged": False}, 8), ({"operands": "fp8"}, 8), ({"reduce_heads": True}, 4),
    ):  # fmt: skip
        p = plan(**{**long, **changes})
        assert (p.kind, p.columns, p.early) == ("row", columns, (4 if columns == 4 else 3) * SMS), changes
        assert p.tile_tokens == columns // changes.get("heads", 4) and p.tile_heads == changes.get("heads", 4)
    o = score.OPERANDS["nvfp4"]
    assert [o.at_once(kind, n) for kind in ("one", "row") for n in (4, 8)] == [2, 2, 4, 2]
    assert plan(operands="nvfp4").entry == "msa_score_one_4" and plan(operands="nvfp4").parts == 32
    assert plan(operands="nvfp4", heads=8, kv_heads=2).entry == "msa_score_8"  # not a row of blocks for each request


def test_bytes_that_codes_choose_add_up_to_twice_their_values() -> None:
    """By the definition of a byte permutation: the low three bits of a place's selector choose one of eight bytes, and with the
    fourth the result is that byte's sign bit, eight times."""
    source = compiler.source(score.PROGRAMS["nvfp4", True].sources)

    def table(name: str) -> bytes:
        low, high = re.findall(rf"Bytes {name} = {{0x(\w+)u, 0x(\w+)u}};", source)[0]
        return int(low, 16).to_bytes(4, "little") + int(high, 16).to_bytes(4, "little")

    def chosen(data: bytes, code: int) -> int:
        byte = data[code & 7]
        byte = (0xFF if byte & 0x80 else 0) if code & 8 else byte
        return byte - 256 if byte & 0x80 else byte

    positive, negative = table("POSITIVE"), table("NEGATIVE")
    for code, value in enumerate(nvfp4_bytes.E2M1.tolist()):
        parts = chosen(positive, code), chosen(negative, code ^ 8)
        assert sum(parts) == 2 * value, code
    (bias,), (factor,) = re.findall(r" BIAS = (\d+)\.f", source), re.findall(r" CODE_FACTOR = ([\d.]+)f", source)
    (signs,) = re.findall(r" SIGNS = 0x(\w+)u", source)
    assert float(factor) == 1 / (2 * 2) and signs == "88888888"
    # No sum on the way takes the float past where its steps are 1.
    most = (
        16
        * int(2 * nvfp4_bytes.E2M1.max())
        * max(abs(chosen(x, code)) for x in (positive, negative) for code in range(8))
    )
    assert int(bias) - most >= 1 << 23 and int(bias) + most < 1 << 24


@given(
    rounds=st.one_of(st.integers(1, 300), st.integers(1, 1 << 24)), parts=st.integers(1, 1 << 13),
    tilt=st.sampled_from([0.0, score._TILT, 0.3, 1.0]),
)  # fmt: skip
def test_how_a_row_is_cut_into_parts(rounds: int, parts: int, tilt: float) -> None:
    """They are side by side, cover the row, and get smaller by as much as is asked for; the first is not empty."""
    parts = min(parts, score._ROUNDS_TIMES_PARTS // rounds)
    step, bend = score.row_slope(parts, tilt)
    assert 0 <= bend < step < 1 << 32
    # As `RowShare::part` of kernels/score_row.cu has it, in 32 bits.
    starts = [(2 * rounds * (n * (step - n * bend) & 0xFFFFFFFF) >> 32) + (n > 0) for n in range(parts + 1)]
    assert starts[0] == 0 and starts[-1] == rounds and starts[1] > 0
    sizes = [b - a for a, b in pairwise(starts)]
    assert min(sizes) >= 0
    for n, size in enumerate(sizes):
        wanted = rounds / parts * (1 + tilt * (parts - 1 - 2 * n) / parts)
        assert abs(size - wanted) < 1.01 + rounds * parts / 2**31  # rounded, also in the numbers of `row_slope`


def test_multiprocessors_with_little_shared_memory_keep_keys_in_registers() -> None:
    """bf16 keys on 8.6, 8.9 and 12.x, where two thread blocks would fit."""
    for operands, shared, kind in (
        ("bf16", 100 << 10, ""), ("bf16-fp16q", 100 << 10, ""), ("fp8", 100 << 10, "one"), ("nvfp4", 100 << 10, "one"),
        ("bf16", 164 << 10, "one"), ("fp8", 164 << 10, "one"), ("bf16", 228 << 10, "one"),
    ):  # fmt: skip
        assert plan(operands=operands, shared=shared).kind == kind, (operands, shared)
    # A thread block that multiplies codes for shared rows has four blocks of keys, of which two would fit.
    for shared, columns in ((100, 8), (164, 4), (228, 4)):
        for blocks, kind in ((64, "one"), (8192, "row")):
            p = plan(operands="nvfp4", blocks=blocks, key_blocks=blocks, shared=shared << 10)
            assert (p.kind, p.columns) == (kind, columns), shared


def test_fewer_thread_blocks_are_planned_with_where_registers_hold_fewer() -> None:
    for operands, there, elsewhere in (("fp8", 8, 5), ("bf16", 6, 4), ("nvfp4", 4, 2)):
        o = score.OPERANDS[operands]
        assert (o.one[0], o.held(o.one[0], True), o.held(o.one[0], False)) == (there, there, elsewhere)
        blocks = 3 * there * SMS // 2 * o.together  # as many as each has a thread block for
        long = {"blocks": blocks, "key_blocks": blocks, "operands": operands, "blocks_innermost": True}
        assert plan(**long).kind == "row" and plan(**{**long, "key_blocks": blocks - 2 * o.together}).kind == "one"
        assert plan(**{**long, "key_blocks": blocks - 2 * o.together}, counted=False).kind == "row"
    long = {"operands": "nvfp4", "batch": 64, "total_q": 64, "blocks": 8192, "key_blocks": 8192}
    assert plan(**long, counted=False).early == 2 * SMS  # all that fit: `held` of four
    assert [score.OPERANDS["nvfp4"].held(n, False) for n in score.OPERANDS["nvfp4"].one] == [2, 3, 2, 1]
    # Those that fill take places from them, but leave half.
    for heads, batch, held in ((16, 64, 2), (32, 64, 1), (16, 128, 2)):
        p = plan(
            heads=heads, batch=batch, total_q=batch, blocks=8192, key_blocks=8192, operands="nvfp4", counted=False, sms=148
        )  # fmt: skip
        assert p.kind == "row" and p.workers >= held * 148 // 2 - batch


@pytest.mark.parametrize(
    "operands, batch, context, parts",
    [
        ("fp8", 8, 32768, 128), ("fp8", 64, 8192, 32), ("fp8", 16, 32768, 128), ("fp8", 1, 1 << 20, 2048),
        ("fp8", 256, 8192, 16), ("fp8", 16, 131072, 256), ("bf16", 64, 8192, 32), ("bf16", 1, 1 << 20, 2731),
        ("bf16", 16, 131072, 171), ("nvfp4", 64, 8192, 8), ("nvfp4", 64, 131072, 32),
        ("nvfp4", 1, 1 << 20, 512), ("nvfp4", 1, 1 << 22, 512), ("nvfp4", 2, 1 << 20, 512),
        ("nvfp4", 1, 270336, 527), ("nvfp4", 1, 809600, 526), ("nvfp4", 16, 20480, 32), ("fp8", 1, 217600, 1055),
    ],
)  # fmt: skip
def test_parts_of_an_h200(operands: str, batch: int, context: int, parts: int) -> None:
    """Where they were measured, or as many as followed from there."""
    p = plan(
        batch=batch, total_q=batch, blocks=context // 128, key_blocks=context // 128, operands=operands,
        blocks_innermost=True,
    )  # fmt: skip
    assert (p.kind, p.parts) == ("row", parts)


@given(st.sampled_from(sorted(score.OPERANDS)), st.integers(1, 600), st.integers(1, 1 << 20), st.integers(1, 160))
def test_parts_of_a_row(operands: str, batch: int, blocks: int, sms: int) -> None:
    """Never more than there are blocks, nor (beyond one a request) than a few times what fits; none that is not needed for
    the longest part to be as short as it is, unless places would stay empty; and nearly all that fit have work, where there is
    enough."""
    o = score.OPERANDS[operands]
    p = plan(batch=batch, total_q=batch, blocks=blocks, key_blocks=blocks, operands=operands, sms=sms)
    single, fit = -(-blocks // o.at_once(p.kind, p.columns)), sms * o.row[0]
    assert 1 <= p.parts <= single
    if p.kind == "one":
        assert p.parts == single
    else:
        assert p.workers <= max(score._MOST_WAVES * fit, batch)
        longest, room = -(-single // p.parts), fit - min(p.fill_blocks, fit // 2)
        fewest = -(-single // longest)
        assert p.parts == fewest or (8 * batch * fewest < 7 * room and p.parts * batch <= room)
        assert p.parts == single or (longest - 1) * (room // batch) <= single


def test_work_past_32_bits_is_counted_in_larger_units() -> None:
    p = plan(total_q=1 << 20, batch=4, heads=64, kv_heads=4, blocks=1 << 20, key_blocks=1 << 20, seqlen_q=1 << 18)
    assert p.grain > 0
    assert ((1 << 20) // p.tile_tokens + 4) * 4 * p.head_tiles * -(-(1 << 20) >> p.grain) < 1 << 31
    assert plan().grain == 0


def test_scoring_asks_for_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory for the blocks that are to be resident, in whole per cent of the multiprocessor's, rounded up."""
    from types import SimpleNamespace

    asked = []
    attributes = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="static", CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT="share"
    )
    fake = SimpleNamespace(
        CUfunction_attribute=attributes,
        CUdevice_attribute=SimpleNamespace(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR="most"),
        cuKernelGetAttribute=lambda attribute, kernel, device: (0, {"static": 2656}[attribute]),
        cuDeviceGetAttribute=lambda attribute, device: (0, {"most": 233472}[attribute]),
        cuKernelSetAttribute=lambda *args: asked.append(args) or (0,),
    )
    monkeypatch.setattr(programs, "driver", lambda: fake)
    programs._prefer_shared("kernel", "device", 4)
    programs._prefer_shared("kernel", "device", 1000)
    programs._prefer_shared("kernel", "device", 0)
    assert asked == [("share", share, "kernel", "device") for share in (7, 100, 100)]
    for program in (*score.PROGRAMS.values(), topk.PROGRAM):
        assert len(program.resident) == len(program.entries)
    for (_, rows), program in score.PROGRAMS.items():
        assert all(n == 0 for n in program.resident) == rows
