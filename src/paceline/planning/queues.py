"""Links of a switch that queues, and cores that ranks share: what a message meets on real hosts.

`transport/virtual.py` lets a message occupy its sender's way out and its receiver's way in at the
same time. A switch does not: what several senders send to one receiver leaves each of them at once
and waits at the receiver's port.

    leaves   the sender's way out: one after the other, in the order of posting
    enters   the receiver's way in: one after the other, in the order of reaching the switch
    arrived  when all has passed both, and a latency later

The first byte of a message enters as soon as it leaves (cut-through), so a message alone takes
latency + n * s_per_byte, as in `virtual.py`. A sender waits only for what its socket does not hold.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from paceline.transport.virtual import Link, Network

# TCP gives a link at most so much of one connection at a time (the kernel's largest segment, GSO),
# so messages to several ranks take turns in pieces of this size.
PIECE_BYTES = 1 << 16
# What a socket takes before a sender waits: about half of Linux's largest send buffer, 4 MB.
SOCKET_BYTES = 2 << 20


@dataclass
class Queues:
    """The messages on a network whose switch queues."""

    network: Network
    _free: dict[tuple[str, int], float] = field(default_factory=dict)  # by way: when it is free

    def link(self, source: int, target: int) -> Link:
        same = self.network.hosts[source] == self.network.hosts[target]
        return self.network.inside if same else self.network.between

    def leave(self, at_s: float, source: int, target: int, size_bytes: int) -> tuple[float, float]:
        """Post a message; return when it begins to leave, and when all of it has left."""
        way = self._way("out", source, target)
        return self._pass(at_s, way, self.link(source, target), size_bytes)

    def enter(self, at_s: float, source: int, target: int, size_bytes: int) -> float:
        """A message reaches the switch; return when it has passed. Call it in the order of time."""
        way = self._way("in", target, source)
        return self._pass(at_s, way, self.link(source, target), size_bytes)[1]

    def _way(self, side: str, rank: int, other: int) -> tuple[str, int]:
        """The ranks of a host share its ways to other hosts."""
        hosts = self.network.hosts
        return (side, hosts[rank]) if hosts[rank] != hosts[other] else (f"rank {side}", rank)

    def _pass(
        self, at_s: float, way: tuple[str, int], link: Link, size_bytes: int
    ) -> tuple[float, float]:
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
