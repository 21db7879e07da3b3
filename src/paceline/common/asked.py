"""A request to leave a run with a checkpoint: by a signal, or because its time is over.

This module imports nothing that takes time: the command line listens to signals before that.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

# Why a run leaves. Where the workers have different reasons, the greatest counts.
STAYS, TIME_IS_OVER, SIGUSR1, SIGTERM = 0, 1, 2, 3
_OF = {signal.SIGUSR1: SIGUSR1, signal.SIGTERM: SIGTERM}


class Asked:
    """Whether the ranks of this process were asked to leave, and what they have agreed on."""

    def __init__(self) -> None:
        self.why = STAYS
        # Of ranks that are threads of one process: their last steps, and after which all leave.
        self.lock = threading.Lock()
        self.steps: dict[int, int] = {}
        self.leave_at: int | None = None

    def hear(self, number: int, frame: FrameType | Any = None) -> None:
        """Take note of a signal; may be its handler."""
        self.why = max(self.why, _OF[signal.Signals(number)])


def told(why: int, step: int, max_time: str | None) -> tuple[str, int]:
    """Return why a run has left, in a sentence, and the number of the signal (0: none)."""
    if why == TIME_IS_OVER:
        return f"--max-time {max_time} is over: the run has left a checkpoint at step {step}", 0
    number = next(n for n, reason in _OF.items() if reason == why)
    return f"interrupted by {number.name} after a checkpoint at step {step}", int(number)
