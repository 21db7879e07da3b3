"""Locks between processes. They end with the process that holds them, however it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Lock(Protocol):
    def release(self) -> None: ...


def try_lock(path: Path) -> Lock | None:
    """Lock the file at `path`, without waiting; None where another process or thread holds it.

    A forked child does not hold the lock: filelock closes the child's copy of the descriptor, so a
    worker that outlives its launcher does not keep a folder locked. `OSError` where the file cannot
    be made, or where the file system has no locks.
    """
    from filelock import FileLock, Timeout  # takes a while to import, and few commands need it

    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock
