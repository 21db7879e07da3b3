"""What every process that a launcher starts does first, and how the launcher ends it."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.launch.signals import ENDING

END_S = 3.0  # between asking a process to end (SIGTERM) and killing it


def obey_parent(parent: int) -> None:
    """Set up a forked process so that the parent alone ends it."""
    leave_terminal_to_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    die_with_parent(parent)


def leave_terminal_to_parent() -> None:
    """Ignore the signals that a terminal sends to all processes: the parent ends this one."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even by SIGKILL (Linux only)."""
    dying_with_parent(parent)()


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


def end_processes(processes: Sequence[Any]) -> None:
    """End processes of `multiprocessing`: SIGTERM, then SIGKILL."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    until = time.monotonic() + END_S
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def describe_end(code: int) -> str:
    """Say how a process ended, from its exit code (negative: the signal that killed it)."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    guess = " (out of memory, perhaps)" if name == "SIGKILL" else ""
    return f"its process was killed by {name}{guess}"
