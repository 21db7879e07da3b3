"""An event queue: ranks as programs in virtual time, without threads.

A rank is a generator that yields what it does next:

    Spend(s)            compute, add or encode for s seconds
    Post(target, size)  start a message; the engine's answer is for `Flush`
    Flush(sent)         wait until these messages have left
    Tell(target)        send a note, a few numbers, which arrive at once
    Take(source)        wait for the next message of a rank
    TakeAny()           wait for the earliest message of any rank; the answer is its source
    Until(time_s)       wait until a moment
    Now()               the answer is the rank's clock

The rank with the earliest clock runs next, so messages are posted in the order of time. Links are
shared as `transport/virtual.py` says: then the same ranks on the transport `simulated` have the
same clocks (tests/contract/test_planned_times.py). With `queues` they are shared as a switch shares
them (`queues.py`), which is what a plan predicts.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from typing import Any

from paceline.planning.queues import PIECE_BYTES, Cores, Leaving, Piece, Queues, Way
from paceline.transport.simulated import Sent
from paceline.transport.virtual import Network, Traffic


@dataclass(frozen=True, slots=True)
class Spend:
    seconds: float
    shared: bool = True  # on the cores that ranks share, where they share some


@dataclass(frozen=True, slots=True)
class Post:
    target: int
    size_bytes: int
    handling_s: float = 0.0  # processor time of both ends; within the latency where a core is free


@dataclass(frozen=True, slots=True)
class Flush:
    sent: Sequence[float | Leaving]  # when each has left, or what knows it


@dataclass(frozen=True, slots=True)
class Tell:
    target: int
    handling_s: float = 0.0


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


Operation = Now | Spend | Post | Flush | Tell | Take | TakeAny | Until
Program = Generator[Operation, Any, None]


class Event(IntEnum):
    """What happens next, to a rank."""

    GOES_ON = 0
    ARRIVES = 1  # the message for which it waits
    ENTERS = 2  # a piece of a message reaches the switch
    HANDLED = 3  # the last part of a message's way: both ends need a core for it
    LEFT = 4  # a piece has left: its way out takes the next one


@dataclass
class Engine:
    """Runs the programs of all ranks."""

    network: Network
    queues: bool = False  # whether the switch queues
    # If it does, messages to several ranks take turns in such pieces; None: each leaves as a whole.
    piece_bytes: int | None = PIECE_BYTES
    cores: int | None = None  # that all ranks share; None: each has what it needs
    seed: int = 0  # of the order of turns
    keeps: bool = False  # whether `sent` keeps every message
    sent: list[Sent] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)  # by rank: what `Spend` added up to
    posted_bytes: list[int] = field(default_factory=list)  # by rank
    messages: int = 0
    handled_s: float = 0.0  # processor time of both ends of all messages, where cores are shared

    def run(self, programs: Sequence[Program]) -> list[float]:
        """Return each rank's clock at its end."""
        ranks = len(programs)
        self._programs = list(programs)
        self._traffic = Traffic(self.network)
        luck = random.Random(self.seed)
        self._switch = Queues(self.network, self.piece_bytes, luck) if self.queues else None
        self._cores = Cores(self.cores) if self.cores else None
        self.clocks, self.busy_s = [0.0] * ranks, [0.0] * ranks
        self.posted_bytes, self.messages, self.handled_s = [0] * ranks, 0, 0.0
        self._inboxes = [_Inbox() for _ in range(ranks)]
        self._awaited: dict[int, int | None] = {}  # by rank that waits: the source; None: any
        self._flushing: dict[int, Sequence[float | Leaving]] = {}  # by rank that waits for them
        self._numbers = count()
        # (time, rank, event, a number that orders what is the same, what it needs to know)
        self._queue: list[tuple[float, int, Event, int, tuple[Any, ...]]] = []
        for rank in range(ranks):
            self._plan(0.0, rank, Event.GOES_ON)
        while self._queue:
            now, rank, event, _, known = heapq.heappop(self._queue)
            if event is Event.GOES_ON:
                self.clocks[rank] = now
                self._advance(rank, None)
            elif event is Event.ENTERS:
                self._enter(now, rank, *known)
            elif event is Event.HANDLED:
                self._handle(now, rank, *known)
            elif event is Event.LEFT:
                self._leave(now, *known)
            elif rank in self._awaited:
                self._take(rank, now)
        if self._awaited:
            waits = ", ".join(f"rank {r} for {s}" for r, s in sorted(self._awaited.items()))
            raise AssertionError(f"ranks wait for messages that no rank sends: {waits}")
        return self.clocks

    def _plan(self, at_s: float, rank: int, event: Event, *known: Any) -> None:
        heapq.heappush(self._queue, (at_s, rank, event, next(self._numbers), known))

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
                self._tell(rank, asked, clock)
                answer = None
                continue
            if isinstance(asked, Spend):
                self.busy_s[rank] += asked.seconds
                done = clock + asked.seconds
                if self._cores is not None and asked.shared:
                    done = self._cores.take(clock, asked.seconds)
                self._plan(done, rank, Event.GOES_ON)
            elif isinstance(asked, Until | Flush):
                until = asked.time_s if isinstance(asked, Until) else _left(asked.sent)
                if until is not None and until <= clock:
                    answer = None
                    continue
                if until is not None:
                    self._plan(until, rank, Event.GOES_ON)
                elif isinstance(asked, Flush):
                    self._flushing[rank] = asked.sent
            else:
                self._awaited[rank] = asked.source if isinstance(asked, Take) else None
                self._wake(rank)
            return

    def _post(self, rank: int, post: Post, clock: float) -> float | Leaving:
        target, size = post.target, post.size_bytes
        self.posted_bytes[rank] += size
        self.messages += 1
        if self._switch is None:
            left, arrived = self._traffic.post(clock, rank, target, size)
            if self.keeps:
                self.sent.append(Sent(rank, target, size, clock, left, arrived))
            self._arrive(rank, target, arrived)
            return left
        message = Leaving(rank, target, size, post.handling_s)
        self._set_off(clock, self._switch.post(clock, message))
        return message

    def _leave(self, now: float, way: Way) -> None:
        """A way out is free, and takes its next piece."""
        assert self._switch is not None
        self._set_off(now, self._switch.leave(now, way))

    def _set_off(self, now: float, piece: Piece | None) -> None:
        if piece is None:
            return
        rank, target = piece.message.source, piece.message.target
        self._plan(piece.begins_s, target, Event.ENTERS, piece)
        if self.piece_bytes is not None:
            assert self._switch is not None
            self._plan(piece.ends_s, rank, Event.LEFT, self._switch.way_out(rank, target))
        if rank in self._flushing and (until := _left(self._flushing[rank])) is not None:
            del self._flushing[rank]
            self._plan(max(now, until), rank, Event.GOES_ON)

    def _enter(self, now: float, target: int, piece: Piece) -> None:
        assert self._switch is not None
        message = piece.message
        passed = self._switch.enter(now, message.source, target, piece.size_bytes)
        if piece.last:
            latency_s = self._switch.link(message.source, target).latency_s
            arrived = max(piece.ends_s, passed) + latency_s
            self._delivered(now, message.source, target, arrived, message.handling_s)

    def _tell(self, rank: int, note: Tell, clock: float) -> None:
        """A note is free in virtual time; a switch's network carries it as a short message."""
        if self._switch is None:
            self._arrive(rank, note.target, clock)
        else:
            arrived = clock + self._switch.link(rank, note.target).latency_s
            self._delivered(clock, rank, note.target, arrived, note.handling_s)

    def _delivered(
        self, now: float, source: int, target: int, arrived: float, handling_s: float
    ) -> None:
        """A message arrives, not before both ends had a core to handle it."""
        if self._cores is None or not handling_s:
            self._arrive(source, target, arrived)
        else:
            begins = max(now, arrived - handling_s)
            self._plan(begins, target, Event.HANDLED, source, arrived, handling_s)

    def _handle(
        self, now: float, target: int, source: int, arrived: float, handling_s: float
    ) -> None:
        assert self._cores is not None
        self.handled_s += handling_s
        self._arrive(source, target, max(arrived, self._cores.take(now, handling_s)))

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
            self._plan(max(self.clocks[rank], arrived), rank, Event.ARRIVES)

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


def _left(sent: Sequence[float | Leaving]) -> float | None:
    """When all of these messages have left; None: that is not known yet."""
    times = [each.left_s if isinstance(each, Leaving) else each for each in sent]
    known = [time for time in times if time is not None]
    return max(known, default=0.0) if len(known) == len(times) else None


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
