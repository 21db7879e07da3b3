"""Seconds of training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class StepTimer:
    """Runs while steps are made; stands still during evaluations and checkpoints."""

    total_s: float = 0.0
    since: float = 0.0  # when the present step began, by `now`
    now: Callable[[], float] = time.perf_counter

    def start(self) -> None:
        """Begin a step now: what happened since the last lap does not count."""
        self.since = self.now()

    def lap(self) -> float:
        """Return the seconds since the step began, and add them to the total."""
        now = self.now()
        lap, self.since = now - self.since, now
        self.total_s += lap
        return lap
