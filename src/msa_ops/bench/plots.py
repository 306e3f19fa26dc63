"""Pictures of a report, each as PNG and SVG: time with the floor, share of the ceiling, speed-up with the losing points.

Needs matplotlib, which is imported with this module, and Pillow, which comes with it.
"""

from __future__ import annotations

import io
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from PIL import Image, PngImagePlugin

from .presets import BY_CONTEXT
from .records import median_of, ours_of
from .report import is_finished, is_model
from .sizes import size

Rows = list[dict[str, Any]]
Key = Callable[[dict[str, Any]], Any]
_OURS = "#c2410c"
_OURS_PART = "#e58a5f"
_COLOURS = ("#1d4ed8", "#15803d", "#7e22ce", "#0e7490", "#a16207", "#be185d", "#4d7c0f", "#475569")
_LOSING = "#dc2626"
_FLOOR = "#111111"
_BAR = "#8a8a8a"
_PARTS = ("score", "select", "attend")
_PNG_COLOURS = 128
"""Lines on white need no more, and such a file is a third of the size."""


def draw(report: dict[str, Any], folder: pathlib.Path, stem: str) -> list[pathlib.Path]:
    """Write the pictures of everything that was timed into `folder` and return their paths, PNG before SVG.

    Names are ``STEM-time``, ``STEM-share``, ``STEM-speedup``, ``STEM-eager`` or ``STEM-ratio``, with the preset before the
    last part where a report holds several. What was not timed has no picture.
    """
    paths = []
    # A salt and no date: the same report gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "msa-ops", "font.size": 10}):
        for name, figure in figures(report, stem).items():
            png, svg = folder / f"{name}.png", folder / f"{name}.svg"
            save_png(figure, png)
            figure.savefig(svg, metadata={"Date": None})
            paths += [png, svg]
    return paths


def figures(report: dict[str, Any], stem: str) -> dict[str, Figure]:
    """The pictures by their names, not yet written."""
    if report.get("kind") == "cpu":
        return {f"{stem}-ratio": _cpu(report)}
    found: dict[str, Figure] = {}
    presets = dict.fromkeys(row["preset"] for row in report["rows"])
    for preset in presets:
        every = [row for row in report["rows"] if row["preset"] == preset and _timed(row)]
        rows = [row for row in every if preset != "step" or row["label"] == "step"]
        prefix = f"{stem}-{preset}" if len(presets) > 1 else stem
        if rows:
            found[f"{prefix}-time"] = _time(report, rows, every)
        if any(map(ours_of, rows)):
            found[f"{prefix}-share"] = _share(report, rows)
        if any(median_of(row, peer) and ours_of(row) for row in rows for peer in peers_of(rows)):
            found[f"{prefix}-speedup"] = _speedup(report, rows)
    if report["host"].get("eager"):
        found[f"{stem}-eager"] = _host(report)
    return found


def _timed(row: dict[str, Any]) -> bool:
    return any(label.startswith("ours") and median_of(row, label) for label in row["sides"])


