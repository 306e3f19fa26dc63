"""The benchmark's options and their command line."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass

from .inputs import KV_KINDS
from .peers import PEERS
from .presets import PRESETS, Axes, split_heads

_NVFP4 = tuple(kv for kv in KV_KINDS if kv.startswith("nvfp4"))


@dataclass(frozen=True)
class Options:
    """One run. Every field can be given on the command line; `sweep` holds the environments to compare."""

    presets: tuple[str, ...]
    axes: Axes
    peers: tuple[str, ...]
    sweep: tuple[dict[str, str | None], ...] = ()
    device: str = "cuda"
    smoke: bool = False
    replays: int = 11
    calls: int | None = None
    time_budget: float | None = None
    seed: int = 0
    workers: int = 12
    json: str | None = None
    markdown: str | None = None
    commit: str | None = None


def parse(argv: list[str] | None = None) -> Options:
    """Options of a command line; exits with a usage message on a bad one."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        return _options(given)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description="Measure msa_ops and published implementations of the same operation.")
    add = p.add_argument
    add("--preset", action="append", choices=PRESETS, help="repeatable; default: grid")
    add("--kv", help=f"comma-separated, of {', '.join(KV_KINDS)} and nvfp4 (both layouts); default: all")
    add("--batch", help="comma-separated; default: the preset's")
    add("--heads", help="comma-separated QUERY/KV pairs; default: the preset's")
    add("--seqlen-q", help="comma-separated; default: the preset's")
    add("--context", type=int, help="keys per request; default: 32768 (512 with --smoke)")
    add("--topk", type=int, default=16)
    add("--overlap", action="store_true", help="tokens of a request share 12 to 15 of 16 blocks (always so in spec)")
    add("--extra", action="store_true", help="more heads and query lengths, outside the goals")
    add("--against", help=f"comma-separated, of {', '.join(PEERS)}; or none; default: flashinfer,vllm; none in a sweep")
    add(
        "--sweep",
        action="append",
        metavar="NAME=V1,V2",
        help="measure under each value of an environment variable, in alternation; separate values that hold commas by "
        "semicolons; an empty value unsets the variable; several sweeps give all combinations",
    )
    add("--device", default="cuda")
    add("--smoke", action="store_true", help="tiny shapes: does everything work?")
    add("--replays", type=int, help="timed graph replays, at least 7 unless --smoke; default: 11 (3 with --smoke)")
    add("--calls", type=int, help="calls in one graph; default: by size, 6 to 24")
    add("--time-budget", type=float, metavar="SECONDS", help="stop cleanly before this, and say what was not measured")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=12, help="processes that compile all sides' kernels beforehand; 0: none")
    add("--json", metavar="FILE")
    add("--markdown", metavar="FILE")
    add("--commit", help="recorded in the JSON where the source is no git checkout")
    return p


def _options(given: argparse.Namespace) -> Options:
    smoke = given.smoke
    replays = given.replays or (3 if smoke else 11)
    if replays < 7 and not smoke:
        raise ValueError(f"--replays must be at least 7 for a median worth reading, got {replays}")
    sweep = _sweep(given.sweep or [])
    against = given.against or ("none" if sweep else "flashinfer,vllm")
    peers = () if against == "none" else tuple(against.split(","))
    for peer in peers:
        if peer not in PEERS:
            raise ValueError(f"--against takes {', '.join(PEERS)} or none, got {peer!r}")
    heads = tuple(given.heads.split(",")) if given.heads else (("4/2", "4/1") if smoke else None)
    for pair in heads or ():
        split_heads(pair)
    axes = Axes(
        _kvs(given.kv),
        _numbers("--batch", given.batch) or ((1, 3) if smoke else None),
        heads,
        _numbers("--seqlen-q", given.seqlen_q),
        given.context or (512 if smoke else 32768),
        given.topk,
        given.overlap,
        given.extra,
    )
    return Options(
        tuple(dict.fromkeys(given.preset or ["grid"])), axes, peers, sweep, given.device, smoke, replays,
        given.calls or (2 if smoke else None), given.time_budget, given.seed, 0 if smoke else given.workers, given.json,
        given.markdown, given.commit,
    )  # fmt: skip


def _kvs(text: str | None) -> tuple[str, ...]:
    if text is None:
        return KV_KINDS
    kvs: list[str] = []
    for name in text.split(","):
        if name != "nvfp4" and name not in KV_KINDS:
            raise ValueError(f"--kv takes {', '.join(KV_KINDS)} or nvfp4, got {name!r}")
        kvs += _NVFP4 if name == "nvfp4" else (name,)
    return tuple(dict.fromkeys(kvs))


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if not all(part.isdigit() and int(part) > 0 for part in text.split(",")):
        raise ValueError(f"{option} takes positive numbers separated by commas, got {text!r}")
    return tuple(int(part) for part in text.split(","))


def _sweep(texts: list[str]) -> tuple[dict[str, str | None], ...]:
    axes = []
    for text in texts:
        name, equals, values = text.partition("=")
        if not (name and equals):
            raise ValueError(f"--sweep takes NAME=V1,V2,..., got {text!r}")
        axes.append([(name, value or None) for value in values.split(";" if ";" in values else ",")])
    return tuple(dict(chosen) for chosen in itertools.product(*axes)) if axes else ()
