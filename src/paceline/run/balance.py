"""Batch sizes that follow how fast each worker is, so that nobody waits for the slowest.

    b_p <- G v_p / (v_1 + ... + v_P)         v_p: samples per second of worker p, alone, without the exchange

The global batch G stays, and gradients are weighted by samples, so the mathematics stays that of
the global batch; every sample is seen once an epoch, by whoever has the time. Speeds are given
(`2,1,1`, or seconds per batch: `runtime:1.2,3.6`), or measured while training: over the last steps,
averaged with what was thought before.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from paceline.common.intervals import due
from paceline.request.speeds import cut
from paceline.transport.base import Transport

FIRST_LOOKS = (
    5,
    10,
    15,
    20,
)  # steps; what a batch costs whatever its size makes sizes settle in a few looks only
KEEP = 0.5  # of what was thought before, at each later look


def _typical(times: Sequence[float]) -> float:
    """The mean, for it is the mean that others wait for; what is far out counts as three times the
    median.
    """
    most = 3 * statistics.median(times)
    return statistics.fmean(min(t, most) for t in times)


class Resizable(Protocol):
    """Shards whose batch sizes may change in the middle of an epoch."""

    batch_sizes: tuple[int, ...]


@dataclass
class Balance:
    """Measures one worker, and changes all workers' batch sizes together."""

    every: str
    shards: Resizable
    line: Transport  # of the workers
    speeds: list[float] = field(default_factory=list)  # as they were last thought to be
    settled: bool = False  # it goes on from an earlier run
    _steps: int = 0
    _times: list[float] = field(
        default_factory=list
    )  # seconds per sample of the steps since the last look

    def saw(self, samples: float, seconds: float) -> None:
        """One step of this worker, without what it waited for others."""
        if (
            samples and seconds > 0
        ):  # clocks that are read one after the other can differ by a little less than nothing
            self._times.append(seconds / samples)

    def look(self, step: int, epoch: int, epoch_ended: bool) -> bool:
        """After a step, by all workers together: whether batch sizes have changed."""
        self._steps += 1
        early = self._steps in FIRST_LOOKS and not self.settled
        if not (early or due(self.every, step, epoch, epoch_ended)):
            return False
        measured = torch.zeros(self.line.size, dtype=torch.float64)
        if self._times:
            measured[self.line.rank] = 1 / _typical(self._times)
        self.line.all_reduce(measured)
        self._times.clear()
        found: list[float] = measured.tolist()
        if not all(found):  # somebody has not worked since: nothing is known of it
            return False
        kept = KEEP if self.speeds and not early else 0.0
        self.speeds = [
            kept * old + (1 - kept) * new
            for old, new in zip(self.speeds or found, found, strict=True)
        ]
        sizes = cut(sum(self.shards.batch_sizes), self.speeds)
        changed, self.shards.batch_sizes = sizes != self.shards.batch_sizes, sizes
        return changed

    def state(self) -> dict[str, Any]:
        return {"speeds": self.speeds, "batch_sizes": list(self.shards.batch_sizes)}

    def load(self, state: dict[str, Any]) -> None:
        if sum(state["batch_sizes"]) != sum(self.shards.batch_sizes):
            return  # another global batch is asked for now
        self.speeds, self.shards.batch_sizes, self.settled = (
            state["speeds"],
            tuple(state["batch_sizes"]),
            bool(state["speeds"]),
        )
