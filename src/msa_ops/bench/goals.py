"""The project's bars, as functions of what was measured.

Speed on the grid: ``bytes / (share * ceiling) + overhead``. Against peers: a geometric mean over the grid, and a bar at
each shape that never asks for more than 95% of the read ceiling.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .measure import geometric_mean

H200_READ_BYTES_PER_S = 4.46e12
"""Read-only stream on an H200: the figure that the goals are written in."""
MUST_OVERHEAD_US = 4.5
AIM_OVERHEAD_US = 3.5
RAGGED_LIMIT = 1.15
ONE_LONG_LIMIT = 1.5
SEPARATE_LIMIT = 1.0
NOISE = 0.02
"""Differences of the same version from run to run; a limit of "never slower" is read with it."""
NVFP4_OVER_BF16 = 2.8
NVFP4_FROM_ITEMS = 256
"""NVFP4 is compared with bf16 from so many (token, KV head) items on."""
NVFP4_LAYOUT_LIMIT = 1.05
"""The slower NVFP4 scale layout over the faster, at every shape."""
STREAM_SHARE = {"nvfp4-planar": 0.88, "nvfp4-tiled": 0.88}
"""Share of the read ceiling that a stream must reach, where it is not 0.95."""


@dataclass(frozen=True)
class PeerGoal:
    """Against one peer: geometric mean of peer time / our time, and the bar at a single shape."""

    peer: str
    must: float
    aim: float
    point: float


PEER_GOALS = {"fp8": PeerGoal("flashinfer", 1.15, 1.25, 1.05), "bf16": PeerGoal("vllm", 1.20, 1.30, 1.08)}


def goal_ceiling(card: str, measured: float) -> float:
    """Bytes per second to judge by: the goals' own figure on their card, else what this card was measured to do."""
    return H200_READ_BYTES_PER_S if "H200" in card else measured


def speed_goal(kv: str, nbytes: float, time_us: float, ceiling: float) -> dict[str, Any]:
    """Bars of one shape in microseconds and whether `time_us` meets them: ``aim``, ``must`` or ``miss``."""
    stream = nbytes / (STREAM_SHARE.get(kv, 0.95) * ceiling) * 1e6
    must, aim = stream + MUST_OVERHEAD_US, stream + AIM_OVERHEAD_US
    met = "aim" if time_us <= aim else "must" if time_us <= must else "miss"
    return {"must_us": round(must, 3), "aim_us": round(aim, 3), "met": met}


def peer_goal(kv: str, times: Mapping[str, float], ours_us: float, floor_us: float) -> dict[str, Any] | None:
    """The bar of one shape against the peer of its KV format; `None` where that peer was not timed."""
    goal = PEER_GOALS.get(kv)
    if goal is None or goal.peer not in times:
        return None
    theirs = times[goal.peer]
    bar = min(goal.point, 0.95 * theirs / floor_us) if floor_us else goal.point
    ratio = theirs / ours_us
    return {"peer": goal.peer, "ratio": round(ratio, 4), "bar": round(bar, 4), "met": ratio >= bar}


def _ours(row: Mapping[str, Any]) -> float | None:
    side = row["sides"].get(row["best"] or "ours", {})
    return side["time_us"]["median"] if side.get("status") == "ok" else None


def _time(row: Mapping[str, Any], name: str) -> float | None:
    side = row["sides"].get(name, {})
    return side["time_us"]["median"] if side.get("status") == "ok" else None


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[n] for n in ("batch", "heads", "seqlen_q", "context", "topk", "overlap"))


