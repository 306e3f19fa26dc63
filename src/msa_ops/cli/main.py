"""The ``msa-ops`` command: one module per sub-command, imported when that sub-command is asked for.

A sub-command's module holds a `typer.Typer` named ``app`` with one command. Its heavy imports (torch, transformers,
matplotlib) belong inside the command, so that ``msa-ops --help`` is quick and works without the other extras.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

SUB_COMMANDS = {
    "bench": "msa_ops.cli.bench",
    "compile": "msa_ops.cli.compile",
    "demo": "msa_ops.cli.demo",
    "doctor": "msa_ops.cli.doctor",
    "explain": "msa_ops.cli.explain",
}
"""Name of a sub-command and the module that holds it."""


def build_app() -> Any:
    """The typer application. Raises `ImportError` where typer is not installed."""
    if importlib.util.find_spec("rich") is None:
        # typer would fail at its first message. Written for it, not read here: no variable of this package.
        os.environ.update({"TYPER_USE_RICH": "0"} | {**os.environ})
    import typer
    from typer.core import TyperGroup

    class SubCommands(TyperGroup):
        """A group that imports the module of a sub-command on first use."""

        def list_commands(self, ctx: Any) -> list[str]:
            return sorted(SUB_COMMANDS)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in SUB_COMMANDS:
                return None
            command = typer.main.get_command(importlib.import_module(SUB_COMMANDS[cmd_name]).app)
            command.name = cmd_name
            return command

    app = typer.Typer(cls=SubCommands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    @app.callback(help="Block-sparse decode attention (MiniMax Sparse Attention): tools.")
    def root() -> None:
        return None

    return app


def main() -> None:
    """Run the command line."""
    try:
        app = build_app()
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"msa-ops needs the package {error.name}: pip install '.[cli]' in a checkout of msa_ops"
        ) from None
    app(prog_name="msa-ops")
