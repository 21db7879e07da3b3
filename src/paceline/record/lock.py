"""One process at a time in a folder, by a lock that ends with the process, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import BadRequest

LOCK = ".lock"
_held: dict[
    Path, int
] = {}  # the folders that this process holds, and which process that is: a forked child holds none


@contextmanager
def alone_in(folder: Path, refusal: str) -> Iterator[None]:
    """Hold `folder` meanwhile; where another process (or another run of this one) holds it, refuse
    in these words.

    The lock is a POSIX record lock, which forked children do not inherit: with `flock` a worker
    that outlives its launcher would keep the folder locked. Such a lock ends when its process
    closes any descriptor of the file, so nothing else may open the file. On a file system without
    locks the folder is not locked.
    """
    place, process = folder.resolve(), os.getpid()
    if _held.get(place) == process:
        raise BadRequest(f"{folder}: {refusal}")
    _held[place] = process
    try:
        with _lock_file(folder) as descriptor:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise BadRequest(f"{folder}: {refusal}") from None
            yield
    finally:
        _held.pop(place, None)


@contextmanager
def _lock_file(folder: Path) -> Iterator[int]:
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise BadRequest(f"{folder} cannot be written: {error.strerror}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)
