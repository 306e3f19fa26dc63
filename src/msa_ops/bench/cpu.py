"""The CPU engine's benchmark, ``benchmarks/cpu.py`` of a checkout, run in a process of its own."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import environment

SCRIPT = pathlib.Path(__file__).parents[3] / "benchmarks" / "cpu.py"
FORMS = ("bf16", "fp16", "fp8", "nvfp4_tiled", "nvfp4_planar")
SMOKE = ("--threads", "1", "--batch", "1", "--heads", "4", "--kv-heads", "2", "--context", "2048", "--topk", "4",
         "--rounds", "5")  # fmt: skip


def measure(
    arguments: Sequence[str],
    forms: Sequence[str],
    say: Callable[[str], None],
    progress: Callable[[int, int, str], None],
    commit: str | None = None,
) -> dict[str, Any]:
    """Run the script on `forms` with `arguments` and return its record with the machine's facts.

    ``bars_held`` says whether every ratio and peak is within its bar. Raises `RuntimeError` with the script's own last
    words where it fails, or where this is no checkout.
    """
    if not SCRIPT.exists():
        raise RuntimeError("bench cpu runs benchmarks/cpu.py, which a checkout has and an installed package has not")
    path = os.pathsep.join(p for p in sys.path if p)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "cpu.json"
        command = [sys.executable, str(SCRIPT), *arguments, "--forms", *forms, "--json", str(file)]
        process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stderr is not None
        done = 0
        progress(0, len(forms), forms[0])
        for line in process.stdout:
            say(line.rstrip())
            done += line.split(maxsplit=1)[:1] in [[form] for form in forms]
            progress(done, len(forms), forms[done] if done < len(forms) else "")
        words = process.stderr.read().strip().splitlines()
        code = process.wait()
        if code not in (0, 1) or not file.exists():
            raise RuntimeError(words[-1] if words else f"benchmarks/cpu.py ended with status {code}")
        record = json.loads(file.read_text(encoding="utf-8"))
    facts = environment.facts(torch.device("cpu"), commit)
    return {**facts, "kind": "cpu", **record, "bars_held": code == 0}


def markdown(report: dict[str, Any], pictures: Sequence[pathlib.Path] = ()) -> str:
    """The report as a page; `pictures` are shown by their names, from the page's own folder."""
    shape = ", ".join(f"{name} {value}" for name, value in report["shape"].items())
    lines = [
        f"# msa_ops on {report['cpu']}", "", f"torch {report['torch']}, commit {report['commit']}, {report['time']}; "
        f"{shape}. Milliseconds a call, medians; the other side is torch's scaled_dot_product_attention on the selected "
        "keys already gathered and widened to float32. **Bold** ratios are past their bar.", "",
        "| KV | ours | SDPA | ratio | bar | peak extra MiB | row error |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in report["results"]:
        lines.append("| " + " | ".join(cells(r, "**{}**")) + " |")
    for picture in pictures:
        lines += ["", f"![{picture.stem}]({picture.name})"]
    return "\n".join(lines) + "\n"


def cells(result: dict[str, Any], past_bar: str) -> list[str]:
    """One form's figures as words; `past_bar` is the format of a ratio that is past its bar."""
    ratio = f"{result['ratio']:.2f}"
    peak = result.get("peak_extra_mib")
    return [
        result["form"], f"{result['ours_ms']:.2f}", f"{result['sdpa_ms']:.2f}",
        past_bar.format(ratio) if result["ratio"] > result["bar"] else ratio, f"{result['bar']:g}",
        "unknown" if peak is None else f"{peak:.1f}", f"{result['row_error']:.1e}",
    ]  # fmt: skip
