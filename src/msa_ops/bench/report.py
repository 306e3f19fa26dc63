"""What is said of a run: a line a row while it runs, JSON, and a markdown page with the losing rows marked."""

from __future__ import annotations

import io
import json
import os
import pathlib
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from .presets import BY_CONTEXT, Job
from .sizes import size


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without local folders, cut at 300 characters."""
    line = next((text for text in str(error).splitlines() if text.strip()), "")
    return line.replace(os.path.expanduser("~"), "~")[:300]


def describe(job: Job) -> str:
    s = job.shape
    parts = [s.kv, s.heads, f"seqlen_q {s.seqlen_q}", f"B {s.batch}", "overlapping" if s.overlap else "", job.label]
    if job.preset in BY_CONTEXT:
        parts.append(f"context {size(s.context)}")
    return " ".join(p for p in parts if p)


def progress_line(row: dict[str, Any]) -> str:
    """One row on one line: our time and the others', the floor, the share of it, the ratios and the bars."""
    where = f"{row['kv']:12} {row['heads']:>5} sq {row['seqlen_q']} B {row['batch']:>3}"
    if row["preset"] in BY_CONTEXT:
        where += f" context {size(row['context']):>4}"
    head = f"{row['preset']:6} {row['label']:{12 if row['preset'] == 'step' else 8}} {where}"
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
        return f"{side['status']} ({textwrap.shorten(side['reason'], 80, placeholder=' ...')})"
    return f"{side['host_us']['median']:.1f} us, {side['allocations_per_call']} allocations"


def write(report: dict[str, Any], json_file: str | None, markdown_file: str | None) -> None:
    """Write the report to the given files, if any; bytes of the command line that were no text come out as they were."""
    if json_file:
        pathlib.Path(json_file).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if markdown_file:
        pathlib.Path(markdown_file).write_text(markdown(report), encoding="utf-8", errors="surrogateescape")


def check_destination(option: str, file: str | None) -> None:
    """Raise `ValueError`, naming the option, where `file` cannot be written; what is there is left as it is."""
    if file is None:
        return
    path = pathlib.Path(file)
    new = not os.path.lexists(path)
    try:
        path.open("a").close()
        if new:
            path.unlink()
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{option} must be a file to write, in a folder that exists, got {file!r}: {words}") from None


def print_what_fits(stream: TextIO) -> None:
    """Print a question mark for a character that the stream's encoding lacks, instead of failing."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


def is_ours(label: str) -> bool:
    """Whether a side is this package, in whatever environment or form."""
    return label.startswith("ours")


def _statuses(report: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Preset, side and outcome of everything that was asked of a side."""
    found = [(row["preset"], label, side) for row in report["rows"] for label, side in row["sides"].items()]
    found += [("accuracy", row["side"], row) for row in report["accuracy"]]
    host = report["host"]
    found += [("host", label, side) for sides in host.get("eager", {}).values() for label, side in sides.items()]
    return found + [("host", "ours", {"status": "ok", **host[n]}) for n in ("import", "first_call") if n in host]


def our_failures(report: dict[str, Any]) -> tuple[int, int]:
    """At how many results this package is wrong or fails, and of how many. What it refuses in a sweep is no failure."""
    ours = [side["status"] for _, label, side in _statuses(report) if is_ours(label)]
    return sum(status in ("wrong", "error") for status in ours), len(ours)


def trouble_lines(report: dict[str, Any]) -> list[str]:
    """A line for every preset and side with wrong or failing results, with the side's own words."""
    found = _statuses(report)
    asked = Counter((preset, label) for preset, label, _ in found)
    bad = Counter(
        (preset, label, side["status"], side["reason"]) for preset, label, side in found if side["status"] in _TROUBLE
    )
    return [
        f"{preset}: {label} {_TROUBLE[status]} at {n} of {asked[preset, label]} results: {reason}"
        for (preset, label, status, reason), n in bad.items()
    ]


_TROUBLE = {"wrong": "is WRONG", "error": "FAILED"}


