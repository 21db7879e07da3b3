"""Links of a switch that queues, and cores that ranks share: what a message meets on real hosts.

`transport/virtual.py` lets a message occupy its sender's way out and its receiver's way in at the
same time. A switch does not: what several senders send to one receiver leaves each of them at once
and waits at the receiver's port.

    leaves   the sender's way out; messages to several ranks take turns, a piece at a time: the
             first piece of each in the order of posting, the others in random order, as TCP does
    enters   the receiver's way in; pieces one after the other, in the order of reaching the switch
    arrived  when all has passed both, and a latency later

The first byte of a piece enters as soon as it leaves (cut-through), so a message alone takes
latency + n * s_per_byte, as in `virtual.py`. A sender waits only for what its socket does not hold.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from paceline.transport.virtual import Link, Network

# TCP gives a link at most so much of one connection at a time (the kernel's largest segment, GSO),
# so messages to several ranks take turns in pieces of this size.
PIECE_BYTES = 1 << 16
MOST_PIECES = 32  # of one message
# What a socket takes before a sender waits: about half of Linux's largest send buffer, 4 MB.
SOCKET_BYTES = 2 << 20

Way = tuple[str, int]
Connection = tuple[int, int]  # the ranks from which and to which it sends


@dataclass(eq=False)
class Leaving:
    """A message on its way out."""

    source: int
    target: int
    size_bytes: float
    handling_s: float = 0.0
    rest_bytes: float = 0.0  # what has not begun to leave
    left_s: float | None = None  # when its sender may go on, as soon as that is known


@dataclass(frozen=True)
class Piece:
    """A part of a message, or all of it, that leaves its sender."""

    message: Leaving
    size_bytes: float
    begins_s: float
    ends_s: float
    last: bool = True


@dataclass
class Queues:
    """The messages on a network whose switch queues."""

    network: Network
    piece_bytes: int | None = PIECE_BYTES  # None: a message leaves in one piece
    luck: random.Random = field(default_factory=lambda: random.Random(0))
    _free: dict[Way, float] = field(default_factory=dict)  # when a way is free
    # By way out that is busy: its connections that have something to send, the one whose piece is
    # leaving first.
    _turns: dict[Way, deque[Connection]] = field(default_factory=dict)
    _lines: dict[Connection, deque[Leaving]] = field(default_factory=dict)

    def link(self, source: int, target: int) -> Link:
        same = self.network.hosts[source] == self.network.hosts[target]
        return self.network.inside if same else self.network.between

    def way_out(self, source: int, target: int) -> Way:
        return self._way("out", source, target)

    def post(self, at_s: float, message: Leaving) -> Piece | None:
        """Post a message; return the piece that begins to leave, unless it waits for its turn."""
        connection = message.source, message.target
        way, link = self.way_out(*connection), self.link(*connection)
        message.size_bytes += link.message_bytes
        if self.piece_bytes is None:
            begins, ends = self._pass(at_s, way, link, message.size_bytes)
            message.left_s = max(at_s, ends - SOCKET_BYTES * link.s_per_byte)
            return Piece(message, message.size_bytes, begins, ends)
        message.rest_bytes = message.size_bytes
        line = self._lines.setdefault(connection, deque())
        line.append(message)
        if sum(each.rest_bytes for each in line) <= SOCKET_BYTES:
            message.left_s = at_s
        if way in self._turns:
            if connection not in self._turns[way]:
                self._turns[way].append(connection)
            return None
        self._turns[way] = deque([connection])
        return self._leave(at_s, way)

    def leave(self, at_s: float, way: Way) -> Piece | None:
        """A piece has left: return the next one, of the connection whose turn it is, if any."""
        turns = self._turns[way]
        before = turns.popleft()
        if self._lines[before]:
            turns.append(before)
        if not turns:
            del self._turns[way]
            return None
        begun = [place for place, connection in enumerate(turns) if self._has_begun(connection)]
        if len(begun) == len(turns):
            turns.rotate(-self.luck.choice(begun))
        else:  # one that has not begun goes first
            turns.rotate(-next(place for place in range(len(turns)) if place not in begun))
        return self._leave(at_s, way)

    def _has_begun(self, connection: Connection) -> bool:
        message = self._lines[connection][0]
        return message.rest_bytes < message.size_bytes

    def _leave(self, at_s: float, way: Way) -> Piece:
        connection, most = self._turns[way][0], self.piece_bytes
        assert most is not None
        line = self._lines[connection]
        message = line[0]
        size = min(message.rest_bytes, max(most, message.size_bytes / MOST_PIECES))
        begins, ends = self._pass(at_s, way, self.link(*connection), size)
        message.rest_bytes -= size
        held = 0.0
        for each in line:
            held += each.rest_bytes
            if each.left_s is None and held <= SOCKET_BYTES:
                each.left_s = ends
        if not message.rest_bytes:
            line.popleft()
        return Piece(message, size, begins, ends, not message.rest_bytes)

    def enter(self, at_s: float, source: int, target: int, size_bytes: float) -> float:
        """A piece reaches the switch; return when it has passed. Call it in the order of time."""
        way = self._way("in", target, source)
        return self._pass(at_s, way, self.link(source, target), size_bytes)[1]

    def _way(self, side: str, rank: int, other: int) -> Way:
        """The ranks of a host share its ways to other hosts."""
        hosts = self.network.hosts
        return (side, hosts[rank]) if hosts[rank] != hosts[other] else (f"rank {side}", rank)

    def _pass(self, at_s: float, way: Way, link: Link, size_bytes: float) -> tuple[float, float]:
        credit_s = link.burst_bytes * link.s_per_byte
        start = max(at_s - credit_s, self._free.get(way, -credit_s))
        self._free[way] = start + size_bytes * link.s_per_byte
        return max(at_s, start), max(at_s, self._free[way])


class Cores:
    """The cores of one machine, which all ranks share: work waits for the first that is free."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count

    def take(self, at_s: float, seconds: float) -> float:
        """Work for so long from a time on; return when it is done. Call it in order of time."""
        done = max(at_s, self._free[0]) + seconds
        heapq.heapreplace(self._free, done)
        return done
