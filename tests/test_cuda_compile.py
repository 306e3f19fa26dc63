"""Compiling the CUDA kernels, which needs NVRTC and no GPU: what the compiler made of them, the cache, the parameter block."""

from __future__ import annotations

import importlib.util
import os
import re
import struct
import subprocess
import sys
import warnings
from dataclasses import dataclass
from functools import cache as remembered
from importlib import resources
from pathlib import Path

import pytest

from msa_ops.engines.cuda import compile as compiler
from msa_ops.engines.cuda import launch, plan, programs
from msa_ops.engines.cuda.plan import Variant

if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
    pytest.skip("needs cuda-bindings and NVRTC: pip install '.[cuda13]'", allow_module_level=True)

SRC = str(Path(__file__).parents[1] / "src")
REGISTERS = 65536
"""Of a multiprocessor, from 8.0 to 12.1; a warp takes them in units of 256."""
QUARTERS = 4
"""Parts of a multiprocessor, each with its share of registers; a warp lives in one."""

# All variants of 9.0; elsewhere the one that the registers or the shared memory of that generation trouble most.
SPREAD = [((9, 0), v) for v in plan.variants((9, 0))] + [
    (capability, plan.variants(capability)[i])
    for capability, picks in {
        (8, 0): (0, 2, 3), (8, 6): (2, 3), (8, 7): (2, 3), (8, 9): (2, 3), (10, 0): (0, 2, 3), (10, 3): (2, 3),
        (10, 7): (2, 3), (11, 0): (0, 3), (12, 0): (0, 2, 3), (12, 1): (2, 3),
    }.items()
    for i in picks
]  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MSA_OPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_warned_unwritable", False)
    return tmp_path / "cache"


# --- what the compiler made of the kernels ---


@dataclass(frozen=True)
class Usage:
    """What ptxas says of one kernel, in bytes but for the registers."""

    stack: int
    spill_stores: int
    spill_loads: int
    registers: int
    shared: int


def usages(log: str) -> dict[str, Usage]:
    """Per entry point, from a log made with ``--ptxas-options=-v``."""
    found = {}
    for name, text in re.findall(r"Compiling entry function '(\w+)'(.*?)Compile time", log, re.DOTALL):
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
        registers = re.search(r"Used (\d+) registers", text)
        shared = re.search(r"(\d+) bytes smem", text)
        assert frame and registers, text
        found[name] = Usage(*(int(x) for x in frame.groups()), int(registers[1]), int(shared[1]) if shared else 0)
    return found


_ONE_TENSOR_COPY = """
struct alignas(64) Map { unsigned long long words[16]; };
extern "C" __global__ void msa_decode(const __grid_constant__ Map map) {
  __shared__ alignas(1024) char to[1024];
  __shared__ unsigned long long barrier;
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %2}], [%3];"
                 ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(&map), "r"(0), "r"((unsigned)__cvta_generic_to_shared(&barrier))
                 : "memory");
}
"""  # noqa: E501


@remembered
def unavoidable_stack(arch: str) -> int:
    """Bytes of stack frame that ptxas gives any kernel with a tensor copy, used or not: 8 for 12.x, as of NVRTC 13.5."""
    if int(re.sub(r"\D", "", arch)) < 90:
        return 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "source", lambda _: _ONE_TENSOR_COPY)
        _, log = compiler.compile_program(plan.variants((9, 0))[0], arch, "--ptxas-options=-v")
    return usages(log)["msa_decode"].stack


