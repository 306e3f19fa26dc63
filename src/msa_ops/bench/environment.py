"""What a result must be read with: card, driver, versions, commit."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import math
import os
import pathlib
import platform
import subprocess
from typing import Any

import torch

SCHEMA_VERSION = 1


def facts(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Everything about the machine and the software that a figure depends on; no names of folders or users."""
    found: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "msa_ops": _version("msa-ops"),
        "driver": None,
    }
    if device.type != "cuda":
        nothing = dict.fromkeys(("compute_capability", "sms", "l2_bytes"))
        return {**found, "card": f"CPU ({platform.machine()})", **nothing}
    properties = torch.cuda.get_device_properties(device)
    return {
        **found,
        "driver": _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "card": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
    }


def short_facts(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Those of `facts` that the scripts beside the benchmark record."""
    whole = facts(device, commit)
    return {name: whole[name] for name in ("schema_version", "time", "card", "commit", "driver", "torch")}


def free_bytes(device: torch.device) -> float:
    """Memory of the device that nothing uses; infinite where the system does not say."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf


def memory_bytes() -> float:
    """Memory of the machine; infinite where the system does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf


def _version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def _commit() -> str | None:
    here = str(pathlib.Path(__file__).resolve().parent)
    head = _command("git", "-C", here, "rev-parse", "HEAD")
    if head and _command("git", "-C", here, "status", "--porcelain", "--untracked-files=no"):
        return f"{head} with changes"
    return head


def _command(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else None