def summary_lines(report: dict[str, Any]) -> list[str]:
    """The verdicts, one a line; those on wrong and failing sides come first."""
    summary, lines = report["summary"], trouble_lines(report)
    for kv, s in summary["speed"].items():
        text = f"speed {kv}: must held at {s['must']} of {s['timed']} shapes, aim at {s['aim']}"
        untimed = s["shapes"] - s["timed"]
        lines.append(text + (f"; {untimed} not timed" if untimed else ""))
    for name, p in summary["peers"].items():
        text = f"{name}: {_spread(p)}"
        if "must" in p:
            text += f"; must {p['must']}, aim {p['aim']}: {p['met'].upper()}"
            text += f"; bar held at {p['points_met']} of {p['points']} shapes"
        lines.append(text)
    ratios = summary["nvfp4_over_bf16"]
    if ratios:
        held = sum(r["met"] for r in ratios)
        least = min(r["ratio"] for r in ratios)
        lines.append(f"NVFP4 over our bf16: {least:.2f} at least, bar held at {held} of {len(ratios)}")
    layouts = summary.get("nvfp4_layouts")
    if layouts:
        held = sum(r["met"] for r in layouts)
        low, high = min(r["ratio"] for r in layouts), max(r["ratio"] for r in layouts)
        lines.append(f"NVFP4 planar over tiled: {low:.3f} to {high:.3f}, limit held at {held} of {len(layouts)}")
    for preset, w in summary["work"].items():
        lines.append(f"{preset}: limit held at {w['met']} of {w['rows']}, worst ratio {w['worst_ratio']:.3f}")
    lines += [f"step {name}: {_spread(p)}" for name, p in summary.get("step", {}).items()]
    return lines


def _spread(p: dict[str, Any]) -> str:
    text = f"{p['geomean']:.3f} times our time (geometric mean of {p['shapes']}, {p['min']:.3f} to {p['max']:.3f})"
    return text + (f", losing at {p['losing']}" if p["losing"] else "")


def markdown(report: dict[str, Any], pictures: Sequence[pathlib.Path] = ()) -> str:
    """The whole report as a page: machine, verdicts, one table a preset, what was not measured.

    `pictures` are shown by their names, from the page's own folder.
    """
    lines = [f"# msa_ops on {report['card']}", ""]
    if not is_finished(report):
        lines += [f"**{UNFINISHED}**", ""]
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
        f"the read ceiling; bars count with {report['goal_ceiling_bytes_per_s'] / 1e12:.3f} TB/s. Peers' times are "
        "followed by their ratio to ours. **Bold** ratios lose; ✗ marks a bar that is not held.",
        "",
    ]
    lines += [f"- {line}" for line in summary_lines(report)]
    lines += [f"- {name} was not measured: {reason}" for name, reason in report["absent"].items()]
    for picture in pictures:
        lines += ["", f"![{picture.stem}]({picture.name})"]
    for preset in dict.fromkeys(row["preset"] for row in report["rows"]):
        lines += ["", f"## {preset}", "", *table([r for r in report["rows"] if r["preset"] == preset])]
    if report["accuracy"]:
        lines += ["", "## accuracy", "", *accuracy_table(report["accuracy"])]
    if report["host"]:
        lines += ["", "## host", "", *host_lines(report["host"])]
    if report["not_measured"]:
        lines += ["", "## not measured", "", *[f"- {text}" for text in report["not_measured"]]]
    return "\n".join(lines) + "\n"


def key_columns(rows: Sequence[dict[str, Any]]) -> dict[str, Callable[[dict[str, Any]], str]]:
    """The columns that say which shape a row is, by their headings."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "KV": lambda row: str(row["kv"]),
        "heads": lambda row: str(row["heads"]),
        "seqlen_q": lambda row: str(row["seqlen_q"]),
        "B": lambda row: str(row["batch"]),
    }
    if is_model(rows):
        columns["TP"] = lambda row: str(row["tp"])
    if any(row["preset"] in BY_CONTEXT for row in rows):
        columns["context"] = lambda row: size(row["context"])
    if any(row["preset"] == "step" for row in rows):
        columns["part"] = lambda row: str(row["label"])
    elif any(row["label"] for row in rows) and not is_model(rows):
        columns["lengths"] = lambda row: str(row["label"])
    return columns


UNFINISHED = "Saved while the run went on: it is not finished, and rows are missing."


def is_finished(report: dict[str, Any]) -> bool:
    """Whether a run went to its end; reports from before the field was there are of such."""
    return bool(report.get("finished", True))


def is_model(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a row is one of the layers of a model's step."""
    return any(row.get("layers") for row in rows)


def share_of(row: dict[str, Any]) -> str:
    """Floor over our time."""
    best = row["best"]
    return f"{100 * row['floor_us'] / row['sides'][best]['time_us']['median']:.0f}%" if best else ""


