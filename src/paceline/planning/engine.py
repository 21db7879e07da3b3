"""An event queue: ranks as programs in virtual time, without threads.

A rank is a generator that yields what it does next:

    Spend(s)            compute, add or encode for s seconds
    Post(target, size)  start a message; the engine answers when it will have left (`Until` waits)
    Take(source)        wait for the next message of a rank
    TakeAny(sources)    wait for the earliest next message of several; the answer is its source
    Until(time_s)       wait until a moment

The rank with the earliest clock runs next, so messages are posted in the order of time, and links
are shared as `transport/virtual.py` says. The same ranks on the transport `simulated` have the same
clocks (tests/contract/test_patterns.py).
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.transport.virtual import Network, Traffic


@dataclass(frozen=True, slots=True)
class Spend:
    seconds: float


@dataclass(frozen=True, slots=True)
class Post:
    target: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Take:
    source: int


@dataclass(frozen=True, slots=True)
class TakeAny:
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Until:
    time_s: float


Operation = Spend | Post | Take | TakeAny | Until
Program = Generator[Operation, Any, None]


@dataclass(frozen=True)
class Sent:
    """A message: who sent it to whom, and when it was posted, had left and had arrived."""

    source: int
    target: int
    size_bytes: int
    posted_s: float
    left_s: float
    arrived_s: float


@dataclass
class Engine:
    """Runs the programs of all ranks."""

    network: Network
    keeps: bool = False  # whether `sent` keeps every message
    sent: list[Sent] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)  # by rank: what `Spend` added up to
    posted_bytes: list[int] = field(default_factory=list)  # by rank

    def run(self, programs: Sequence[Program]) -> list[float]:
        """Return each rank's clock at its end."""
        ranks = len(programs)
        self._traffic, self._programs = Traffic(self.network), list(programs)
        self.clocks, self.busy_s = [0.0] * ranks, [0.0] * ranks
        self.posted_bytes = [0] * ranks
        self._coming: dict[tuple[int, int], deque[float]] = defaultdict(deque)
        self._awaited: dict[int, tuple[int, ...]] = {}  # by rank that waits: the sources
        self._queue: list[tuple[float, int, Any]] = [(0.0, rank, None) for rank in range(ranks)]
        heapq.heapify(self._queue)
        while self._queue:
            clock, rank, answer = heapq.heappop(self._queue)
            self.clocks[rank] = clock
            self._advance(rank, answer)
        if self._awaited:
            waits = "; ".join(f"{r} for {s}" for r, s in sorted(self._awaited.items()))
            raise AssertionError(f"ranks wait for messages that no rank sends: {waits}")
        return self.clocks

    def _advance(self, rank: int, answer: Any) -> None:
        """Run a rank's program until its clock moves or it waits."""
        program, clock = self._programs[rank], self.clocks[rank]
        while True:
            try:
                asked = program.send(answer)
            except StopIteration:
                return
            if isinstance(asked, Post):
                answer = self._post(rank, asked, clock)
                continue
            if isinstance(asked, Spend):
                self.busy_s[rank] += asked.seconds
                heapq.heappush(self._queue, (clock + asked.seconds, rank, None))
            elif isinstance(asked, Until):
                if asked.time_s <= clock:
                    answer = None
                    continue
                heapq.heappush(self._queue, (asked.time_s, rank, None))
            else:
                sources = (asked.source,) if isinstance(asked, Take) else asked.sources
                self._awaited[rank] = sources
                self._deliver(rank)
            return

    def _post(self, rank: int, message: Post, clock: float) -> float:
        left, arrived = self._traffic.post(clock, rank, message.target, message.size_bytes)
        self.posted_bytes[rank] += message.size_bytes
        if self.keeps:
            size = message.size_bytes
            self.sent.append(Sent(rank, message.target, size, clock, left, arrived))
        self._coming[rank, message.target].append(arrived)
        if rank in self._awaited.get(message.target, ()):
            self._deliver(message.target)
        return left

    def _deliver(self, rank: int) -> None:
        """Let a rank go on that waits, if a message for it is under way.

        A rank that waits for any of several takes the earliest to arrive of those that are posted.
        A later one cannot overtake it: both come through the rank's way in.
        """
        coming = [
            (self._coming[source, rank][0], source)
            for source in self._awaited[rank]
            if self._coming[source, rank]
        ]
        if not coming:
            return
        arrived, source = min(coming)
        self._coming[source, rank].popleft()
        del self._awaited[rank]
        heapq.heappush(self._queue, (max(self.clocks[rank], arrived), rank, source))
