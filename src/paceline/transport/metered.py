"""A wrapper that counts a transport's bytes, messages and seconds by phase, operation and peer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from paceline.transport.base import NOTE_TAG, Message, Op, Transport, Work
from paceline.transport.wrapper import Wrapper
from paceline.types import PHASES, Phase

ALL_PEERS = -1


@dataclass
class Tally:
    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    seconds: float = 0.0
    calls: int = 0


class Meter:
    """The counters of one rank, shared by its transport and all groups made from it."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.phase: Phase = "setup"
        self.tallies: dict[tuple[Phase, str, int], Tally] = {}
        self.totals: dict[Phase, Tally] = {phase: Tally() for phase in PHASES}
        # False once the time of an exchange could not be measured (DDP's, in the backward pass).
        self.times_known = True

    def add(
        self, operation: str, peer: int, sent: int, received: int, messages: int, seconds: float
    ) -> None:
        key = (self.phase, operation, peer)
        tally = self.tallies.get(key)
        if tally is None:
            tally = self.tallies[key] = Tally()
        for counted in (tally, self.totals[self.phase]):
            counted.sent_bytes += sent
            counted.received_bytes += received
            counted.messages += messages
            counted.seconds += seconds
            counted.calls += 1

    def total(self, phase: Phase) -> Tally:
        return self.totals[phase]

    def taken(self, phase: Phase) -> Tally:
        """Return the totals of a phase and start them anew."""
        tally, self.totals[phase] = self.totals[phase], Tally()
        return tally

    def described(self) -> list[dict[str, Any]]:
        """Every counter, for the record: by phase, operation and peer (-1: all peers)."""
        return [
            {"phase": phase, "operation": operation, "peer": peer, **asdict(tally)}
            for (phase, operation, peer), tally in sorted(self.tallies.items())
        ]

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


class Metered(Wrapper):
    """Counts what the transport inside does.

    The bytes of a native all-reduce are counted as a ring's: 2(P-1) times the buffer over all
    ranks, the least that any all-reduce can move. A broadcast is counted as one message from the
    root to each other rank.
    """

    name = "metered"

    def __init__(self, inner: Transport, meter: Meter | None = None) -> None:
        super().__init__(inner)
        self.meter = meter or Meter(inner.now)

    def wait_any(self, works: Sequence[Work], patience_s: float | None = None) -> int | None:
        return self.inner.wait_any(
            [w.work if isinstance(w, _Timed) else w for w in works], patience_s
        )

    def around(self, other: Transport) -> Metered:
        return Metered(other, self.meter)

    def during(self, phase: Phase) -> AbstractContextManager[None]:
        return self.meter.during(phase)

    def enter(self, phase: Phase) -> None:
        self.meter.phase = phase

    def counted(self, phase: Phase) -> Tally:
        return self.meter.total(phase)

    def uncounted(self) -> Transport:
        return self.inner

    def aside(self) -> Metered:
        return Metered(self.inner)

    def take(self) -> Tally:
        return self.meter.taken("setup")

    def settle(self, taken: Tally, waited_s: float) -> None:
        self.meter.add(
            "overlapped",
            ALL_PEERS,
            taken.sent_bytes,
            taken.received_bytes,
            taken.messages,
            waited_s,
        )

    def send_note(self, tensor: Tensor, to: int) -> Work:
        """Only the time is counted."""
        return _Timed(self.inner.control.isend(tensor, to, NOTE_TAG), self.meter, "note", to)

    def recv_note(self, tensor: Tensor, source: int) -> Work:
        work = self.inner.control.irecv(tensor, source, NOTE_TAG)
        return _Timed(work, self.meter, "note", source)

    def expect(self, tensor: Tensor, source: int) -> Work:
        """The bytes are counted by `wait`."""
        return _Timed(self.inner.irecv(tensor, source), self.meter, "recv", source, tensor.nbytes)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        start = self.meter.now()
        work = self.inner.isend(tensor, to, tag)
        self.meter.add("send", to, tensor.nbytes, 0, 1, self.meter.now() - start)
        return _Timed(work, self.meter, "send", to)

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        start = self.meter.now()
        work = self.inner.irecv(tensor, source, tag)
        self.meter.add("recv", source, 0, tensor.nbytes, 0, self.meter.now() - start)
        return _Timed(work, self.meter, "recv", source)

    def sending(self, tensor: Tensor, to: int) -> Message:
        return _Counted(
            self.inner.sending(tensor, to), self.meter, "send", to, (tensor.nbytes, 0, 1)
        )

    def receiving(self, tensor: Tensor, source: int) -> Message:
        return _Counted(
            self.inner.receiving(tensor, source), self.meter, "recv", source, (0, tensor.nbytes, 0)
        )

    def barrier(self) -> None:
        start = self.meter.now()
        self.inner.barrier()
        self.meter.add("barrier", ALL_PEERS, 0, 0, 0, self.meter.now() - start)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        start = self.meter.now()
        self.inner.all_reduce(tensor, op)
        self._count_all_reduce(tensor.numel(), tensor.element_size(), self.meter.now() - start)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        start = self.meter.now()
        self.inner.broadcast(tensor, root)
        seconds, at_root = self.meter.now() - start, self.rank == root
        sent = tensor.nbytes * (self.size - 1) if at_root else 0
        received = 0 if at_root else tensor.nbytes
        self.meter.add(
            "broadcast", ALL_PEERS, sent, received, self.size - 1 if at_root else 0, seconds
        )

    def note_all_reduce(self, length: int, itemsize: int) -> None:
        """Count an all-reduce of PyTorch's DDP, whose time cannot be measured from here."""
        if self.size > 1:
            self.meter.times_known = False
        self._count_all_reduce(length, itemsize, 0.0)

    def _count_all_reduce(self, length: int, itemsize: int, seconds: float) -> None:
        sent, received, messages = self.inner.all_reduce_bytes(length, itemsize)
        self.meter.add("all_reduce", ALL_PEERS, sent, received, messages, seconds)


class _Timed:
    """A work whose waiting time is counted, with `received` bytes that were not counted before."""

    def __init__(
        self, work: Work, meter: Meter, operation: str, peer: int, received: int = 0
    ) -> None:
        self.work, self._meter, self._operation, self._peer, self._received = (
            work,
            meter,
            operation,
            peer,
            received,
        )

    def wait(self) -> None:
        start = self._meter.now()
        self.work.wait()
        self._meter.add(
            self._operation, self._peer, 0, self._received, 0, self._meter.now() - start
        )


class _Counted(_Timed):
    """A message that is sent often: its bytes are counted each time it starts."""

    def __init__(
        self,
        message: Message,
        meter: Meter,
        operation: str,
        peer: int,
        counts: tuple[int, int, int],
    ) -> None:
        super().__init__(message, meter, operation, peer)
        self._message, self._counts = message, counts  # (sent, received, messages)

    def start(self) -> None:
        began = self._meter.now()
        self._message.start()
        self._meter.add(self._operation, self._peer, *self._counts, self._meter.now() - began)