def most_registers(variant: Variant) -> int:
    """Registers a thread with which `min_blocks` blocks are resident at once."""
    warps = -(-variant.min_blocks * variant.threads // 32)
    return min(255, REGISTERS // QUARTERS // -(-warps // QUARTERS) // 32 // 8 * 8)


@pytest.mark.parametrize(
    "capability, variant", SPREAD, ids=lambda x: x.name if isinstance(x, Variant) else f"{x[0]}.{x[1]}"
)
def test_a_kernel_keeps_to_its_registers_and_memory(capability: tuple[int, int], variant: Variant) -> None:
    arch = compiler.architecture(capability)
    if capability[0] * 10 + capability[1] not in compiler.supported_architectures():
        pytest.skip(f"NVRTC {compiler.nvrtc_version()} does not know {arch}")
    cubin, log = compiler.compile_program(variant, arch, "--ptxas-options=-v")
    assert cubin[:4] == b"\x7fELF"
    kernels = usages(log)
    assert set(kernels) == {"msa_decode", "msa_merge"}
    for name, usage in kernels.items():
        assert usage.spill_stores == usage.spill_loads == 0, f"{name} spills: {usage}"
        allowed = unavoidable_stack(arch) if name == "msa_decode" else 0
        assert usage.stack <= allowed, f"{name} keeps {usage.stack} bytes in local memory"
    decode = kernels["msa_decode"]
    assert decode.shared <= variant.static_shared_bytes
    assert decode.shared + variant.shared_bytes <= plan.SHARED_PER_BLOCK[capability]
    assert decode.registers <= most_registers(variant), f"{variant.min_blocks} blocks are not resident: {decode}"
    assert kernels["msa_merge"].shared == 0


@pytest.mark.parametrize(
    "fields", [(1, 4, 64, 4, 2), (2, 4, 64, 4, 2), (1, 8, 64, 3, 2), (2, 8, 64, 5, 1), (1, 4, 128, 3, 1)], ids=str
)
def test_static_memory_of_forced_variants_is_bounded(fields: tuple[int, int, int, int, int]) -> None:
    """MSA_OPS_PLAN may ask for what no plan does."""
    variant = Variant(plan.KVFormat.BF16, *fields)
    _, log = compiler.compile_program(variant, "sm_90a", "--ptxas-options=-v")
    assert usages(log)["msa_decode"].shared <= variant.static_shared_bytes


def test_usage_is_read_from_the_log() -> None:
    """The parser above, on a log with everything that a good kernel does not have."""
    log = """ptxas info    : Compiling entry function 'msa_decode' for 'sm_100a'
ptxas info    : Function properties for msa_decode
    56 bytes stack frame, 48 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 56 bytes cumulative stack size, 2048 bytes smem
ptxas info    : Compile time = 100 ms"""
    assert usages(log) == {"msa_decode": Usage(56, 48, 40, 168, 2048)}


def test_a_source_error_comes_with_its_log() -> None:
    variant = plan.variants((9, 0))[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "source", lambda _: "__global__ void f() { undeclared(); }")
        with pytest.raises(compiler.KernelCompileError, match=r"could not compile .* for sm_90 (.|\n)*undeclared"):
            compiler.compile_program(variant, "sm_90")


def test_an_architecture_that_nvrtc_does_not_know_says_what_to_do() -> None:
    with pytest.raises(compiler.KernelCompileError, match="install a newer NVRTC package"):
        compiler.compile_program(plan.variants((9, 0))[0], "sm_999")


@pytest.mark.parametrize(
    "capability, arch",
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 1), "sm_121a"),
    ],
)
def test_targets_from_blackwell_on_are_the_a_targets(capability: tuple[int, int], arch: str) -> None:
    assert compiler.architecture(capability) == arch


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_an_older_gpu_is_refused(capability: tuple[int, int]) -> None:
    with pytest.raises(RuntimeError, match=rf"compute capability 8\.0 or newer, this GPU has 7\.{capability[1]}"):
        compiler.architecture(capability)


def test_the_source_needs_no_header() -> None:
    folder = resources.files("msa_ops.engines.cuda") / "kernels"
    kernels = {f.name for f in folder.iterdir() if f.name.endswith((".cu", ".cuh"))}
    used = set(plan.SOURCES).union(*(p.sources for p in programs.all_programs()))
    assert kernels == used, "every file is part of a program"
    assert "#include" not in compiler.source(tuple(sorted(used)))


# --- the parameter block ---

_C_SIZES = {"u32": 4, "int": 4, "float": 4, "u64": 8, "i64": 8}


