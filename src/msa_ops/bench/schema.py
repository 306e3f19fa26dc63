"""What a report must hold to be read: a wrong field is named before anything is compared or drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_LARGEST = 1e30
"""No time, count or rate is more; JSON's integers may be longer than a float holds."""


def check_bench(report: Mapping[str, Any]) -> None:
    """Raise `ValueError`, naming the field, where a report of ``msa-ops bench`` holds what cannot be read."""
    for name in ("host", "summary", "sides", "absent", "options"):
        _mapping(report.get(name, {}), name)
    _text(report["card"], "card")
    _number(report.get("read_ceiling_bytes_per_s", 1), "read_ceiling_bytes_per_s")
    for i, row in enumerate(report["rows"]):
        _check_row(row, f"rows[{i}]")
    for i, row in enumerate(_list(report.get("accuracy", []), "accuracy")):
        _check_accuracy(_mapping(row, f"accuracy[{i}]"), f"accuracy[{i}]")
    for text in _list(report.get("not_measured", []), "not_measured"):
        _text(text, "not_measured")
    _check_host(report["host"])


def check_cpu(report: Mapping[str, Any]) -> None:
    """Raise `ValueError`, naming the field, where a report of ``msa-ops bench cpu`` holds what cannot be read."""
    if not report["results"]:
        raise ValueError("results must not be empty")
    for i, result in enumerate(report["results"]):
        _text(result["form"], f"results[{i}].form")
        for name in ("ours_ms", "sdpa_ms", "ratio", *(["bar"] if "bar" in result else [])):
            _number(result[name], f"results[{i}].{name}")


def _check_row(row: Mapping[str, Any], where: str) -> None:
    for name in ("preset", "label", "kv", "heads"):
        _text(row[name], f"{where}.{name}")
    for name in ("batch", "seqlen_q", "context", "topk"):
        _number(row[name], f"{where}.{name}", whole=True)
    for name in ("overlap", "in_grid"):
        if not isinstance(row[name], bool):
            raise ValueError(f"{where}.{name} must be true or false, got {_shown(row[name])}")
    _number(row["floor_us"], f"{where}.floor_us", zero=True)
    sides = _mapping(row["sides"], f"{where}.sides")
    for label, side in sides.items():
        _check_side(side, f"{where}.sides[{label!r}]", "time_us", ("median", "min", "max"))
    if not any(label.startswith("ours") for label in sides):
        raise ValueError(f"{where}.sides must hold a side of this package, called 'ours', got {_shown(list(sides))}")
    best = row["best"]
    if best is not None and (not isinstance(best, str) or sides.get(best, {}).get("status") != "ok"):
        raise ValueError(f"{where}.best must be null or a side that was timed, got {_shown(best)}")
    for name in ("step_us", "layers", "tp", "page_uses"):
        if row.get(name) is not None:
            _number(row[name], f"{where}.{name}")
    figures = {"speed_goal": (), "peer_goal": ("bar",), "work_goal": ("ratio", "limit")}
    words = {"speed_goal": ("met",), "peer_goal": ("peer", "met"), "work_goal": ("baseline", "met")}
    for name, fields in figures.items():
        if row.get(name) is not None:
            goal = _mapping(row[name], f"{where}.{name}")
            _have(goal, f"{where}.{name}", words[name])
            for part in fields:
                _number(goal.get(part), f"{where}.{name}.{part}", zero=True)


def _check_side(side: object, where: str, timing: str, parts: Sequence[str]) -> None:
    """A side that is ok has its times, any other one a reason."""
    found = _mapping(side, where)
    _text(found.get("status"), f"{where}.status")
    if found["status"] != "ok":
        _text(found.get("reason"), f"{where}.reason")
        return
    times = _mapping(found.get(timing), f"{where}.{timing}")
    for part in parts:
        _number(times.get(part), f"{where}.{timing}.{part}")


def _check_accuracy(row: Mapping[str, Any], where: str) -> None:
    _have(row, where, ("kv", "heads", "batch", "seqlen_q", "q_scale", "side"))
    _text(row.get("status"), f"{where}.status")
    if row["status"] != "ok":
        _text(row.get("reason"), f"{where}.reason")
        return
    for name in ("rms", "max"):
        _number(row.get(name), f"{where}.{name}", zero=True)


def _check_host(host: Mapping[str, Any]) -> None:
    for kv, sides in _mapping(host.get("eager", {}), "host.eager").items():
        for label, side in _mapping(sides, f"host.eager.{kv}").items():
            where = f"host.eager.{kv}[{label!r}]"
            _check_side(side, where, "host_us", ("median",))
            if side["status"] == "ok":
                _have(side, where, ("allocations_per_call",))
    for name, fields in (("import", ("median_ms",)), ("first_call", ("cold_ms", "warm_ms"))):
        measured = _mapping(host.get(name, {}), f"host.{name}")
        for field in fields:
            if measured.get(field) is not None:
                _number(measured[field], f"host.{name}.{field}")


def _have(found: Mapping[str, Any], where: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in found:
            raise ValueError(f"{where}.{name} is missing")


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {_shown(value)}")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} must be an array, got {_shown(value)}")
    return value


def _text(value: object, where: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be a text, got {_shown(value)}")


def _number(value: object, where: str, *, zero: bool = False, whole: bool = False) -> None:
    kinds = int if whole else (int, float)
    good = isinstance(value, kinds) and not isinstance(value, bool)
    if not (good and (value >= 0 if zero else value > 0) and value < _LARGEST):  # type: ignore[operator]  # NaN: not good
        kind = "whole number" if whole else "number"
        raise ValueError(
            f"{where} must be a finite {kind} {'of 0 or more' if zero else 'above 0'}, got {_shown(value)}"
        )


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = type(value).__name__ if isinstance(value, (dict, int)) and not isinstance(value, bool) else repr(value)
    return f"{value}" if isinstance(value, int) and abs(value) < _LARGEST else text[:60]
