"""Batch sizes that follow how fast each worker is, so that nobody waits for the slowest.

    b_p <- G v_p / (v_1 + ... + v_P)         v_p: samples per second of worker p, alone, without the exchange

The global batch G stays, and gradients are weighted by samples, so the mathematics stays that of the global batch; every
sample is seen once an epoch, by whoever has the time. Speeds are given (`2,1,1`, or seconds per batch: `runtime:1.2,3.6`), or
measured while training: over the last steps, averaged with what was thought before.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from paceline.config import due, every_of
from paceline.data.shards import split
from paceline.errors import BadRequest
from paceline.registry import convert, parse_pairs
from paceline.transport.base import Transport

FIRST_LOOKS = (5, 10, 15, 20)  # steps; what a batch costs whatever its size makes sizes settle in a few looks only
KEEP = 0.5  # of what was thought before, at each later look
HOW = "write measured, measured:every=50, speeds (2,1,1), or seconds per batch (runtime:1.2,3.6)"


@dataclass(frozen=True)
class Plan:
    """What was asked for: speeds, or to measure them every so often."""

    speeds: tuple[float, ...] = ()
    every: str | None = None

    @classmethod
    def read(cls, text: str, workers: int) -> Plan:
        name, _, rest = text.partition(":")
        if name == "measured":
            options = parse_pairs(rest, f"balance={text}") if rest else {}
            if unknown := set(options) - {"every"}:
                raise BadRequest(f"balance={text}: measured knows every, not {', '.join(sorted(unknown))}")
            return cls(every=every_of(options.get("every", "20"), "balance: every"))
        numbers = _numbers(rest if name == "runtime" else text, text)
        if len(numbers) != workers:
            what = "times" if name == "runtime" else "speeds"
            raise BadRequest(f"balance={text} has {len(numbers)} {what} for {workers} workers")
        return cls(tuple(1 / n for n in numbers) if name == "runtime" else numbers)

    def sizes(self, whole: int) -> tuple[int, ...]:
        """Where speeds are given: the global batch cut accordingly."""
        return cut(whole, self.speeds)


def _numbers(text: str, given: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(convert(part, float, "balance")) for part in text.split(","))
    except BadRequest:
        raise BadRequest(f"balance={given}: {HOW}") from None
    if not all(0 < n < float("inf") for n in numbers):
        raise BadRequest(f"balance={given}: speeds and times are more than 0")
    return numbers


def cut(whole: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """In proportion, nobody without a sample: whoever has none cannot be measured."""
    if whole < len(speeds):
        raise BadRequest(f"a global batch of {whole} cannot be cut for {len(speeds)} workers")
    sizes = list(split(whole, speeds))
    for poorest in (i for i, size in enumerate(sizes) if size == 0):
        sizes[max(range(len(sizes)), key=sizes.__getitem__)] -= 1
        sizes[poorest] = 1
    return tuple(sizes)


def _typical(times: Sequence[float]) -> float:
    """The mean, for it is the mean that others wait for; what is far out counts as three times the median."""
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
    _times: list[float] = field(default_factory=list)  # seconds per sample of the steps since the last look

    def saw(self, samples: float, seconds: float) -> None:
        """One step of this worker, without what it waited for others."""
        if samples and seconds > 0:  # clocks that are read one after the other can differ by a little less than nothing
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
        self.speeds = [kept * old + (1 - kept) * new for old, new in zip(self.speeds or found, found, strict=True)]
        sizes = cut(sum(self.shards.batch_sizes), self.speeds)
        changed, self.shards.batch_sizes = sizes != self.shards.batch_sizes, sizes
        return changed

    def state(self) -> dict[str, Any]:
        return {"speeds": self.speeds, "batch_sizes": list(self.shards.batch_sizes)}

    def load(self, state: dict[str, Any]) -> None:
        if sum(state["batch_sizes"]) != sum(self.shards.batch_sizes):
            return  # another global batch is asked for now
        self.speeds, self.shards.batch_sizes, self.settled = state["speeds"], tuple(state["batch_sizes"]), bool(state["speeds"])
