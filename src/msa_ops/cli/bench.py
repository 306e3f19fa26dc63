"""``msa-ops bench``: this package and published implementations on the same tensors, with tables and pictures.

The measuring itself is `msa_ops.bench`; this module turns options into its own, and reports into files.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .folders import prepare_folder

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.options import Options

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure this package against published implementations, checked against float64 before anything is timed.",
)

_OUT = Path("bench-out")
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "kv": (Annotated[str | None, typer.Option(help="KV formats: bf16, fp8, nvfp4-planar, nvfp4-tiled. [all]")], None),
    "batch": (Annotated[str | None, typer.Option(help="Batches, comma-separated. [the preset's]")], None),
    "heads": (Annotated[str | None, typer.Option(help="QUERY/KV heads, as 64/4,16/1. [the preset's]")], None),
    "tp": (Annotated[str | None, typer.Option(help="Tensor-parallel sizes. [1,2,4,8]")], None),
    "seqlen_q": (Annotated[str | None, typer.Option(help="Tokens of a request. [the preset's]")], None),
    "context": (Annotated[str | None, typer.Option(help="Keys of a request, as 32K. [32K; with --smoke 512]")], None),
    "contexts": (
        Annotated[str | None, typer.Option("--context", help="Context lengths. [8K,32K,128K,512K,1M]")],
        None,
    ),
    "step_contexts": (
        Annotated[str | None, typer.Option("--context", help="Context lengths, multiples of 128. [8K,128K,1M]")],
        None,
    ),
    "topk": (Annotated[int, typer.Option(help="Blocks each token selects.")], 16),
    "overlap": (
        Annotated[bool, typer.Option("--overlap", help="Tokens of a request share 12 to 15 of 16 blocks.")],
        False,
    ),
    "extra": (Annotated[bool, typer.Option("--extra", help="More heads and query lengths, outside the goals.")], False),
    "against": (
        Annotated[
            str | None,
            typer.Option(help="Peers, of flashinfer, vllm and sdpa, or none. [flashinfer,vllm; in a sweep none]"),
        ],
        None,
    ),
    "sweep": (
        Annotated[
            list[str] | None,
            typer.Option(
                metavar="NAME=V1,V2",
                help="Measure under each value of an environment variable, in turns; separate values that hold commas by "
                "semicolons; an empty value unsets the variable; several sweeps give all combinations.",
            ),
        ],
        None,
    ),
    "peer_version": (
        Annotated[
            list[str] | None,
            typer.Option(metavar="PEER=VERSION", help="Recorded for a peer that does not say its version."),
        ],
        None,
    ),
    "device": (
        Annotated[str, typer.Option(help="auto, cuda, cuda:1 or cpu; auto is the CPU with --smoke alone.")],
        "auto",
    ),
    "smoke": (
        Annotated[bool, typer.Option("--smoke", help="Tiny shapes, on any machine: does everything work?")],
        False,
    ),
    "replays": (Annotated[int | None, typer.Option(help="Timed graph replays, 7 or more. [11]")], None),
    "time_budget": (Annotated[float | None, typer.Option(help="Seconds after which no shape is begun.")], None),
    "seed": (Annotated[int, typer.Option(help="Seed of all inputs.")], 0),
    "workers": (Annotated[int, typer.Option(help="Processes that compile beforehand; 0: none.")], 12),
    "commit": (Annotated[str | None, typer.Option(help="Recorded where the source is no git checkout.")], None),
    "out": (Annotated[Path, typer.Option(help="Folder for the JSON, the page and the pictures.")], _OUT),
    "plots": (Annotated[bool, typer.Option(help="Draw the pictures.")], True),
}
_COMMON = (
    "kv", "batch", "seqlen_q", "topk", "against", "sweep", "device", "smoke", "replays", "time_budget", "seed",
    "workers", "peer_version", "commit", "out", "plots",
)  # fmt: skip


def _takes(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the named options: typer reads them from the signature, and the commands share most of them."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(n, kind, default=_OPTIONS[n][1], annotation=_OPTIONS[n][0]) for n in names]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in parameters}
        return function

    return decorate


@app.command()
@_takes("heads", "context", "overlap", "extra", *_COMMON)
def decode(**given: Any) -> None:
    """The grid: batches 1 to 256, 64/4 and 16/1 heads, 1 and 4 tokens a request, every KV format, 32K keys."""
    _measure("decode", "grid", given)


@app.command()
@_takes("heads", "context", "extra", *(name for name in _COMMON if name != "seqlen_q"))
def ragged(**given: Any) -> None:
    """Requests of 1 to 128K keys, and one long among short ones, against as many blocks evenly spread."""
    _measure("ragged", "ragged", given)


@app.command()
@_takes("heads", "context", "extra", *_COMMON)
def spec(**given: Any) -> None:
    """Speculative decoding: several tokens a request that select mostly the same blocks, against separate requests."""
    _measure("spec", "spec", given)


@app.command()
@_takes("heads", "step_contexts", *_COMMON)
def step(**given: Any) -> None:
    """A decode step with its indexer: scoring, selecting, attending, and the whole, at contexts of 8K, 128K and 1M."""
    _measure("step", "step", given | {"context": given.pop("step_contexts")})


@app.command()
@_takes("heads", "context", "extra", *(name for name in _COMMON if name not in ("replays", "plots")))
def accuracy(**given: Any) -> None:
    """Errors against float64 of every side, as multiples of those of one rounding, for flat and peaked attention."""
    _measure("accuracy", "accuracy", given | {"plots": False})


@app.command()
@_takes("tp", "contexts", "overlap", *_COMMON)
def model(**given: Any) -> None:
    """Attention of MiniMax-M3's 57 sparse layers in one decode step, at each tensor-parallel size and context."""
    _measure("model", "model", given | {"context": given.pop("contexts")})


@app.command()
@_takes(
    "kv", "context", "against", "sweep", "device", "smoke", "time_budget", "seed", "peer_version", "commit", "out",
    "plots",
)  # fmt: skip
def host(**given: Any) -> None:
    """Host time of an eager call, of the import, and of the first call with a cold and a warm compile cache."""
    _measure("host", "host", given)


@app.command()
def cpu(
    forms: Annotated[str, typer.Option(help="KV forms.")] = "bf16,fp16,fp8,nvfp4_tiled,nvfp4_planar",
    threads: Annotated[int, typer.Option(help="torch threads.")] = 2,
    batch: Annotated[int, typer.Option(help="Requests.")] = 8,
    heads: Annotated[str, typer.Option(help="QUERY/KV heads.")] = "32/4",
    context: Annotated[str, typer.Option(help="Keys of a request, as 128K.")] = "128K",
    topk: Annotated[int, typer.Option(help="Blocks each token selects.")] = 16,
    rounds: Annotated[int, typer.Option(help="Timed calls of each side.")] = 101,
    smoke: Annotated[bool, typer.Option("--smoke", help="One tiny shape instead; bars are not judged.")] = False,
    commit: Annotated[str | None, typer.Option(help="Recorded where the source is no git checkout.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the JSON, the page and the picture.")] = _OUT,
    plots: Annotated[bool, typer.Option(help="Draw the picture.")] = True,
) -> None:
    """The CPU engine against torch's attention on keys that are gathered and widened already."""
    from ..bench import cpu as bench
    from ..bench import cpu_report
    from ..bench.sizes import parse_size, split_heads

    try:
        (query, kv), keys = split_heads(heads), parse_size("--context", context)
        given = {"threads": threads, "batch": batch, "heads": query, "kv_heads": kv, "context": keys, "topk": topk}
        shape = bench.Shape(**(bench.SMOKE if smoke else given | {"rounds": rounds}))
        chosen = bench.checked(shape, forms.split(","))
        prepare_folder("--out", out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    draw, terminal = _pictures(plots), _terminal()
    console = terminal.make_console()
    try:
        with terminal.progress(console) as (say, step):
            report = bench.measure(shape, chosen, say, step, commit)
    except RuntimeError as error:
        raise SystemExit(f"msa-ops bench cpu: {error}") from None
    terminal.print_cpu(report, console)
    pictures = draw(report, out, "cpu")
    _write(console, out / "cpu.json", json.dumps(report, indent=1) + "\n", pictures)
    (out / "cpu.md").write_text(cpu_report.markdown(report, pictures[::2]), encoding="utf-8")
    if not (report["bars_held"] or smoke):
        raise typer.Exit(1)


@app.command()
def plot(
    files: Annotated[
        list[Path], typer.Argument(help="Reports. Several are compared: the first is ours.", metavar="FILE...")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = _OUT,
    name: Annotated[str | None, typer.Option(help="Beginning of the pictures' names. [of the files' names]")] = None,
    preset: Annotated[str | None, typer.Option(help="Only these presets' rows. [all]")] = None,
    kv: Annotated[str | None, typer.Option(help="Only these KV formats. [all]")] = None,
    heads: Annotated[str | None, typer.Option(help="Only these heads. [all]")] = None,
    seqlen_q: Annotated[str | None, typer.Option(help="Only these query lengths. [all]")] = None,
) -> None:
    """Draw the pictures of a report again, or compare several: our times of the others appear beside the first's."""
    from ..bench import records
    from ..bench.sizes import numbers

    try:
        reports = {path.stem: records.load(path) for path in files}
        if len(reports) < len(files):
            reports = {str(path): records.load(path) for path in files}
        if len(reports) < len(files):
            raise ValueError("the same file is given twice")
        if len(reports) > 1 and any(report.get("kind") == "cpu" for report in reports.values()):
            raise ValueError("reports of bench cpu are compared by msa-ops bench diff; plot draws one at a time")
        whole = records.side_by_side(reports) if len(reports) > 1 else next(iter(reports.values()))
        words = {field: text and text.split(",") for field, text in (("preset", preset), ("kv", kv), ("heads", heads))}
        chosen = {**words, "seqlen_q": numbers("--seqlen-q", seqlen_q)}
        if whole.get("kind") != "cpu":
            whole = records.select(whole, **chosen)
        elif any(chosen.values()):
            raise ValueError("a report of bench cpu has no rows to choose from: leave the options out")
        if name is not None and (name in ("", ".", "..") or set(name) & set("/\\\0")):
            raise ValueError(f"--name must be the beginning of a file's name, without a folder, got {name!r}")
        prepare_folder("--out", out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    draw, terminal = _pictures(True), _terminal()
    console = terminal.make_console()
    stem = name or "-against-".join(path.stem for path in files)
    pictures = draw(whole, out, stem)
    if len(reports) > 1:
        terminal.print_report({**whole, "summary": _NO_VERDICTS}, console)
    if not pictures:
        raise SystemExit("msa-ops bench plot: nothing was timed in what was given, so there is nothing to draw")
    _say_written(console, pictures)


_NO_VERDICTS: dict[str, Any] = {"speed": {}, "peers": {}, "nvfp4_over_bf16": [], "work": {}, "step": {}}


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="The earlier report.", metavar="A")],
    after: Annotated[Path, typer.Argument(help="The later report.", metavar="B")],
    tolerance: Annotated[float, typer.Option(help="Share by which a time may grow.")] = 0.03,
) -> None:
    """Say what got slower from A to B. Exit status 1 if anything did by more than --tolerance, or is no longer timed."""
    from ..bench import records

    try:
        found = records.diff(records.load(before), records.load(after), tolerance)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    terminal = _terminal()
    terminal.print_difference(found, tolerance, terminal.make_console())
    if found.is_worse:
        raise typer.Exit(1)