def c_layout(source: str, name: str, chooses: bool = False) -> tuple[list[tuple[str, int, int]], int]:
    """Fields of a struct as (name, offset, size), and its size, by C's rules. `chooses`: in an attention that does."""
    source = re.sub(r"#ifdef SELECTS\n(.*?)#endif\n", r"\1" if chooses else "", source, flags=re.DOTALL)
    match = re.search(rf"struct (?:alignas\((\d+)\) )?{name} {{(.*?)\n}};", source, re.DOTALL)
    assert match, name
    body = re.sub(r"//[^\n]*", "", match[2])
    fields, end, widest = [], 0, int(match[1] or 1)
    for line in body.split(";"):
        if "(" in line or not line.strip(" \n}"):
            continue  # a member function
        kind, names = re.fullmatch(r"\s*(?:const\s+)?(\w+)\s+(.*?)\s*", line, re.DOTALL).groups()  # type: ignore[union-attr]
        for declared in names.split(","):
            field = re.fullmatch(r"\s*(\*?)(\w+)(?:\[(\d+)\])?\s*", declared)
            assert field, declared
            size, align = (8, 8) if field[1] else c_size(source, kind)
            end = -(-end // align) * align
            size *= int(field[3] or 1)
            fields.append((field[2], end, size))
            end, widest = end + size, max(widest, align)
    return fields, -(-end // widest) * widest


def c_size(source: str, kind: str) -> tuple[int, int]:
    """Size and alignment of a type."""
    if kind in _C_SIZES:
        return _C_SIZES[kind], _C_SIZES[kind]
    fields, size = c_layout(source, kind)
    aligned = re.search(rf"struct alignas\((\d+)\) {kind}", source)
    return size, int(aligned[1]) if aligned else max(min(size_, 8) for _, _, size_ in fields)


@pytest.mark.parametrize("chooses", [False, True])
def test_the_parameter_block_is_the_struct_of_the_kernel(chooses: bool) -> None:
    """Every value that launch.py packs lies where the kernel reads it."""
    source = compiler.source(("common.cuh", "params.cuh"))
    fields, size = c_layout(source, "Params", chooses)
    assert size == (launch.PARAMETER_BYTES if chooses else launch._PARAMS.size)
    flat = []
    for name, offset, length in fields:
        divisor = re.search(rf"\bDivisor [^;]*\b{name}\b", source)
        flat += [(offset + i, 4) for i in (0, 4, 8)] if divisor else [(offset, length)]
    packed = packed_places(launch._PARAMS)
    if chooses:
        packed += [(launch._PARAMS.size + offset, length) for offset, length in packed_places(launch._CHOICE)]
    assert packed == flat


def packed_places(packed: struct.Struct) -> list[tuple[int, int]]:
    """Offset and length of each value of a format of numbers and bytes, as C aligns them; padding may follow them."""
    places, offset = [], 0
    for count, code in re.findall(r"(\d*)([a-zA-Z])", packed.format):
        if code == "x":
            continue
        length = int(count) if code == "s" else struct.calcsize(code)
        for _ in range(1 if code == "s" else int(count or 1)):
            offset += 0 if code == "s" else -offset % length
            places.append((offset, length))
            offset += length
    return places


def test_the_compiler_agrees_on_the_size_of_the_struct() -> None:
    """The rules of C above are held against the compiler itself."""
    usual, chooses = plan.variants((8, 0))[0], plan.variants((9, 0))[-1]
    assert chooses.selects
    for variant, size in ((usual, launch._PARAMS.size), (chooses, launch.PARAMETER_BYTES)):
        with pytest.MonkeyPatch.context() as patch:
            checked = f'{compiler.source(plan.SOURCES)}\nstatic_assert(sizeof(Params) == {size}, "size");'
            patch.setattr(compiler, "source", lambda _, checked=checked: checked)
            compiler.compile_program(variant, "sm_80")


@pytest.mark.parametrize("name", ["fp8-g2w4t128s5b1", "bf16-g1w8t64s5b1"])
@pytest.mark.parametrize("size", [2, 3, 4, 6, 8, 16])
def test_what_a_clusters_blocks_receive_has_room(name: str, size: int) -> None:
    variant = next(v for v in plan.variants((9, 0)) if v.name == name)
    with pytest.MonkeyPatch.context() as patch:
        room = variant.dynamic_bytes(plan.Combine.CLUSTER, size) - variant.dynamic_bytes(plan.Combine.NONE)
        if variant.groups > 1:  # which have a place to meet anyway
            room += plan.ROW_TILE * plan.HEAD_DIM * 4 * variant.groups
        check = (
            f"static_assert(Meeting<{size}>::PARTS * Meeting<{size}>::OWN * HEAD_DIM * 4 == {room} && "
            f'Meeting<{size}>::PARTS * Meeting<{size}>::OWN <= PEER_ROWS, "what meets in a block");'
        )
        checked = f"{compiler.source(plan.SOURCES)}\n{check}"
        patch.setattr(compiler, "source", lambda _: checked)
        compiler.compile_program(variant, "sm_90a")


@pytest.mark.parametrize("arch, at", [("sm_80", 0), ("sm_90a", 0), ("sm_90a", -1)], ids=str)
def test_the_form_for_racecheck_compiles(arch: str, at: int) -> None:
    """tests/sanitize.py --every-lane."""
    with pytest.MonkeyPatch.context() as patch:
        checked = f"#define EVERY_LANE_ARRIVES\n{compiler.source(plan.SOURCES)}\nstatic_assert(WARP_ARRIVALS == 32);"
        patch.setattr(compiler, "source", lambda _: checked)
        variant = plan.variants((9, 0))[at]
        assert bool(variant.selects) == (at == -1)
        compiler.compile_program(variant, arch)


@pytest.mark.parametrize(
    "name", ["fp8-g1w4t128s3b2", *(v.name for v in plan.variants((9, 0)) if "nvfp4" in v.name and not v.selects)]
)
def test_the_kernel_lays_shared_memory_out_as_planned(name: str) -> None:
    variant = next(v for v in plan.variants((9, 0)) if v.name == name)
    with pytest.MonkeyPatch.context() as patch:
        planned = variant.dynamic_bytes(plan.Combine.CLUSTER)
        check = (
            "static_assert(RING_BYTES + GROUPS * (2 * WEIGHT_BYTES + OPERAND_BYTES + WARPS * VALUE_SCALE_BYTES + "
            f'ROWS * HEAD_DIM * 4) == {planned}, "dynamic shared memory");'
        )
        checked = f"{compiler.source(plan.SOURCES)}\n{check}"
        patch.setattr(compiler, "source", lambda _: checked)
        compiler.compile_program(variant, "sm_80")


def test_enumerations_agree_with_the_kernel() -> None:
    source = compiler.source(plan.SOURCES)
    for combine in plan.Combine:
        assert f"COMBINE_{combine.name} = {int(combine)}" in source
    for dtype, value in launch._QUERY_TYPE.items():
        name = {"bfloat16": "BF16", "float16": "FP16", "float8_e4m3fn": "FP8"}[str(dtype).removeprefix("torch.")]
        assert f"QUERY_{name} = {value}" in source
    for dtype, value in launch._PARTIAL_TYPE.items():
        if dtype is not None:
            name = str(dtype).removeprefix("torch.").replace("bfloat", "BF").replace("float8_e4m3fn", "FP8")
            assert f"PARTIAL_{name.replace('float', 'FP')} = {value}" in source
            assert launch._PARTIAL_DTYPE[value] == dtype


@pytest.mark.parametrize(
    "value", [1, 2, 3, 5, 7, 12, 16, 63, 64, 65, 641, 65_535, 65_537, 2**20 - 1, 2**30 + 1, 2**31 - 1]
)
def test_division_by_multiplication_is_exact(value: int) -> None:
    """At both sides of every kind of multiple, where a rounded reciprocal goes wrong first, for n < 2^31."""
    given, multiplier, shift = launch.divisor(value)
    assert given == value and 0 <= multiplier < 2**32 and 0 <= shift < 32
    top = 2**31 - 1
    quotients = {0, 1, 2, 3, 1000, top // value // 2, top // value - 1, top // value}
    for n in {q * value + d for q in quotients for d in (-1, 0, 1)} | {top, top - 1}:
        if 0 <= n <= top:
            assert (n if multiplier == 0 else (n * multiplier >> 32) >> shift) == n // value, n


# --- the cache ---

VARIANT = plan.variants((9, 0))[0]


def test_a_cubin_is_read_back(cache: Path) -> None:
    path = compiler.write_cached(VARIANT, "sm_90", b"cubin", (13, 5))
    assert path.is_relative_to(cache) and path.name == f"{compiler._stem(VARIANT)}-nvrtc13.5.cubin"
    assert compiler.read_cached(VARIANT, "sm_90") == [b"cubin"]
    assert compiler.read_cached(VARIANT, "sm_80") == []
    assert compiler.read_cached(plan.variants((9, 0))[1], "sm_90") == []
    assert os.stat(path).st_mode & 0o444 == 0o444, "a cache that one user prebuilt serves others"
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no temporary file is left"


def test_another_source_is_another_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.write_cached(VARIANT, "sm_90", b"cubin", (13, 5))
    for sources, defines in ((VARIANT.sources[1:], VARIANT.defines), (VARIANT.sources, (*VARIANT.defines, "-DX"))):
        assert compiler.read_cached(programs.KernelProgram(VARIANT.name, sources, (), defines), "sm_90") == []
    monkeypatch.setattr(compiler, "source_hash", lambda: "0123456789abcdef")
    assert compiler.read_cached(VARIANT, "sm_90") == []


def test_the_newest_nvrtc_comes_first(cache: Path) -> None:
    """A driver may be too old for it; then the next is tried."""
    for version in ((13, 2), (12, 9), (13, 10), (9, 0)):
        compiler.write_cached(VARIANT, "sm_90", repr(version).encode(), version)
    assert compiler.read_cached(VARIANT, "sm_90") == [b"(13, 10)", b"(13, 2)", b"(12, 9)", b"(9, 0)"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:20],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: b"x" + data[1:],
        lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
    ],
    ids=["cut", "header alone", "empty", "longer", "other format", "one bit"],
)
def test_a_damaged_file_is_passed_over(cache: Path, damage: object) -> None:
    path = compiler.write_cached(VARIANT, "sm_90", b"good" * 100, (13, 5))
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert compiler.read_cached(VARIANT, "sm_90") == []
    compiler.write_cached(VARIANT, "sm_90", b"good", (13, 5))
    assert compiler.read_cached(VARIANT, "sm_90") == [b"good"], "and is replaced"


def test_files_of_others_are_passed_over(cache: Path) -> None:
    path = compiler.write_cached(VARIANT, "sm_90", b"good", (13, 5))
    (path.parent / f"{compiler._stem(VARIANT)}-nvrtc13.5.cubin.tmp").write_bytes(path.read_bytes())
    (path.parent / f"{compiler._stem(VARIANT)}-nvrtcnew.cubin").write_bytes(path.read_bytes())
    (path.parent / f"{compiler._stem(VARIANT)}-nvrtc13.6.cubin").mkdir()
    assert compiler.read_cached(VARIANT, "sm_90") == [b"good"]


def test_an_interrupted_write_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compiler.write_cached(VARIANT, "sm_90", b"cubin", (13, 5))
    assert [p for p in cache.rglob("*") if p.is_file()] == []


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MSA_OPS_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compiler.cache_dir() == tmp_path / "own"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MSA_OPS_CACHE_DIR", "~/kernels")
    assert compiler.cache_dir() == tmp_path / "home" / "kernels"
    monkeypatch.setenv("MSA_OPS_CACHE_DIR", "~nobody_of_this_name/kernels")
    with pytest.raises(OSError, match="home directory"):
        compiler.cache_dir()
    monkeypatch.delenv("MSA_OPS_CACHE_DIR")
    assert compiler.cache_dir() == tmp_path / "xdg" / "msa_ops"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compiler.cache_dir() == tmp_path / "home" / ".cache" / "msa_ops"


def assert_builds_with_one_warning(count: int = 3) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(count):
            compiler._store(VARIANT, "sm_90", b"cubin %d" % i, (13, 5))
            assert compiler.read_cached(VARIANT, "sm_90") == []
    said = [w for w in caught if issubclass(w.category, RuntimeWarning)]
    assert len(said) == 1, [str(w.message) for w in caught]
    assert "cannot write its kernel cache" in str(said[0].message) and "MSA_OPS_CACHE_DIR" in str(said[0].message)


def test_a_cache_that_cannot_be_written_costs_one_warning(cache: Path) -> None:
    """A file where the folder should be: refused for every user, root included."""
    cache.write_text("not a folder")
    assert_builds_with_one_warning()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes into read-only folders")
def test_a_read_only_cache_costs_one_warning(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o500)
    assert_builds_with_one_warning()


def test_a_user_without_a_home_costs_one_warning(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MSA_OPS_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert_builds_with_one_warning()


def test_a_build_without_a_cache_still_gives_a_cubin(cache: Path) -> None:
    cache.write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="cannot write its kernel cache"):
        assert compiler.build(VARIANT, "sm_90")[:4] == b"\x7fELF"


def test_sixteen_processes_at_once_leave_whole_files(cache: Path) -> None:
    """Each compiles, then writes many times what is large enough to be seen half-written, and reads what others write."""
    code = f"""
import os, sys; sys.path.insert(0, {SRC!r})
from msa_ops.engines.cuda import compile as compiler, plan
variant, other = plan.variants((9, 0))[:2]
start, go = os.pipe()
children = []
for _ in range(16):
    child = os.fork()
    if child == 0:
        try:
            os.close(go)
            os.read(start, 1)  # until the parent has started all
            assert compiler.build(variant, "sm_90")[:4] == b"\\x7fELF"
            assert compiler.read_cached(variant, "sm_90")[0][:4] == b"\\x7fELF"
            for i in range(20):
                compiler.write_cached(other, "sm_90", bytes([i]) * 300_000, (13, 5))
                (cubin,) = compiler.read_cached(other, "sm_90")
                assert len(cubin) == 300_000 and len(set(cubin)) == 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    children.append(child)
os.close(go)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str([0] * 16), run.stderr
    assert len([p for p in cache.rglob("*") if p.is_file()]) == 2, "temporary files were left"


# --- what is missing is named ---


@pytest.mark.parametrize("what, call", [("nvrtc", "compile.nvrtc()"), ("driver", "driver.driver()")])
def test_a_missing_package_is_named_with_its_remedy(what: str, call: str) -> None:
    code = f"""
import sys; sys.path.insert(0, {SRC!r})
import torch
from msa_ops.engines.cuda import compile, driver
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "cuda" or name.startswith("cuda."):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
for name in [n for n in sys.modules if n == "cuda" or n.startswith("cuda.")]:
    del sys.modules[name]
sys.meta_path.insert(0, Block())
try:
    {call}
except RuntimeError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs the package cuda-bindings" in run.stdout
    assert "pip install '.[cuda13]'" in run.stdout and "'.[cuda12]'" in run.stdout


def test_a_missing_nvrtc_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc as bindings

    def missing() -> None:
        raise RuntimeError("Failed to dlopen libnvrtc.so.13")

    monkeypatch.setattr(bindings, "nvrtcVersion", missing)
    compiler.nvrtc.cache_clear()
    try:
        with pytest.raises(
            RuntimeError, match=r"found no NVRTC library \(Failed to dlopen.*pip install '\.\[cuda13\]'"
        ):
            compiler.nvrtc()
    finally:
        compiler.nvrtc.cache_clear()


# --- the command ---


def all_kernels(capability: tuple[int, int]) -> list[compiler.Program]:
    return [*plan.variants(capability), *programs.all_programs()]


def test_the_command_builds_every_variant_of_what_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typer_testing = pytest.importorskip("typer.testing")
    from msa_ops.cli.compile import app

    out = tmp_path / "built"
    result = typer_testing.CliRunner().invoke(app, ["--arch", "sm_80,8.0", "--arch", "sm_120a", "--out", str(out)])
    assert result.exit_code == 0, result.output
    count = 0
    monkeypatch.setenv("MSA_OPS_CACHE_DIR", str(out))
    for capability in ((8, 0), (12, 0)):
        for variant in all_kernels(capability):
            count += 1
            assert variant.name in result.output
            (cubin,) = compiler.read_cached(variant, compiler.architecture(capability))
            assert cubin[:4] == b"\x7fELF"
    assert f"Built {count} kernels for 2 architectures" in result.output
    assert f"MSA_OPS_CACHE_DIR={out}" in result.output
    assert len([p for p in out.rglob("*") if p.is_file()]) == count


def test_the_command_fails_if_anything_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typer_testing = pytest.importorskip("typer.testing")
    from msa_ops.cli.compile import app

    def compile_some(variant: Variant, arch: str) -> tuple[bytes, str]:
        if variant == plan.variants((8, 0))[1]:
            raise compiler.KernelCompileError("no")
        return b"cubin", ""

    monkeypatch.setattr(compiler, "compile_program", compile_some)
    result = typer_testing.CliRunner().invoke(app, ["--arch", "sm_80", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert f"1 failed: sm_80 {plan.variants((8, 0))[1].name}" in result.output
    assert f"Built {len(all_kernels((8, 0))) - 1} kernels" in result.output, "the others are built all the same"


@pytest.mark.parametrize("value", ["sm_75", "sm_200", "hopper", "", "sm_90,"])
def test_an_unknown_architecture_is_named(value: str) -> None:
    pytest.importorskip("typer")
    from msa_ops.cli.compile import parse_architectures

    with pytest.raises(ValueError, match=r"--arch must be of sm_80, .*sm_121, got '"):
        parse_architectures([value])


def test_architectures_are_read_in_every_spelling() -> None:
    pytest.importorskip("typer")
    from msa_ops.cli.compile import parse_architectures

    assert parse_architectures(["sm_80,9.0", "SM_100a", "120f", "sm_80"]) == ((8, 0), (9, 0), (10, 0), (12, 0))


def test_a_file_is_no_folder_to_build_into(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    from msa_ops.cli.compile import check_folder

    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--out must be a folder, got the file"):
        check_folder(tmp_path / "file")
