"""``msa-ops doctor``: what this machine has, which engine serves what, self-tests, and what is missing."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..doctor import Machine, Report, RouteReport

app = typer.Typer(add_completion=False)
_WIDTH = 120


@app.command("doctor")
def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Plain text without colours, to be pasted.")] = False,
) -> None:
    """Say what this machine has and lacks, which engine serves each route, and test every route against the oracle.

    Exit codes: 0 all well, 1 a self-test failed, 2 something that this machine should have is missing. Works without a
    GPU: the CPU's routes are tested then, and that is all well.
    """
    page = None if as_json else make_page("doctor", plain)  # before the tests run: a missing package costs no wait
    from ..doctor import examine

    with _progress(quiet=as_json or plain) as progress:
        report = examine(progress=progress)
    if page is None:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        render(report, page)
    raise typer.Exit(report.exit_code)


class Page(Protocol):
    """Where a report is printed. Styles are names that rich knows; a page without colours leaves them aside."""

    def line(self, text: str = "", style: str = "", whole: bool = False) -> None:
        """Print a line, folded at the page's width unless it is to stay whole, to be copied."""

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print names and their values in two columns."""

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
        """Print a table; the style of a row is that of its last cell."""


def make_page(command: str, plain: bool) -> Page:
    """A page without colours and of fixed width for what is pasted, which needs no package; else one that rich prints.
    Raises `SystemExit` where rich is wanted and missing."""
    if plain:
        return PlainPage()
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"msa-ops {command} needs the package {error.name}: pip install '.[cli]' in a checkout of msa_ops; --plain "
            "and --json work without it"
        ) from None
    if sys.stdout.isatty():
        return RichPage(Console(highlight=False, markup=False, emoji=False))
    return RichPage(Console(color_system=None, width=_WIDTH, highlight=False, markup=False, emoji=False))


class PlainPage:
    """Text of a fixed width without colours."""

    def line(self, text: str = "", style: str = "", whole: bool = False) -> None:
        for part in [text] if whole else _folded(text, _WIDTH):
            typer.echo(part)

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        self._columns(rows, 2)

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
        self._columns([headings, *rows], 1)

    def _columns(self, rows: Sequence[Sequence[str]], padding: int) -> None:
        """Columns as wide as what they hold; the widest ones give way until the page holds all."""
        widths = [
            max(1, *(len(part) for cell in cells for part in cell.split("\n"))) for cells in zip(*rows, strict=True)
        ]
        while sum(widths) + 2 * padding * len(widths) > _WIDTH:
            widths[widths.index(max(widths))] -= 1
        gap = " " * padding
        for row in rows:
            cells = [_folded(cell, width) for cell, width in zip(row, widths, strict=True)]
            for at in range(max(map(len, cells))):
                parts = (cell[at] if at < len(cell) else "" for cell in cells)
                padded = (gap + part.ljust(width) + gap for part, width in zip(parts, widths, strict=True))
                typer.echo("".join(padded).rstrip())


def _folded(text: str, width: int) -> list[str]:
    """Lines of at most so many characters, broken at spaces where there are any, with the indent of what they continue."""
    folded = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip(" ")))
        folded += textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return folded


class RichPage:
    """A page on a rich console."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def line(self, text: str = "", style: str = "", whole: bool = False) -> None:
        from rich.text import Text

        self.console.print(Text(text, style=style), soft_wrap=whole)

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        from rich.table import Table

        table = Table(box=None, show_header=False, padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, value)
        self.console.print(table)

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE if self.console.color_system else None, padding=(0, 1), pad_edge=True)
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for (*cells, last), style in zip(rows, styles, strict=True):
            table.add_row(*cells, Text(last, style=style))
        self.console.print(table)


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows the stage on the terminal's error stream, or does nothing."""
    if quiet or not sys.stderr.isatty():
        yield lambda stage: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True, markup=False, highlight=False).status("") as status:
        yield lambda stage: status.update(Text(stage))


def render(report: Report, page: Page) -> None:
    """Print a report."""
    page.line("msa-ops doctor", "bold")
    for title, rows in _facts(report.machine):
        _section(page, title)
        page.pairs(rows)
    _section(page, "Routes and their numeric self-tests against the float64 oracle")
    _print_routes(report, page)
    _section(page, "Compile self-test")
    for test in report.compile_tests:
        size = f"{test.cubin_bytes / 1024:.0f} KiB, {test.seconds:.2f} s"
        page.line(f"  {test.variant} for {test.target}: " + (f"ok, {size}" if test.passed else "FAILED"))
    if not report.compile_tests:
        page.line("  not run")
    for title, lines, style in (
        ("Not run", report.not_run, "bold"),
        ("Notes", report.notes, "bold"),
        ("Failed", report.failures, "bold red"),
    ):
        if lines:
            _section(page, title, style)
            for line in lines:
                page.line(f"  {line}")
    if report.missing:
        _section(page, "Missing", "bold red")
        for item in report.missing:
            page.line(f"  {item.what}")
            page.line(f"    {item.remedy}", "bold", whole=True)
    page.line()
    page.line(verdict(report), "bold green" if report.exit_code == 0 else "bold red")


