"""Whether something can be written, asked before work begins."""

from __future__ import annotations

import tempfile
from pathlib import Path


def no_folder(folder: Path) -> tuple[Path, str] | None:
    """Where and why no file can be written in a folder, which need not be there yet; None when one can."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return there, f"{there} cannot be written: {error.strerror}"


def no_file(file: Path) -> str | None:
    """Why a file cannot be written, or put in another's place; None when it can."""
    if file.is_dir():
        return f"{file} is a folder: name a file in it"
    if file.exists() and not file.is_file():
        return f"{file} is there and no plain file"
    found = no_folder(file.absolute().parent)
    return found and found[1]
