"""Checkpoints every so many minutes: worker 0's clock decides, and tells the others."""

from __future__ import annotations

import time

import torch

from paceline.transport.base import Transport


class Minutes:
    """Says when an interval of time has passed, on all workers at the same step.

    Workers compare notes rarely: at each look, worker 0 estimates the step at which half of the
    remaining time will have passed, and all look again there.
    """

    def __init__(self, every_s: float, step: int) -> None:
        self.every_s, self.next_look = every_s, step + 1
        self._began, self._since = time.monotonic(), step

    def looks(self, step: int) -> bool:
        return step >= self.next_look

    def due(self, step: int, peers: Transport) -> bool:
        """All workers call it at the same step, where `looks` is true."""
        said = torch.zeros(2, dtype=torch.float64)
        if peers.rank == 0:
            spent = time.monotonic() - self._began
            passed = spent >= self.every_s
            if passed:
                self._began = time.monotonic()
            left = self.every_s - (0.0 if passed else spent)
            per_step = max(1e-6, spent / max(1, step - self._since))
            said[0], said[1] = float(passed), step + max(1.0, 0.5 * left // per_step)
            if passed:
                self._since = step
        if peers.size > 1:
            peers.control.broadcast(said)
        self.next_look = int(said[1])
        return bool(said[0])
