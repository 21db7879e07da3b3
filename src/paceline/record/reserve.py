"""Space on the disk that is kept back while a run goes on, so that its record can be written when
the disk is full.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NAME = ".reserve"
BYTES = 256 * 1024  # run.json of some ten workers


def take(folder: Path) -> None:
    """Where there is no space to keep back, nothing is kept back: the run may still fit."""
    path = folder / NAME
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, BYTES)
    except OSError:
        release(folder)


def release(folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / NAME).unlink(missing_ok=True)