def _measure(name: str, preset: str, given: dict[str, Any]) -> None:
    """Measure, print, write. Exit status 1 for a bad machine, or where this package is wrong or fails; 3 for shapes not
    measured. In a sweep a shape that this package refuses is no failure, and is shown like a peer's refusal."""
    from ..bench import main, report

    out, plots = given.pop("out"), given.pop("plots")
    try:
        options = _options(preset, given)
        prepare_folder("--out", out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    draw, terminal = _pictures(plots), _terminal()
    console = terminal.make_console()
    options = replace(options, json=str(out / f"{name}.json"), markdown=str(out / f"{name}.md"))
    try:
        with terminal.progress(console) as (say, step):
            result = main.measure(options, say, step)
    except RuntimeError as error:
        raise SystemExit(f"msa-ops bench {name}: {error}") from None
    except KeyboardInterrupt:
        console.print(f"interrupted: {out} holds what was measured", style="bold red", markup=False)
        raise typer.Exit(main.INTERRUPTED) from None
    pictures = draw(result, out, name)
    page = report.markdown(result, pictures[::2])
    (out / f"{name}.md").write_text(page, encoding="utf-8", errors="surrogateescape")
    terminal.print_report(result, console)
    _say_written(console, [out / f"{name}.json", out / f"{name}.md", *pictures])
    if status := main.exit_status(result, lambda line: console.print(line, style="bold red")):
        raise typer.Exit(status)


def _options(preset: str, given: dict[str, Any]) -> Options:
    """`Options` of a command's values. Raises `ValueError`."""
    import torch

    from ..bench.options import from_values

    if given["device"] == "auto":
        given["device"] = "cpu" if given["smoke"] and not torch.cuda.is_available() else "cuda"
    try:
        torch.device(given["device"])
    except RuntimeError:
        raise ValueError(f"--device must be auto, cpu or cuda, got {given['device']!r}") from None
    return from_values(preset=[preset], **given)


def _terminal() -> Any:
    try:
        from ..bench import terminal
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"msa-ops bench needs the package {error.name}: pip install '.[cli]' in a checkout of msa_ops"
        ) from None
    return terminal


def _pictures(wanted: bool) -> Callable[[dict[str, Any], Path, str], list[Path]]:
    """The function that draws; asked for before anything is measured, so that a missing matplotlib costs no run."""
    if not wanted:
        return lambda report, folder, stem: []
    try:
        from ..bench import plots
    except ModuleNotFoundError as error:
        remedy = "pip install '.[demo]' in a checkout of msa_ops, or --no-plots where there is that option"
        raise SystemExit(f"msa-ops bench needs the package {error.name} for its pictures: {remedy}") from None
    return plots.draw


def _say_written(console: Console, paths: list[Path]) -> None:
    console.print("Written: " + ", ".join(str(path) for path in paths), soft_wrap=True, markup=False)


def _write(console: Console, file: Path, text: str, pictures: list[Path]) -> None:
    file.write_text(text, encoding="utf-8")
    _say_written(console, [file, file.with_suffix(".md"), *pictures])
