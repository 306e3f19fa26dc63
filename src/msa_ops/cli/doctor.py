"""``msa-ops doctor``: what this machine has, which engine serves what, self-tests, and what is missing."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
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
    from ..doctor import examine

    with _progress(quiet=as_json or plain) as progress:
        report = examine(progress=progress)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        render(report, make_console(plain))
    raise typer.Exit(report.exit_code)


def make_console(plain: bool) -> Console:
    """A console for a terminal, or one of fixed width without colours for what is pasted or read by a program."""
    if plain or not sys.stdout.isatty():
        return Console(color_system=None, width=_WIDTH, highlight=False, markup=False, emoji=False)
    return Console(highlight=False, markup=False, emoji=False)


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows the stage on the terminal's error stream, or does nothing."""
    console = Console(stderr=True, markup=False, highlight=False)
    if quiet or not console.is_terminal:
        yield lambda stage: None
        return
    with console.status("") as status:
        yield lambda stage: status.update(Text(stage))


def render(report: Report, console: Console) -> None:
    """Print a report."""
    console.print(Text("msa-ops doctor", style="bold"))
    for title, rows in _facts(report.machine):
        _section(console, title)
        _print_pairs(console, rows)
    _section(console, "Routes and their numeric self-tests against the float64 oracle")
    console.print(_route_table(report, console))
    _section(console, "Compile self-test")
    for test in report.compile_tests:
        size = f"{test.cubin_bytes / 1024:.0f} KiB, {test.seconds:.2f} s"
        console.print(f"  {test.variant} for {test.target}: " + (f"ok, {size}" if test.passed else "FAILED"))
    if not report.compile_tests:
        console.print("  not run")
    for title, lines, style in (
        ("Not run", report.not_run, ""),
        ("Notes", report.notes, ""),
        ("Failed", report.failures, "bold red"),
    ):
        if lines:
            _section(console, title, style)
            for line in lines:
                console.print(f"  {line}")
    if report.missing:
        _section(console, "Missing", "bold red")
        for item in report.missing:
            console.print(f"  {item.what}")
            console.print(Text(f"    {item.remedy}", style="bold"), soft_wrap=True)
    console.print()
    console.print(Text(verdict(report), style="bold green" if report.exit_code == 0 else "bold red"))


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


def _section(console: Console, title: str, style: str = "bold") -> None:
    console.print()
    console.print(Text(title, style=style or "bold"))


def _print_pairs(console: Console, rows: list[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2))
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


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
    prebuilt = [
        f"{a.architecture} ({'all' if a.complete else f'{a.kernels} of'} {a.needed} kernels)"
        for a in cache.architectures
    ]
    others = f", {cache.files_of_other_versions} of other versions" if cache.files_of_other_versions else ""
    return [
        ("folder", f"{cache.folder or 'none'} ({state}{'' if cache.exists else ', not there yet'})"),
        ("kernels", f"{cache.files} of this version, {cache.bytes / 1024:.0f} KiB{others}"),
        ("prebuilt for", ", ".join(prebuilt) or "no architecture"),
    ]


def _route_table(report: Report, console: Console) -> Table:
    """One row for each device and KV dtype; a route that failed has a row of its own."""
    table = Table(box=box.SIMPLE if console.color_system else None, padding=(0, 1), pad_edge=True)
    for heading in ("device", "KV", "q", "layouts", "engine", "kernels", "self-test"):
        table.add_column(heading, overflow="fold")
    groups: dict[tuple[str, ...], list[RouteReport]] = {}
    for route in report.routes:
        alone = () if all(test.passed for test in route.tests) else (route.q, route.layout)
        groups.setdefault((route.device, route.kv, *alone), []).append(route)
    for (device, kv, *_), routes in groups.items():
        queries = ", ".join(dict.fromkeys(route.q for route in routes))
        layouts = ", ".join(dict.fromkeys(route.layout for route in routes))
        outcome = _outcome(routes)
        style = "red" if outcome.startswith("FAILED") else "green" if outcome.startswith("ok") else "yellow"
        engine, kernels = routes[0].engine or "none", "\n".join(routes[0].kernels)
        table.add_row(device, kv, queries, layouts, engine, kernels, Text(outcome, style=style))
    return table


def _outcome(routes: list[RouteReport]) -> str:
    tests = [test for route in routes for test in route.tests]
    if not tests:
        return routes[0].why_not or "not run"
    failed = [test.way for test in tests if not test.passed]
    if failed:
        return f"FAILED: {', '.join(dict.fromkeys(failed))}"
    worst = max(test.error / test.tolerance for test in tests if test.error is not None)
    return f"ok: {', '.join(dict.fromkeys(test.way for test in tests))}; error {worst:.0%} of tolerance"
