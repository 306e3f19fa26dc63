#!/usr/bin/env python3
"""Write what README.md and docs/ say about measurements and support anew, from the results and from the code.

    make figures                        # or: PYTHONPATH=src python3 benchmarks/figures.py
    python3 benchmarks/figures.py --check

In a page, what stands between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->`` is the text that `BLOCKS[NAME]`
returns. Sources: the JSON files of benchmarks/results/, and the tables of the code. Runs of the benchmark on the H200 are
`RUNS`; every block says which of them its figures are from. The pictures of ``docs/images/h200-*.png`` and the table that
``msa-ops explain`` reads are written too. ``--check`` writes nothing and exits with 1 where a page is not what this would
write; the tests do the same.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from msa_ops.bench import goals, records
from msa_ops.bench.cpu import MEMORY_BAR_MIB
from msa_ops.bench.options import command_of
from msa_ops.bench.peers import UNKNOWN
from msa_ops.bench.report import (
    host_words,
    is_finished,
    summary_lines,
    table,
    trouble_lines,
)
from msa_ops.bench.sizes import size
from msa_ops.contract import _KV_FORMATS_OF_Q, _OUT_DTYPE, KVFormat
from msa_ops.engines.cuda.plan import SHARED_PER_BLOCK

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
EXPLAIN_TABLE = ROOT / "src" / "msa_ops" / "cli" / "data" / "h200.json"
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
NAMES = {KVFormat.BF16: "bf16", KVFormat.FP16: "fp16", KVFormat.FP8: "fp8", KVFormat.NVFP4: "NVFP4"}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}
PRESETS = {
    "grid": "The grid",
    "ragged": "Requests of differing lengths",
    "spec": "Speculative decoding",
    "step": "A decode step with its indexer",
    "model": "MiniMax-M3's sparse layers",
}


MAIN = "h200.json"
RUNS = (MAIN, "h200-step.json")
"""Runs of the benchmark on one machine. The first has the grid; the others may be missing, and have other presets."""
CPU_ACCURACY = "accuracy-cpu.json"


def h200() -> dict[str, Any]:
    return runs()[MAIN]


def runs() -> dict[str, dict[str, Any]]:
    """The runs by their files. Raises `ValueError` for one that is not finished, or a preset that two of them have."""
    found = {name: records.load(RESULTS / name) for name in RUNS if name == MAIN or (RESULTS / name).exists()}
    owners: dict[str, str] = {}
    for name, r in found.items():
        if not is_finished(r):
            raise ValueError(f"{name} was saved while its run went on: figures are made of finished runs")
        for preset in dict.fromkeys(row["preset"] for row in r["rows"]):
            if owners.setdefault(preset, name) != name:
                raise ValueError(f"preset {preset} is in both {owners[preset]} and {name}: leave it in one of them")
    return found


def run_of(preset: str) -> str:
    """The file of the run that has a preset's rows; the first where none has."""
    return next((name for name, r in runs().items() if any(row["preset"] == preset for row in r["rows"])), MAIN)


def _when(r: dict[str, Any]) -> str:
    """``2026-11-30 01:47 UTC``."""
    return f"{r['time'][:10]} {r['time'][11:16]} UTC" if r.get("time") else "time not recorded"


def _from(*names: str, link: str = "#the-runs") -> str:
    """Which runs figures are from: file, time, commit and ceiling. `link` leads to their commands."""
    words = []
    for name in names:
        r = runs()[name]
        ceiling = f"read ceiling {r['read_ceiling_bytes_per_s'] / 1e12:.3f} TB/s"
        words.append(f"`{name}` ({_when(r)}, commit {r['commit']}, {ceiling})")
    return f"From {' and '.join(words)}; [machine and command]({link})."


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


# --- what is supported ---


