"""What a terminal shows: a bar with the time left, and tables of a report. Needs rich."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from . import cpu_report
from .records import Difference, median_of, ours_of
from .report import (
    ACCURACY_HEAD,
    UNFINISHED,
    accuracy_cells,
    host_words,
    is_finished,
    key_columns,
    last_column,
    print_what_fits,
    share_of,
    sharing,
    summary_lines,
)

Say = Callable[[str], None]
Step = Callable[[int, int, str], None]


def make_console() -> Console:
    """A console; where the output is no terminal it is wide, so that tables keep their columns."""
    print_what_fits(sys.stdout)
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(console.width, 180))


@contextlib.contextmanager
def progress(console: Console) -> Iterator[tuple[Say, Step]]:
    """A bar with the time left below the lines that are said; gives the functions that say a line and move the bar."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    # Seconds of the past that the time left follows from: single shapes differ widely.
    with Progress(*columns, console=console, speed_estimate_period=600) as bar:
        task = bar.add_task("starting", total=None)

        def say(line: str) -> None:
            console.print(escape(line), soft_wrap=True)

        def step(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=escape(name or "done"))

        yield say, step


def print_report(report: dict[str, Any], console: Console) -> None:
    """Tables of all that was measured, the verdicts, and what was not measured."""
    if not is_finished(report):
        console.print(UNFINISHED, style="bold red", markup=False)
    for preset in dict.fromkeys(row["preset"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["preset"] == preset]
        notes: dict[str, int] = {}
        console.print(_rows_table(report, preset, rows, notes))
        for reason, number in notes.items():
            console.print(f"  [{number}] {reason}", markup=False)
        if shared := sharing(rows):
            console.print(shared, markup=False)
    if report["accuracy"]:
        console.print(_accuracy_table(report))
    if report["host"]:
        console.print(_host_table(report["host"]))
    for line in summary_lines(report):
        console.print(line, markup=False)
    for name, reason in report["absent"].items():
        console.print(f"{name} was not measured: {reason}", markup=False)
    for text in report["not_measured"]:
        console.print(f"not measured: {text}", markup=False)


def _rows_table(report: dict[str, Any], preset: str, rows: list[dict[str, Any]], notes: dict[str, int]) -> Table:
    labels = list(dict.fromkeys(label for row in rows for label in row["sides"]))
    keys, last = key_columns(rows), last_column(rows)
    ceiling = f"{report['read_ceiling_bytes_per_s'] / 1e12:.3f} TB/s read ceiling"
    table = Table(title=f"{preset} on {report['card']}, us a call, {ceiling}", title_justify="left", min_width=60)
    words = ("KV", "lengths", "part", "bars")
    for name in [*keys, "floor", *labels, "share", *filter(None, [last])]:
        table.add_column(escape(name), justify="left" if name in words else "right")
    for row in rows:
        cells = [word(row) for word in keys.values()]
        cells += [f"{row['floor_us']:.2f}", *(_cell(row, label, notes) for label in labels), share_of(row)]
        if last:
            step = row.get("step_us")
            cells.append(_bars(row) if last == "bars" else f"{step / 1e3:.3f}" if step else "")
        table.add_row(*cells)
    return table


def _cell(row: dict[str, Any], label: str, notes: dict[str, int]) -> str:
    side = row["sides"].get(label)
    if side is None:
        return ""
    time, mine = median_of(row, label), ours_of(row)
    if time is None:
        note = escape(f"[{notes.setdefault(side['reason'], len(notes) + 1)}]")
        colour = "bold red" if side["status"] == "wrong" else "yellow"
        return f"[{colour}]{side['status']}[/] {note}"
    if label == row["best"]:
        return f"[bold]{time:.2f}[/] ({side['time_us']['min']:.2f}-{side['time_us']['max']:.2f})"
    if mine is None:
        return f"{time:.2f}"
    ratio = time / mine
    return f"{time:.2f} [{'green' if ratio >= 1 else 'bold red'}]x{ratio:.2f}[/]"


def _bars(row: dict[str, Any]) -> str:
    marks = []
    if goal := row.get("speed_goal"):
        marks.append("[red]miss[/]" if goal["met"] == "miss" else str(goal["met"]))
    if (goal := row.get("peer_goal")) and not goal["met"]:
        marks.append(f"[red]{goal['peer']} under {goal['bar']:.2f}[/]")
    if goal := row.get("work_goal"):
        text = f"{goal['ratio']:.2f} of {goal['baseline']} (limit {goal['limit']})"
        marks.append(text if goal["met"] else f"[red]{text}[/]")
    return ", ".join(marks)


def _accuracy_table(report: dict[str, Any]) -> Table:
    title = f"accuracy on {report['card']}: errors against float64, as multiples of those of one rounding"
    table = Table(title=title, title_justify="left", min_width=60)
    for name in ACCURACY_HEAD:
        table.add_column(name, justify="left" if name in ("KV", "side") else "right")
    for row in report["accuracy"]:
        table.add_row(*map(escape, accuracy_cells(row)))
    return table


def _host_table(host: dict[str, Any]) -> Table:
    table = Table(title="host", title_justify="left", show_header=False, min_width=60)
    for kv, sides in host.get("eager", {}).items():
        for label, side in sides.items():
            table.add_row("eager call", kv, escape(label), escape(host_words(side)))
    for name in ("import", "first_call"):
        words = ", ".join(f"{key} {value}" for key, value in host.get(name, {}).items())
        if words:
            table.add_row(name.replace("_", " "), "", "ours", escape(words))
    return table


def print_cpu(report: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{report['cpu']}, ms a call", title_justify="left", min_width=60)
    for name in ("KV", "ours", "SDPA", "ratio", "bar", "peak MiB", "row error"):
        table.add_column(name, justify="left" if name == "KV" else "right")
    for result in report["results"]:
        table.add_row(*cpu_report.cells(result, "[bold red]{}[/]"))
    console.print(table)


def print_difference(found: Difference, tolerance: float, console: Console) -> None:
    """What got slower and faster, the most changed first, and what only one of the reports has."""
    for line in found.warnings:
        console.print(f"warning: {line}", style="yellow", markup=False)
    for title, changes, colour in (("slower", found.slower, "bold red"), ("faster", found.faster, "green")):
        if not changes:
            continue
        table = Table(title=f"{title} by more than {100 * tolerance:g}%", title_justify="left", min_width=60)
        for name in ("what", "before", "after", "after / before"):
            table.add_column(name, justify="left" if name == "what" else "right")
        for c in changes:
            after = escape(c.reason or "no time") if c.after is None else f"{c.after:.2f} {c.unit}"
            ratio = "" if c.after is None else f"[{colour}]{c.ratio:.3f}[/]"
            table.add_row(escape(c.name), f"{c.before:.2f} {c.unit}", after, ratio)
        console.print(table)
    for where, names in (("first", found.only_before), ("second", found.only_after)):
        if names:
            shown = "; ".join(names[:3]) + ("; ..." if len(names) > 3 else "")
            console.print(f"only in the {where} report: {len(names)} ({shown})", markup=False)
    counts = f"{len(found.slower)} slower, {len(found.faster)} faster, {found.within} within {100 * tolerance:g}%"
    if found.no_longer_timed:
        counts += f", {len(found.no_longer_timed)} no longer timed"
    console.print(counts, style="bold red" if found.is_worse else "bold")
