"""Keep freed memory for the next step.

Each training step frees and allocates the same large tensors. The C library returns freed memory
above a threshold to the system, and the system zeroes every page when it is allocated again. With
25 M parameters that made a backward pass take 95 ms instead of 54 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Make this process keep the memory that it frees; does nothing without Linux and glibc."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
