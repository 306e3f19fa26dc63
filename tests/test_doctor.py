"""`msa-ops doctor`: the self-tests find faults, machines of every kind get the right diagnosis, the report can be read.

Machines that are not here are made up: `doctor.probe` reads one, and everything behind it takes what was read as data.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.testing

import msa_ops.decode
import msa_ops.step
from compare import LSE_TOLERANCE, ROW_TOLERANCE
from msa_ops import doctor, selftest
from msa_ops.cli import doctor as command
from msa_ops.cli.main import build_app
from msa_ops.contract import _KV_FORMATS_OF_Q, KVFormat, KVLayout, ScaleLayout
from msa_ops.doctor import Cache, CachedArchitecture, Gpu, Machine, Missing
from msa_ops.engines.cuda import compile as compiler
from msa_ops.engines.cuda import plan, programs
from msa_ops.selftest import CompileResult, NumericResult, Route

H200 = Gpu(0, "NVIDIA H200", (9, 0), 150 * 2**30, 132, 232448, 233472)
T4 = Gpu(0, "Tesla T4", (7, 5), 15 * 2**30, 40, 65536, 65536)
NO_GPU = Machine(
    msa_ops="0.1.0", kernel_source="0123456789abcdef", python="3.11.7", platform="Linux x86_64", torch="2.13.0+cpu",
    torch_cuda=None, threads=1, system_gpus=(), gpus=(), driver=None, driver_cuda=None, cuda_bindings=None,
    cuda_bindings_error="No module named 'cuda'", nvrtc=None, nvrtc_error="No module named 'cuda'", nvrtc_architectures=(),
    cache=Cache("~/.cache/msa_ops", False, True, (), 0, 0, 0), environment={},
)  # fmt: skip
WHOLE = dataclasses.replace(
    NO_GPU, torch="2.13.0+cu130", torch_cuda="13.0", system_gpus=("NVIDIA H200",), gpus=(H200,), driver="580.159.04",
    driver_cuda=(13, 0), cuda_bindings="13.0.3", cuda_bindings_error=None, nvrtc=(13, 0), nvrtc_error=None,
    nvrtc_architectures=(80, 90, 100),
)  # fmt: skip
PREBUILT = Cache("/prebuilt", True, False, (CachedArchitecture("sm_90", 6, 6),), 6, 400000, 0)


real_examine = doctor.examine


def result(device: str, route: Route, way: str, message: str = "") -> NumericResult:
    names = (device, route.q, route.kv.value, route.layout_name, way)
    return NumericResult(*names, not message, None if message else 1e-3, 4e-3, 1e-7, 1e-4, message)


def all_pass(device: str, route: Route, way: str, facts: plan.DeviceFacts | None) -> NumericResult:
    return result(device, route, way)


def compiles(target: str, facts: plan.DeviceFacts) -> CompileResult:
    return CompileResult(target, "fp8-g1w4t128s3b2", True, 80000, 0.5, "")


def examined(machine: Machine, numeric_test: doctor.NumericTest = all_pass) -> doctor.Report:
    return real_examine(machine, compile_test=compiles, numeric_test=numeric_test)


def printed(report: doctor.Report, capsys: pytest.CaptureFixture[str]) -> str:
    command.render(report, command.PlainPage())
    return capsys.readouterr().out


# --- the self-tests ---


def test_routes_are_all_of_the_contract() -> None:
    found = selftest.routes()
    assert len(set(found)) == len(found)
    for name, dtype in selftest._QUERY_DTYPES.items():
        for kv in KVFormat:
            layouts = {(r.layout, r.scales) for r in found if r.q == name and r.kv is kv}
            if kv not in _KV_FORMATS_OF_Q[dtype]:
                want = set()
            elif kv is KVFormat.NVFP4:
                want = {(layout, ScaleLayout.TILED) for layout in KVLayout} | {(KVLayout.PAGED, ScaleLayout.PLANAR)}
            else:
                want = {(layout, ScaleLayout.NONE) for layout in KVLayout}
            assert layouts == want, (name, kv)


@pytest.mark.parametrize(
    "route", selftest.routes(), ids=lambda r: f"{r.q}-{r.kv.value}-{r.layout_name}".replace(" ", "-")
)
def test_every_route_of_the_cpu_passes(route: Route) -> None:
    ways = selftest.ways(route, None)
    assert ways == (("segments", "step") if route.layout is KVLayout.PAGED else ("segments",))
    for way in ways:
        found = selftest.numeric("cpu", route, way, None)
        assert found.passed, (way, found.message)
        assert found.error is not None and found.lse_error is not None


def test_a_step_that_chooses_other_blocks_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = msa_ops.step.select_blocks

    def faulty(scores: torch.Tensor, topk: int, extent: Any, output: torch.Tensor, begin: int, end: int) -> None:
        real(scores, topk, extent, output, begin, end)
        output[0, 1, 0] += 1  # one head's first block is another one

    monkeypatch.setattr(msa_ops.step, "select_blocks", faulty)
    found = selftest.numeric("cpu", selftest.routes()[0], "step", None)
    assert not found.passed and "other blocks than the rule" in found.message


def test_tolerances_are_those_of_the_tests() -> None:
    assert (selftest.ROW_TOLERANCE, selftest.LSE_TOLERANCE) == (ROW_TOLERANCE, LSE_TOLERANCE)


def _wrong_output(out: torch.Tensor, lse: torch.Tensor) -> None:
    out[-1, -1] *= 1.02


def _wrong_lse(out: torch.Tensor, lse: torch.Tensor) -> None:
    lse[0, 0] += 1e-3


def _nan(out: torch.Tensor, lse: torch.Tensor) -> None:
    out[0, 0, 0] = torch.nan


def _raises(out: torch.Tensor, lse: torch.Tensor) -> None:
    raise RuntimeError("the engine broke")


@pytest.mark.parametrize("fault", [_wrong_output, _wrong_lse, _nan, _raises])
def test_a_faulty_engine_fails_and_the_exit_code_is_1(
    fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = msa_ops.decode.ops.run

    def faulty(problem: Any, out: torch.Tensor, lse: torch.Tensor) -> None:
        real(problem, out, lse)
        if problem.kv_format is KVFormat.FP16:
            fault(out, lse)

    monkeypatch.setattr(msa_ops.decode.ops, "run", faulty)
    report = doctor.examine(NO_GPU)
    assert report.exit_code == 1
    assert len(report.failures) == 3  # paged and flat, and a step of the paged one
    assert all(line.startswith("cpu: fp16 q, fp16 KV, ") for line in report.failures)
    assert fault is not _raises or "RuntimeError: the engine broke" in report.failures[0]
    json.dumps(report.to_dict(), allow_nan=False)
    text = printed(report, capsys)
    assert "FAILED: segments, step" in text and "3 of 33 self-tests FAILED." in text


@pytest.mark.parametrize("capability", list(plan.SHARED_PER_BLOCK))
@pytest.mark.parametrize("multiprocessors", [20, 132])
def test_every_way_of_a_gpu_is_taken_by_its_problem(capability: tuple[int, int], multiprocessors: int) -> None:
    """The plans that these problems get on each generation, and that no kernel goes untested."""
    facts = plan.DeviceFacts.of_capability(capability, multiprocessors)
    tested = set()
    for route in selftest.routes():
        for way in selftest.ways(route, facts):
            size = selftest._size(way, facts)
            if selftest.is_step(way):
                tested |= chosen_in_a_step(route, way, facts)
                continue
            tokens = len(size.lengths) * size.seqlen_q
            special = selftest._special(route, facts).get(way)
            forced = None if special else plan.Combine[way.upper()]
            shape = plan.Shape(route.kv, tokens, size.kv_heads, size.group, size.topk, None, forced)
            taken = plan.plan_for(shape, facts, functools.partial(plan.typical_room, facts))
            assert taken.combine.name.lower() == selftest.route_of(way)
            want = special or plan.choose_variant(route.kv, facts)
            assert taken.variant == want and taken.variant.name in selftest.variants(route, facts)
            tested.add(taken.variant)
    usual = {plan.choose_variant(kv, facts) for kv in KVFormat}
    built = plan.variants_for(facts, tuple(KVFormat))
    assert tested == {v for v in built if not v.selects or dataclasses.replace(v, selects=0) in usual}


def chosen_in_a_step(route: Route, way: str, facts: plan.DeviceFacts) -> set[plan.Variant]:
    """The kernel that chooses in this way of a step; none where a selection goes before."""
    size, pages = selftest._STEPS, int(way.partition("-")[2] or plan.CHOICES[-1] + 1)
    shape = plan.Shape(route.kv, len(size.lengths) * size.seqlen_q, size.kv_heads, size.group, size.topk)
    taken = plan.plan_for(shape, facts, functools.partial(plan.typical_room, facts))
    chosen = plan.choosing_plan(taken, shape, facts, pages)
    if way == "step":
        assert chosen is None
        return set()
    assert chosen is not None and chosen.variant == selftest._choosing(route, facts)[way]
    assert chosen.variant.name in selftest.variants(route, facts)
    return {chosen.variant}


def test_the_problem_of_the_wide_kernel_is_right_on_the_cpu() -> None:
    facts = plan.DeviceFacts.of_capability((9, 0), 70)
    route = Route("bf16", KVFormat.FP8, KVLayout.PAGED, ScaleLayout.NONE)
    size = selftest._size("wide", facts)
    args, kwargs = selftest._arguments(route, size, "cpu")
    got = msa_ops.msa_sparse_decode_attention(*args, **kwargs)
    assert isinstance(got, tuple)
    error, lse_error = selftest._errors(got, selftest._expected(route, size))
    assert error <= ROW_TOLERANCE[torch.bfloat16] and lse_error <= LSE_TOLERANCE


def test_forcing_a_route_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSA_OPS_PLAN", "1,4,64,3,2,1,0")
    monkeypatch.delenv("MSA_OPS_COMBINE", raising=False)
    with selftest._forced("scratch"):
        assert os.environ["MSA_OPS_COMBINE"] == "scratch" and "MSA_OPS_PLAN" not in os.environ
    assert os.environ["MSA_OPS_PLAN"] == "1,4,64,3,2,1,0" and "MSA_OPS_COMBINE" not in os.environ


def test_compiling_is_tested() -> None:
    facts = plan.DeviceFacts.of_capability((9, 0))
    if doctor.probe().nvrtc is None:
        failed = selftest.compile_one("sm_90", facts)
        assert not failed.passed and "pip install" in failed.message
        return
    found = selftest.compile_one("sm_90", facts)
    assert found.passed and found.cubin_bytes > 1000 and found.variant.startswith("fp8-")
    failed = selftest.compile_one("sm_10", facts)
    assert not failed.passed and "could not compile" in failed.message


@pytest.mark.gpu
def test_a_real_gpu_passes() -> None:
    report = doctor.examine()
    assert report.failures == ()
    assert {route.device for route in report.routes} >= {"cpu", "cuda:0"}
    assert all(t.passed for route in report.routes for t in route.tests)


# --- diagnoses ---


def test_this_machine_can_be_read() -> None:
    machine = doctor.probe()
    assert machine.torch == torch.__version__ and machine.torch_cuda == torch.version.cuda
    assert len(machine.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert (machine.nvrtc is None) == (machine.nvrtc_error is not None)
    assert (machine.cuda_bindings is None) == (machine.cuda_bindings_error is not None)


def test_a_machine_without_a_gpu_lacks_nothing() -> None:
    report = examined(NO_GPU)
    assert report.exit_code == 0 and report.missing == ()
    assert {route.engine for route in report.routes} == {"cpu"}
    assert report.compile_tests == () and "needed on GPUs only" in report.not_run[0]
    with_nvrtc = examined(dataclasses.replace(NO_GPU, nvrtc=(13, 0), nvrtc_architectures=(90,)))
    assert [test.target for test in with_nvrtc.compile_tests] == ["sm_90"]


def test_a_whole_gpu_machine_is_well() -> None:
    report = examined(WHOLE)
    assert report.exit_code == 0 and report.missing == () and report.not_run == ()
    on_gpu = [route for route in report.routes if route.device == "cuda:0"]
    assert len(on_gpu) == len(selftest.routes())
    for route in on_gpu:
        special = {"nvfp4": ["wide", "dense-3", "dense-4"], "fp8": ["wide"]}.get(
            route.kv, ["wide", "whole", "tall", "deep"]
        )
        steps = ["step", "step-128", "step-256"] if route.layout.startswith("paged") else []
        assert route.engine == "cuda" and len(route.kernels) == 1 + len(special) + len(steps[1:])
        assert [t.way for t in route.tests] == ["none", "cluster", "scratch", *special, *steps]


CHECKOUT = "  # in a checkout of msa_ops"
MISSING = [
    pytest.param(
        {"cuda_bindings": None, "cuda_bindings_error": "no module"}, "cuda-bindings", f"pip install '.[cuda13]'{CHECKOUT}"
    ),
    pytest.param(
        {"cuda_bindings": None, "nvrtc": None, "torch_cuda": "12.8"}, "cuda-bindings", f"pip install '.[cuda12]'{CHECKOUT}"
    ),
    pytest.param({"nvrtc": None, "nvrtc_error": "no library"}, "NVRTC, which", f"pip install '.[cuda13]'{CHECKOUT}"),
    pytest.param({"driver_cuda": (12, 4)}, "suits the driver", f"pip install '.[cuda12]'{CHECKOUT}"),
    pytest.param({"nvrtc_architectures": (80,)}, "9.0 (NVIDIA H200)", "pip install --upgrade nvidia-cuda-nvrtc"),
    pytest.param(
        {"cache": Cache("/read/only", True, False, (), 0, 0, 0)}, "/read/only", "export MSA_OPS_CACHE_DIR=/some/writable/folder"
    ),
    pytest.param(
        {"gpus": (), "torch_cuda": None}, "a torch built with CUDA",
        "pip install --force-reinstall torch (on Windows: the command at https://pytorch.org/get-started)",
    ),
    pytest.param(
        {"gpus": ()}, "a driver that torch can use",
        "update the NVIDIA driver, or install a torch built for the driver's CUDA version"
    ),
]  # fmt: skip


@pytest.mark.parametrize("change, what, remedy", MISSING)
def test_what_is_missing_is_named_with_its_remedy(
    change: dict[str, Any], what: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = examined(dataclasses.replace(WHOLE, **change))
    assert report.exit_code == 2
    (only,) = report.missing
    assert what in only.what and only.remedy == remedy
    assert remedy in printed(report, capsys), "brackets of extras are no markup"


@pytest.mark.parametrize("change", [p.values[0] for p in MISSING[:5]])
def test_a_gpu_that_cannot_run_is_not_tested(change: dict[str, Any]) -> None:
    def refuse_cuda(device: str, route: Route, way: str, facts: plan.DeviceFacts | None) -> NumericResult:
        assert device == "cpu"
        return result(device, route, way)

    report = examined(dataclasses.replace(WHOLE, **change), refuse_cuda)
    assert any(line.startswith("numeric self-tests on cuda:0: ") for line in report.not_run)
    assert all(r.why_not for r in report.routes if r.device == "cuda:0")


def test_a_prebuilt_cache_needs_no_compiler_and_no_writing() -> None:
    report = examined(dataclasses.replace(WHOLE, nvrtc=None, nvrtc_error="no library", cache=PREBUILT))
    assert report.exit_code == 0 and report.missing == ()
    assert any(route.tests for route in report.routes if route.device == "cuda:0")
    part = dataclasses.replace(PREBUILT, architectures=(CachedArchitecture("sm_90", 5, 6),))
    assert len(doctor.missing(dataclasses.replace(WHOLE, nvrtc=None, nvrtc_error="no library", cache=part))) == 2


def test_an_unsupported_gpu_is_said_to_be_one() -> None:
    report = examined(dataclasses.replace(WHOLE, gpus=(T4,), system_gpus=("Tesla T4",)))
    assert report.exit_code == 0
    assert any("7.5 is not supported" in note for note in report.notes)
    assert all(route.engine is None for route in report.routes if route.device == "cuda:0")
    assert report.to_dict()["machine"]["gpus"][0]["supported"] is False


def test_a_gpu_that_is_hidden_on_purpose_is_not_missed() -> None:
    report = examined(dataclasses.replace(WHOLE, gpus=(), environment={"CUDA_VISIBLE_DEVICES": ""}))
    assert report.exit_code == 0
    assert report.notes == ("CUDA_VISIBLE_DEVICES hides this machine's GPU.",)


def test_a_failure_weighs_more_than_something_missing() -> None:
    def broken(device: str, route: Route, way: str, facts: plan.DeviceFacts | None) -> NumericResult:
        return result(device, route, way, "wrong" if way == "scratch" else "")

    assert examined(WHOLE, broken).exit_code == 1
    both = doctor.Report(WHOLE, (), (CompileResult("sm_90", "v", False, 0, 0.0, "no"),), (Missing("a", "b"),), (), ())
    assert both.exit_code == 1
    assert both.failures == ("compiling v for sm_90: no",)


def test_a_forced_plan_is_noted() -> None:
    machine = dataclasses.replace(WHOLE, environment={"MSA_OPS_COMBINE": "none", "MSA_OPS_CHECK": "1"})
    text = " ".join(examined(machine).notes)
    assert "MSA_OPS_COMBINE forces" in text and "MSA_OPS_CHECK=1" in text


# --- the cache ---


def test_the_cache_is_counted_by_version_and_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MSA_OPS_CACHE_DIR", str(tmp_path / "kernels"))
    empty = doctor.read_cache()
    assert (empty.folder, empty.exists, empty.writable, empty.files) == ("~/kernels", False, True, 0)
    assert not (tmp_path / "kernels").exists(), "reading creates nothing"
    wanted: list[compiler.Program] = [*plan.variants((9, 0)), *programs.all_programs()]
    for kernel in wanted:
        compiler.write_cached(kernel, "sm_90", b"cubin", (13, 0))
    compiler.write_cached(plan.variants((8, 0))[0], "sm_80", b"cubin", (13, 0))
    other = tmp_path / "kernels" / "ffffffffffffffff" / "sm_90" / "old.cubin"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"old")
    cache = doctor.read_cache()
    assert cache.files == len(wanted) + 1 and cache.files_of_other_versions == 1 and cache.bytes > 0
    assert cache.holds("sm_90") and not cache.holds("sm_80") and not cache.holds("sm_100a") and not cache.holds(None)
    assert cache.architectures[1] == CachedArchitecture("sm_90", len(wanted), len(wanted))


@pytest.mark.parametrize("lacking", range(2), ids=["an attention kernel", "a kernel beside the attention"])
def test_a_cache_that_lacks_one_kernel_of_any_kind_is_not_complete(
    lacking: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSA_OPS_CACHE_DIR", str(tmp_path))
    kinds: list[list[compiler.Program]] = [[*plan.variants((9, 0))], [*programs.all_programs()]]
    wanted = [*kinds[0], *kinds[1]]
    missing = kinds[lacking][-1]
    for kernel in wanted:
        if kernel is not missing:
            compiler.write_cached(kernel, "sm_90", b"cubin", (13, 0))
    cache = doctor.read_cache()
    assert cache.architectures == (CachedArchitecture("sm_90", len(wanted) - 1, len(wanted)),)
    assert not cache.holds("sm_90")
    compiler.write_cached(missing, "sm_90", b"cubin", (13, 0))
    assert doctor.read_cache().holds("sm_90")


def test_a_file_in_the_caches_place_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MSA_OPS_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    assert not doctor.read_cache().writable


LONG = "x" * 300


@pytest.mark.parametrize("path", [LONG, "y/" * 3000], ids=["a long name", "a long path"])
def test_a_cache_folder_with_too_long_a_name_is_a_finding(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSA_OPS_CACHE_DIR", str(tmp_path / path))
    machine = doctor.probe()
    assert machine.cache.error == "File name too long" and machine.unreadable == ()
    assert not machine.cache.exists and not machine.cache.writable and machine.cache.files == 0
    assert "Not all of the kernel cache can be read: File name too long" in doctor.notes(machine)
    (lacking,) = doctor.missing(dataclasses.replace(WHOLE, cache=machine.cache))
    assert "(File name too long)" in lacking.what


def test_a_home_folder_that_may_not_be_read_is_a_finding(tmp_path: Path) -> None:
    """In a process of its own, that gives up its rights where it has them."""
    home = tmp_path / "home"
    (home / ".cache" / "msa_ops").mkdir(parents=True)
    code = (
        "import os, json, dataclasses\n"
        "from msa_ops import doctor\n"
        "from msa_ops.engines.cuda import programs\n"
        "programs.all_programs(), doctor.compiler.source_hash()\n"
        f"os.chmod({str(home)!r}, 0)\n"
        "os.geteuid() or os.seteuid(65534)\n"
        "print(json.dumps(dataclasses.asdict(doctor.probe().cache)))\n"
    )
    places = {"HOME": str(home), "PYTHONPATH": str(Path(doctor.__file__).parents[1])}
    environment = {n: v for n, v in os.environ.items() if n not in ("MSA_OPS_CACHE_DIR", "XDG_CACHE_HOME")} | places
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
    finally:
        home.chmod(0o700)
    assert done.returncode == 0, done.stderr
    cache = json.loads(done.stdout)
    assert (cache["error"], cache["exists"], cache["writable"]) == ("Permission denied", False, False)
    assert cache["folder"] == "~/.cache/msa_ops"


def test_a_kernel_that_goes_while_it_is_counted_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSA_OPS_CACHE_DIR", str(tmp_path))
    path = compiler.write_cached(plan.variants((9, 0))[0], "sm_90", b"cubin", (13, 0))
    (path.parent / "gone.cubin").symlink_to(tmp_path / "nowhere")
    (path.parent / "folder.cubin").mkdir()
    cache = doctor.read_cache()
    assert (cache.files, cache.bytes) == (1, path.stat().st_size) and cache.error == "No such file or directory"


# --- reading what is broken ---


def test_output_that_is_no_utf_8_is_shown_with_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_bytes(b"#!/bin/sh\nprintf 'GPU 0: NVIDIA \\377\\351 (UUID: GPU-0)\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("MSA_OPS_CACHE_DIR", os.fsdecode(b"/\xff"))
    machine = doctor.probe()
    assert machine.system_gpus == ("NVIDIA \\xff\\xe9",) and machine.unreadable == ()
    assert machine.environment["MSA_OPS_CACHE_DIR"].encode("ascii") == machine.cache.folder.encode("ascii")


@pytest.mark.parametrize(
    "name, field, empty, what",
    [
        ("_version", "msa_ops", None, "the version of msa-ops"),
        ("_system_gpus", "system_gpus", (), "the GPUs that the system names"),
        ("_gpus", "gpus", (), "the GPUs that torch sees"),
        ("_driver", "driver", None, "the driver's version"),
        ("_environment", "environment", {}, "the environment"),
        ("read_cache", "cache", Cache(None, False, False, (), 0, 0, 0), "the kernel cache"),
    ],
)
def test_a_reading_that_fails_is_named_and_the_others_stay(
    name: str, field: str, empty: object, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("in ruins")

    monkeypatch.setattr(doctor, name, broken)
    machine = doctor.probe()
    assert getattr(machine, field) == empty and machine.torch == torch.__version__
    assert machine.unreadable == (f"{what}: RuntimeError: in ruins",)
    assert f"Could not be read: {what}: RuntimeError: in ruins" in doctor.notes(machine)


# --- the command ---


@pytest.mark.parametrize("arguments, code", [(("--json",), 0), (("--plain",), 0), ((), 1)])
def test_without_rich_it_is_plain_or_says_what_is_missing(
    arguments: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda progress: examined(WHOLE))
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    done = run(*arguments)
    assert done.exit_code == code and isinstance(done.exception, SystemExit | None), done.output
    if arguments == ("--json",):
        assert json.loads(done.stdout)["exit_code"] == 0
    elif arguments:
        assert "All well: " in done.stdout
    else:
        assert "msa-ops doctor needs the package rich" in done.output


def test_the_page_for_reading_says_what_the_plain_one_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = examined(dataclasses.replace(WHOLE, nvrtc=None, nvrtc_error="no library"))
    plain = printed(report, capsys)
    command.render(report, command.make_page("doctor", plain=False))
    assert sorted(capsys.readouterr().out.split()) == sorted(plain.split())


def test_a_plain_page_folds_what_is_too_wide(capsys: pytest.CaptureFixture[str]) -> None:
    page = command.PlainPage()
    page.pairs([("name", "word " * 60), ("other", "z" * 250)])
    page.line("  " + "word " * 40)
    page.line("y" * 150, whole=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop() == "y" * 150
    assert max(map(len, lines)) <= 120 and all(line.startswith("  ") for line in lines)
    assert "".join(lines).count("z") == 250 and "".join(lines).count("word") == 100


def run(*arguments: str) -> Any:
    return typer.testing.CliRunner().invoke(build_app(), ["doctor", *arguments])


KEYS = {
    "schema_version", "exit_code", "failures", "machine", "routes", "compile_tests", "missing", "not_run", "notes",
}  # fmt: skip
MACHINE_KEYS = {
    "msa_ops", "kernel_source", "python", "platform", "torch", "torch_cuda", "threads", "system_gpus", "gpus", "driver",
    "driver_cuda", "cuda_bindings", "cuda_bindings_error", "nvrtc", "nvrtc_error", "nvrtc_architectures", "cache",
    "environment", "unreadable",
}  # fmt: skip


def test_the_json_report_keeps_its_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe", lambda: WHOLE)
    monkeypatch.setattr(doctor, "examine", lambda progress: examined(doctor.probe()))
    done = run("--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["schema_version"] == doctor.SCHEMA_VERSION == 1
    assert set(found) == KEYS and set(found["machine"]) == MACHINE_KEYS
    assert set(found["routes"][0]) == {"device", "q", "kv", "layout", "engine", "kernels", "why_not", "tests"}
    assert found["machine"]["gpus"][0]["architecture"] == "sm_90"


@pytest.mark.parametrize("machine, code", [(WHOLE, 0), (dataclasses.replace(WHOLE, nvrtc=None), 2)])
def test_the_exit_code_is_the_reports(machine: Machine, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda progress: examined(machine))
    assert run("--plain").exit_code == code


def test_the_plain_report_of_a_gpu_machine_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(examined(WHOLE), capsys)
    assert text.isascii() and "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 120
    for part in (
        "NVIDIA H200, compute capability 9.0 (supported, sm_90)", "580.159.04, serves CUDA 13.0", "2.13.0+cu130 (CUDA 13.0)",
        "fp8-g1w4t128s3b2", "nvfp4-g1w4t128s3b3", "ok: none, cluster,", "All well: ",
    ):  # fmt: skip
        assert part in " ".join(text.split()), part


def test_the_command_runs_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSA_OPS_CACHE_DIR", str(tmp_path))
    if torch.cuda.is_available():
        monkeypatch.setattr(doctor, "_gpus", lambda: ())  # its own test runs on it
        monkeypatch.setattr(doctor, "_system_gpus", lambda: ())
    done = run("--json")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["failures"]) == (0, [])
    tests = [test for route in report["routes"] for test in route["tests"]]
    assert len(tests) == sum(len(selftest.ways(route, None)) for route in selftest.routes()) and all(
        test["passed"] for test in tests
    )


def test_calls_under_test_have_the_threads_that_a_user_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = msa_ops.decode.ops.run, []

    def counting(*arguments: Any) -> None:
        seen.append(torch.get_num_threads())
        real(*arguments)

    monkeypatch.setattr(msa_ops.decode.ops, "run", counting)
    selftest._expected.cache_clear()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert selftest.numeric("cpu", selftest.routes()[0], "segments", None).passed
        assert (seen, torch.get_num_threads()) == ([2], 2)
    finally:
        torch.set_num_threads(before)