def nvfp4_ratios(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Our bf16 time over our NVFP4 time at the shapes where the goal holds, both from this run."""
    grid = [r for r in rows if r["preset"] == "grid"]
    bf16 = {_key(r): _ours(r) for r in grid if r["kv"] == "bf16"}
    found = []
    for row in grid:
        items = row["batch"] * row["seqlen_q"] * row["num_kv_heads"]
        mine, base = _ours(row), bf16.get(_key(row))
        if row["kv"].startswith("nvfp4") and items >= NVFP4_FROM_ITEMS and mine and base:
            shape = {n: row[n] for n in ("kv", "batch", "heads", "seqlen_q")}
            found.append({**shape, "ratio": round(base / mine, 4), "met": base / mine >= NVFP4_OVER_BF16})
    return found


def nvfp4_layouts(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Planar time over tiled time at the grid's shapes where both were timed in this run."""
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if row["preset"] == "grid" and row["kv"].startswith("nvfp4") and (mine := _ours(row)):
            times.setdefault(_key(row), {})[row["kv"]] = mine
    found = []
    for (batch, heads, seqlen_q, *_), pair in times.items():
        if len(pair) == 2:
            ratio = pair["nvfp4-planar"] / pair["nvfp4-tiled"]
            met = max(ratio, 1 / ratio) <= NVFP4_LAYOUT_LIMIT
            found.append({"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "ratio": round(ratio, 4), "met": met})
    return found


def step_ratios(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole step of every other side over ours, with ours in three calls among them."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row["preset"] == "step" and row["label"] == "step" and (mine := _ours(row)):
            for name in row["sides"]:
                if name != row["best"] and (theirs := _time(row, name)):
                    ratios.setdefault(f"{row['kv']} {name}", []).append(theirs / mine)
    return {name: _spread(values) for name, values in ratios.items()}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means and the count of bars held, over the shapes of the grid proper."""
    grid = [r for r in rows if r["preset"] == "grid" and r["in_grid"]]
    summary: dict[str, Any] = {
        "speed": {}, "peers": {}, "nvfp4_over_bf16": nvfp4_ratios(rows), "nvfp4_layouts": nvfp4_layouts(rows),
        "work": {}, "step": step_ratios(rows),
    }  # fmt: skip
    for kv in dict.fromkeys(r["kv"] for r in grid):
        mine = [r for r in grid if r["kv"] == kv and r["speed_goal"]]
        met = [r["speed_goal"]["met"] for r in mine]
        shares = [r["floor_us"] / t for r in mine if (t := _ours(r))]
        summary["speed"][kv] = {
            "shapes": sum(r["kv"] == kv for r in grid),
            "timed": len(met),
            "aim": met.count("aim"),
            "must": met.count("aim") + met.count("must"),
            "floor_over_time_geomean": _rounded(geometric_mean(shares)),
        }
        for peer in dict.fromkeys(name for r in mine for name in r["sides"] if not name.startswith("ours")):
            pairs = [(p, t) for r in mine if (p := _time(r, peer)) and (t := _ours(r))]
            if pairs:
                summary["peers"][f"{kv} {peer}"] = _against(kv, peer, [p / t for p, t in pairs], mine)
    for preset in ("ragged", "spec"):
        goals = [r["work_goal"] for r in rows if r["preset"] == preset and r["work_goal"]]
        if goals:
            worst = max(g["ratio"] for g in goals)
            summary["work"][preset] = {"rows": len(goals), "met": sum(g["met"] for g in goals), "worst_ratio": worst}
    return summary


def _spread(ratios: list[float]) -> dict[str, Any]:
    """Of the times of another side over ours."""
    return {
        "shapes": len(ratios), "geomean": round(geometric_mean(ratios), 4), "min": round(min(ratios), 4),
        "max": round(max(ratios), 4), "losing": sum(r < 1 for r in ratios),
    }  # fmt: skip


def _against(kv: str, peer: str, ratios: list[float], rows: list[dict[str, Any]]) -> dict[str, Any]:
    mean, result = geometric_mean(ratios), _spread(ratios)
    goal = PEER_GOALS.get(kv)
    if goal and goal.peer == peer:
        points = [r["peer_goal"]["met"] for r in rows if r["peer_goal"]]
        result |= {"must": goal.must, "aim": goal.aim, "points_met": sum(points), "points": len(points)}
        result["met"] = "aim" if mean >= goal.aim else "must" if mean >= goal.must else "miss"
    return result


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)
