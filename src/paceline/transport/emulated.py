"""Ranks as threads in virtual time, whose computing takes the processor time that it really took.

Like `simulated`, on a network that is only described. Threads take turns, so a rank's processor
time is its own: P ranks run on one core as if each had a core for itself. That costs P times the
work, and memory for P ranks in one process.

It shows what a split of a model, which no table of step times describes, would do on P workers. Its
times are measured: two runs differ a little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from paceline.registry import transports
from paceline.transport.inproc import Baton
from paceline.transport.simulated import SimulatedHub, SimulatedTransport, VirtualBaton, When


class MeasuringBaton(VirtualBaton):
    """Adds a thread's processor time to its virtual time, before others can see either."""

    def __init__(self) -> None:
        super().__init__()
        self._used: dict[int, float] = {}  # by thread: its processor time, as far as it was added

    def time_of(self, who: int) -> float:
        """The time of the thread that asks."""
        return self.times[who] + time.thread_time() - self._used[who]

    def enter(self, who: int) -> None:
        super().enter(who)
        self._used[who] = time.thread_time()

    def leave(self, who: int) -> None:
        self._add(who)
        super().leave(who)

    def settle(self, who: int) -> None:
        self.charge(who, 0.0)

    def charge(self, who: int, seconds: float) -> None:
        self._add(who)
        super().charge(who, seconds)

    def wait(self, who: int, when: When, why: str, deadline_s: float | None = None) -> None:
        self._add(who)
        super().wait(who, when, why, deadline_s)
        self._used[who] = time.thread_time()  # waiting is not computing

    def _add(self, who: int) -> None:
        self.times[who] = self._now = self.time_of(who)
        self._used[who] = time.thread_time()


class EmulatedHub(SimulatedHub):
    """What the ranks of one emulated run share."""

    baton: MeasuringBaton

    def make_baton(self, seed: int) -> Baton:
        return MeasuringBaton()


@transports.register("emulated")
class EmulatedTransport(SimulatedTransport):
    """Threads in virtual time on a described network: computing takes what it really takes."""

    traits = replace(SimulatedTransport.traits, real_compute=True)
    hub_kind = EmulatedHub
    _hub: EmulatedHub

    @property
    def now(self) -> Callable[[], float]:
        baton, rank = self._hub.baton, self._world_rank
        return lambda: baton.time_of(rank)
