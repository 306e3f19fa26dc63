"""The demo's table, plot and JSON."""

from __future__ import annotations

import dataclasses
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .demo_run import NOISE_FACTOR, ContextResult

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class DemoReport:
    """A whole run: how it was set up, and the results in ascending order of context."""

    kv_dtype: str
    seed: int
    device: str
    text: str
    prefill_seconds: float
    total_seconds: float
    config: Any
    results: list[ContextResult]

    @property
    def enforced(self) -> bool:
        """Whether the comparison decides success: for bf16 caches. Others are reported only."""
        return self.kv_dtype == "bf16"

    @property
    def passed(self) -> bool:
        return not self.enforced or all(result.agrees for result in self.results)


def device_name(device: str) -> str:
    """The hardware that ran, for headings."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {torch.get_num_threads()} threads"


def engine_sentence(device: str) -> str:
    """Which engine served the sparse calls: calls are served by the device of their tensors."""
    if device.startswith("cuda"):
        return f"msa_ops ran on its CUDA engine: its own kernel on {device_name(device)}."
    return f"msa_ops ran on its CPU engine: torch operations on {device_name(device)}. No GPU was used."


def short(context: int) -> str:
    """``16384`` as ``16K``."""
    return f"{context // 1024}K" if context % 1024 == 0 else str(context)


def print_report(report: DemoReport, console: Console) -> None:
    """The tables, the continuations and the verdict."""
    for table in (_speed_table(report), _bytes_table(report), _agreement_table(report)):
        console.print(table)
    console.print(_LEGEND)
    if report.kv_dtype in ("fp8", "nvfp4"):
        console.print(
            f"[dim]transformers reads no {report.kv_dtype} pages: its path got a bf16 copy. The copying counts in "
            "its ms per token (it has to be done every step) and not in its ms per sparse call.[/dim]"
        )
    for result in report.results:
        console.print(
            f"\n[bold]After {short(result.context)} bytes of text the model writes[/bold] (as bytes, escaped):"
        )
        console.print(escaped(result.continuation), markup=False, highlight=False)
        console.print(
            f"[dim]transformers' path, running freely too, wrote the same first {result.common_prefix} bytes.[/dim]"
        )
    console.print("[dim]The weights are random (seeded): what is shown is decoding, not language.[/dim]\n")
    console.print(f"{engine_sentence(report.device)}\n", highlight=False)
    console.print(_verdict(report))


def escaped(text: bytes) -> str:
    """Bytes as a printable line: ASCII as it is, everything else as in a Python bytes literal."""
    return repr(text)[2:-1]


def _speed_table(report: DemoReport) -> Table:
    table = Table(
        title=f"Decode, batch 1, {report.kv_dtype} KV, ms: msa_ops and transformers (sdpa)",
        caption=device_name(report.device),
    )
    for heading in ("context", "sparse call\nmsa_ops", "sdpa", "ratio"):
        table.add_column(heading, justify="right")
    for heading in ("whole model\nmsa_ops", "sdpa", "ratio"):
        table.add_column(heading, justify="right")
    for r in report.results:
        table.add_row(
            short(r.context),
            f"{r.call_ms_ours:.2f}",
            f"{r.call_ms_transformers:.2f}",
            f"{r.call_ms_transformers / r.call_ms_ours:.1f}x",
            f"{r.token_ms_ours:.1f}",
            f"{r.token_ms_transformers:.1f}",
            f"{r.token_ms_transformers / r.token_ms_ours:.1f}x",
        )
    return table


def _bytes_table(report: DemoReport) -> Table:
    table = Table(title=f"KV read per token by the sparse layers, in {report.kv_dtype}")
    for heading in ("context", "selected blocks", "dense", "share"):
        table.add_column(heading, justify="right")
    for r in report.results:
        selected, dense = r.kv_bytes_selected, r.kv_bytes_dense
        table.add_row(
            short(r.context), f"{selected / 2**20:.2f} MiB", f"{dense / 2**20:.2f} MiB", f"{selected / dense:.0%}"
        )
    return table


def _agreement_table(report: DemoReport) -> Table:
    table = Table(title="Logits against transformers' sdpa path, teacher-forced: largest difference")
    for heading in ("context", "tokens", "msa_ops", "eager\npath", "one block\nleft out"):
        table.add_column(heading, justify="right")
    for heading in ("argmax\nequal", "near\nties", "agrees"):
        table.add_column(heading, justify="right")
    for r in report.results:
        table.add_row(
            short(r.context),
            str(r.tokens),
            f"{r.logit_difference:.3f}",
            f"{r.reference_difference:.3f}",
            f"{r.block_left_out_difference:.3f}",
            f"{r.argmax_equal}/{r.argmax_compared}",
            str(r.differing_choices),
            "[green]yes[/green]" if r.agrees else "[red]NO[/red]",
        )
    return table


_LEGEND = (
    "[dim]All runs take the reference's tokens, blocks and experts. 'eager path': transformers' other path, which "
    "shows bf16's own rounding. 'one block left out': our path with a small fault made on purpose. 'argmax equal': of "
    "the tokens whose top-2 gap exceeds twice our difference. 'near ties': tokens at which rounding alone would have "
    "made our path choose another block or expert.[/dim]"
)


def _verdict(report: DemoReport) -> str:
    rule = (
        f"logits differ from transformers' sdpa by at most {NOISE_FACTOR:g} times what its own eager path does, and "
        "the argmax is equal wherever the reference's top-2 gap exceeds twice the difference"
    )
    if not report.enforced:
        return f"[bold]{report.kv_dtype} cache: the difference is reported only.[/bold] Rule for bf16: {rule}."
    if report.passed:
        return f"[bold green]Both paths agree:[/bold green] {rule}."
    bad = ", ".join(short(r.context) for r in report.results if not r.agrees)
    return f"[bold red]The paths disagree at {bad}.[/bold red] Rule: {rule}."


def write_json(report: DemoReport, path: Path) -> None:
    """Everything that was measured, and what it was measured with; `schema_version` counts incompatible changes."""
    import transformers

    from .. import __name__ as package

    config = report.config
    document = {
        "schema_version": SCHEMA_VERSION,
        "package": package,
        "passed": report.passed,
        "enforced": report.enforced,
        "noise_factor": NOISE_FACTOR,
        "device": report.device,
        "device_name": device_name(report.device),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "kv_dtype": report.kv_dtype,
        "seed": report.seed,
        "text": report.text,
        "prefill_seconds": round(report.prefill_seconds, 3),
        "total_seconds": round(report.total_seconds, 3),
        "model": {
            "layers": list(config.layer_types),
            "hidden_size": config.hidden_size,
            "query_heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "block_size": config.index_block_size,
            "topk": config.index_topk_blocks,
            "experts": config.num_local_experts,
        },
        "contexts": [
            {**dataclasses.asdict(r), "continuation": escaped(r.continuation), "agrees": r.agrees}
            for r in report.results
        ],
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_plot(report: DemoReport, path: Path) -> None:
    """Three panels over the context length: the sparse call, the whole model, KV bytes; ours and transformers'."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    contexts = [r.context for r in report.results]
    panels = [
        ("Sparse attention call", "ms", [(r.call_ms_ours, r.call_ms_transformers) for r in report.results]),
        ("Whole model", "ms per token", [(r.token_ms_ours, r.token_ms_transformers) for r in report.results]),
        (
            "KV read by the sparse layers",
            "MiB per token",
            [(r.kv_bytes_selected / 2**20, r.kv_bytes_dense / 2**20) for r in report.results],
        ),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    for axis, (title, unit, pairs) in zip(axes, panels, strict=True):
        ours, theirs = zip(*pairs, strict=True)
        names = ("selected blocks", "dense") if "KV" in title else ("msa_ops", "transformers (sdpa)")
        axis.plot(contexts, theirs, marker="s", color="#8a8a8a", label=names[1])
        axis.plot(contexts, ours, marker="o", color="#c2410c", label=names[0])
        axis.set_title(title)
        axis.set_xlabel("context, tokens")
        axis.set_ylabel(unit)
        axis.set_xscale("log", base=2)
        axis.set_xticks(contexts, [short(c) for c in contexts])
        axis.set_ylim(0, 1.08 * max(*theirs, *ours))  # room for the whole of a single marker
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.suptitle(
        f"MiniMax-M3 architecture, small, random weights; {report.kv_dtype} KV; {device_name(report.device)}"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