def save_png(figure: Figure, path: pathlib.Path, note: str = "") -> None:
    """Write a picture with few colours and no date. `note` is kept in it as its "Comment"."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120 if len(figure.axes) <= 8 else 95, format="png")
    image = Image.open(buffer).convert("RGB").quantize(_PNG_COLOURS, dither=Image.Dither.NONE)
    facts = PngImagePlugin.PngInfo()
    if note:
        facts.add_text("Comment", note)
    image.save(path, optimize=True, pnginfo=facts)


def peers_of(rows: Rows) -> list[str]:
    """Labels of the sides that are not ours."""
    return list(dict.fromkeys(label for row in rows for label in row["sides"] if not label.startswith("ours")))


# --- panels ---


def _x(rows: Rows) -> tuple[Key, str]:
    """Batch across the page; contexts where rows differ in them."""
    if rows[0]["preset"] in BY_CONTEXT:
        return (lambda row: row["context"]), "context, tokens"
    return (lambda row: row["batch"]), "batch"


def _column(rows: Rows) -> Callable[[dict[str, Any]], tuple[str, ...]]:
    """What parts the panels of one KV format, as words; what does not vary is left out, but for heads and seqlen_q."""
    words: dict[str, Callable[[dict[str, Any]], str]] = {
        "label": lambda row: str(row["label"]),
        "heads": lambda row: f"heads {row['heads']}",
        "seqlen_q": lambda row: f"seqlen_q {row['seqlen_q']}",
        "topk": lambda row: f"top-k {row['topk']}",
    }
    always: tuple[str, ...] = ("heads", "seqlen_q")
    if rows[0]["preset"] in BY_CONTEXT:
        words["batch"] = lambda row: f"batch {row['batch']}"
        always = ("batch",)
        if is_model(rows):  # a line for each tensor-parallel size, which is what the heads follow from
            del words["label"], words["heads"]
    else:
        words["context"] = lambda row: f"context {size(row['context'])}"
        words["overlap"] = lambda row: "overlapping" if row["overlap"] else "apart"
    kept = [name for name in words if len({row[name] for row in rows}) > 1 or name in always]
    return lambda row: tuple(words[name](row) for name in kept)


def _panels(report: dict[str, Any], title: str, rows: int, columns: int) -> tuple[Figure, Any]:
    width, height = max(6.4, 3.6 * columns), 1.1 + 2.7 * rows
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(f"{title}\n{report['card']}, msa_ops {_commit(report)}", fontsize=11)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _commit(report: dict[str, Any]) -> str:
    commit, _, changes = (report.get("commit") or "of unknown commit").partition(" with ")
    short = commit[:10] if report.get("commit") else commit
    words = f"{short} with {changes}" if changes else short
    words += "" if is_finished(report) else "; an unfinished run"
    return f"{words}; a smoke run, no measurement" if report.get("options", {}).get("smoke") else words


def _axis(axis: Any, rows: Rows, x: Key, name: str) -> None:
    ticks = sorted({x(row) for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [size(tick) if "context" in name else str(tick) for tick in ticks], fontsize=8)
    axis.tick_params(axis="y", labelsize=8)
    axis.minorticks_off()
    axis.set_xlabel(name)
    axis.grid(alpha=0.25)


def _logarithmic(axis: Any) -> None:
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    if high < 200 * low:  # about two powers of ten: 2 and 5 are marked between them
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.minorticks_off()


def _line(axis: Any, points: Iterable[tuple[float, float | None]], **style: Any) -> None:
    kept = sorted((x, y) for x, y in points if y is not None and math.isfinite(y))
    if kept:
        axis.plot([x for x, _ in kept], [y for _, y in kept], **style)


def _colour(i: int) -> str:
    return _COLOURS[i % len(_COLOURS)]


def _legend(figure: Figure) -> None:
    """One legend below all panels."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    letters = sum(len(label) + 8 for label in handles)  # with the handles
    rows = math.ceil(letters / (figure.get_size_inches()[0] * 13))
    columns = -(-len(handles) // rows)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", frameon=False, fontsize=9, ncols=columns
    )


# --- the pictures ---


def _time(report: dict[str, Any], rows: Rows, every: Rows) -> Figure:
    """One panel per KV format and column; the floor is what reading the bytes once takes at the measured ceiling.

    `every` holds the parts of a step as well as `rows`, the whole ones.
    """
    (x, name), column, model = _x(rows), _column(rows), is_model(rows)
    kvs, columns = (list(dict.fromkeys(map(key, rows))) for key in (lambda row: row["kv"], column))
    title = {"step": "Time of one decode step with its indexer, and of its parts"}.get(
        rows[0]["preset"], "Time of one call"
    )
    title = f"Attention of {rows[0].get('layers')} sparse layers, one step" if model else title
    across = len(columns) == 1  # then the KV formats stand side by side
    figure, axes = _panels(report, title, *((1, len(kvs)) if across else (len(kvs), len(columns))))
    for i, kv in enumerate(kvs):
        for j, words in enumerate(columns):
            axis = axes[0][i] if across else axes[i][j]
            part = [row for row in rows if row["kv"] == kv and column(row) == words]
            axis.set_title(", ".join((kv, *words)), fontsize=9)
            if model:
                _model_lines(axis, part, x)
            else:
                _call_lines(axis, part, x, [label for label in _labels(rows) if not label.startswith("ours")])
                _part_lines(axis, [row for row in every if row["kv"] == kv and row["batch"] in _batches(part)], x)
            if part:
                _axis(axis, part, x, name)
                _logarithmic(axis)
            if j == 0 and (i == 0 or not across):
                axis.set_ylabel("ms a step" if model else "us a call")
    _legend(figure)
    return figure