def devices() -> str:
    """The device table."""
    kv = ", ".join(NAMES[f] for f in KVFormat)
    others = ", ".join(f"{a}.{b}" for a, b in SHARED_PER_BLOCK if (a, b) != (9, 0))
    return _table(
        ("device", "KV dtypes", "layouts", "features", "tested"),
        [
            ("CPU", kv, "all below", "all below; `force_fused`, `partial_dtype` and `workspace` have no effect",
             "`make test`"),
            ("NVIDIA GPU, compute capability 9.0", kv, "all below", "all below; CUDA graphs",
             f"on an {h200()['card'].removeprefix('NVIDIA ')} ([what ran](docs/kernel-notes.md#state-of-verification))"),
            (f"NVIDIA GPU, compute capability {others}", kv, "as for 9.0", "as for 9.0",
             "kernels compiled for each, not run"),
        ],
    )  # fmt: skip


def dtypes() -> str:
    """The matrix of query and KV dtypes."""
    rows = []
    for q, allowed in _KV_FORMATS_OF_Q.items():
        cells = ["CPU, GPU" if f in allowed else "no" for f in KVFormat]
        rows.append((DTYPES[q], *cells, DTYPES[_OUT_DTYPE[q]]))
    return _table(("q", *(f"{NAMES[f]} KV" for f in KVFormat), "output"), rows)


# --- the run ---


def _version(report: dict[str, Any], side: str) -> str:
    version = report["sides"][side]
    return f"{side} (version not recorded)" if version == UNKNOWN else f"{side} {version}"


def _peers(r: dict[str, Any]) -> str:
    return " and ".join(_version(r, name) for name in r["sides"] if not name.startswith("ours")) or "nothing else"


def machine() -> str:
    """Where, with what and when, a paragraph for each run."""
    return "\n".join(_machine(name, r) for name, r in runs().items())


def _machine(name: str, r: dict[str, Any]) -> str:
    given = [peer for peer, _ in r["options"].get("versions", ())]
    by_hand = f" (the version of {' and '.join(given)} was given by hand)" if given else ""
    presets = ", ".join(f"`{preset}`" for preset in r["options"]["presets"])
    ceiling = f"{r['read_ceiling_bytes_per_s'] / 1e12:.3f} TB/s ({r['read_ceiling_method']})"
    bars = f"{r['goal_ceiling_bytes_per_s'] / 1e12:.2f} TB/s"
    sentences = (
        f"[`{name}`](../benchmarks/results/{name}): presets {presets}, on {_when(r)}, in {r['seconds']:.0f} s.",
        f"One {r['card']}, driver {r['driver']}, CUDA {r['cuda']}, torch {r['torch']}, triton {r['triton']}; msa_ops at commit",
        f"{r['commit']}, against {_peers(r)}{by_hand}.",
        f"The card read {ceiling}, which `floor` counts with; bars count with {bars}.",
        f"An empty node of a CUDA graph took {r['empty_graph_node_us']} us.",
    )
    return _wrap(" ".join(sentences))


def commands() -> str:
    """The commands of the runs, as their reports hold them, and of the one on the CPU that has errors alone."""
    found = {**runs(), CPU_ACCURACY: records.load(RESULTS / CPU_ACCURACY)}
    lines = [command_of(r["options"], f"benchmarks/results/{name}") for name, r in found.items()]
    return "```sh\n" + "\n".join(lines) + "\n```\n"


def headline() -> str:
    """The table and the sentences of the README."""
    r = h200()
    rows = []
    for name, p in r["summary"]["peers"].items():
        kv, _, peer = name.partition(" ")
        figures = (f"{p['geomean']:.2f}", f"{p['min']:.2f} to {p['max']:.2f}", f"{p['losing']} of {p['shapes']}")
        rows.append((kv, _version(r, peer), *figures))
    heading = ("KV", "against", "their time / ours, geometric mean", "range", "shapes at which we lose")
    shapes = max(s["shapes"] for s in r["summary"]["speed"].values())
    method = (
        f"One {r['card']}; {shapes} shapes a KV dtype: batches 1 to 256, 64/4 and 16/1 heads, 1 and 4 tokens a request, top-k "
        f"16 of 32K keys; CUDA graphs of distinct calls with a cold L2 cache, all sides checked against float64 first. "
        f"{_from(MAIN, link='docs/benchmarks.md#the-runs')}"
    )
    troubles = [f"{line}." for run in runs().values() for line in trouble_lines(run)]
    items = [_shares(r), _bars(r), *_nvfp4(r), *_step(), *troubles, _eager(r)]
    return "\n".join([_table(heading, rows), _wrap(method), "".join(_wrap(item, "- ") for item in items)])


