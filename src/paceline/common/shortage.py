"""Sentences about what a machine has run out of: disk space, memory."""

from __future__ import annotations

import errno
import re

from paceline.errors import PacelineError

FULL = (errno.ENOSPC, errno.EDQUOT)
NO_MEMORY = ("DefaultCPUAllocator", "can't allocate memory", "out of memory", "std::bad_alloc")
LESS = "use a smaller --batch-size, a smaller model or fewer --workers"


def why_not_written(error: OSError) -> str:
    """Say why a file could not be written, and what to do where that is known."""
    reason = error.strerror or str(error)
    if error.errno in FULL:
        return f"{reason} (free space on that disk, or choose a folder on another one with --out)"
    if error.errno == errno.EROFS:
        return f"{reason} (mount it for writing again, or choose another folder with --out)"
    return reason


def out_of_memory(error: BaseException) -> str | None:
    """Say that memory was exhausted and what to do; None: the error has another reason."""
    if isinstance(error, PacelineError):
        return None
    text = str(error)
    if not (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and any(sign in text for sign in NO_MEMORY))
    ):
        return None
    asked = re.search(
        r"(?:tried to allocate|Unable to allocate|Tried to allocate) ([0-9.]+) ?(bytes|[KMGT]i?B)",
        text,
    )
    if asked is None:
        return f"out of memory: {LESS}"
    amount = f"{asked[1]} {asked[2]}"
    if asked[2] == "bytes":
        amount = f"{float(asked[1]) / 1e6:,.0f} MB"
    return f"out of memory, {amount} could not be had: {LESS}"
