"""Reserve disk space during a run, so that its record can be written when the disk is full."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NAME = ".reserve"
BYTES = 256 * 1024  # about the size of run.json with ten workers


def take(folder: Path) -> None:
    """Reserve space in a run's folder; without enough space the run goes on without a reserve."""
    path = folder / NAME
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, BYTES)
    except OSError:
        release(folder)


def release(folder: Path) -> None:
    """Give the reserved space back."""
    with contextlib.suppress(OSError):
        (folder / NAME).unlink(missing_ok=True)