def _shares(r: dict[str, Any]) -> str:
    """The share of the ceiling at the batches of the headline."""
    found = []
    for kv in r["summary"]["speed"]:
        rows = [
            row
            for row in r["rows"]
            if (row["preset"], row["kv"], row["heads"], row["seqlen_q"]) == ("grid", kv, "64/4", 1)
        ]
        shares = {row["batch"]: 100 * row["floor_us"] / mine for row in rows if (mine := records.ours_of(row))}
        words = [f"{shares[b]:.0f}% at batch {b}" for b in (1, 16, 128) if b in shares]
        found.append(f"{kv} {', '.join(words)}")
    ceiling = f"{r['read_ceiling_bytes_per_s'] / 1e12:.2f} TB/s, as measured in this run"
    return f"Share of the card's read ceiling ({ceiling}) at 64/4 heads and one token: {'; '.join(found)}."


def _bars(r: dict[str, Any]) -> str:
    held = [f"{kv} at {s['must']} of {s['timed']} shapes" for kv, s in r["summary"]["speed"].items()]
    ceiling = f"{r['goal_ceiling_bytes_per_s'] / 1e12:.2f} TB/s"
    bar = f"the bytes over 0.95 (NVFP4: 0.88) of {ceiling}, plus {goals.MUST_OVERHEAD_US} us"
    return f"This project's own bar, {bar}, is held with {', '.join(held)}."


def _eager(r: dict[str, Any]) -> str:
    eager = r["host"].get("eager", {})
    if not eager:
        return "Host time was not measured."
    kv, sides = next(iter(eager.items()))
    words = [f"{name} {s['host_us']['median']:.0f} us" for name, s in sides.items() if s["status"] == "ok"]
    return f"Host time of one eager call ({kv}): {', '.join(words)}."


def _nvfp4(r: dict[str, Any]) -> list[str]:
    ratios = [x["ratio"] for x in r["summary"]["nvfp4_over_bf16"]]
    if not ratios:
        return []
    spread = f"{min(ratios):.2f} to {max(ratios):.2f} times as fast as our bf16"
    return [
        f"NVFP4 is {spread} from {goals.NVFP4_FROM_ITEMS} (token, KV head) items on (wanted: {goals.NVFP4_OVER_BF16})."
    ]


def _step() -> list[str]:
    words, file = [], run_of("step")
    r = runs()[file]
    for name, p in r["summary"].get("step", {}).items():
        if "ours" not in name:
            losing = f", losing at {p['losing']} of {p['shapes']}" if p["losing"] else ""
            words.append(f"{name} {p['geomean']:.2f} ({p['min']:.2f} to {p['max']:.2f}{losing})")
    where = f"`{file}`, {_when(r)}, commit {r['commit']}"
    return [f"A whole step with its indexer ({where}), their time / ours: {'; '.join(words)}."] if words else []


def verdicts() -> str:
    """Each run's own verdicts, as a list."""
    text = []
    for name, r in runs().items():
        lines = [f"- {line}\n" for line in summary_lines(r)]
        lines += [f"- {peer} was not measured: {reason}\n" for peer, reason in r["absent"].items()]
        lines += [f"- not measured: {left}\n" for left in r["not_measured"]]
        text.append(f"{_wrap(_from(name))}\n{''.join(lines)}")
    return "\n".join(text)


