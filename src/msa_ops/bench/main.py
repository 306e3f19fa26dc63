"""The benchmark as a program: parse, run, print, write."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from . import report
from .options import Options, parse
from .runner import Runner

INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell has it."""


def measure(
    options: Options,
    say: Callable[[str], None] = print,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Measure what `options` ask for, write the files that they name, and return the report.

    `progress` is told the number of shapes done, of all, and the next one's name. Raises `RuntimeError` where there is
    no such device.
    """
    runner = Runner(options, say)
    runner.checkpoint = lambda so_far: report.write(so_far, options.json, options.markdown)
    if progress is not None:
        runner.progress = progress
    result = runner.run()
    report.write(result, options.json, options.markdown)
    return result


def run(options: Options, say: Callable[[str], None] = print) -> dict[str, Any]:
    """`measure`, with the verdicts said at the end."""
    result = measure(options, say)
    for line in report.summary_lines(result):
        say(line)
    for text in result["not_measured"]:
        say(f"not measured: {text}")
    return result


def main(argv: list[str] | None = None) -> int:
    """0 when all that was asked for was measured; 1 for a bad machine, or where this package is wrong or fails; 2 (from
    the parser) for a bad command line or a file that cannot be written; 3 when the time budget or a lost device left
    shapes unmeasured; 130 when it was interrupted, 141 when nobody reads its output any more: the files hold what was
    measured until then."""
    options = parse(argv)
    report.print_what_fits(sys.stdout)
    try:
        report.check_destination("--json", options.json)
        report.check_destination("--markdown", options.markdown)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        result = run(options, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        print("interrupted: the files hold what was measured", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # so that the exit does not flush the pipe
        return 141
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return exit_status(result, lambda line: print(line, file=sys.stderr))


def exit_status(result: dict[str, Any], say: Callable[[str], None]) -> int:
    """What a finished run means to whoever started it: `main` lists the numbers. A failure of ours is said."""
    failed, asked = report.our_failures(result)
    if failed:
        say(f"msa_ops itself is wrong or fails at {failed} of {asked} results")
        return 1
    return 3 if result["not_measured"] else 0
