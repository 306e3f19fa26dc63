"""Pictures of a report, each as PNG and SVG: time with the floor, share of the ceiling, speed-up with the losing points.

Needs matplotlib, which is imported with this module.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from .records import median_of, ours_of
from .report import size

Rows = list[dict[str, Any]]
Key = Callable[[dict[str, Any]], Any]
_OURS = "#c2410c"
_COLOURS = ("#1d4ed8", "#15803d", "#7e22ce", "#0e7490", "#a16207", "#be185d", "#4d7c0f", "#475569")
_LOSING = "#dc2626"
_FLOOR = "#111111"


def draw(report: dict[str, Any], folder: pathlib.Path, stem: str) -> list[pathlib.Path]:
    """Write the pictures of everything that was timed into `folder` and return their paths, PNG before SVG.

    Names are ``STEM-time``, ``STEM-share``, ``STEM-speedup``, ``STEM-eager`` or ``STEM-ratio``, with the preset before the
    last part where a report holds several. What was not timed has no picture.
    """
    figures: dict[str, Figure] = {}
    if report.get("kind") == "cpu":
        figures[f"{stem}-ratio"] = _cpu(report)
    else:
        presets = dict.fromkeys(row["preset"] for row in report["rows"])
        for preset in presets:
            rows = [row for row in report["rows"] if row["preset"] == preset and ours_of(row)]
            prefix = f"{stem}-{preset}" if len(presets) > 1 else stem
            if rows:
                figures[f"{prefix}-time"] = _time(report, rows)
                figures[f"{prefix}-share"] = _share(report, rows)
            if any(median_of(row, peer) for row in rows for peer in peers_of(rows)):
                figures[f"{prefix}-speedup"] = _speedup(report, rows)
        if report["host"].get("eager"):
            figures[f"{stem}-eager"] = _host(report)
    paths = []
    # A salt and no date: the same report gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "msa-ops"}):
        for name, figure in figures.items():
            png, svg = folder / f"{name}.png", folder / f"{name}.svg"
            figure.savefig(png, dpi=120)
            figure.savefig(svg, metadata={"Date": None})
            paths += [png, svg]
    return paths


def peers_of(rows: Rows) -> list[str]:
    """Labels of the sides that are not ours."""
    return list(dict.fromkeys(label for row in rows for label in row["sides"] if not label.startswith("ours")))


# --- panels ---


def _is_model(rows: Rows) -> bool:
    return any(row.get("layers") for row in rows)


def _x(rows: Rows) -> tuple[Key, str]:
    """Batch across the page; contexts in preset model."""
    if _is_model(rows):
        return (lambda row: row["context"]), "context, tokens"
    return (lambda row: row["batch"]), "batch"


def _column(rows: Rows) -> Callable[[dict[str, Any]], tuple[str, ...]]:
    """What parts the panels of one KV format, as words; what does not vary is left out."""
    model = _is_model(rows)
    words: dict[str, Callable[[dict[str, Any]], str]] = {
        "label": lambda row: str(row["label"]),
        "heads": lambda row: f"heads {row['heads']}",
        "seqlen_q": lambda row: f"seqlen_q {row['seqlen_q']}",
        "topk": lambda row: f"top-k {row['topk']}",
    }
    if model:
        words = {"batch": lambda row: f"batch {row['batch']}", "seqlen_q": words["seqlen_q"], "topk": words["topk"]}
    else:
        words["context"] = lambda row: f"context {size(row['context'])}"
        words["overlap"] = lambda row: "overlapping" if row["overlap"] else "apart"
    kept = [name for name in words if len({row[name] for row in rows}) > 1 or name in ("heads", "batch")]
    return lambda row: tuple(words[name](row) for name in kept)


def _panels(report: dict[str, Any], title: str, rows: int, columns: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(max(6.4, 3.9 * columns), 0.7 + 3.1 * rows), layout="constrained")
    figure.suptitle(f"{title}; {report['card']}, msa_ops {report['commit_short']}")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _titled(report: dict[str, Any]) -> dict[str, Any]:
    commit, _, changes = (report.get("commit") or "of unknown commit").partition(" with ")
    short = commit[:10] if report.get("commit") else commit
    words = f"{short} with {changes}" if changes else short
    if report.get("options", {}).get("smoke"):
        words += "; a smoke run, no measurement"
    return {**report, "commit_short": words}


def _axis(axis: Any, rows: Rows, x: Key, name: str) -> None:
    ticks = sorted({x(row) for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [size(tick) if "context" in name else str(tick) for tick in ticks], fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel(name)
    axis.grid(alpha=0.25)


def _line(axis: Any, points: Iterable[tuple[float, float | None]], **style: Any) -> None:
    kept = sorted((x, y) for x, y in points if y is not None and math.isfinite(y))
    if kept:
        axis.plot([x for x, _ in kept], [y for _, y in kept], **style)


def _colour(i: int) -> str:
    return _COLOURS[i % len(_COLOURS)]


# --- the pictures ---


def _time(report: dict[str, Any], rows: Rows) -> Figure:
    """One panel per KV format and column; the floor is what reading the bytes once takes at the measured ceiling."""
    (x, name), column, model = _x(rows), _column(rows), _is_model(rows)
    kvs, columns = (list(dict.fromkeys(map(key, rows))) for key in (lambda row: row["kv"], column))
    title = f"Attention of {rows[0].get('layers')} sparse layers, one step" if model else "Time of one call"
    figure, axes = _panels(_titled(report), title, len(kvs), len(columns))
    for i, kv in enumerate(kvs):
        for j, words in enumerate(columns):
            axis, part = axes[i][j], [row for row in rows if row["kv"] == kv and column(row) == words]
            axis.set_title(", ".join((kv, *words)), fontsize=9)
            (_model_lines if model else _call_lines)(axis, part, x)
            if part:
                _axis(axis, part, x, name)
                axis.set_yscale("log")
                axis.legend(frameon=False, fontsize=7)
            axis.set_ylabel("ms a step" if model else "us a call")
    return figure


def _call_lines(axis: Any, part: Rows, x: Key) -> None:
    others = list(dict.fromkeys(label for row in part for label in row["sides"] if label != row["best"]))
    for k, label in enumerate(others):
        points = [(x(row), median_of(row, label)) for row in part]
        _line(axis, points, marker="s", markersize=4, color=_colour(k), label=label)
    _line(axis, [(x(row), ours_of(row)) for row in part], marker="o", color=_OURS, label="ours", zorder=3)
    goals = [(x(row), row["speed_goal"]["must_us"]) for row in part if row.get("speed_goal")]
    _line(axis, goals, linestyle=":", color="#9a9a9a", label="this project's bar")
    floors = [(x(row), row["floor_us"]) for row in part]
    _line(axis, floors, marker="_", linestyle="--", color=_FLOOR, label="floor")


def _model_lines(axis: Any, part: Rows, x: Key) -> None:
    for k, label in enumerate(dict.fromkeys(row["label"] for row in part)):
        mine = [row for row in part if row["label"] == label]
        steps = [(x(row), row["step_us"] / 1e3 if row["step_us"] else None) for row in mine]
        floors = [(x(row), row["floor_us"] * row["layers"] / 1e3) for row in mine]
        _line(axis, steps, marker="o", color=_colour(k), label=label)
        _line(axis, floors, marker="_", linestyle="--", color=_colour(k), label=f"{label} floor")


def _share(report: dict[str, Any], rows: Rows) -> Figure:
    """Floor over time in percent: one panel a column, a line per KV format, peers' lines broken."""
    (x, name), column = _x(rows), _column(rows)
    columns = list(dict.fromkeys(map(column, rows)))
    lines = list(dict.fromkeys((row["kv"], row["label"] if row.get("layers") else "") for row in rows))
    styles = dict(zip(peers_of(rows), (":", "-.", "--") * len(rows), strict=False))
    figure, axes = _panels(_titled(report), "Share of the read ceiling", 1, len(columns))
    for axis, words in zip(axes[0], columns, strict=True):
        part = [row for row in rows if column(row) == words]
        axis.set_title(", ".join(words), fontsize=9)
        for k, (kv, label) in enumerate(lines):
            mine = [row for row in part if row["kv"] == kv and label in ("", row["label"])]
            points = [(x(row), 100 * row["floor_us"] / (ours_of(row) or math.nan)) for row in mine]
            _line(axis, points, marker="o", markersize=4, color=_colour(k), label=f"{kv} {label}".strip())
            for peer, style in styles.items():
                theirs = [(x(row), 100 * row["floor_us"] / (median_of(row, peer) or math.nan)) for row in mine]
                words_of_line = " ".join(filter(None, (kv, label, peer)))
                _line(axis, theirs, linestyle=style, marker="s", markersize=3, color=_colour(k), label=words_of_line)
        axis.axhline(100, color=_FLOOR, linestyle="--", linewidth=1)
        _axis(axis, part, x, name)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("floor / time, %")
    handles: dict[str, Any] = {}
    for axis in axes[0]:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize=7)
    return figure


