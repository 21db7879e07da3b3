"""Processes that the kernel ends together with their parent (Linux only)."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even by SIGKILL."""
    dying_with_parent(parent)()


def asked_to_end_with_parent() -> None:
    """Have the kernel send this process a SIGTERM when its parent ends, even by SIGKILL."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG


def dying_with_parent(parent: int) -> Callable[[], None]:
    """Return `die_with_parent` as a function to call between fork and exec.

    The library is loaded here, before the fork, because nothing may be loaded in between.
    """
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return lambda: None

    def set_death_signal() -> None:
        prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)

    return set_death_signal
