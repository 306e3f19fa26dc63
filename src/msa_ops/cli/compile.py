"""``msa-ops compile``: build the CUDA kernels of given architectures ahead of time, on a machine with or without a GPU."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .folders import prepare_folder

if TYPE_CHECKING:
    from ..engines.cuda.compile import Program

app = typer.Typer(add_completion=False)


@app.command("compile")
def compile_command(
    arch: Annotated[
        list[str],
        typer.Option(
            help="Architectures, as sm_80 or 8.0: repeat it or give a list (sm_80,sm_90,sm_100).", metavar="LIST"
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Cache folder to fill. [the folder that this user's calls read]")
    ] = None,
) -> None:
    """Prebuild the kernel cache: every kernel that a call on these architectures can ask for.

    Copy the folder to machines that must not compile, and set MSA_OPS_CACHE_DIR to it there.
    """
    try:
        capabilities = parse_architectures(arch)
        folder = check_folder(out)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    from ..engines.cuda import compile as compiler
    from ..engines.cuda import plan, programs

    try:
        major, minor = compiler.nvrtc_version()
    except RuntimeError as error:
        raise SystemExit(f"msa-ops compile: {error}") from None
    typer.echo(f"NVRTC {major}.{minor}, kernel source {compiler.source_hash()}, into {folder}")
    began, built, size, failures = time.perf_counter(), 0, 0, []
    for capability in capabilities:
        kernels: list[compiler.Program] = [*plan.variants(capability), *programs.all_programs()]
        target = compiler.architecture(capability)
        typer.echo(f"{target}: {len(kernels)} kernels")
        for kernel in kernels:
            try:
                bytes_written, seconds = build_into(folder, kernel, target)
            except (compiler.KernelCompileError, OSError) as error:
                failures.append(f"{target} {kernel.name}")
                typer.echo(f"  {kernel.name}: FAILED: {error}", err=True)
                continue
            built, size = built + 1, size + bytes_written
            typer.echo(f"  {kernel.name}: {bytes_written / 1024:.0f} KiB, {seconds:.2f} s")
    typer.echo(
        f"Built {built} kernels for {len(capabilities)} architectures, {size / 2**20:.1f} MiB, "
        f"in {time.perf_counter() - began:.0f} s"
    )
    if failures:
        typer.echo(f"{len(failures)} failed: {', '.join(failures)}", err=True)
        raise typer.Exit(1)
    if out is not None:
        typer.echo(f"Use it with MSA_OPS_CACHE_DIR={folder}")


def build_into(folder: Path, program: Program, target: str) -> tuple[int, float]:
    """Compile one program into the cache in `folder`; bytes of the cubin and seconds.

    Raises `KernelCompileError` or `OSError`.
    """
    from ..engines.cuda import compile as compiler

    start = time.perf_counter()
    cubin, _ = compiler.compile_program(program, target)
    compiler.write_cached(program, target, cubin, compiler.nvrtc_version(), folder)
    return len(cubin), time.perf_counter() - start


def parse_architectures(values: list[str]) -> tuple[tuple[int, int], ...]:
    """``["sm_80,9.0", "sm_100a"]`` as ``((8, 0), (9, 0), (10, 0))``, without repeats.

    Raises `ValueError` for what is not an architecture that the kernels support.
    """
    from ..engines.cuda.plan import SHARED_PER_BLOCK

    found: dict[tuple[int, int], None] = {}
    for value in ",".join(values).split(","):
        match = re.fullmatch(r"(?:sm_?|compute_?)?(\d+)\.?(\d)[af]?", value.strip().lower())
        capability = (int(match[1]), int(match[2])) if match else None
        if capability not in SHARED_PER_BLOCK:
            known = ", ".join(f"sm_{major}{minor}" for major, minor in SHARED_PER_BLOCK)
            raise ValueError(f"--arch must be of {known}, got {value.strip()!r}")
        found[capability] = None
    return tuple(found)


def check_folder(out: Path | None) -> Path:
    """The cache folder to fill, made if it is missing. Raises `ValueError` or `OSError` where it cannot be."""
    from ..engines.cuda import compile as compiler

    folder = compiler.cache_dir() if out is None else out.absolute()
    prepare_folder("--out" if out is not None else "the kernel cache", folder)
    return folder
