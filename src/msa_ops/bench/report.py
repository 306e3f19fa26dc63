"""What is said of a run: a line a row while it runs, JSON, and a markdown page with the losing rows marked."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from .presets import Job


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without local folders, cut at 300 characters."""
    line = next((text for text in str(error).splitlines() if text.strip()), "")
    return line.replace(os.path.expanduser("~"), "~")[:300]


def describe(job: Job) -> str:
    s = job.shape
    parts = [s.kv, s.heads, f"seqlen_q {s.seqlen_q}", f"B {s.batch}", "overlapping" if s.overlap else "", job.label]
    if job.layers:
        parts.append(f"context {size(s.context)}")
    return " ".join(p for p in parts if p)


def size(tokens: int) -> str:
    """``32768`` as ``32K``, ``1048576`` as ``1M``."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return str(tokens)


def progress_line(row: dict[str, Any]) -> str:
    """One row on one line: our time and the others', the floor, the share of it, the ratios and the bars."""
    where = f"{row['kv']:12} {row['heads']:>5} sq {row['seqlen_q']} B {row['batch']:>3}"
    if row["layers"]:
        where += f" context {size(row['context']):>4}"
    head = f"{row['preset']:6} {row['label']:8} {where}"
    words = [f"{head} | floor {row['floor_us']:7.2f}"]
    best = row["best"]
    mine = row["sides"][best]["time_us"]["median"] if best else None
    for label, side in row["sides"].items():
        if side["status"] != "ok":
            words.append(f"{label} {side['status'].upper()} ({side['reason'][:90]})")
            continue
        median = side["time_us"]["median"]
        text = f"{label} {median:7.2f} [{side['time_us']['min']:.2f}-{side['time_us']['max']:.2f}]"
        if label == best:
            text += "*" if len(row["sides"]) > 1 and "[" in label else ""
            text += f" {100 * row['floor_us'] / median:.0f}%"
        elif mine:
            text += f" x{median / mine:.3f}"
        words.append(text)
    if row["step_us"]:
        words.append(f"{row['layers']} layers {row['step_us'] / 1e3:.3f} ms")
    if row["speed_goal"]:
        goal = row["speed_goal"]
        words.append("aim held" if goal["met"] == "aim" else f"{goal['met'].upper()} (must {goal['must_us']:.2f})")
    if row["peer_goal"] and not row["peer_goal"]["met"]:
        words.append(f"UNDER BAR {row['peer_goal']['bar']:.3f}")
    if row["work_goal"]:
        goal = row["work_goal"]
        words.append(f"/{goal['baseline']} {goal['ratio']:.3f}{'' if goal['met'] else ' OVER ' + str(goal['limit'])}")
    return " | ".join(words)


def accuracy_line(row: dict[str, Any]) -> str:
    head = f"accuracy {row['kv']:12} {row['heads']:>5} B {row['batch']:>3} q x{row['q_scale']:g} {row['side']}"
    if row["status"] != "ok":
        return f"{head}: {row['status']} ({row['reason'][:90]})"
    return f"{head}: rms {row['rms']:.3f}, max {row['max']:.3f} times one rounding"


def host_words(side: dict[str, Any]) -> str:
    if side["status"] != "ok":
        return f"{side['status']} ({side['reason'][:60]})"
    return f"{side['host_us']['median']:.1f} us, {side['allocations_per_call']} allocations"


def write(report: dict[str, Any], json_file: str | None, markdown_file: str | None) -> None:
    """Write the report to the given files, if any."""
    if json_file:
        pathlib.Path(json_file).write_text(json.dumps(report, indent=1) + "\n")
    if markdown_file:
        pathlib.Path(markdown_file).write_text(markdown(report))


def summary_lines(report: dict[str, Any]) -> list[str]:
    """The verdicts, one a line."""
    summary, lines = report["summary"], []
    for kv, s in summary["speed"].items():
        text = f"speed {kv}: must held at {s['must']} of {s['timed']} shapes, aim at {s['aim']}"
        untimed = s["shapes"] - s["timed"]
        lines.append(text + (f"; {untimed} not timed" if untimed else ""))
    for name, p in summary["peers"].items():
        spread = f"geometric mean of {p['shapes']}, {p['min']:.3f} to {p['max']:.3f}"
        text = f"{name}: {p['geomean']:.3f} times our time ({spread})"
        if p["losing"]:
            text += f", losing at {p['losing']}"
        if "must" in p:
            text += f"; must {p['must']}, aim {p['aim']}: {p['met'].upper()}"
            text += f"; bar held at {p['points_met']} of {p['points']} shapes"
        lines.append(text)
    ratios = summary["nvfp4_over_bf16"]
    if ratios:
        held = sum(r["met"] for r in ratios)
        least = min(r["ratio"] for r in ratios)
        lines.append(f"NVFP4 over our bf16: {least:.2f} at least, bar held at {held} of {len(ratios)}")
    for preset, w in summary["work"].items():
        lines.append(f"{preset}: limit held at {w['met']} of {w['rows']}, worst ratio {w['worst_ratio']:.3f}")
    return lines


