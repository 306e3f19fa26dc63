#!/usr/bin/env python3
"""Write what README.md and docs/ say about measurements and support anew, from the results and from the code.

    make figures                        # or: PYTHONPATH=src python3 benchmarks/figures.py
    python3 benchmarks/figures.py --check

In a page, what stands between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->`` is the text that `BLOCKS[NAME]`
returns. Sources: benchmarks/results/{h200,cpu,accuracy-cpu}.json, and the tables of the code. The pictures of
``docs/images/h200-*.png`` and the table that ``msa-ops explain`` reads are written too. ``--check`` writes nothing and
exits with 1 where a page is not what this would write; the tests do the same.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from msa_ops.bench import goals, records
from msa_ops.bench.cpu import MEMORY_BAR_MIB
from msa_ops.bench.peers import UNKNOWN
from msa_ops.bench.report import host_words, summary_lines, table
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


def h200() -> dict[str, Any]:
    return records.load(RESULTS / "h200.json")


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


def machine() -> str:
    """Where, with what and when, in a paragraph."""
    r = h200()
    sides = [_version(r, name) for name in r["sides"] if not name.startswith("ours")]
    ceiling = f"{r['read_ceiling_bytes_per_s'] / 1e12:.2f} TB/s"
    return _wrap(
        f"One {r['card']}, driver {r['driver']}, CUDA {r['cuda']}, torch {r['torch']}, triton {r['triton']}; msa_ops at commit "
        f"{r['commit']}, against {' and '.join(sides) or 'nothing else'}, on {r['time'][:10]}. The card read {ceiling} "
        f"({r['read_ceiling_method']}); an empty node of a CUDA graph took {r['empty_graph_node_us']} us. Data: "
        "[benchmarks/results/h200.json](../benchmarks/results/h200.json)."
    )


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
        f"One {r['card']}, commit {r['commit']}; {shapes} shapes a KV dtype: batches 1 to 256, 64/4 and 16/1 heads, 1 and 4 "
        "tokens a request, top-k 16 of 32K keys; CUDA graphs of distinct calls with a cold L2 cache, all sides checked against "
        "float64 first."
    )
    items = [_shares(r), _bars(r), *_nvfp4(r), *_step(r), _eager(r)]
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
    return f"Share of the card's read ceiling at 64/4 heads and one token: {'; '.join(found)}."


def _bars(r: dict[str, Any]) -> str:
    held = [f"{kv} at {s['must']} of {s['timed']} shapes" for kv, s in r["summary"]["speed"].items()]
    bar = f"floor / 0.95 (NVFP4: 0.88) + {goals.MUST_OVERHEAD_US} us"
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
    return [f"NVFP4 is {spread} from {goals.NVFP4_FROM_ITEMS} (token, KV head) items on."]


def _step(r: dict[str, Any]) -> list[str]:
    words = []
    for name, p in r["summary"].get("step", {}).items():
        if "ours" not in name:
            losing = f", losing at {p['losing']} of {p['shapes']}" if p["losing"] else ""
            words.append(f"{name} {p['geomean']:.2f} ({p['min']:.2f} to {p['max']:.2f}{losing})")
    return [f"A whole step with its indexer, their time / ours: {'; '.join(words)}."] if words else []


def verdicts() -> str:
    """The run's own verdicts, as a list."""
    r = h200()
    lines = [f"- {line}\n" for line in summary_lines(r)]
    lines += [f"- {name} was not measured: {reason}\n" for name, reason in r["absent"].items()]
    return "".join(lines + [f"- not measured: {text}\n" for text in r["not_measured"]])


def tables() -> str:
    """Every row of every preset, losing ones included."""
    r = h200()
    text = []
    for preset in dict.fromkeys(row["preset"] for row in r["rows"]):
        lines = table([row for row in r["rows"] if row["preset"] == preset])
        image = IMAGES / f"h200-{preset}.png"
        picture = (
            [f"![{PRESETS[preset]}: time over the context](images/{image.name})", ""] if preset in BY_CONTEXT else []
        )
        text.append("\n".join([f"### {PRESETS[preset]}", "", *picture, *lines, ""]))
    return "\n".join(text)


BY_CONTEXT = ("step", "model")


def host() -> str:
    """Host costs of the run."""
    measured = h200()["host"]
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
    return _table(("what", "side", "host time"), rows) if rows else "Not measured in this run.\n"


def _words(found: dict[str, Any], **formats: str) -> str:
    if "reason" in found:
        return f"{found['status']}: {found['reason']}"
    return ", ".join(text.format(found[name]) for name, text in formats.items())


