"""What every process that a launcher starts does first, and how the launcher ends it."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Any

from paceline.common.parents import die_with_parent
from paceline.common.shortage import LESS
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
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


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
    guess = f" (out of memory, perhaps: {LESS})" if name == "SIGKILL" else ""
    return f"its process was killed by {name}{guess}"