def tables() -> str:
    """Every row of every preset of every run, losing ones included."""
    text = []
    for name, r in runs().items():
        for preset in dict.fromkeys(row["preset"] for row in r["rows"]):
            lines = table([row for row in r["rows"] if row["preset"] == preset])
            picture = f"![{PRESETS[preset]}: time over the context](images/h200-{preset}.png)"
            shown = [picture, ""] if preset in BY_CONTEXT else []
            text.append("\n".join([f"### {PRESETS[preset]}", "", _wrap(_from(name)), *shown, *lines, ""]))
    return "\n".join(text)


BY_CONTEXT = ("step", "model")


def host() -> str:
    """Host costs of the run."""
    name = next((n for n, r in runs().items() if r["host"]), MAIN)
    measured = runs()[name]["host"]
    rows = [
        (f"eager call, {kv}", name, host_words(side))
        for kv, s in measured.get("eager", {}).items()
        for name, side in s.items()
    ]
    if found := measured.get("import"):
        rows.append(("import, beyond torch's own", "ours", _words(found, median_ms="median {} ms")))
    if found := measured.get("first_call"):
        words = _words(found, cold_ms="{} ms with an empty kernel cache", warm_ms="{} ms with a filled one")
        rows.append(("first call of a process", "ours", words))
    if not rows:
        return "Not measured in these runs.\n"
    return _wrap(_from(name)) + "\n" + _table(("what", "side", "host time"), rows)


def eager() -> str:
    """The host time of one eager call of ours, by KV dtype, as a paragraph."""
    r = h200()
    ours = {kv: s["ours"] for kv, s in r["host"].get("eager", {}).items() if s["ours"]["status"] == "ok"}
    if not ours:
        return "Its host time has not been recorded yet.\n"
    times = [side["host_us"]["median"] for side in ours.values()]
    spread = f"{min(times):.1f} to {max(times):.1f} us of host time, by KV dtype ({', '.join(ours)})"
    return _wrap(
        f"With `out=` given, such a call takes {spread}, on the host of one {r['card'].removeprefix('NVIDIA ')}. "
        f"{_from(MAIN, link='benchmarks.md#the-runs')}"
    )


def _words(found: dict[str, Any], **formats: str) -> str:
    if "reason" in found:
        return f"{found['status']}: {found['reason']}"
    return ", ".join(text.format(found[name]) for name, text in formats.items())


def accuracy() -> str:
    """The largest errors of each side and KV dtype over the batches of each run, and what was not ok."""
    rows, notes, sources = [], {}, []
    files = [("CPU", CPU_ACCURACY, records.load(RESULTS / CPU_ACCURACY)), ("H200", MAIN, h200())]
    for where, file, report in files:
        context = size(report["options"]["axes"]["context"])
        sources.append(f"{where}: `{file}`, {_when(report)}, commit {report['commit']}")
        groups: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
        for r in report["accuracy"]:
            side = "msa_ops" if r["side"] == "ours" else r["side"]
            groups.setdefault((side, r["kv"], r["status"], r.get("reason", "")), []).append(r)
        for (side, kv, status, reason), found in groups.items():
            batches = ", ".join(str(b) for b in dict.fromkeys(r["batch"] for r in found))
            cells = [where, context, batches, side, kv]
            if status == "ok":
                cells += [_worst(found, flat, figure) for flat in (True, False) for figure in ("rms", "max")]
            else:
                cells += [f"{status} [{notes.setdefault(reason, len(notes) + 1)}]", "", "", ""]
            rows.append(cells)
    columns = ("flat, rms", "flat, max", "peaked, rms", "peaked, max")
    text = _table(("where", "context", "batches", "side", "KV", *columns), rows)
    text += "".join(f"\n[{n}] {reason}\n" for reason, n in notes.items())
    text += "\n" + _wrap(f"{'; '.join(sources)}; [machine and commands](docs/benchmarks.md#the-runs).")
    if not h200()["accuracy"]:
        text += "\nOn a GPU this has not been recorded yet.\n"
    return text


