"""Ranks as threads in virtual time: the run's own code on a network that is only described.

Every rank has a virtual time, which moves in three ways only: `charge` (computing), `added` (adding
received bytes), and waiting. Posting a send or a receive takes none. Messages cost what
`virtual.Traffic` says: a send's wait returns when the message has left, a receive's wait when it
has arrived. The thread with the earliest time runs next (the lowest rank where several are equal),
until it computes or has to wait, so messages are posted in the order of virtual time.

Barriers, the transport's own `all_reduce` and `broadcast`, and all messages over `control` (notes,
agreements) wait for the slowest rank and take no time beyond that. They are not payload. The trait
`native` has no all-reduce, so that payload is exchanged by schedules, whose messages cost time.

Nothing here reads the real time. The same ranks with the same times give the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from paceline.common.links import Links
from paceline.registry import transports
from paceline.transport.base import Transport, Work
from paceline.transport.inproc import Baton, Hub, InprocTransport, Ready, Receive
from paceline.transport.virtual import Link, Network, Traffic

FOREVER = float("inf")
When = Callable[[], float | None]  # the time at which a thread can go on; None: not known yet


@dataclass(frozen=True)
class Sent:
    """A payload message, and its times in seconds."""

    source: int
    target: int
    size_bytes: int
    posted_s: float
    left_s: float
    arrived_s: float


class VirtualBaton(Baton):
    """Lets the thread with the earliest virtual time run next."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[int, float] = {}  # by thread
        self._now = 0.0  # the time of the thread that runs
        self._when: dict[int, When] = {}
        self._deadlines: dict[int, float] = {}
        self._due: dict[int, float] = {}  # by thread: when it goes on, as far as it is known

    def join(self, who: int) -> None:
        super().join(who)
        self.times[who] = 0.0

    def hand_over(self, who: int, ready: Ready, why: str) -> None:
        """Return once `ready()` holds: at the time of the thread that made it hold."""
        since: float | None = None

        def when() -> float | None:
            nonlocal since
            if since is None and ready():
                since = self._now
            return since

        self.wait(who, when, why)

    def wait(self, who: int, when: When, why: str, deadline_s: float | None = None) -> None:
        """Let other threads run until the time `when()` or the deadline, whichever is earlier.

        A deadline passes only while some thread can go on: otherwise it is a deadlock.
        """
        self._when[who] = when
        if deadline_s is not None:
            self._deadlines[who] = deadline_s
        try:
            super().hand_over(who, lambda: when() is not None, why)
            self.times[who] = self._now = self._time(who)
        finally:
            del self._when[who]
            self._deadlines.pop(who, None)

    def settle(self, who: int) -> None:
        """Called before a thread shows its time to others, in a message; here it is settled."""
        return

    def charge(self, who: int, seconds: float) -> None:
        """Let this thread's time pass."""
        until = self.times[who] + seconds
        self.wait(who, lambda: until, "its time")

    def _able(self) -> list[int]:
        self._due = {who: self._time(who) for who in self._ready}
        able = [who for who, due in self._due.items() if due < FOREVER]
        return able if any(map(self._knows, able)) else []

    def _pick(self, able: list[int]) -> int:
        return min(able, key=lambda who: (self._due[who], who))

    def _knows(self, who: int) -> bool:
        """Whether something else than a deadline lets a thread go on."""
        return who not in self._deadlines or self._when[who]() is not None

    def _time(self, who: int) -> float:
        """When a thread goes on, as far as it is known now."""
        own, when = self.times[who], self._when.get(who)
        known = when() if when is not None else own
        due = FOREVER if known is None else max(own, known)
        return min(due, max(own, self._deadlines.get(who, FOREVER)))


class SimulatedHub(Hub):
    """What the ranks of one simulated run share: also the network, and the messages on their way.

    `sent`: a list that gets every payload message, in the order of posting.
    """

    baton: VirtualBaton

    def __init__(
        self,
        size: int,
        network: Network | None = None,
        s_per_byte_added: float = 0.0,
        sent: list[Sent] | None = None,
        deadline_s: float = 30.0,
        kind: type[SimulatedTransport] | None = None,
    ) -> None:
        super().__init__(size, 0, deadline_s, kind or SimulatedTransport)
        self.traffic = Traffic(network or Network(tuple(range(size)), Link()))
        self.s_per_byte_added, self.sent = s_per_byte_added, sent
        self.arrivals: dict[tuple[Any, ...], deque[float]] = {}  # of the messages, by channel

    def make_baton(self, seed: int) -> Baton:
        return VirtualBaton()


