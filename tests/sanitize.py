#!/usr/bin/env python3
"""Small calls of every route and variant, checked, for compute-sanitizer to run.

    PYTHONPATH=src compute-sanitizer --tool memcheck python3 tests/sanitize.py attention
    PYTHONPATH=src compute-sanitizer --tool racecheck --kernel-name kns=msa_ python3 tests/sanitize.py attention --every-lane

`steps` are those whose attention chooses its blocks itself.

Racecheck sees no `__syncwarp` where the compiler needs no instruction for it. With ``--every-lane`` kernels are built so that
every lane of a warp arrives at its barriers for itself, which changes nothing else.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

import msa_ops
from msa_ops.bench.exact import exact_output, relative_error
from msa_ops.bench.inputs import Shape, make_calls, make_pool
from msa_ops.bench.peers import ours
from msa_ops.contract import KVFormat
from msa_ops.engines.cuda import compile as compiler
from msa_ops.engines.cuda import plan, prepared, score
from test_choosing_gpu import assert_chosen, make

CONTEXT = 5 * 128 + 70  # few keys: racecheck follows every byte of every copy
TOLERANCE = 0.01


class Attention(NamedTuple):
    kv: str
    batch: int
    query_heads: int = 16
    kv_heads: int = 1
    seqlen_q: int = 1
    plan: str = ""
    combine: str = ""


def attention_calls() -> Iterator[Attention]:
    """With all formats of K and V."""
    for kv, tile in (("fp8", 128), ("bf16", 64), ("nvfp4-planar", 128), ("nvfp4-tiled", 128)):
        yield Attention(kv, 1, 20, 2)
        yield Attention(kv, 1, 40, 2, 2, f"1,4,{tile},3,2,4,0")
        for size in (2, 3):
            yield Attention(kv, 2, plan=f"2,4,{tile},5,1,{size},0")
        yield Attention(kv, 3, plan=f"2,4,{tile},5,1,1,2")
        yield Attention(kv, 3, plan=f"1,4,{tile},3,2,1,2")
        yield Attention(kv, 2, combine="scratch")
    yield Attention("bf16", 1, plan="1,4,128,2,1,16,0")
    for size in (6, 8):
        yield Attention("bf16", 2, plan=f"1,8,64,5,1,{size},0")
    for kv in ("nvfp4-planar", "nvfp4-tiled"):
        for variant in ("1,4,128,3,3", "1,4,128,2,4"):
            yield Attention(kv, 3, plan=f"{variant},1,0")


def run_attention(
    device: torch.device, generator: torch.Generator, formats: list[str] | None, first: int, last: int
) -> int:
    """The number of wrong results. `formats`: of K and V; None: all. Of their calls those from `first` to before `last`."""
    wrong = 0
    for given in [call for call in attention_calls() if not formats or call.kv in formats][first:last]:
        for name, value in (("MSA_OPS_PLAN", given.plan), ("MSA_OPS_COMBINE", given.combine)):
            os.environ.pop(name, None)
            if value:
                os.environ[name] = value
        plan.make_plan.cache_clear()
        prepared.forget()
        shape = Shape(given.kv, given.batch, given.query_heads, given.kv_heads, given.seqlen_q, context=CONTEXT)
        (call,) = make_calls(shape, make_pool(shape, 40, given.kv_heads, generator), 1, generator)
        ours().run(call)
        tokens = torch.arange(shape.tokens, device=device)[:4]
        error = relative_error(call.out[tokens], exact_output(call, tokens))
        wrong += not error < TOLERANCE
        print(*given, f"error {error:.4f}", flush=True)
    return wrong


def step_plans() -> Iterator[tuple[KVFormat, str]]:
    """One for each kernel that chooses: three items or more, by blocks that serve one each, or several in turn."""
    for kv in KVFormat:
        tile = 64 if kv in (KVFormat.BF16, KVFormat.FP16) else 128
        three = 2 if kv is KVFormat.NVFP4 else 3  # NVFP4 in clusters of three chooses among short rows alone
        forced = [f"1,4,{tile},3,2,1,5", f"1,4,{tile},3,2,2,0", f"2,4,{tile},5,1,1,5", f"2,4,{tile},5,1,{three},0"]
        if tile == 64:
            forced += ["1,4,128,2,1,2,0", "1,8,64,5,1,4,0"]
        if kv is KVFormat.NVFP4:
            forced += ["1,4,128,3,3,1,0", "1,4,128,2,4,1,5"]
        yield from ((kv, plan_) for plan_ in forced)


def run_steps(formats: list[str] | None, first: int, last: int) -> int:
    """0: a wrong step raises. For the arguments see `run_attention`."""
    wanted = [(kv, x) for kv, x in step_plans() if not formats or any(name.startswith(kv.value) for name in formats)]
    if not wanted[first:last]:
        raise SystemExit("no such call")
    for kv, forced in wanted[first:last]:
        os.environ["MSA_OPS_PLAN"] = forced
        plan.make_plan.cache_clear()
        for pages in plan.CHOICES:
            a = make(kv, 3, pages - 7)
            assert_chosen(a, True, topk=3, sink_blocks=1)
        a["index_k"].fill_(1.0)  # all scores equal
        assert_chosen(a, True, topk=3)
        print(kv.value, forced, flush=True)
    return 0


def run_selection(device: torch.device, generator: torch.Generator) -> int:
    """The number of wrong selections, and of scores that depend on what stood where a selection writes their lengths."""

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    wrong = 0
    chosen, slope = score._row_parts, score.row_slope

    def three(*_: object) -> tuple[str, int]:
        return "row", 3

    # As planned, in three even parts, and in three that get smaller, as those of more thread blocks than fit at once do.
    for way, cut in ((chosen, slope), (three, slope), (three, lambda parts, _: slope(parts, score._TILT))):
        score._row_parts, score.row_slope = way, cut
        score.make_plan.cache_clear()
        for lengths, seqlen_q in (((2000,), 1), ((1000, 5, 0, 2048), 1), ((300, 2048), 5)):
            batch = len(lengths)
            q = torch.randn((batch * seqlen_q, 4, 128), device=device, generator=generator).bfloat16()
            k = torch.randn((70, 1, 128, 128), device=device, generator=generator).bfloat16()
            k8 = k.to(torch.float8_e4m3fn)
            (q4, q_scale), (k4, k_scale) = (msa_ops.nvfp4_quantize(x, 448.0) for x in (q, k))
            starts, given = integers(*range(0, (batch + 1) * seqlen_q, seqlen_q)), integers(*lengths)
            options = {
                "page_table": torch.randint(70, (batch, 16), dtype=torch.int32, device=device, generator=generator),
                "seqused_k": given.clone(), "max_seqlen_q": seqlen_q, "max_k_tiles": 16,
            }  # fmt: skip
            ones = torch.full((1, 2049, batch), -1.0, device=device)  # of which a selection makes the lengths
            ones[0, given.long(), torch.arange(batch, device=device)] = 1.0
            for scores in (
                partial(msa_ops.msa_proxy_score, q, k, starts, **options),
                partial(msa_ops.msa_proxy_score, q, k8, starts, **options),
                partial(msa_ops.msa_proxy_score_fp4, q4, k4, q_scale, k_scale, 1 / 448, 1 / 448, starts, **options),
            ):
                for reduced in (False, True):
                    want = scores(reduce_heads=reduced)
                    for stale in (0, 2**31 - 1):
                        options["seqused_k"].fill_(stale)
                        msa_ops.msa_topk_select(ones, 1, output=options["seqused_k"].view(batch, 1, 1))
                        wrong += not torch.equal(scores(reduce_heads=reduced), want)
    score._row_parts, score.row_slope = chosen, slope
    score.make_plan.cache_clear()
    for blocks in (40, 64, 200, 256, 1000, 5000, 20000):
        for tokens in (1, 9):
            scores = torch.randn((4, blocks, tokens), device=device, generator=generator)
            scores[0, :, 0], scores[1, ::3] = 1.0, -torch.inf
            for topk in (1, 16, 40):
                ids = msa_ops.msa_topk_select(scores, topk, force_end_blocks=1)
                wrong += not torch.equal(ids.cpu(), msa_ops.msa_topk_select(scores.cpu(), topk, force_end_blocks=1))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("attention", "selection", "steps"))
    parser.add_argument("--every-lane", action="store_true", help="for racecheck: see above")
    formats = sorted({call.kv for call in attention_calls()})
    parser.add_argument(
        "--kv", action="append", choices=formats, help="attention and steps: this format alone; may be repeated"
    )
    parser.add_argument("--first", type=int, default=0, help="leave out so many of these calls")
    parser.add_argument("--last", type=int, default=1000, help="end before this one of them")
    given = parser.parse_args()
    if given.every_lane:
        source = compiler.source
        compiler.source = lambda files: f"#define EVERY_LANE_ARRIVES\n{source(files)}"
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU, and torch sees none here")
    device = torch.device("cuda", torch.cuda.current_device())
    if given.what == "steps" and torch.cuda.get_device_capability() != (9, 0):
        parser.error("no attention chooses but on compute capability 9.0")
    generator = torch.Generator(device).manual_seed(3)
    attention = given.what == "attention"
    if attention:
        wrong = run_attention(device, generator, given.kv, given.first, given.last)
    else:
        wrong = (
            run_steps(given.kv, given.first, given.last) if given.what == "steps" else run_selection(device, generator)
        )
    torch.cuda.synchronize()
    print(f"done, {wrong} wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    raise SystemExit(main())
