"""Virtual time: what messages cost on a network that is only described.

    a message of n bytes from rank a to rank b, posted at t:
      start   = the earliest time from t on at which a's way out and b's way in are both free
      left    = start + n * s_per_byte        both ways are busy from start to left
      arrived = left + latency_s

A way that is shaped by a token bucket (`tc tbf`, as in a testbed) lets the first `burst_bytes`
after a pause pass at once: it counts as free that many bytes before the message.

A link is full duplex. The ranks of one host share its way out and its way in to other hosts;
between two ranks of one host each rank has its own. So many workers that send to one server wait
for each other at its way in. The transport `simulated` and the planner use this one model.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Link:
    """What moving bytes costs; times in seconds."""

    latency_s: float = 0.0
    s_per_byte: float = 0.0  # in each direction; a bandwidth of b bits per second is 8 / b
    burst_bytes: float = 0.0  # what passes at once after a pause
    # What a message takes of a way beside its own bytes (protocols): where a switch queues.
    message_bytes: float = 0.0


@dataclass(frozen=True)
class Network:
    """Which rank is on which host, and the links between and inside hosts."""

    hosts: tuple[int, ...]  # by rank
    between: Link
    inside: Link = Link()

    @property
    def ranks(self) -> int:
        return len(self.hosts)


@dataclass
class Traffic:
    """The messages on a network so far. Call `post` in the order of the times of posting."""

    network: Network
    _busy: dict[tuple[str, int], float] = field(default_factory=dict)  # until when, by way

    def post(self, at_s: float, source: int, target: int, size_bytes: int) -> tuple[float, float]:
        """Send a message; return when it has left its sender, and when it has arrived."""
        network = self.network
        a, b = network.hosts[source], network.hosts[target]
        if a != b:
            link, out, into = network.between, ("out", a), ("in", b)
        else:
            link, out, into = network.inside, ("rank out", source), ("rank in", target)
        credit_s = link.burst_bytes * link.s_per_byte
        start = max(
            at_s - credit_s, self._busy.get(out, -credit_s), self._busy.get(into, -credit_s)
        )
        until = start + size_bytes * link.s_per_byte
        self._busy[out] = self._busy[into] = until
        left = max(at_s, until)
        return left, left + link.latency_s
