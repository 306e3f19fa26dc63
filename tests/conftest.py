"""Shared fixtures. Every test that can run on both engines takes `device`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, settings

from msa_ops.engines.cuda import score

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# "default" is bounded and repeatable, for `make test` and CI. "thorough" (HYPOTHESIS_PROFILE=thorough) looks further,
# with new examples on every run. Neither has a deadline: tests time nothing.
_COMMON = {
    "deadline": None,
    "print_blob": True,
    # `device` and `poisoned_empty` hold no state that an example could change.
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
}
settings.register_profile("default", max_examples=60, derandomize=True, database=None, **_COMMON)
settings.register_profile("thorough", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def poisoned_empty() -> Iterator[None]:
    """`torch.empty` hands out NaN (integers: the largest): scratch that was never written cannot pass for 0."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(params=["one", "row-1", "row-3", "row-50"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How decoding steps are scored: a thread block for each block of keys, or so many for each request, whatever its size."""
    kind, _, parts = request.param.partition("-")

    def forced(operands: score.Operands, columns: int, batch: int, key_blocks: int, *_: int) -> tuple[str, int]:
        single = -(-key_blocks // operands.at_once(kind, columns))
        return kind, min(int(parts or single), single)

    monkeypatch.setattr(score, "_row_parts", forced)
    score.make_plan.cache_clear()
    yield kind
    score.make_plan.cache_clear()


@pytest.fixture
def figures() -> ModuleType:
    """benchmarks/figures.py as a module of its own, so that a test may change what it reads."""
    path = Path(__file__).parents[1] / "benchmarks" / "figures.py"
    spec = importlib.util.spec_from_file_location("figures_of_results", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
