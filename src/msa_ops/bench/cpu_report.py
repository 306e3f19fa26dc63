"""What is said of a run of the CPU engine's benchmark: a line a form while it runs, and a markdown page."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

HEADING = (
    f"{'KV':<14}{'ours ms':>9}{'SDPA ms':>9}{'ratio':>7}{'bar':>6}{'fast decile':>17}{'peak MiB':>10}{'error':>10}"
)


def line(r: dict[str, Any]) -> str:
    """One form below `HEADING`."""
    fast = f"{r['ours_fast_ms']:.2f}/{r['sdpa_fast_ms']:.2f}={r['ratio_fast']:.2f}"
    return (
        f"{r['form']:<14}{r['ours_ms']:>9.2f}{r['sdpa_ms']:>9.2f}{r['ratio']:>7.2f}{r['bar']:>6.1f}{fast:>17}"
        f"{_peak(r):>10}{r['row_error']:>10.1e}"
    )


def cells(r: dict[str, Any], past_bar: str) -> list[str]:
    """One form's figures as words; `past_bar` is the format of a ratio that is past its bar."""
    ratio = f"{r['ratio']:.2f}"
    return [
        r["form"], f"{r['ours_ms']:.2f}", f"{r['sdpa_ms']:.2f}",
        past_bar.format(ratio) if r["ratio"] > r["bar"] else ratio, f"{r['bar']:g}", _peak(r), f"{r['row_error']:.1e}",
    ]  # fmt: skip


def _peak(r: dict[str, Any]) -> str:
    peak = r.get("peak_extra_mib")
    return "unknown" if peak is None else f"{peak:.1f}"


def markdown(report: dict[str, Any], pictures: Sequence[pathlib.Path] = ()) -> str:
    """The report as a page; `pictures` are shown by their names, from the page's own folder."""
    shape = ", ".join(f"{name} {value}" for name, value in report["shape"].items())
    lines = [
        f"# msa_ops on {report['cpu']}", "", f"torch {report['torch']}, commit {report['commit']}, {report['time']}; "
        f"{shape}. Milliseconds a call, medians; the other side is torch's scaled_dot_product_attention on the selected "
        "keys already gathered and widened to float32. **Bold** ratios are past their bar.", "",
        "| KV | ours | SDPA | ratio | bar | peak extra MiB | row error |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += ["| " + " | ".join(cells(r, "**{}**")) + " |" for r in report["results"]]
    for picture in pictures:
        lines += ["", f"![{picture.stem}]({picture.name})"]
    return "\n".join(lines) + "\n"
