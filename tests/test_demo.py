"""The demo command: its options, its run on a short context, and that it fails when the attention is wrong."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.testing
from torch import Tensor

from msa_ops.cli import demo as demo_command
from msa_ops.cli import demo_report, demo_run
from msa_ops.cli.demo_model import Choices, build_model, demo_config, step
from msa_ops.cli.main import SUB_COMMANDS, build_app, main
from msa_ops.integrations.transformers import MSAPagedCache, enable
from msa_ops.integrations.transformers import attention as attention_module

NO_COLOR = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "100"}


def run(*arguments: str) -> Any:
    return typer.testing.CliRunner().invoke(build_app(), ["demo", *arguments], env=NO_COLOR)


def one_line(outcome: Any) -> str:
    """What a run printed, without line breaks and the frame around errors."""
    return re.sub(r"[\s│]+", " ", outcome.output)


def result(**changes: Any) -> demo_run.ContextResult:
    facts: dict[str, Any] = {
        "context": 1024,
        "tokens": 4,
        "logit_difference": 0.03,
        "reference_difference": 0.05,
        "block_left_out_difference": 0.5,
        "logit_spread": 1.0,
        "argmax_compared": 3,
        "argmax_equal": 3,
        "differing_choices": 1,
        "continuation": b'a"\n\xff',
        "common_prefix": 4,
        "call_ms_ours": 1.0,
        "call_ms_transformers": 2.0,
        "token_ms_ours": 10.0,
        "token_ms_transformers": 12.0,
        "kv_bytes_selected": 2**20,
        "kv_bytes_dense": 2**22,
    }
    return demo_run.ContextResult(**{**facts, **changes})


def test_the_demo_runs_and_writes_what_it_measured(tmp_path: Path) -> None:
    outcome = run("--context", "300,512", "--tokens", "5", "--seed", "3", "--device", "cpu", "--out", str(tmp_path))
    assert outcome.exit_code == 0, outcome.output
    assert "Both paths agree" in outcome.output
    assert "msa_ops ran on its CPU engine: torch operations on" in one_line(outcome)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    document = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert document["schema_version"] == 1 and document["passed"] and document["seed"] == 3
    assert [c["context"] for c in document["contexts"]] == [300, 512]
    for context in document["contexts"]:
        assert 0 < context["logit_difference"] <= 2 * context["reference_difference"]
        # All of 3 and 5 blocks are selected: 4 sparse layers, 2 heads, K and V, 256 bytes a row, with the new token.
        assert context["kv_bytes_selected"] == context["kv_bytes_dense"] == 4 * 2 * 2 * 256 * (context["context"] + 1)
        assert all(context[name] > 0 for name in context if "_ms_" in name)
        assert context["continuation"] in re.sub(r"\n", "", outcome.output)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", demo_command.KV_DTYPES)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_the_demo_runs_on_a_gpu(kv_dtype: str, device: str, tmp_path: Path) -> None:
    outcome = run(
        "--context", "1K,3K", "--tokens", "8", "--kv-dtype", kv_dtype, "--device", device, "--out", str(tmp_path)
    )
    assert outcome.exit_code == 0 and "msa_ops ran on its CUDA engine" in one_line(outcome), outcome.output


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_gpu_that_can_serve_the_demo_is_taken(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, capability)
    assert demo_command.choose_device("cpu") == ("cpu", "")
    assert all(demo_command.choose_device(device) == ("cuda", "") for device in ("auto", "cuda"))


def test_a_gpu_that_cannot_serve_the_demo_is_left_aside_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lack = "the CUDA engine needs compute capability 8.0 or newer, this GPU has 7.5"
    pretend_gpu(monkeypatch, (7, 5))
    assert demo_command.choose_device("cpu") == ("cpu", "")
    assert demo_command.choose_device("auto") == (
        "cpu",
        f"--device auto takes the CPU, although there is a GPU: {lack}.",
    )
    with pytest.raises(ValueError, match=rf"--device cuda: {lack}\. Take --device cpu"):
        demo_command.choose_device("cuda")


def test_the_demo_says_that_it_left_a_gpu_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = demo_command.check_options(
        context=["256"], tokens=1, kv_dtype="nvfp4", seed=0, out=tmp_path, text=None, device="cpu"
    )
    options = dataclasses.replace(options, device_note="--device auto takes the CPU.")
    monkeypatch.setattr(demo_command, "check_options", lambda **_: options)
    outcome = run()
    assert outcome.exit_code == 0, outcome.output
    assert outcome.output.startswith("--device auto takes the CPU.\n")
    assert "msa_ops ran on its CPU engine: torch operations on" in one_line(outcome)


def test_a_context_beyond_the_selection_reads_sixteen_blocks(tmp_path: Path) -> None:
    """2,304 tokens are 18 blocks and a nineteenth for the new token; 15 whole blocks and its own are read."""
    outcome = run(
        "--context", "2304", "--tokens", "1", "--kv-dtype", "nvfp4", "--device", "cpu", "--out", str(tmp_path)
    )
    assert outcome.exit_code == 0, outcome.output
    assert "reported only" in outcome.output and "transformers reads no nvfp4 pages" in outcome.output
    (context,) = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))["contexts"]
    assert context["kv_bytes_selected"] == 4 * 2 * 2 * 72 * (15 * 128 + 1)
    assert context["kv_bytes_dense"] == 4 * 2 * 2 * 72 * 2305


@pytest.mark.parametrize("kv_dtype, code", [("bf16", 1), ("fp8", 0)])
def test_a_wrong_attention_fails_the_bf16_demo(
    kv_dtype: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A softmax scale that is a quarter off: bf16 exits with 1 and says where, quantised caches only report."""
    real = attention_module.msa_sparse_decode_attention

    def off(*args: Any, softmax_scale: float, **kwargs: Any) -> Any:
        return real(*args, softmax_scale=1.25 * softmax_scale, **kwargs)

    monkeypatch.setattr(attention_module, "msa_sparse_decode_attention", off)
    outcome = run(
        "--context", "300", "--tokens", "6", "--kv-dtype", kv_dtype, "--device", "cpu", "--out", str(tmp_path)
    )  # fmt: skip
    assert outcome.exit_code == code, outcome.output
    assert ("The paths disagree at 300" in outcome.output) == (code == 1)
    assert not json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))["contexts"][0]["agrees"]