def _labels(rows: Rows) -> list[str]:
    return list(dict.fromkeys(label for row in rows for label in row["sides"]))


def _batches(rows: Rows) -> set[int]:
    return {row["batch"] for row in rows}


def _call_lines(axis: Any, part: Rows, x: Key, peers: Sequence[str]) -> None:
    """Peers have the same colours in all panels; our other forms, such as a baseline, the colours after those."""
    mine = [label for label in _labels(part) if label.startswith("ours")]
    others = [label for label in mine if any(row["best"] != label for row in part)]
    for k, label in enumerate((*peers, *others)):
        points = [(x(row), median_of(row, label)) for row in part if label != row["best"]]
        style = {"linestyle": "-" if label in peers else "-.", "marker": "s", "markersize": 4, "color": _colour(k)}
        _line(axis, points, label=label, **style)
    _line(axis, [(x(row), ours_of(row)) for row in part], marker="o", linewidth=2, color=_OURS, label="ours", zorder=3)
    goals = [(x(row), row["speed_goal"]["must_us"]) for row in part if row.get("speed_goal")]
    _line(axis, goals, linestyle=":", linewidth=2, color=_BAR, label="this project's bar")
    _line(axis, [(x(row), row["floor_us"]) for row in part], linestyle="--", color=_FLOOR, label="floor")


def _part_lines(axis: Any, every: Rows, x: Key) -> None:
    for name, marker in zip(_PARTS, "^vx", strict=True):
        points = [(x(row), ours_of(row)) for row in every if row["label"] == name]
        style = {"linestyle": ":", "color": _OURS_PART, "linewidth": 1.2, "marker": marker, "markersize": 5}
        _line(axis, points, label=f"ours, {name} alone", **style)


def _model_lines(axis: Any, part: Rows, x: Key) -> None:
    for k, label in enumerate(dict.fromkeys(row["label"] for row in part)):
        mine = [row for row in part if row["label"] == label]
        steps = [(x(row), row["step_us"] / 1e3 if row["step_us"] else None) for row in mine]
        floors = [(x(row), row["floor_us"] * row["layers"] / 1e3) for row in mine]
        _line(axis, steps, marker="o", color=_colour(k), label=label)
        _line(axis, floors, linestyle="--", color=_colour(k), label=f"{label} floor")


def _share(report: dict[str, Any], rows: Rows) -> Figure:
    """Floor over time in percent: one panel a column, a colour per KV format, peers' lines broken."""
    (x, name), column = _x(rows), _column(rows)
    columns = list(dict.fromkeys(map(column, rows)))
    lines = list(dict.fromkeys((row["kv"], row["label"] if is_model(rows) else "") for row in rows))
    styles = dict(zip(peers_of(rows), (":", "-.", "--") * len(rows), strict=False))
    figure, axes = _panels(report, "Share of the read ceiling: floor / time", 1, len(columns))
    for axis, words in zip(axes[0], columns, strict=True):
        part = [row for row in rows if column(row) == words]
        axis.set_title(", ".join(words), fontsize=9)
        for k, (kv, label) in enumerate(lines):
            mine = [row for row in part if row["kv"] == kv and label in ("", row["label"])]
            points = [(x(row), 100 * row["floor_us"] / (ours_of(row) or math.nan)) for row in mine]
            _line(axis, points, marker="o", markersize=4, linewidth=2, color=_colour(k), label=f"{kv} {label}".strip())
            for peer, style in styles.items():
                theirs = [(x(row), 100 * row["floor_us"] / (median_of(row, peer) or math.nan)) for row in mine]
                words_of_line = " ".join(filter(None, (kv, label, peer)))
                _line(axis, theirs, linestyle=style, marker="s", markersize=3, color=_colour(k), label=words_of_line)
        axis.axhline(100, color=_FLOOR, linestyle="--", linewidth=1)
        _axis(axis, part, x, name)
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("percent")
    _legend(figure)
    return figure