def markdown(report: dict[str, Any], pictures: Sequence[pathlib.Path] = ()) -> str:
    """The whole report as a page: machine, verdicts, one table a preset, what was not measured.

    `pictures` are shown by their names, from the page's own folder.
    """
    lines = [f"# msa_ops on {report['card']}", ""]
    if report["options"]["smoke"]:
        lines += ["A smoke run: it shows that everything works, and measures nothing.", ""]
    ceiling = f"{report['read_ceiling_bytes_per_s'] / 1e12:.3f} TB/s ({report['read_ceiling_method']})"
    method = (
        "runs on the CPU, with warm caches" if report["compute_capability"] is None else "graph replays with a cold L2"
    )
    sides = ", ".join(f"{name} {version}" for name, version in report["sides"].items())
    lines += [
        f"Driver {report['driver']}, CUDA {report['cuda']}, torch {report['torch']}, triton {report['triton']}, commit "
        f"{report['commit']}, {report['time']}. Read ceiling {ceiling}; empty graph node "
        f"{report['empty_graph_node_us']} us. Sides: {sides}.",
        "",
        f"Microseconds a call: median of {method} (least to most), distinct inputs a call. `floor` is unique bytes over "
        "the read ceiling. Peers' times are followed by their ratio to ours. **Bold** ratios lose; ✗ marks a bar that is "
        "not held.",
        "",
    ]
    lines += [f"- {line}" for line in summary_lines(report)]
    lines += [f"- {name} was not measured: {reason}" for name, reason in report["absent"].items()]
    for picture in pictures:
        lines += ["", f"![{picture.stem}]({picture.name})"]
    for preset in dict.fromkeys(row["preset"] for row in report["rows"]):
        lines += ["", f"## {preset}", "", *_table([r for r in report["rows"] if r["preset"] == preset])]
    if report["accuracy"]:
        lines += ["", "## accuracy", "", *_accuracy_table(report["accuracy"])]
    if report["host"]:
        lines += ["", "## host", "", *_host_lines(report["host"])]
    if report["not_measured"]:
        lines += ["", "## not measured", "", *[f"- {text}" for text in report["not_measured"]]]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    labels = list(dict.fromkeys(label for row in rows for label in row["sides"]))
    named = any(row["label"] for row in rows)
    model = any(row.get("layers") for row in rows)
    name = ["TP", "context"] if model else ["lengths"] if named else []
    head = ["KV", "heads", "seqlen_q", "B", *name, "floor", *labels, "ms a step" if model else "bars"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    notes: dict[str, int] = {}
    for row in rows:
        cells = [row["kv"], row["heads"], str(row["seqlen_q"]), str(row["batch"])]
        cells += [str(row["tp"]), size(row["context"])] if model else [row["label"]] if named else []
        cells.append(f"{row['floor_us']:.2f}")
        cells += [_cell(row, label, notes) for label in labels]
        last = (f"{row['step_us'] / 1e3:.3f}" if row["step_us"] else "") if model else _bars(row)
        lines.append("| " + " | ".join([*cells, last]) + " |")
    return lines + [f"{'' if i else chr(10)}[{n}] {reason}" for i, (reason, n) in enumerate(notes.items())]


def _cell(row: dict[str, Any], label: str, notes: dict[str, int]) -> str:
    side = row["sides"].get(label)
    if side is None:
        return ""
    if side["status"] != "ok":
        return f"{side['status']} [{notes.setdefault(side['reason'], len(notes) + 1)}]"
    t = side["time_us"]
    text = f"{t['median']:.2f} ({t['min']:.2f}-{t['max']:.2f})"
    best = row["best"]
    if best is None or label == best:
        return text
    ratio = t["median"] / row["sides"][best]["time_us"]["median"]
    return f"{text} {f'**{ratio:.3f}**' if ratio < 1 else f'{ratio:.3f}'}"


def _bars(row: dict[str, Any]) -> str:
    marks = []
    if goal := row["speed_goal"]:
        marks.append(goal["met"] if goal["met"] != "miss" else f"✗ must {goal['must_us']:.2f}")
    if (goal := row["peer_goal"]) and not goal["met"]:
        marks.append(f"✗ {goal['peer']} {goal['ratio']:.3f} < {goal['bar']:.3f}")
    if goal := row["work_goal"]:
        marks.append(f"{'' if goal['met'] else '✗ '}{goal['ratio']:.3f} of {goal['baseline']} (limit {goal['limit']})")
    return ", ".join(marks)


def _accuracy_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "Error against float64, as a multiple of that of the exact result rounded once.", "",
        "| KV | heads | B | seqlen_q | q scale | side | rms | max |", "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        figures = [f"{r['rms']:.3f}", f"{r['max']:.3f}"] if r["status"] == "ok" else [r["status"], r["reason"][:120]]
        keys = ("kv", "heads", "batch", "seqlen_q", "q_scale", "side")
        lines.append("| " + " | ".join([*(str(r[k]) for k in keys), *figures]) + " |")
    return lines


def _host_lines(measured: dict[str, Any]) -> list[str]:
    lines = []
    for kv, sides in measured.get("eager", {}).items():
        lines += [f"- eager call, {kv}: " + ", ".join(f"{n} {host_words(s)}" for n, s in sides.items())]
    for name in ("import", "first_call"):
        if name in measured:
            lines.append(f"- {name.replace('_', ' ')}: " + ", ".join(f"{k} {v}" for k, v in measured[name].items()))
    return lines