def accuracy() -> str:
    """The largest errors of each side and KV dtype over the shapes of both devices' runs."""
    rows: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for name, report in (("CPU", records.load(RESULTS / "accuracy-cpu.json")), ("H200", h200())):
        for r in report["accuracy"]:
            if r["status"] == "ok":
                key = (name, "msa_ops" if r["side"] == "ours" else r["side"], r["kv"])
                kind = "flat" if r["q_scale"] == 1 else "peaked"
                figures = rows.setdefault(key, {})
                figures.setdefault(f"{kind} rms", []).append(r["rms"])
                figures.setdefault(f"{kind} max", []).append(r["max"])
    columns = ("flat rms", "flat max", "peaked rms", "peaked max")
    heading = ("where", "side", "KV", *(c.replace(" ", ", ") for c in columns))
    text = _table(heading, [(*key, *(f"{max(figures[c]):.3f}" for c in columns)) for key, figures in rows.items()])
    if not h200()["accuracy"]:
        text += "\nOn a GPU this has not been recorded yet.\n"
    return text


def tested() -> str:
    """The GPU's line of the list of versions tested."""
    r = h200()
    sides = [_version(r, name) for name in r["sides"] if not name.startswith("ours")]
    return _wrap(
        f"GPU: torch {r['torch'].partition('+')[0]} (CUDA {r['cuda']}), Python {r['python']}, driver {r['driver']}, on an "
        f"{r['card']}; measured beside {' and '.join(sides)}. For the other compute capabilities NVRTC compiles the kernels.",
        "- ",
    )


def cpu() -> str:
    """The table of the CPU engine and its verdict."""
    r = json.loads((RESULTS / "cpu.json").read_text(encoding="utf-8"))
    rows = [
        (x["form"], f"{x['ours_ms']:.2f}", f"{x['sdpa_ms']:.2f}", f"{x['ratio']:.2f}", f"{x['bar']:.1f}",
         f"{x['peak_extra_mib']:.1f}")
        for x in r["results"]
    ]  # fmt: skip
    heading = ("KV", "call, ms", "SDPA on gathered float32, ms", "ratio", "goal", "extra memory, MiB")
    missed = [
        f"**{x['form']} misses it**: {x['ratio']:.2f} where {x['bar']} is the goal."
        for x in r["results"]
        if x["ratio"] > x["bar"]
    ]
    text = " ".join(missed) or "Every form keeps within it."
    return _table(heading, rows) + "\n" + _wrap(
        f"The goal column is the ratio that the command itself asks for. {text} A miss stays in the table, and the command "
        "exits with 1; it prints the fastest deciles too. Extra memory is the growth of the resident set during a call, "
        f"whatever the cache's size; the bound is {MEMORY_BAR_MIB} MiB."
    )  # fmt: skip


def explain() -> str:
    """A command and what it prints."""
    from typer.testing import CliRunner

    from msa_ops.cli.main import build_app

    command = "explain --batch 16 --heads 64/4 --kv fp8 --topk 16 --arch 9.0 --plain"
    done = CliRunner().invoke(build_app(), command.split(), catch_exceptions=False)
    text = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    return f"```sh\nmsa-ops {command}\n```\n\n```text\n{text}\n```\n"


BLOCKS: dict[str, Callable[[], str]] = {
    "devices": devices, "dtypes": dtypes, "machine": machine, "headline": headline, "verdicts": verdicts, "tables": tables,
    "host": host, "accuracy": accuracy, "tested": tested, "cpu": cpu, "explain": explain,
}  # fmt: skip


# --- writing ---


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" if line[0] != "---" else "|---" * len(line) + "|\n" for line in lines)


def _wrap(text: str, first: str = "", width: int = 120) -> str:
    import textwrap

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


def note() -> str:
    """What a picture keeps of the results it shows: they are another's once this differs."""
    return "h200.json " + hashlib.sha256((RESULTS / "h200.json").read_bytes()).hexdigest()


def pictures() -> dict[str, Any]:
    """Figures by the stem of their file."""
    from msa_ops.bench import plots

    r = h200()
    grid = records.select(r, preset=("grid",))
    one_token = records.select(grid, heads=("64/4",), seqlen_q=(1,))
    found = {"h200-time": plots.figures(one_token, "x")["x-time"]}
    found |= {f"h200-{name}": plots.figures(grid, "x")[f"x-{name}"] for name in ("share", "speedup")}
    found["h200-time-all"] = plots.figures(grid, "x")["x-time"]
    for preset in BY_CONTEXT:
        if any(row["preset"] == preset for row in r["rows"]):
            found[f"h200-{preset}"] = plots.figures(records.select(r, preset=(preset,)), "x")["x-time"]
    return found


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
    for name, figure in pictures().items():
        plots.save_png(figure, IMAGES / f"{name}.png", note())
        print(f"written: docs/images/{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