def last_column(rows: Sequence[dict[str, Any]]) -> str:
    """What a row says at its end: the time of a step, its bars, or, of parts of a step, nothing."""
    return "ms a step" if is_model(rows) else "bars" if rows[0]["preset"] in ("grid", "ragged", "spec") else ""


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows of one preset as lines of markdown, with reasons below for what was not timed."""
    labels = list(dict.fromkeys(label for row in rows for label in row["sides"]))
    keys, last = key_columns(rows), last_column(rows)
    head = [*keys, "floor", *labels, "share", *filter(None, [last])]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    notes: dict[str, int] = {}
    for row in rows:
        cells = [word(row) for word in keys.values()]
        cells.append(f"{row['floor_us']:.2f}")
        cells += [_cell(row, label, notes) for label in labels]
        cells.append(share_of(row))
        if last:
            cells.append(_bars(row) if last == "bars" else f"{row['step_us'] / 1e3:.3f}" if row["step_us"] else "")
        lines.append("| " + " | ".join(cells) + " |")
    reasons = [f"[{n}] {reason}" for reason, n in notes.items()]
    if shared := sharing(rows):
        reasons.append(shared)
    for reason in reasons:
        lines += ["", reason]
    return lines


def sharing(rows: Sequence[dict[str, Any]]) -> str:
    """Which rows had more pages in their tables than the memory holds, in words, or nothing."""
    uses = {(row["kv"], row["batch"], size(row["context"])): row.get("page_uses", 1.0) for row in rows}
    shared = [f"{kv} B {b} {context}: {n:g} times" for (kv, b, context), n in uses.items() if n > 1]
    if not shared:
        return ""
    return "Requests share pages, for which the card's memory is too small otherwise, in the mean: " + "; ".join(shared)


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
    ratio = _over_ours(row, label)
    return f"{text} {f'**{ratio:.3f}**' if ratio < 1 else f'{ratio:.3f}'}"


def _bars(row: dict[str, Any]) -> str:
    marks = []
    if goal := row["speed_goal"]:
        marks.append(goal["met"] if goal["met"] != "miss" else f"✗ must {goal['must_us']:.2f}")
    if (goal := row["peer_goal"]) and not goal["met"]:
        marks.append(f"✗ {goal['peer']} {_over_ours(row, goal['peer']):.3f} < {goal['bar']:.3f}")
    if goal := row["work_goal"]:
        ratio = 1 / _over_ours(row, f"{row['best']} {goal['baseline']}")
        marks.append(f"{'' if goal['met'] else '✗ '}{ratio:.3f} of {goal['baseline']} (limit {goal['limit']})")
    return ", ".join(marks)


def _over_ours(row: dict[str, Any], label: str) -> float:
    """A side's time over ours, from the times: a ratio that was rounded for the JSON would be rounded twice."""
    mine, theirs = (row["sides"][name]["time_us"]["median"] for name in (row["best"], label))
    return float(theirs / mine)


def accuracy_cells(r: dict[str, Any]) -> list[str]:
    """One side's errors as words, below `ACCURACY_HEAD`."""
    figures = [f"{r['rms']:.3f}", f"{r['max']:.3f}"] if r["status"] == "ok" else [r["status"], r["reason"][:120]]
    return [*(str(r[k]) for k in ("kv", "heads", "batch", "seqlen_q", "q_scale", "side")), *figures]


ACCURACY_HEAD = ("KV", "heads", "B", "seqlen_q", "q scale", "side", "rms", "max")


def accuracy_table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of markdown."""
    lines = [
        "Error against float64, as a multiple of that of the exact result rounded once.", "",
        "| " + " | ".join(ACCURACY_HEAD) + " |", "|" + "---|" * len(ACCURACY_HEAD),
    ]  # fmt: skip
    return lines + ["| " + " | ".join(accuracy_cells(r)) + " |" for r in rows]


def host_lines(measured: dict[str, Any]) -> list[str]:
    """Host costs as items of markdown."""
    lines = []
    for kv, sides in measured.get("eager", {}).items():
        lines += [f"- eager call, {kv}: " + ", ".join(f"{n} {host_words(s)}" for n, s in sides.items())]
    for name in ("import", "first_call"):
        if name in measured:
            lines.append(f"- {name.replace('_', ' ')}: " + ", ".join(f"{k} {v}" for k, v in measured[name].items()))
    return lines
