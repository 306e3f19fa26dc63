"""The benchmark's options and their command line."""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..contract import BLOCK_SIZE
from .inputs import KV_KINDS
from .peers import PEERS
from .presets import BY_CONTEXT, PRESETS, TP_SIZES, Axes
from .sizes import numbers, parse_sizes, size, split_heads

_NVFP4 = tuple(kv for kv in KV_KINDS if kv.startswith("nvfp4"))
DEFAULT_CONTEXT = 32768
_LARGEST_TOPK = 2**24
_LARGEST_BATCH = 2**20
SMOKE_BATCHES = (1, 3)
SMOKE_HEADS = ("4/2", "4/1")
SMOKE_CONTEXTS = (512, 1024)
"""What --smoke takes where nothing is given."""


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
    versions: tuple[tuple[str, str], ...] = ()
    """Peers' versions as they were given, for those that say none themselves."""


def parse(argv: list[str] | None = None) -> Options:
    """Options of a command line; exits with a usage message on a bad one."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        return _options(given)
    except ValueError as error:
        parser.error(str(error))


def from_values(**values: Any) -> Options:
    """Options of values named as the command line's options; what is missing or `None` takes its default.

    Raises `ValueError` for a bad value and `TypeError` for a name that is no option.
    """
    given = _parser().parse_args([])
    for name, value in values.items():
        if not hasattr(given, name):
            raise TypeError(f"no option is called {name!r}")
        if value is not None:
            setattr(given, name, value)
    return _options(given)


def arguments_of(recorded: Mapping[str, Any]) -> list[str]:
    """The command line of a run, of the options that its report holds: `parse` makes the same options of it.

    The files that it wrote are not recorded.
    """
    return list(_arguments(recorded))


def command_of(recorded: Mapping[str, Any], json: str) -> str:
    """`arguments_of` as a line for a shell, of a run that writes the report to the file `json`."""
    return shlex.join(["python3", "benchmarks/decode.py", *arguments_of(recorded), "--json", json])


def _arguments(recorded: Mapping[str, Any]) -> Iterator[str]:
    axes, smoke = recorded["axes"], recorded["smoke"]
    for preset in recorded["presets"]:
        yield from ("--preset", preset)
    if tuple(axes["kvs"]) != KV_KINDS:
        yield from ("--kv", ",".join(axes["kvs"]))
    contexts = tuple(axes["contexts"] or (axes["context"],))
    lists = {
        "--batch": (axes["batches"], SMOKE_BATCHES), "--heads": (axes["heads"], SMOKE_HEADS),
        "--seqlen-q": (axes["seqlens_q"], None), "--tp": (axes["tps"], None),
    }  # fmt: skip
    for option, (values, of_smoke) in lists.items():
        if values and not (smoke and tuple(values) == of_smoke):
            yield from (option, ",".join(map(str, values)))
    if contexts != (SMOKE_CONTEXTS if smoke else (DEFAULT_CONTEXT,)) or (axes["contexts"] and not smoke):
        yield from ("--context", ",".join(map(size, contexts)))
    values = {
        "--topk": (axes["topk"], 16), "--device": (recorded["device"], "cuda"), "--seed": (recorded["seed"], 0),
        "--replays": (recorded["replays"], 3 if smoke else 11), "--calls": (recorded["calls"], 2 if smoke else None),
        "--workers": (recorded["workers"], 0 if smoke else 12), "--commit": (recorded["commit"], None),
    }  # fmt: skip
    for option, (value, default) in values.items():
        if value != default:
            yield from (option, str(value))
    if recorded["time_budget"] is not None:
        yield from ("--time-budget", f"{recorded['time_budget']:g}")
    yield from (
        name for name, on in (("--overlap", axes["overlap"]), ("--extra", axes["extra"]), ("--smoke", smoke)) if on
    )
    yield from ("--against", ",".join(recorded["peers"]) or "none")
    for name in dict.fromkeys(itertools.chain.from_iterable(recorded["sweep"])):
        chosen = list(dict.fromkeys(environment[name] or "" for environment in recorded["sweep"]))
        yield from ("--sweep", f"{name}={(';' if any(',' in value for value in chosen) else ',').join(chosen)}")
    for peer, version in recorded.get("versions", ()):
        yield from ("--peer-version", f"{peer}={version}")


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description="Measure msa_ops and published implementations of the same operation.")
    add = p.add_argument
    add("--preset", action="append", choices=PRESETS, help="repeatable; default: grid")
    add("--kv", help=f"comma-separated, of {', '.join(KV_KINDS)} and nvfp4 (both layouts); default: all")
    add("--batch", help="comma-separated; default: the preset's")
    add("--heads", help="comma-separated QUERY/KV pairs; default: the preset's")
    add("--seqlen-q", help="comma-separated; default: the preset's")
    add(
        "--context",
        help="keys per request, such as 32K; several for presets model and step; default: 32K (512 with --smoke)",
    )
    add("--tp", help="tensor-parallel sizes of preset model, comma-separated; default: 1,2,4,8")
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
    add(
        "--peer-version", action="append", metavar="PEER=VERSION",
        help="recorded for a peer that is importable and does not say its version",
    )  # fmt: skip
    return p


def _options(given: argparse.Namespace) -> Options:
    smoke = given.smoke
    _check_numbers(given)
    presets = tuple(dict.fromkeys(given.preset or ["grid"]))
    sweep = _sweep(given.sweep or [])
    against = given.against or ("none" if sweep else "flashinfer,vllm")
    peers = () if against == "none" else tuple(dict.fromkeys(against.split(",")))
    for peer in peers:
        if peer not in PEERS:
            raise ValueError(f"--against takes {', '.join(PEERS)} or none, got {peer!r}")
    replays = (3 if smoke else 11) if given.replays is None else given.replays
    calls = (2 if smoke else None) if given.calls is None else given.calls
    return Options(
        presets, _axes(given, presets), peers, sweep, given.device, smoke, replays, calls, given.time_budget,
        given.seed, 0 if smoke else given.workers, given.json, given.markdown, given.commit,
        _versions(given.peer_version or []),
    )  # fmt: skip


def _check_numbers(given: argparse.Namespace) -> None:
    least = {"replays": 1 if given.smoke else 7, "calls": 1, "topk": 1, "workers": 0}
    for name, bound in least.items():
        value = getattr(given, name)
        if value is not None and value < bound:
            reason = " for a median worth reading" if name == "replays" and not given.smoke else ""
            raise ValueError(f"--{name} must be at least {bound}{reason}, got {value}")
    if not -(2**63) <= given.seed < 2**64:
        raise ValueError(f"--seed must be from -2^63 to 2^64 - 1, got {given.seed}")
    if given.topk > _LARGEST_TOPK:
        raise ValueError(f"--topk must be at most {_LARGEST_TOPK}, got {given.topk}")
    if given.time_budget is not None and not given.time_budget > 0:
        raise ValueError(f"--time-budget must be more than 0 seconds, got {given.time_budget:g}")


def _axes(given: argparse.Namespace, presets: tuple[str, ...]) -> Axes:
    smoke = given.smoke
    heads = tuple(given.heads.split(",")) if given.heads else None
    for pair in heads or ():
        split_heads(pair)
    if (batches := numbers("--batch", given.batch)) and max(batches) > _LARGEST_BATCH:
        raise ValueError(f"--batch must be at most {_LARGEST_BATCH}, got {max(batches)}")
    contexts, tps = parse_sizes("--context", given.context), numbers("--tp", given.tp)
    if heads and presets == ("model",):
        raise ValueError("--heads is not for preset model, whose heads follow from --tp")
    if tps and "model" not in presets:
        raise ValueError("--tp is for preset model; the others take --heads")
    for tp in tps or ():
        if tp not in TP_SIZES:
            raise ValueError(f"--tp takes {', '.join(map(str, TP_SIZES))}, got {tp}")
    if contexts and len(contexts) > 1 and not set(presets) <= set(BY_CONTEXT):
        raise ValueError(
            f"--context takes one length, several for presets {' and '.join(BY_CONTEXT)} alone, got {given.context!r}"
        )
    if "step" in presets:
        _check_step(contexts, numbers("--seqlen-q", given.seqlen_q))
    return Axes(
        kvs=_kvs(given.kv),
        batches=batches or (SMOKE_BATCHES if smoke else None),
        heads=heads or (SMOKE_HEADS if smoke else None),
        seqlens_q=numbers("--seqlen-q", given.seqlen_q),
        context=contexts[0] if contexts else SMOKE_CONTEXTS[0] if smoke else DEFAULT_CONTEXT,
        topk=given.topk,
        overlap=given.overlap,
        extra=given.extra,
        contexts=contexts or (SMOKE_CONTEXTS if smoke else None),
        tps=tps,
    )


def _check_step(contexts: tuple[int, ...] | None, seqlens_q: tuple[int, ...] | None) -> None:
    """In preset step all tokens of a request see the same blocks, so that every side is given the same selection."""
    for context in contexts or ():
        if context % BLOCK_SIZE:
            raise ValueError(f"--context must be a multiple of {BLOCK_SIZE} in preset step, got {context}")
    if seqlens_q and max(seqlens_q) > BLOCK_SIZE:
        raise ValueError(f"--seqlen-q must be at most {BLOCK_SIZE} in preset step, got {max(seqlens_q)}")


def _versions(texts: list[str]) -> tuple[tuple[str, str], ...]:
    found = []
    for text in texts:
        name, equals, version = text.partition("=")
        if name not in PEERS or not (equals and version):
            raise ValueError(f"--peer-version takes PEER=VERSION with a peer of {', '.join(PEERS)}, got {text!r}")
        found.append((name, version))
    return tuple(found)


def _kvs(text: str | None) -> tuple[str, ...]:
    if text is None:
        return KV_KINDS
    kvs: list[str] = []
    for name in text.split(","):
        if name != "nvfp4" and name not in KV_KINDS:
            raise ValueError(f"--kv takes {', '.join(KV_KINDS)} or nvfp4, got {name!r}")
        kvs += _NVFP4 if name == "nvfp4" else (name,)
    return tuple(dict.fromkeys(kvs))


def _sweep(texts: list[str]) -> tuple[dict[str, str | None], ...]:
    axes = []
    for text in texts:
        name, equals, values = text.partition("=")
        if not (name and equals):
            raise ValueError(f"--sweep takes NAME=V1,V2,..., got {text!r}")
        axes.append([(name, value or None) for value in values.split(";" if ";" in values else ",")])
    return tuple(dict(chosen) for chosen in itertools.product(*axes)) if axes else ()