def _speedup(report: dict[str, Any], rows: Rows) -> Figure:
    """Peer's time over ours, a panel per peer and KV format; a cross and its figure mark each point under 1."""
    (x, name), column = _x(rows), _column(rows)
    both = {
        (peer, kv): [row for row in rows if row["kv"] == kv and median_of(row, peer) and ours_of(row)]
        for peer in peers_of(rows)
        for kv in dict.fromkeys(row["kv"] for row in rows)
    }
    both = {key: found for key, found in both.items() if found}
    lines = list(dict.fromkeys((row["label"] if is_model(rows) else "", *column(row)) for row in rows))
    across = min(len(both), 4)
    down = -(-len(both) // across)
    figure, axes = _panels(report, "Speed-up: their time / ours (a cross: we lose)", down, across)
    for axis in axes.flat[len(both) :]:
        axis.set_axis_off()
    for axis, ((peer, kv), part) in zip(axes.flat, both.items(), strict=False):
        for k, line in enumerate(lines):
            mine = [row for row in part if (row["label"] if is_model(rows) else "", *column(row)) == line]
            style = {"linestyle": ("-", "--", "-.", ":")[k // len(_COLOURS) % 4], "color": _colour(k)}
            label = ", ".join(dict.fromkeys(word for word in line if word))
            _line(axis, [(x(row), _ratio(row, peer)) for row in mine], marker="o", markersize=4, label=label, **style)
        losing = [(x(row), _ratio(row, peer)) for row in part if _ratio(row, peer) < 1]
        _mark(axis, losing)
        axis.set_title(f"{peer}, {kv}: losing at {len(losing)} of {len(part)}", fontsize=9)
        axis.axhline(1, color=_FLOOR, linewidth=1)
        _axis(axis, part, x, name)
        axis.set_ylabel(f"{peer} / ours", fontsize=9)
    _legend(figure)
    return figure


def _ratio(row: dict[str, Any], peer: str) -> float:
    return (median_of(row, peer) or math.nan) / (ours_of(row) or math.nan)


def _mark(axis: Any, losing: Sequence[tuple[float, float]]) -> None:
    """Crosses, and the lowest figure at each place across the page, so that none lies on another."""
    if not losing:
        return
    xs, ys = zip(*losing, strict=True)
    axis.scatter(xs, ys, marker="x", s=60, linewidths=2, color=_LOSING, zorder=4)
    lowest = {x: min(y for at, y in losing if at == x) for x in xs}
    for x, y in lowest.items():
        style = {"textcoords": "offset points", "xytext": (0, -13), "ha": "center", "fontsize": 7, "color": _LOSING}
        axis.annotate(f"{y:.3f}", (x, y), **style)
    axis.margins(y=0.12)


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
        axis.bar_label(bars, fmt="%.1f", fontsize=8)
    axis.set_xticks(range(len(eager)), list(eager))
    axis.set_ylabel("us of host time a call")
    axis.set_title(f"Eager call with out=; {report['card']}, msa_ops {_commit(report)}", fontsize=9)
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
    axis.axhline(1, color=_BAR, linewidth=1)
    axis.set_xticks(range(len(results)), [r["form"] for r in results], fontsize=8)
    axis.set_ylabel("ours / SDPA on gathered keys")
    axis.set_title(str(report.get("cpu", report.get("card", "CPU"))), fontsize=9)
    axis.legend(frameon=False, fontsize=8)
    return figure
