"""``msa-ops demo``: a small MiniMax-M3 reads a text and writes on, by this package and by transformers.

One chunked prefill by transformers' own path fills one cache; at each context length both paths decode from it.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .folders import prepare_folder

if TYPE_CHECKING:
    from rich.console import Console

    from .demo_report import DemoReport

app = typer.Typer(add_completion=False)

KV_DTYPES = ("bf16", "fp8", "nvfp4")
DEFAULT_CONTEXTS = "1K,4K,16K"
MAX_CONTEXT = 1 << 20
MAX_TOKENS = 4096
"""A token takes some ten decode steps, and all logits are kept: with more, a slip of the keyboard would run for hours."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The demo's options, checked."""

    contexts: tuple[int, ...]
    tokens: int
    kv_dtype: str
    seed: int
    out: Path
    text: bytes
    text_name: str
    device: str
    device_note: str = ""
    """Why ``--device auto`` left a GPU aside, as a sentence; empty where it did not."""


@app.command()
def demo(
    context: Annotated[
        list[str] | None,
        typer.Option(help=f"Context lengths in tokens: repeat it or give a list. [{DEFAULT_CONTEXTS}]"),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to decode at each context.")] = 32,
    kv_dtype: Annotated[str, typer.Option(help="Cache of the sparse layers: bf16, fp8 or nvfp4.")] = "bf16",
    seed: Annotated[int, typer.Option(help="Seed of the model's weights.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png.")] = Path("demo-out"),
    text: Annotated[
        Path | None, typer.Option(help="Text to read, as bytes. [the beginning of Newton's Opticks]")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Decode a small MiniMax-M3 through msa_ops and through transformers, compare token by token, and time both."""
    try:
        options = check_options(
            context=context, tokens=tokens, kv_dtype=kv_dtype, seed=seed, out=out, text=text, device=device
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    from rich.console import Console

    try:
        from . import demo_report, demo_run  # noqa: F401
    except ModuleNotFoundError as error:
        remedy = "pip install '.[demo]' in a checkout of msa_ops"
        raise SystemExit(f"msa-ops demo needs the package {error.name}: {remedy}") from None
    console = Console()
    if options.device_note:
        console.print(options.device_note, highlight=False)
    report = run_demo(options, console)
    demo_report.write_json(report, options.out / "demo.json")
    demo_report.write_plot(report, options.out / "demo.png")
    demo_report.print_report(report, console)
    console.print(
        f"Written: {options.out / 'demo.json'}, {options.out / 'demo.png'} ({report.total_seconds:.0f} s in all)"
    )
    if not report.passed:
        raise typer.Exit(1)


def check_options(
    *, context: list[str] | None, tokens: int, kv_dtype: str, seed: int, out: Path, text: Path | None, device: str
) -> DemoOptions:
    """Turn the command line's values into `DemoOptions`. Raises `ValueError`, naming the option that is wrong."""
    contexts = parse_contexts(context or [DEFAULT_CONTEXTS])
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"--tokens must be in 1..{MAX_TOKENS}, got {tokens}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed must be in 0..2^63 - 1, got {seed}")
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"--kv-dtype must be {', '.join(KV_DTYPES[:-1])} or {KV_DTYPES[-1]}, got {kv_dtype!r}")
    device, note = choose_device(device)
    data, name = read_text(text)
    if len(data) < contexts[-1]:
        raise ValueError(
            f"--context {contexts[-1]} needs a text of as many bytes, got {len(data)} from {name}: "
            "give a longer one with --text"
        )
    prepare_folder("--out", out)  # now, not after minutes of work
    return DemoOptions(contexts, tokens, kv_dtype, seed, out, data, name, device, note)


def choose_device(device: str) -> tuple[str, str]:
    """What ``--device`` means here: "cpu" or "cuda", and a sentence where a GPU is left aside, else an empty one.

    Raises `ValueError` for an unknown device, and for cuda where it cannot serve the demo.
    """
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, got {device!r}")
    if device == "cpu":
        return "cpu", ""
    if not torch.cuda.is_available():
        if device == "auto":
            return "cpu", ""
        raise ValueError(
            "--device cuda needs a CUDA build of torch and an NVIDIA GPU, and torch sees none: take --device cpu"
        )
    capability = torch.cuda.get_device_capability()
    if capability >= (8, 0):
        return "cuda", ""
    lack = f"the CUDA engine needs compute capability 8.0 or newer, this GPU has {capability[0]}.{capability[1]}"
    if device == "cuda":
        raise ValueError(f"--device cuda: {lack}. Take --device cpu")
    return "cpu", f"--device auto takes the CPU, although there is a GPU: {lack}."


def parse_contexts(values: list[str]) -> tuple[int, ...]:
    """``["1K,4K", "16384"]`` as ``(1024, 4096, 16384)``: ascending, without repeats."""
    lengths = set()
    for value in ",".join(values).split(","):
        match = re.fullmatch(r"\s*(\d{1,12})\s*([kK]?)\s*", value)
        length = int(match.group(1)) * (1024 if match.group(2) else 1) if match else 0
        if length < 1:
            raise ValueError(f"--context must be lengths such as 1K,4K or 16384, got {value.strip()!r}")
        if length > MAX_CONTEXT:
            raise ValueError(f"--context must be at most {MAX_CONTEXT // 1024}K, got {value.strip()}")
        lengths.add(length)
    return tuple(sorted(lengths))


def read_text(path: Path | None) -> tuple[bytes, str]:
    """The text to read and its name for the report; without a path, the one that the package brings."""
    if path is None:
        return (resources.files("msa_ops.cli") / "data" / "opticks.txt").read_bytes(), "Isaac Newton, Opticks (1730)"
    if not path.is_file():
        raise ValueError(f"--text must be a file, got {path}, which is none")
    try:
        with path.open("rb") as file:
            return file.read(MAX_CONTEXT), path.name
    except OSError as error:
        raise ValueError(f"--text must be a file to read, got {path}: {error.strerror or error}") from None


def run_demo(options: DemoOptions, console: Console) -> DemoReport:
    """Prefill once and measure at each context on the way, showing progress on `console`."""
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ..integrations.transformers import MSAPagedCache, enable
    from .demo_model import PREFILL_CHUNK, build_model, step
    from .demo_report import DemoReport, short
    from .demo_run import REFERENCE, Measurement

    began = time.perf_counter()
    model = enable(build_model(options.seed, options.device))
    cache = MSAPagedCache(model.config, options.contexts[-1] + options.tokens, kv_dtype=options.kv_dtype)
    ids = torch.tensor(list(options.text[: options.contexts[-1]]), device=options.device)[None]
    results, prefill_seconds, done = [], 0.0, 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with torch.inference_mode(), Progress(*columns, console=console, transient=True) as progress:
        reading = progress.add_task(f"reading {options.text_name}, bytes", total=options.contexts[-1])
        decoding = progress.add_task("decoding", total=7 * len(options.contexts))
        for context in options.contexts:
            model.set_attn_implementation(REFERENCE)
            start = time.perf_counter()
            while done < context:
                chunk = min(PREFILL_CHUNK, context - done)
                step_logits = step(model, ids[:, done : done + chunk], cache)
                done += chunk
                progress.update(reading, completed=done)
            first = int(step_logits.argmax())
            prefill_seconds += time.perf_counter() - start

            def tell(stage: str, context: int = context) -> None:
                progress.update(decoding, advance=1, description=f"at {short(context)}: {stage}")

            results.append(Measurement(model, cache, context, first, options.tokens).run(tell))
            progress.update(decoding, advance=1)
    return DemoReport(
        kv_dtype=options.kv_dtype,
        seed=options.seed,
        device=options.device,
        text=options.text_name,
        prefill_seconds=prefill_seconds,
        total_seconds=time.perf_counter() - began,
        config=model.config,
        results=results,
    )
