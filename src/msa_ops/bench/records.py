"""Reports that lie on disk: read and checked, laid side by side, and compared.

Within one schema version fields are only added, so that a reader of an older report finds all that it knows.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from . import schema
from .environment import SCHEMA_VERSION
from .peers import PEERS
from .report import is_finished, is_ours
from .sizes import size

_ROW_KEYS = ("preset", "label", "kv", "batch", "heads", "seqlen_q", "context", "topk", "overlap")
_ROW_FIELDS = (*_ROW_KEYS, "sides", "best", "floor_us", "in_grid")


def load(path: pathlib.Path) -> dict[str, Any]:
    """A report that ``msa-ops bench`` or ``benchmarks/decode.py`` wrote.

    Raises `ValueError`, naming the file, for what is none or is of another schema version.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} cannot be read as JSON: it is nested too deeply") from None
    if not isinstance(report, dict) or report.get("kind", "bench") not in ("bench", "cpu"):
        raise ValueError(f"{path} is no report of msa-ops bench")
    if report.get("schema_version") != SCHEMA_VERSION:
        if (version := report.get("schema_version")) is None:
            command = "msa-ops bench cpu" if "cpu" in report else "msa-ops bench"
            raise ValueError(
                f"{path} has no schema_version: it was written by an older version, which recorded neither that nor the "
                f"commit and the time of the run. Measure anew with {command}"
            )
        raise ValueError(f"{path} has schema version {version!r}; this msa-ops reads {SCHEMA_VERSION}")
    if report.get("kind") == "cpu":
        good = _all_have(report.get("results"), ("form", "ours_ms", "sdpa_ms", "ratio"))
    else:
        good = (
            _all_have(report.get("rows"), _ROW_FIELDS)
            and {"host", "summary", "sides", "card", "accuracy", "absent", "read_ceiling_bytes_per_s"} <= report.keys()
        )
    if not good:
        raise ValueError(f"{path} is no report of msa-ops bench: fields are missing")
    try:
        (schema.check_cpu if report.get("kind") == "cpu" else schema.check_bench)(report)
    except ValueError as error:
        raise ValueError(f"{path} is no report of msa-ops bench: {error}") from None
    return report


def _all_have(rows: object, names: Sequence[str]) -> bool:
    return isinstance(rows, list) and all(isinstance(row, dict) and set(names) <= row.keys() for row in rows)


def row_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes two rows of two reports the same shape."""
    return tuple(row[name] for name in _ROW_KEYS)


def row_name(row: Mapping[str, Any]) -> str:
    parts = [row["preset"], row["label"], row["kv"], row["heads"], f"seqlen_q {row['seqlen_q']}", f"B {row['batch']}"]
    parts += [f"context {size(row['context'])}", "" if row["topk"] == 16 else f"topk {row['topk']}"]
    parts.append("overlapping" if row["overlap"] and row["preset"] != "spec" else "")
    return " ".join(part for part in parts if part)


def median_of(row: Mapping[str, Any], label: str | None) -> float | None:
    """Microseconds of a side of a row; `None` where it was not timed."""
    side = row["sides"].get(label, {})
    return side["time_us"]["median"] if side.get("status") == "ok" else None


def ours_of(row: Mapping[str, Any]) -> float | None:
    """Our best time of a row."""
    return median_of(row, row["best"])


def select(report: dict[str, Any], **wanted: Sequence[Any] | None) -> dict[str, Any]:
    """The report with the rows whose fields are among those wanted: ``select(report, kv=("fp8",), seqlen_q=(1,))``.

    `None` wants all. Raises `ValueError`, naming the field, where no row is left; host figures are left out.
    """
    rows = report["rows"]
    for name, values in wanted.items():
        if values is not None:
            there = list(dict.fromkeys(row[name] for row in rows))
            rows = [row for row in rows if row[name] in values]
            if not rows:
                option = name.replace("_", "-")
                raise ValueError(
                    f"--{option}: the report has {', '.join(map(str, there))}, got {', '.join(map(str, values))}"
                )
    return {**report, "rows": rows, "host": {} if any(v is not None for v in wanted.values()) else report["host"]}


def side_by_side(reports: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """One report of several: the first one's rows, with our times of the others as sides named as the keys are.

    A shape that the first report lacks is left out and named in ``not_measured``. A key that is called like a side, or
    like what a picture draws, becomes ``run KEY``: runs and sides stay apart.
    """
    (name, first), *others = reports.items()
    rows = {row_key(row): {**row, "sides": dict(row["sides"])} for row in first["rows"]}
    taken = {*_RESERVED, *(label for row in first["rows"] for label in row["sides"])}
    lost = []
    for key, report in others:
        label = _run_label(key, taken | (reports.keys() - {key}))
        taken.add(label)
        for row in report["rows"]:
            mine = rows.get(row_key(row))
            if mine is None:
                lost.append(f"{row_name(row)}: in {label}, not in {name}")
            elif row["best"] is not None:
                mine["sides"][label] = row["sides"][row["best"]]
            else:
                mine["sides"][label] = next(side for n, side in row["sides"].items() if is_ours(n))
    return {**first, "rows": list(rows.values()), "not_measured": lost}


_RESERVED = frozenset({*PEERS, "floor", "bar"})


def _run_label(key: str, taken: Set[str]) -> str:
    """`key`, or ``run KEY`` where it would be read as a side; a picture's legend leaves out what begins with "_"."""
    label = key
    while label in taken or is_ours(label) or label.startswith("_"):
        label = f"run {label}"
    return label


