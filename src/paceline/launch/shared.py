"""Whether all ranks see the run's folder, where rank 0 reads what the others write.

Rank 0 leaves a file there, and every rank on another host looks for it before the run begins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import BadRequest
from paceline.launch.restarts import MARK

SEEN = ".seen-by-rank-0"
LOOK_S = 5.0  # network file systems may show a new file a moment later
AGAIN_S = 0.1


def leave(out: Path) -> None:
    """As rank 0, leave the file."""
    with suppress(OSError):  # a full disk is told in another way
        (out / SEEN).touch()


def look(out: Path, host: str) -> None:
    """Refuse a folder in which this rank does not see the file that rank 0, on `host`, has left."""
    until = time.monotonic() + LOOK_S
    while not (out / SEEN).exists():
        if time.monotonic() > until:
            raise BadRequest(
                f"the hosts do not share {out}: {os.uname().nodename} does not see what {host} has"
                " written there; choose a folder (--out) on a file system that all hosts mount"
            )
        time.sleep(AGAIN_S)


@contextmanager
def taken_back(out: Path, leads: bool) -> Iterator[None]:
    """As rank 0, remove the file at the end; after a refusal also a folder that was just made."""
    try:
        yield
    except BadRequest:
        if leads:
            with suppress(OSError):  # only empty folders are removed
                (out / SEEN).unlink(missing_ok=True)
                (out / "events").rmdir()
                (out / MARK).unlink(missing_ok=True)
                out.rmdir()
        raise
    finally:
        if leads:
            (out / SEEN).unlink(missing_ok=True)
