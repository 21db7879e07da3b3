"""Waiting for another process: poll, then yield the core, then sleep until a peer rings.

A rank polls only briefly, because runs with more ranks than cores must work well. It sleeps on a
futex, a word of shared memory that peers increment to wake it (its bell).
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence

from paceline.common.cores import cores
from paceline.errors import PeerLost, TransportError
from paceline.transport.patience import Patience
from paceline.transport.shm.memory import SharedMemory

POLLS = 200  # before the rank yields its core
YIELDS = 20  # before the rank sleeps, where ranks share cores
# Where each rank has a core: it yields for a few milliseconds, in which waking up costs nothing.
ROOMY_YIELDS = 4000
NAP_S = 0.02  # the longest sleep before the rank checks again that the peer is alive
FUTEX = 202  # the number of the system call on x86-64, the only machine that `shm` runs on
CHANNELS = 2  # per pair of ranks and direction: one for tensors, one for notes
PACKETS = 4  # per channel: so many can be written before the receiver has read the first
CACHE_LINE = 16  # in words of 32 bits


class Column:
    """One counter per rank (or channel, or packet), each on a cache line of its own."""

    def __init__(self, words: memoryview, start: int) -> None:
        self._words, self._start = words, start

    def __getitem__(self, index: int) -> int:
        return int(self._words[self._start + index * CACHE_LINE])

    def __setitem__(self, index: int, value: int) -> None:
        self._words[self._start + index * CACHE_LINE] = value

    def index(self, index: int) -> int:
        return self._start + index * CACHE_LINE


class Counters:
    """The counters of a group of ranks, in memory that all of them map."""

    @staticmethod
    def size(ranks: int) -> int:
        return 4 * CACHE_LINE * (7 * ranks + (6 + 5 * PACKETS) * CHANNELS * ranks * ranks)

    def __init__(self, words: memoryview, ranks: int) -> None:
        self._words, self.ranks = words, ranks
        columns = [Column(words, i * ranks * CACHE_LINE) for i in range(7)]
        self.pids, self.arrived, self.closed, self.bells, self.asleep, *self.said = columns
        pairs = 7 * ranks * CACHE_LINE
        step = CHANNELS * ranks * ranks * CACHE_LINE
        # Per channel: packets written and read; receives posted by the receiver, and filled by the
        # sender; whether the sender writes to a posted address now; whether a message of the
        # channel was given up.
        columns = [Column(words, pairs + i * step) for i in range(6)]
        self.written, self.read, self.posted, self.filled, self.writing, self.given_up = columns
        # Per packet: the length of its message. Per posted receive: the length, and the address
        # (number of the allocation, offset in two words).
        columns = [Column(words, pairs + (6 + i * PACKETS) * step) for i in range(5)]
        self.lengths, self.wanted, self.numbers, self.low, self.high = columns
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(words))
        self._libc = ctypes.CDLL(None, use_errno=True)

    def ring(self, peer: int) -> None:
        """Wake a peer if it sleeps, and keep it from falling asleep if it is about to."""
        self.bells[peer] = (self.bells[peer] + 1) & 0xFFFFFFFF
        if self.asleep[peer]:
            self._libc.syscall(
                FUTEX, ctypes.c_void_p(self._base + 4 * self.bells.index(peer)), 1, 2**31 - 1, None
            )

    def ring_all(self, me: int) -> None:
        for peer in range(self.ranks):
            if peer != me:
                self.ring(peer)

    def sleep(self, me: int, heard: int) -> None:
        """Sleep until the bell differs from `heard`, at most `NAP_S`."""
        self._libc.syscall(
            FUTEX, ctypes.c_void_p(self._base + 4 * self.bells.index(me)), 0, heard, _NAP
        )


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NAP = ctypes.byref(_Timespec(0, int(NAP_S * 1e9)))


class Waiter:
    """Waits for one rank's peers and notices when a peer's process ends."""

    def __init__(
        self,
        counters: Counters,
        me: int,
        members: Sequence[int],
        patience: Patience,
        memory: SharedMemory,
    ) -> None:
        self._counters, self._me, self._members, self.patience = counters, me, members, patience
        crowded = memory.ranks > cores()
        self._yields = YIELDS if crowded else ROOMY_YIELDS
        self._memory = memory
        self.tolerant = False

    def wait(self, ready: Callable[[], bool], peer: int, what: str) -> None:
        for _ in range(POLLS):
            if ready():
                return
        for _ in range(self._yields):
            os.sched_yield()
            if ready():
                return
        # If the peer's end is noticed, the wait needs no limit.
        watched = self._memory.watches(self._members[peer])
        with self.patience.waiting(what, self._members[peer], gives_up=not watched) as look:
            self._sleep_until(ready, peer, what, look)

    def _sleep_until(
        self, ready: Callable[[], bool], peer: int, what: str, look: Callable[[], None]
    ) -> None:
        counters, me = self._counters, self._me
        while True:
            heard = counters.bells[me]
            counters.asleep[me] = 1
            try:
                if ready():
                    return
                counters.sleep(me, heard)
            finally:
                counters.asleep[me] = 0
            if ready():
                return
            if counters.closed[peer] or self.has_ended(peer):
                if ready():  # the peer may have finished this just before it ended
                    return
                raise self._lost(peer, what)
            # The peer may itself be waiting for another rank that has ended.
            for other in () if self.tolerant else range(len(self._members)):
                if other in (me, peer) or counters.closed[other]:
                    continue
                if self.has_ended(other):
                    raise self._lost(other, what)
            look()

    def _lost(self, peer: int, what: str) -> TransportError:
        return self.patience.blame(PeerLost(self._members[peer], f"while waiting for {what}"))

    def wait_any(
        self, found: Callable[[], int | None], peers: Sequence[int], patience_s: float | None
    ) -> int | None:
        """Wait until `found` returns an index, and return it.

        Returns a peer's index if that peer has ended, and None after `patience_s`.
        """
        for look in range(POLLS + self._yields):
            if (which := found()) is not None:
                return which
            if look >= POLLS:
                os.sched_yield()
        counters, me = self._counters, self._me
        until = time.monotonic() + patience_s if patience_s is not None else float("inf")
        while True:
            heard = counters.bells[me]
            counters.asleep[me] = 1
            try:
                if (which := found()) is not None:
                    return which
                counters.sleep(me, heard)
            finally:
                counters.asleep[me] = 0
            if (which := found()) is not None:
                return which
            for index, peer in enumerate(peers):
                if counters.closed[peer] or self.has_ended(peer):
                    return index if (which := found()) is None else which
            if time.monotonic() > until:
                return None

    def has_ended(self, peer: int) -> bool:
        return self._memory.has_ended(self._members[peer])