@dataclass(frozen=True)
class Change:
    """One measured quantity of both reports, in `unit`; `after` is `None` where it has no time any more."""

    name: str
    before: float
    after: float | None
    unit: str = "us"
    reason: str = ""

    @property
    def ratio(self) -> float:
        """after / before; infinite where there is no time any more, or none that is a number."""
        if self.after is None or not math.isfinite(self.after):
            return float("inf")
        return self.after / self.before


@dataclass(frozen=True)
class Difference:
    """What `diff` found. `slower` and `faster` are past the tolerance, the most changed first."""

    slower: list[Change]
    faster: list[Change]
    within: int
    only_before: list[str] = field(default_factory=list)
    only_after: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    no_longer_timed: list[str] = field(default_factory=list)
    """Those of `only_before` that the first report has a time for."""

    @property
    def is_worse(self) -> bool:
        """Whether anything is slower, or was timed and is not there any more."""
        return bool(self.slower or self.no_longer_timed)


def diff(before: dict[str, Any], after: dict[str, Any], tolerance: float) -> Difference:
    """Compare our own times. Slower is a time over ``(1 + tolerance)`` times what it was, or one that is gone because
    the side is refused, failing or wrong now; faster is the inverse.

    Raises `ValueError` for a negative tolerance, or reports with nothing in common.
    """
    if not tolerance >= 0:
        raise ValueError(f"the tolerance must be 0 or more, got {tolerance}")
    old, new = quantities(before), quantities(after)
    changes = []
    for name, (value, unit, _) in old.items():
        if name in new and value is not None and math.isfinite(value):
            now, _, reason = new[name]
            changes.append(Change(name, value, now, unit, reason))
    if not changes:
        raise ValueError("the two reports have no shape in common that was timed in the first")
    slower = sorted((c for c in changes if c.ratio > 1 + tolerance), key=lambda c: -c.ratio)
    faster = sorted((c for c in changes if c.ratio < 1 / (1 + tolerance)), key=lambda c: c.ratio)
    within = len(changes) - len(slower) - len(faster)
    gone, added = [n for n in old if n not in new], [n for n in new if n not in old]
    no_longer = [n for n in gone if old[n][0] is not None]
    return Difference(slower, faster, within, gone, added, _warnings(before, after), no_longer)


def quantities(report: dict[str, Any]) -> dict[str, tuple[float | None, str, str]]:
    """Everything of ours that a report has a time for: name to value, unit and, where there is no value, the reason."""
    if report.get("kind") == "cpu":
        return {f"cpu {r['form']}": (r["ours_ms"], "ms", "") for r in report["results"]}
    found: dict[str, tuple[float | None, str, str]] = {}
    for row in report["rows"]:
        why = next((s.get("reason", "") for n, s in row["sides"].items() if n.startswith("ours")), "")
        found[row_name(row)] = (ours_of(row), "us", why)
    for kv, sides in report["host"].get("eager", {}).items():
        for label, side in sides.items():
            if label.startswith("ours"):
                time = side["host_us"]["median"] if side["status"] == "ok" else None
                found[f"host eager call {kv} {label}"] = (time, "us", side.get("reason", ""))
    for what, names in (("import", ("median_ms",)), ("first_call", ("cold_ms", "warm_ms"))):
        measured = report["host"].get(what, {})
        for name in names:
            if what in report["host"]:
                kind = f"host {what.replace('_', ' ')} {name.removesuffix('_ms')}"
                found[kind] = (measured.get(name), "ms", measured.get("reason", ""))
    return found


def _warnings(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Differences of the machines, and of the runs, that make a comparison of times mean little."""
    pair = {"first": before, "second": after}
    lines = [f"the {which} report is of an unfinished run" for which, r in pair.items() if not is_finished(r)]
    for name in ("kind", "card", "driver", "torch", "read_ceiling_bytes_per_s"):
        a, b = before.get(name), after.get(name)
        if name == "read_ceiling_bytes_per_s":
            if a and b and abs(a / b - 1) > 0.03:
                lines.append(f"the read ceilings differ: {a / 1e12:.3f} and {b / 1e12:.3f} TB/s")
        elif a != b:
            lines.append(f"{name} differs: {a} and {b}")
    return lines