def _speedup(report: dict[str, Any], rows: Rows) -> Figure:
    """Peer's time over ours, a panel per peer; a cross and its figure mark each point under 1."""
    (x, name), column = _x(rows), _column(rows)
    peers = [peer for peer in peers_of(rows) if any(median_of(row, peer) for row in rows)]
    figure, axes = _panels(_titled(report), "Speed-up: their time / ours", 1, len(peers))
    for axis, peer in zip(axes[0], peers, strict=True):
        both = [row for row in rows if median_of(row, peer)]
        lines = dict.fromkeys((row["kv"], row["label"], *column(row)) for row in both)
        for k, line in enumerate(lines):
            mine = [row for row in both if (row["kv"], row["label"], *column(row)) == line]
            label = " ".join(dict.fromkeys(word for word in line if word))
            style = {"linestyle": ("-", "--", "-.", ":")[k // len(_COLOURS) % 4], "color": _colour(k), "label": label}
            _line(axis, [(x(row), _ratio(row, peer)) for row in mine], marker="o", markersize=4, **style)
        losing = [(x(row), _ratio(row, peer)) for row in both if _ratio(row, peer) < 1]
        _mark(axis, losing)
        axis.set_title(f"{peer}: losing at {len(losing)} of {len(both)}", fontsize=9)
        axis.axhline(1, color=_FLOOR, linewidth=1)
        _axis(axis, both, x, name)
        axis.set_ylabel(f"{peer} / ours")
        axis.legend(frameon=False, fontsize=6, ncols=1 + len(lines) // 9)
    return figure


def _ratio(row: dict[str, Any], peer: str) -> float:
    return (median_of(row, peer) or math.nan) / (ours_of(row) or math.nan)


def _mark(axis: Any, losing: Sequence[tuple[float, float]]) -> None:
    if not losing:
        return
    xs, ys = zip(*losing, strict=True)
    axis.scatter(xs, ys, marker="x", s=70, linewidths=2, color=_LOSING, zorder=4, label="we lose")
    for x, y in losing:
        axis.annotate(f"{y:.2f}", (x, y), textcoords="offset points", xytext=(5, -9), fontsize=7, color=_LOSING)


def _host(report: dict[str, Any]) -> Figure:
    """Host time of one eager call, a group of bars per KV format."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis, eager = figure.subplots(), report["host"]["eager"]
    labels = list(dict.fromkeys(label for sides in eager.values() for label in sides))
    width = 0.8 / len(labels)
    for k, label in enumerate(labels):
        timed = [(i, s[label]) for i, s in enumerate(eager.values()) if s.get(label, {}).get("status") == "ok"]
        at, times = [i + (k + 0.5) * width - 0.4 for i, _ in timed], [s["host_us"]["median"] for _, s in timed]
        bars = axis.bar(at, times, width, label=label, color=_OURS if label.startswith("ours") else _colour(k))
        axis.bar_label(bars, fmt="%.1f", fontsize=7)
    axis.set_xticks(range(len(eager)), list(eager))
    axis.set_ylabel("us of host time a call")
    axis.set_title(f"Eager call with out=; {report['card']}", fontsize=9)
    axis.legend(frameon=False, fontsize=8)
    return figure


def _cpu(report: dict[str, Any]) -> Figure:
    """Our time over torch's attention on keys that are gathered and widened already; the bar of each form drawn in."""
    results = report["results"]
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    ratios = [r["ratio"] for r in results]
    colours = [_LOSING if "bar" in r and r["ratio"] > r["bar"] else _OURS for r in results]
    axis.bar_label(axis.bar(range(len(results)), ratios, 0.6, color=colours), fmt="%.2f", fontsize=8)
    for i, r in enumerate(results):
        if "bar" in r:
            axis.plot([i - 0.4, i + 0.4], [r["bar"]] * 2, color=_FLOOR, linestyle="--", label="" if i else "bar")
    axis.axhline(1, color="#9a9a9a", linewidth=1)
    axis.set_xticks(range(len(results)), [r["form"] for r in results], fontsize=8)
    axis.set_ylabel("ours / SDPA on gathered keys")
    axis.set_title(str(report.get("cpu", report.get("card", "CPU"))), fontsize=9)
    axis.legend(frameon=False, fontsize=8)
    return figure