def verdict(report: Report) -> str:
    """One sentence for the exit code, with the number of self-tests behind it."""
    tests = sum(len(route.tests) for route in report.routes) + len(report.compile_tests)
    failed, lacking = len(report.failures), len(report.missing)
    if failed:
        also = f", and {lacking} missing" if lacking else ""
        return f"{failed} of {tests} self-tests FAILED{also}."
    if lacking:
        return f"{lacking} missing; the {tests} self-tests that could run passed."
    return f"All well: {tests} self-tests passed."


def _section(page: Page, title: str, style: str = "bold") -> None:
    page.line()
    page.line(title, style)


def _facts(machine: Machine) -> list[tuple[str, list[tuple[str, str]]]]:
    """Titles of the sections about the machine, and their rows."""
    m = machine

    def dotted(version: tuple[int, int] | None) -> str:
        return "not found" if version is None else f"{version[0]}.{version[1]}"

    software = [
        ("msa-ops", f"{m.msa_ops or 'not installed, run from its sources'} (kernel source {m.kernel_source})"),
        ("Python", f"{m.python}, {m.platform}"),
        (
            "torch",
            f"{m.torch} ({'CPU build' if m.torch_cuda is None else f'CUDA {m.torch_cuda}'}), {m.threads} threads",
        ),
        ("driver", "not found" if m.driver is None else f"{m.driver}, serves CUDA {dotted(m.driver_cuda)}"),
        ("cuda-bindings", m.cuda_bindings or "not found"),
        ("NVRTC", dotted(m.nvrtc)),
        *((name, value) for name, value in m.environment.items()),
    ]
    gpus = [
        (
            gpu.device,
            f"{gpu.name}, compute capability {dotted(gpu.capability)} "
            f"({'not supported' if gpu.architecture is None else f'supported, {gpu.architecture}'}), "
            f"{gpu.multiprocessors} multiprocessors, {gpu.memory_bytes / 2**30:.0f} GiB",
        )
        for gpu in m.gpus
    ]
    unseen = [("not seen by torch", name) for name in m.system_gpus] if not gpus else []
    return [("Software", software), ("GPUs", gpus or unseen or [("none", "")]), ("Kernel cache", _cache_rows(m))]


def _cache_rows(machine: Machine) -> list[tuple[str, str]]:
    cache = machine.cache
    state = "writable" if cache.writable else "not writable"
    if not cache.exists and not cache.error:
        state += ", not there yet"
    prebuilt = [
        f"{a.architecture} ({'all' if a.complete else f'{a.kernels} of'} {a.needed} kernels)"
        for a in cache.architectures
    ]
    others = f", {cache.files_of_other_versions} of other versions" if cache.files_of_other_versions else ""
    return [
        ("folder", f"{cache.folder or 'none'} ({state})"),
        ("kernels", f"{cache.files} of this version, {cache.bytes / 1024:.0f} KiB{others}"),
        ("prebuilt for", ", ".join(prebuilt) or "no architecture"),
    ]


def _print_routes(report: Report, page: Page) -> None:
    """One row for each device and KV dtype; a route that failed has a row of its own."""
    groups: dict[tuple[str, ...], list[RouteReport]] = {}
    for route in report.routes:
        alone = () if all(test.passed for test in route.tests) else (route.q, route.layout)
        groups.setdefault((route.device, route.kv, *alone), []).append(route)
    rows, styles = [], []
    for (device, kv, *_), routes in groups.items():
        queries = ", ".join(dict.fromkeys(route.q for route in routes))
        layouts = ", ".join(dict.fromkeys(route.layout for route in routes))
        outcome = _outcome(routes)
        styles.append("red" if outcome.startswith("FAILED") else "green" if outcome.startswith("ok") else "yellow")
        engine = routes[0].engine or "none"
        kernels = "\n".join(dict.fromkeys(name for route in routes for name in route.kernels))
        rows.append((device, kv, queries, layouts, engine, kernels, outcome))
    page.table(("device", "KV", "q", "layouts", "engine", "kernels", "self-test"), rows, styles)


def _outcome(routes: list[RouteReport]) -> str:
    tests = [test for route in routes for test in route.tests]
    if not tests:
        return routes[0].why_not or "not run"
    failed = [test.way for test in tests if not test.passed]
    if failed:
        return f"FAILED: {', '.join(dict.fromkeys(failed))}"
    worst = max(test.error / test.tolerance for test in tests if test.error is not None)
    return f"ok: {', '.join(dict.fromkeys(test.way for test in tests))}; error {worst:.0%} of tolerance"