def _worst(found: list[dict[str, Any]], flat: bool, figure: str) -> str:
    return f"{max(r[figure] for r in found if (r['q_scale'] == 1) == flat):.3f}"


def tested() -> str:
    """The GPU's line of the list of versions tested."""
    r = h200()
    return _wrap(
        f"GPU: torch {r['torch'].partition('+')[0]} (CUDA {r['cuda']}), Python {r['python']}, driver {r['driver']}, on an "
        f"{r['card']}; measured beside {_peers(r)}. For the other compute capabilities NVRTC compiles the kernels.",
        "- ",
    )


def cpu() -> str:
    """The table of the CPU engine and its verdict."""
    r = json.loads((RESULTS / "cpu.json").read_text(encoding="utf-8"))
    rows = [
        (x["form"], f"{x['ours_ms']:.2f}", f"{x['sdpa_ms']:.2f}", f"{x['ratio']:.2f}", f"{x['bar']:.1f}",
         "unknown" if x["peak_extra_mib"] is None else f"{x['peak_extra_mib']:.1f}")
        for x in r["results"]
    ]  # fmt: skip
    heading = ("KV", "call, ms", "SDPA on gathered float32, ms", "ratio", "goal", "extra memory, MiB")
    missed = [
        f"**{x['form']} misses it**: {x['ratio']:.2f} where {x['bar']} is the goal."
        for x in r["results"]
        if x["ratio"] > x["bar"]
    ]
    text = " ".join(missed) or "Every form keeps within it."
    run = f"commit {r['commit']}, {_when(r)}" if r.get("commit") else "the file records neither commit nor time"
    sentences = (
        f"From `cpu.json` ({run}). The goal column is the ratio that the command itself asks for. {text}",
        "A miss stays in the table, and the command exits with 1; it prints the fastest deciles too.",
        "Extra memory is the growth of the resident set during a call, whatever the cache's size; the bound is",
        f"{MEMORY_BAR_MIB} MiB.",
    )
    return _table(heading, rows) + "\n" + _wrap(" ".join(sentences))


def explain() -> str:
    """A command and what it prints."""
    from typer.testing import CliRunner

    from msa_ops.cli.main import build_app

    command = "explain --batch 16 --heads 64/4 --kv fp8 --topk 16 --arch 9.0 --plain"
    done = CliRunner().invoke(build_app(), command.split(), catch_exceptions=False)
    text = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    return f"```sh\nmsa-ops {command}\n```\n\n```text\n{text}\n```\n"


# --- measured by scripts of their own ---


def _kernels(name: str, script: str) -> tuple[dict[str, Any], str]:
    """A file that benchmarks/quantize.py or benchmarks/selection.py wrote, and where it is from in words."""
    r = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    if r.get("schema_version") != 1:
        raise ValueError(f"{name} has schema version {r.get('schema_version')!r}; this reads 1")
    where = f"One {r['card']}, driver {r['driver']}, torch {r['torch']}, commit {r['commit']}, {_when(r)}"
    by = "" if r.get("time") else "an earlier form of "  # which did not record it
    return r, f"{where}: [`{name}`](../benchmarks/results/{name}), by {by}`benchmarks/{script}`."


