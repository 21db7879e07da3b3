"""An event queue: ranks as programs in virtual time, without threads.

A rank is a generator that yields what it does next:

    Spend(s)            compute, add or encode for s seconds
    Post(target, size)  start a message; the engine answers when it will have left (`Until` waits)
    Tell(target)        send a note, a few numbers, which arrive at once
    Take(source)        wait for the next message of a rank
    TakeAny()           wait for the earliest message of any rank; the answer is its source
    Until(time_s)       wait until a moment
    Now()               the answer is the rank's clock

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

from paceline.transport.simulated import Sent
from paceline.transport.virtual import Network, Traffic


@dataclass(frozen=True, slots=True)
class Spend:
    seconds: float


@dataclass(frozen=True, slots=True)
class Post:
    target: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Tell:
    target: int


@dataclass(frozen=True, slots=True)
class Take:
    source: int


@dataclass(frozen=True, slots=True)
class TakeAny:
    pass


@dataclass(frozen=True, slots=True)
class Until:
    time_s: float


@dataclass(frozen=True, slots=True)
class Now:
    pass


Operation = Now | Spend | Post | Tell | Take | TakeAny | Until
Program = Generator[Operation, Any, None]


@dataclass
class Engine:
    """Runs the programs of all ranks."""

    network: Network
    keeps: bool = False  # whether `sent` keeps every message
    sent: list[Sent] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)  # by rank: what `Spend` added up to
    posted_bytes: list[int] = field(default_factory=list)  # by rank
    messages: int = 0

    def run(self, programs: Sequence[Program]) -> list[float]:
        """Return each rank's clock at its end."""
        ranks = len(programs)
        self._traffic, self._programs = Traffic(self.network), list(programs)
        self.clocks, self.busy_s = [0.0] * ranks, [0.0] * ranks
        self.posted_bytes, self.messages = [0] * ranks, 0
        self._inboxes = [_Inbox() for _ in range(ranks)]
        self._awaited: dict[int, int | None] = {}  # by rank that waits: the source; None: any
        self._queue: list[tuple[float, int, bool]] = [(0.0, rank, False) for rank in range(ranks)]
        while self._queue:
            clock, rank, arrival = heapq.heappop(self._queue)
            if not arrival:
                self.clocks[rank] = clock
                self._advance(rank, None)
            elif rank in self._awaited:
                self._take(rank, clock)
        if self._awaited:
            waits = ", ".join(f"rank {r} for {s}" for r, s in sorted(self._awaited.items()))
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
            if isinstance(asked, Now):
                answer = clock
                continue
            if isinstance(asked, Tell):
                self._arrive(rank, asked.target, clock)
                answer = None
                continue
            if isinstance(asked, Spend):
                self.busy_s[rank] += asked.seconds
                heapq.heappush(self._queue, (clock + asked.seconds, rank, False))
            elif isinstance(asked, Until):
                if asked.time_s <= clock:
                    answer = None
                    continue
                heapq.heappush(self._queue, (asked.time_s, rank, False))
            else:
                self._awaited[rank] = asked.source if isinstance(asked, Take) else None
                self._wake(rank)
            return

    def _post(self, rank: int, message: Post, clock: float) -> float:
        left, arrived = self._traffic.post(clock, rank, message.target, message.size_bytes)
        self.posted_bytes[rank] += message.size_bytes
        self.messages += 1
        if self.keeps:
            size = message.size_bytes
            self.sent.append(Sent(rank, message.target, size, clock, left, arrived))
        self._arrive(rank, message.target, arrived)
        return left

    def _arrive(self, rank: int, target: int, arrived: float) -> None:
        self._inboxes[target].put(rank, arrived)
        if self._awaited.get(target, rank) in (None, rank):
            self._wake(target)

    def _wake(self, rank: int) -> None:
        """Let a rank that waits look at its messages when the next one has arrived."""
        if rank not in self._awaited:
            return
        arrived = self._inboxes[rank].next_of(self._awaited[rank])
        if arrived is not None:
            heapq.heappush(self._queue, (max(self.clocks[rank], arrived), rank, True))

    def _take(self, rank: int, clock: float) -> None:
        """Give a rank the message that it waits for, if one has arrived by now.

        A message may have been posted later and have arrived earlier than the one for which the
        rank was woken.
        """
        source, inbox = self._awaited[rank], self._inboxes[rank]
        arrived = inbox.next_of(source)
        if arrived is not None and arrived <= clock:
            del self._awaited[rank]
            self.clocks[rank] = clock
            self._advance(rank, inbox.pop(source))


class _Inbox:
    """The messages that are under way to a rank: by source, and all by time of arrival."""

    def __init__(self) -> None:
        self._by_source: dict[int, deque[tuple[float, int]]] = defaultdict(deque)
        self._all: list[tuple[float, int, int]] = []  # (arrived, number, source)
        self._taken: set[int] = set()  # numbers that are still in `_all`
        self._count = 0

    def put(self, source: int, arrived: float) -> None:
        self._by_source[source].append((arrived, self._count))
        heapq.heappush(self._all, (arrived, self._count, source))
        self._count += 1

    def next_of(self, source: int | None) -> float | None:
        """When the next message of a source (None: of any) arrives; None: none is under way."""
        if source is not None:
            messages = self._by_source[source]
            return messages[0][0] if messages else None
        while self._all and self._all[0][1] in self._taken:
            self._taken.remove(heapq.heappop(self._all)[1])
        return self._all[0][0] if self._all else None

    def pop(self, source: int | None) -> int:
        """Take the next message and return its source."""
        if source is None:
            source = self._all[0][2]
        _, number = self._by_source[source].popleft()
        self._taken.add(number)
        return source
