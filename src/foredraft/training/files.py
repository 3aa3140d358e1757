"""Files that are whole or not there, whenever the process is killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_atomically(file: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `file`, bring it to disk, and give it that name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        write(partial)
        partial.chmod(0o644)  # some writers leave files that nobody else can read
        _flush(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    _flush(file.parent)


def write_text(file: Path, text: str) -> None:
    """`write_atomically` with a text."""
    write_atomically(file, lambda partial: partial.write_text(text, encoding="utf-8"))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