def quantize() -> str:
    """Quantising and appending."""
    r, source = _kernels("h200-quantize.json", "quantize.py")
    large = [row for row in r["rows"] if "GB/s" in row]
    rows = [
        (
            row["name"].strip(),
            f"{row['us']:.1f}",
            f"{row['GB/s']:,.0f}",
            f"{row['of_copy']:.0%}" if "of_copy" in row else "",
        )
        for row in large
    ]
    small: dict[str, dict[int, dict[str, Any]]] = {}
    other = []
    for row in r["rows"]:
        if match := re.fullmatch(r"decode append B=(\d+) (.*)", row["name"]):
            small.setdefault(match[2], {})[int(match[1])] = row
        elif row not in large:
            other.append(f"{row['name']}: {row['us']:.0f} us")
    batches = list(dict.fromkeys(b for found in small.values() for b in found))
    cells = [
        (kv, *(f"{found[b]['us']:.2f} ({found[b]['host_us']:.0f})" if b in found else "" for b in batches))
        for kv, found in small.items()
    ]
    return "\n".join(
        [
            _wrap(source), _table(("64 MiB at a time", "us", "GB/s moved", "of a copy's"), rows),
            _wrap("Appending one token a request, K and V of 8 heads, in us: in a CUDA graph, and the host time of an eager "
                  "write in brackets. " + "; ".join(other) + "."),
            _table(("KV, layout", *(f"B {b}" for b in batches)), cells),
        ]
    )  # fmt: skip


def selection() -> str:
    """Selecting blocks by their scores."""
    r, source = _kernels("h200-select.json", "selection.py")
    found = [x for x in r["records"] if x["part"] == "select"]
    columns = list(dict.fromkeys((x["batch"], x["innermost"]) for x in found))
    rows = []
    for blocks in dict.fromkeys(x["blocks"] for x in found):
        cells = {(x["batch"], x["innermost"]): x for x in found if x["blocks"] == blocks}
        rows.append((str(blocks), *(_selected(cells[c]) if c in cells else "" for c in columns)))
    text = (
        "us a call for 4 KV heads and top-k 16, by the blocks of a row and the batch, for scores whose innermost dimension is "
        "blocks or tokens; ✗ marks a goal that is not held."
    )
    heading = ("blocks", *(f"B {batch}, {innermost}" for batch, innermost in columns))
    return "\n".join([_wrap(source), _wrap(text), _table(heading, rows), *_scores(r["records"])])


def _scores(records: list[dict[str, Any]]) -> Iterator[str]:
    """Scores of decoding steps, and with the selection behind them, where a run has them."""
    timed = [x for x in records if x["part"] == "scores"]
    if not timed:
        return
    found: dict[tuple[int, int, bool], dict[str, Any]] = {}
    for x in timed:
        found.setdefault((x["batch"], x["context"], x["ragged"]), {})[x["keys"]] = x
    keys = list(dict.fromkeys(x["keys"] for x in timed))
    yield _wrap(
        "Scores of a token, and scores with the selection behind them (us), the bar of both together in brackets: floor / 0.95 "
        "+ 4.5 us; ✗ marks a bar that is not held."
    )
    rows = []
    for (batch, context, ragged), cells in found.items():
        row = [f"B {batch}, {'up to ' if ragged else ''}{size(context)}"]
        for name in keys:
            if name in cells:
                x = cells[name]
                row += [f"{x['score']:.2f}", f"{x['both']:.2f} ({x['bar']:.2f}){'' if x['held'] else ' ✗'}"]
            else:
                row += ["", ""]
        rows.append(row)
    yield _table(("requests, keys", *(f"{k}: {what}" for k in keys for what in ("scores", "and selection"))), rows)


def _selected(record: dict[str, Any]) -> str:
    over = record["goal"].removeprefix("OVER ") if record["goal"].startswith("OVER") else ""
    return f"{record['us']:.2f}" + (f" ✗ {over}" if over else "")


BLOCKS: dict[str, Callable[[], str]] = {
    "devices": devices, "dtypes": dtypes, "machine": machine, "commands": commands, "headline": headline,
    "verdicts": verdicts, "tables": tables, "host": host, "eager": eager, "accuracy": accuracy, "tested": tested,
    "cpu": cpu, "explain": explain, "quantize": quantize, "selection": selection,
}  # fmt: skip


# --- writing ---


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" if line[0] != "---" else "|---" * len(line) + "|\n" for line in lines)


