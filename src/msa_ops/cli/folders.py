"""The folder that a command writes into."""

from __future__ import annotations

import tempfile
from pathlib import Path


def prepare_folder(option: str, folder: Path) -> None:
    """Make `folder` if it is missing, and try to write in it. Raises `ValueError`, naming the option, if that fails."""
    try:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{option} must be a folder, got the file {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{option} must be a folder to write in, got {folder}: {error.strerror or error}") from None
