"""The times of a private run: of every few steps together, because a step takes longer when more
samples were drawn.
"""

from __future__ import annotations

import time

TOGETHER = 20  # steps whose times are recorded as one sum


class SummedTimes:
    """Replaces the times of a step by zeros, and at every TOGETHER-th step by their sums."""

    def __init__(self, total_steps: int | None) -> None:
        self._total_steps = total_steps
        self._sums: dict[str, float] = {}
        self._train_s: float | None = None
        self._moment = time.time()

    def of_step(self, step: int, train_s: float, times: dict[str, float]) -> dict[str, float]:
        """Return the fields of a step's event, also its time of day (`t`)."""
        for name, seconds in times.items():
            self._sums[name] = self._sums.get(name, 0.0) + seconds
        if self._train_s is None:  # after a resume it does not begin at 0
            self._train_s = max(0.0, train_s - sum(times.values()))
        if step % TOGETHER and step != self._total_steps:
            return {**dict.fromkeys(times, 0.0), "train_s": self._train_s, "t": self._moment}
        told, self._sums = self._sums, {}
        self._train_s, self._moment = train_s, time.time()
        return {**told, "train_s": train_s, "t": self._moment}
