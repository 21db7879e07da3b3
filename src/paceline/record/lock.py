"""The lock of a run's or a study's folder: one process at a time works in it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.common.locks import Lock, try_lock
from paceline.errors import BadRequest

LOCK = ".lock"
HELD = "this run is being continued by another process"
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)  # what a file system without locks answers


def refuse_held(folder: Path, refusal: str) -> None:
    """Raise `BadRequest` where another process or another run works in the folder."""
    if (folder / LOCK).exists():
        with alone_in(folder, refusal):
            return


@contextmanager
def alone_in(folder: Path, refusal: str) -> Iterator[None]:
    """Hold `folder` while the body runs; `BadRequest` with `refusal` where it is held already.

    The holder may be another process or another run in this process. Forked workers do not hold the
    folder. On a file system without locks the folder is not locked.
    """
    try:
        lock: Lock | None = try_lock(folder / LOCK)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise BadRequest(f"{folder} cannot be written: {error.strerror}") from None
        yield
        return
    if lock is None:
        raise BadRequest(f"{folder}: {refusal}")
    try:
        yield
    finally:
        lock.release()