@transports.register("simulated")
class SimulatedTransport(InprocTransport):
    """Threads in virtual time on a described network: the real code, times that are computed."""

    traits = replace(
        InprocTransport.traits, devices=("cpu",), native=("broadcast",), virtual_time=True
    )
    hub_kind: ClassVar[type[SimulatedHub]] = SimulatedHub
    _hub: SimulatedHub
    _own_control: FreeTransport | None = None

    @classmethod
    def hub(
        cls, size: int, seed: int = 0, deadline_s: float = 30.0, links: Links | None = None
    ) -> SimulatedHub:
        links = links or Links()
        link = Link(links.latency_s, 8 / links.rate if links.rate else 0.0)
        network = Network(tuple(range(size)), link)  # a host per rank
        return cls.hub_kind(size, network, deadline_s=deadline_s, kind=cls)

    @property
    def now(self) -> Callable[[], float]:
        times, rank = self._hub.baton.times, self._world_rank
        return lambda: times[rank]

    def charge(self, seconds: float) -> None:
        if seconds > 0:
            self._hub.baton.charge(self._world_rank, seconds)

    def added(self, size_bytes: int) -> None:
        self.charge(size_bytes * self._hub.s_per_byte_added)

    @property
    def control(self) -> Transport:
        if self._own_control is None:
            place = (*self._place, "control")
            self._own_control = FreeTransport(self._hub, self._world_rank, self._members, place)
        return self._own_control

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        target = self._members[to]
        self._hub.baton.settle(self._world_rank)
        self._post(tensor, target, tag)
        left_s, arrived_s = self._cost(target, tensor.nbytes)
        key = (self._place, self._world_rank, target, tag)
        self._hub.arrivals.setdefault(key, deque()).append(arrived_s)
        return _Leaving(self, left_s)

    def _cost(self, target: int, size_bytes: int) -> tuple[float, float]:
        """When a message that is posted now has left, and when it has arrived."""
        hub, source, now = self._hub, self._world_rank, self.now()
        left_s, arrived_s = hub.traffic.post(now, source, target, size_bytes)
        if hub.sent is not None:
            hub.sent.append(Sent(source, target, size_bytes, now, left_s, arrived_s))
        return left_s, arrived_s

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        return _Arriving(self, tensor, self._members[source], tag)

    def wait_any(self, works: Sequence[Work], patience_s: float | None = None) -> int | None:
        def known() -> list[tuple[float, int]]:
            """The times at which works are complete, each with its index."""
            times = ((_when(work), index) for index, work in enumerate(works))
            return [(time, index) for time, index in times if time is not None]

        def earliest() -> float | None:
            return min(known(), default=(None,))[0]

        deadline_s = None if patience_s is None else self.now() + patience_s
        self.wait_until(earliest, "one message of several", deadline_s)
        time, index = min(known(), default=(float("inf"), 0))
        return index if time <= self.now() else None

    def wait_until(self, when: When, why: str, deadline_s: float | None = None) -> None:
        """Wait until the virtual time `when()`. A time that has passed lets no other rank run."""
        time = when()
        if time is None or time > self.now():
            self._hub.baton.wait(self._world_rank, when, why, deadline_s)


class FreeTransport(SimulatedTransport):
    """The control channel: its messages arrive when they are posted, and are not payload."""

    @property
    def control(self) -> Transport:
        return self

    def _cost(self, target: int, size_bytes: int) -> tuple[float, float]:
        return self.now(), self.now()


class _Leaving:
    """A send: it is complete when the message has left."""

    def __init__(self, transport: SimulatedTransport, left_s: float) -> None:
        self._transport, self._left_s = transport, left_s

    def when(self) -> float | None:
        return self._left_s

    def wait(self) -> None:
        self._transport.wait_until(self.when, "a message to leave")


class _Arriving(Receive):
    """A receive: it is complete when the message has arrived, or its sender has left."""

    _transport: SimulatedTransport

    def when(self) -> float | None:
        hub = self._transport._hub
        if arrivals := hub.arrivals.get(self._key):
            return arrivals[0]
        return hub.baton.times[self._source] if self.ready() else None

    def wait(self) -> None:
        self._transport.wait_until(self.when, f"a message from rank {self._source}")
        if arrivals := self._transport._hub.arrivals.get(self._key):
            arrivals.popleft()
        self.take()


def _when(work: Any) -> float | None:
    """When a work is complete; None: not known yet. Works of other transports are complete."""
    when: When | None = getattr(work, "when", None)
    return when() if when is not None else 0.0