def _wrap(text: str, first: str = "", width: int = 120) -> str:
    indent = " " * len(first)
    lines = textwrap.wrap(
        " ".join(text.split()), width, initial_indent=first, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(lines) + "\n"


def render(text: str) -> str:
    """A page with its blocks written anew. Raises `ValueError` for a block that has no function or no end."""

    def replaced(match: re.Match[str]) -> str:
        if match[2] not in BLOCKS:
            raise ValueError(f"there is no block named {match[2]!r}: {', '.join(BLOCKS)}")
        return match[1] + BLOCKS[match[2]]() + match[3]

    found = BLOCK.sub(replaced, text)
    if text.count("<!-- figures: ") != len(BLOCK.findall(text)):
        raise ValueError("a block has no <!-- end of figures -->")
    return found


def explain_table() -> dict[str, Any]:
    """Our times of the grid with whole blocks selected apart, which is what ``msa-ops explain`` says of a shape."""
    r = h200()
    rows = []
    for row in r["rows"]:
        mine = records.ours_of(row)
        if row["preset"] == "grid" and not row["overlap"] and mine and row["kv"] != "nvfp4-planar":
            kv = row["kv"].partition("-")[0]
            names = ("num_qo_heads", "num_kv_heads", "topk", "seqlen_q", "context", "unique_bytes", "floor_us")
            shape = {name: row[name] for name in names}
            rows.append({"kv": kv, "batch_size": row["batch"], **shape, "time_us": round(mine, 2)})
    return {
        "schema_version": 2, "card": r["card"], "commit": r["commit"], "driver": r["driver"], "torch": r["torch"],
        "ceiling_tb_s": round(r["read_ceiling_bytes_per_s"] / 1e12, 3), "rows": rows,
    }  # fmt: skip


def explain_text() -> str:
    """`explain_table` as JSON, a row a line."""
    whole = explain_table()
    lines = ",\n".join("  " + json.dumps(row) for row in whole.pop("rows"))
    return json.dumps(whole, indent=1)[:-2] + ',\n "rows": [\n' + lines + "\n ]\n}\n"


def note(run: str) -> str:
    """What a picture keeps of the run it shows: it is another's once this differs."""
    return f"{run} {hashlib.sha256((RESULTS / run).read_bytes()).hexdigest()}"


def pictures() -> dict[str, tuple[str, Any]]:
    """The run's file and the figure, by the stem of the picture's file."""
    from msa_ops.bench import plots

    r = h200()
    grid = records.select(r, preset=("grid",))
    one_token = records.select(grid, heads=("64/4",), seqlen_q=(1,))
    found = {"h200-time": plots.figures(one_token, "x")["x-time"]}
    found |= {f"h200-{name}": plots.figures(grid, "x")[f"x-{name}"] for name in ("share", "speedup")}
    found["h200-time-all"] = plots.figures(grid, "x")["x-time"]
    shown = {name: (MAIN, figure) for name, figure in found.items()}
    for name, run in runs().items():
        for preset in BY_CONTEXT:
            if any(row["preset"] == preset for row in run["rows"]):
                figure = plots.figures(records.select(run, preset=(preset,)), "x")["x-time"]
                shown[f"h200-{preset}"] = (name, figure)
    return shown


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    # First the table that a page's example reads.
    if not check:
        EXPLAIN_TABLE.write_text(explain_text(), encoding="utf-8")
    texts = {page: render(page.read_text(encoding="utf-8")) for page in pages()} | {EXPLAIN_TABLE: explain_text()}
    old = [p for p, text in texts.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    for path in old:
        print(f"{'differs' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(texts[path], encoding="utf-8")
    if check:
        return int(bool(old))
    from msa_ops.bench import plots

    for path in IMAGES.glob("h200-*.png"):
        path.unlink()
    for name, (run, figure) in pictures().items():
        plots.save_png(figure, IMAGES / f"{name}.png", note(run))
        print(f"written: docs/images/{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
