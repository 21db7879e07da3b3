"""The process of a rank, as the kernel shows it to others on the same machine (/proc)."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

State = Literal["running", "stopped", "ended", "elsewhere"]


@cache
def machine_id() -> bytes:
    """Names this start of this machine and its numbering of processes (containers have theirs)."""
    told = ""
    with suppress(OSError):
        told = Path("/proc/sys/kernel/random/boot_id").read_text()
        told += str(os.stat("/proc/self/ns/pid").st_ino)
    return hashlib.sha256(told.encode()).digest()[:16] if told else b""


def start_of(pid: int) -> int | None:
    """When a process began, in clock ticks; None: there is no such process here."""
    found = _stat(pid)
    return int(found[19]) if found else None


def state_of(pid: int, start: int, machine: bytes) -> State:
    """What the kernel says of a rank's process. A later process of the same number is not it."""
    if not machine or machine.rstrip(b"\0") != machine_id().rstrip(b"\0"):
        return "elsewhere"
    found = _stat(pid)
    if not found or int(found[19]) != start or found[0] in "ZX":
        return "ended"
    return "stopped" if found[0] in "Tt" else "running"


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on; the second may hold spaces."""
    with suppress(OSError, ValueError):
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return found if len(found) > 19 else None
    return None