def test_the_verdict_needs_a_small_difference_and_equal_argmaxes() -> None:
    assert result().agrees
    assert result(logit_difference=0.1).agrees
    assert not result(logit_difference=0.101).agrees
    assert not result(argmax_equal=2).agrees
    assert not result(logit_difference=float("inf"), reference_difference=float("inf")).agrees


def test_nan_logits_are_an_infinite_difference() -> None:
    assert demo_run._largest_difference(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")
    assert demo_run._largest_difference(torch.tensor([1.0, 3.0]), torch.ones(2)) == 2.0


def test_only_bf16_decides_success() -> None:
    bad = result(logit_difference=1.0)
    report = demo_report.DemoReport("bf16", 0, "cpu", "text", 1.0, 2.0, demo_config(), [bad])
    assert not report.passed
    assert dataclasses.replace(report, kv_dtype="fp8").passed


def test_continuations_are_printed_as_escaped_bytes() -> None:
    assert demo_report.escaped(b"a\n\xff'\x00") == "a\\n\\xff'\\x00"


def test_contexts_may_be_listed_repeated_and_in_k() -> None:
    assert demo_command.parse_contexts(["4K,1k", "16384", " 1024 "]) == (1024, 4096, 16384)
    for wrong in ("", "1M", "0", "-5", "1K,,2K", "a"):
        with pytest.raises(ValueError, match="--context must be lengths such as 1K,4K or 16384"):
            demo_command.parse_contexts([wrong])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--context", "x"), "--context must be lengths"),
        (("--context", "2048K"), "--context must be at most 1024K, got 2048K"),
        (("--context", "9" * 5000), "--context must be lengths"),
        (("--tokens", "0"), "--tokens must be in 1..4096, got 0"),
        (("--tokens", "999999999"), "--tokens must be in 1..4096, got 999999999"),
        (("--seed", "99999999999999999999999"), "--seed must be in 0..2^63 - 1, got 99999999999999999999999"),
        (("--seed", "-1"), "--seed must be in 0..2^63 - 1, got -1"),
        (("--kv-dtype", "int8"), "--kv-dtype must be bf16, fp8 or nvfp4, got 'int8'"),
        (("--device", "tpu"), "--device must be auto, cpu or cuda, got 'tpu'"),
        (("--text", "/no/such/file"), "--text must be a file, got /no/such/file"),
        (("--out", __file__), "--out must be a folder, got the file"),
        (("--out", f"{__file__}/below"), "--out must be a folder to write in, got"),
        (("--context", "200K"), "--context 204800 needs a text of as many bytes, got"),
    ],
)
def test_wrong_options_are_named_before_anything_runs(arguments: tuple[str, ...], message: str) -> None:
    outcome = run(*arguments)
    assert outcome.exit_code == 2
    assert message in one_line(outcome)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where not even root can make a file")
@pytest.mark.parametrize("out", ["/proc", "/proc/none"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(out: str) -> None:
    outcome = run("--out", out)
    assert outcome.exit_code == 2 and f"--out must be a folder to write in, got {out}: " in one_line(outcome)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine where torch sees no GPU")
def test_cuda_is_refused_where_there_is_none() -> None:
    outcome = run("--device", "cuda")
    assert outcome.exit_code == 2 and "take --device cpu" in one_line(outcome)


def test_another_text_can_be_read(tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_bytes(bytes(range(256)))
    options = demo_command.check_options(
        context=["256"], tokens=1, kv_dtype="bf16", seed=0, out=tmp_path / "out", text=text, device="cpu"
    )
    assert options.text == bytes(range(256)) and options.text_name == "own.txt"


def test_the_text_that_comes_with_the_package_is_long_enough_and_says_where_it_is_from() -> None:
    data, name = demo_command.read_text(None)
    assert (
        len(data) > 64 * 1024 and data.decode("utf-8").startswith("OPTICKS") and name == "Isaac Newton, Opticks (1730)"
    )
    readme = (Path(demo_command.__file__).parent / "data" / "README.md").read_text(encoding="utf-8")
    assert "public domain" in readme and "1730" in readme


def test_weights_depend_on_the_seed_alone() -> None:
    models = [build_model(seed, "cpu") for seed in (0, 0, 1)]
    weights = [torch.cat([w.flatten().float() for w in m.parameters()]) for m in models]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_imposed_choices_are_taken_and_differences_counted() -> None:
    """Experts recorded from other inputs are imposed: the model's own choices differ, and its output changes."""
    model = enable(build_model(0, "cpu"))

    def decode(tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            cache = MSAPagedCache(model.config, 8)
            return torch.stack([step(model, torch.tensor([[token]]), cache) for token in tokens])

    choices = Choices(model)
    plain = decode([1, 2, 3])
    with choices.record():
        assert torch.equal(decode([1, 2, 3]), plain)
    with choices.impose():
        assert torch.equal(decode([1, 2, 3]), plain)
    assert choices.differing_steps == set()
    with choices.record():
        decode([9, 2, 200])
    with choices.impose():
        forced = decode([1, 2, 3])
    assert choices.differing_steps and not torch.equal(forced, plain)
    assert torch.equal(decode([1, 2, 3]), plain), "the hooks are gone"


def test_every_sub_command_can_be_listed_and_loaded() -> None:
    app = typer.main.get_command(build_app())
    context = typer.Context(app)
    assert app.list_commands(context) == sorted(SUB_COMMANDS)
    assert all(app.get_command(context, name).name == name for name in SUB_COMMANDS)
    assert app.get_command(context, "nothing") is None


def test_without_typer_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"msa-ops needs the package typer: pip install '\.\[cli\]'"):
        main()
