"""What importing the package brings along, seen in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SRC = str(Path(__file__).parents[1] / "src")
FORBIDDEN = (
    "transformers", "cuda", "nvidia", "pynvml", "triton", "cupy", "flashinfer", "vllm", "sglang", "rich", "typer",
    "click", "matplotlib", "pandas", "scipy", "tokenizers", "safetensors", "huggingface_hub", "hypothesis", "pytest",
)  # fmt: skip


def in_fresh_process(code: str) -> str:
    """Run `code` where only this checkout's sources and the installed packages can be imported; returns its output."""
    code = f"import sys; sys.path.insert(0, {SRC!r})\n{code}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_importing_adds_no_package_to_torch() -> None:
    """torch may bring packages of its own; msa_ops brings none."""
    code = """
import torch
before = {name.partition(".")[0] for name in sys.modules}
import msa_ops
added = {name.partition(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)
print(sorted(added))
"""
    assert in_fresh_process(code).strip() == "['msa_ops']"


def test_importing_works_where_optional_packages_are_missing() -> None:
    """Everything beyond torch is blocked, numpy included; a call still runs."""
    code = f"""
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {(*FORBIDDEN, "numpy")!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)
        return None
sys.meta_path.insert(0, Block())
import warnings
warnings.simplefilter("ignore")  # torch says that numpy is missing
import torch
import msa_ops
q = torch.ones(1, 2, 128, dtype=torch.bfloat16)
kv = torch.ones(4, 1, 128, dtype=torch.bfloat16)
out, lse = msa_ops.msa_sparse_decode_attention(
    q, kv, kv, torch.zeros(1, 1, 1, dtype=torch.int32), cu_seqlens_k=torch.tensor([0, 4], dtype=torch.int32),
    return_softmax_lse=True,
)
assert torch.equal(out, torch.ones_like(out)), out
print("ran")
"""
    assert in_fresh_process(code).strip() == "ran"


def test_importing_starts_no_cuda() -> None:
    code = """
import torch, msa_ops
print(torch.cuda.is_initialized())
"""
    assert in_fresh_process(code).strip() == "False"


def test_importing_leaves_global_settings_alone() -> None:
    code = """
import os, torch
def state():
    return (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), dict(os.environ),
            torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled(), torch.initial_seed())
torch.manual_seed(3)
before = state()
import msa_ops
assert state() == before
print("same")
"""
    assert in_fresh_process(code).strip() == "same"


def test_every_public_name_exists_and_is_documented() -> None:
    import msa_ops

    for name in msa_ops.__all__:
        value = getattr(msa_ops, name)
        if callable(value):
            assert value.__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("module", ["msa_ops.contract", "msa_ops.ops", "msa_ops.reference", "msa_ops.workspace"])
def test_each_module_is_importable_first(module: str) -> None:
    assert in_fresh_process(f"import {module}\nprint('ok')").strip() == "ok"
