"""The benchmark as a program: parse, run, print, write."""

from __future__ import annotations

import sys
from collections.abc import Callable

from . import report
from .options import Options, parse
from .runner import Runner


def run(options: Options, say: Callable[[str], None] = print) -> dict[str, object]:
    """Measure what `options` ask for, write the files that they name, and return the report."""
    runner = Runner(options, say)
    runner.checkpoint = lambda so_far: report.write(so_far, options.json, options.markdown)
    result = runner.run()
    report.write(result, options.json, options.markdown)
    for line in report.summary_lines(result):
        say(line)
    for text in result["not_measured"]:
        say(f"not measured: {text}")
    return result


def main(argv: list[str] | None = None) -> int:
    """0 when all that was asked for was measured; 1 for a bad machine; 2 (from the parser) for a bad
    command line; 3 when the time budget or a lost device left shapes unmeasured."""
    options = parse(argv)
    try:
        result = run(options, lambda line: print(line, flush=True))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 3 if result["not_measured"] else 0
