"""Waiting for another process: look for a while, let others run for a while, then sleep until the
doorbell rings.

More ranks than cores must work well, so nobody burns a core for long; and nobody sleeps past the
moment it is needed, so sleeping is a futex on a word in shared memory that peers change and ring.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import time
from collections.abc import Callable, Sequence

from paceline.errors import PeerLost
from paceline.transport.patience import Patience

LOOKS = 200  # before yielding the core
YIELDS = 20  # before going to sleep, where ranks share cores
# ... and where each has its own: some milliseconds in which waking up costs nothing (measured: 0.89
# -> 0.95)
ROOMY_YIELDS = 4000
NAP_S = 0.02  # the longest sleep between two looks at whether the peer is alive
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
CHANNELS = 2  # per pair of ranks and direction: for tensors, and for notes
PIECES = 4  # of a message, under way between two ranks at a time
LINE = 16  # words: one cache line per rank and counter


class Column:
    """One counter per rank (or pair), each on a cache line of its own."""

    def __init__(self, words: memoryview, start: int) -> None:
        self._words, self._start = words, start

    def __getitem__(self, index: int) -> int:
        return int(self._words[self._start + index * LINE])

    def __setitem__(self, index: int, value: int) -> None:
        self._words[self._start + index * LINE] = value

    def index(self, index: int) -> int:
        return self._start + index * LINE


class Board:
    """The counters that all ranks of a group see."""

    @staticmethod
    def size(ranks: int) -> int:
        return 4 * LINE * (7 * ranks + (4 + 5 * PIECES) * CHANNELS * ranks * ranks)

    def __init__(self, words: memoryview, ranks: int) -> None:
        self._words, self.ranks = words, ranks
        columns = [Column(words, i * ranks * LINE) for i in range(7)]
        self.pids, self.arrived, self.closed, self.bells, self.asleep, *self.said = columns
        pairs = 7 * ranks * LINE
        step = CHANNELS * ranks * ranks * LINE
        columns = [Column(words, pairs + i * step) for i in range(4)]
        self.written, self.read, self.posted, self.filled = (
            columns  # pieces; and what receivers want, and have been given
        )
        columns = [Column(words, pairs + (4 + i * PIECES) * step) for i in range(5)]
        self.lengths, self.wanted, self.numbers, self.low, self.high = (
            columns  # of messages; of what is wanted, and where
        )
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(words))
        self._libc = ctypes.CDLL(None, use_errno=True)

    def ring(self, peer: int, me: int) -> None:
        self.bells[peer] = (self.bells[peer] + 1) & 0xFFFFFFFF
        if FUTEX is not None and self.asleep[peer]:
            self._libc.syscall(
                FUTEX, ctypes.c_void_p(self._base + 4 * self.bells.index(peer)), 1, 2**31 - 1, None
            )

    def ring_all(self, me: int) -> None:
        for peer in range(self.ranks):
            if peer != me:
                self.ring(peer, me)

    def sleep(self, me: int, heard: int) -> None:
        """Until the bell rings again after `heard`, or a nap is over."""
        if FUTEX is None:
            time.sleep(0.0002)
            return
        self._libc.syscall(
            FUTEX, ctypes.c_void_p(self._base + 4 * self.bells.index(me)), 0, heard, _NAP
        )


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NAP = ctypes.byref(_Timespec(0, int(NAP_S * 1e9)))


class Waiter:
    """One rank's way of waiting; knows who is alive."""

    def __init__(
        self, board: Board, me: int, members: Sequence[int], patience: Patience, crowded: bool
    ) -> None:
        self._board, self._me, self._members, self.patience = board, me, members, patience
        self._yields = YIELDS if crowded else ROOMY_YIELDS
        self.descriptors: dict[int, int] = {}
        self.tolerant = False

    def wait(self, ready: Callable[[], bool], peer: int, what: str) -> None:
        for _ in range(LOOKS):
            if ready():
                return
        for _ in range(self._yields):
            os.sched_yield()
            if ready():
                return
        watched = peer in self.descriptors  # then its end is noticed, and a wait for it can go on
        with self.patience.waiting(what, self._members[peer], gives_up=not watched) as look:
            self._sleep_until(ready, peer, what, look)

    def _sleep_until(
        self, ready: Callable[[], bool], peer: int, what: str, look: Callable[[], None]
    ) -> None:
        board, me = self._board, self._me
        while True:
            heard = board.bells[me]
            board.asleep[me] = 1
            try:
                if ready():
                    return
                board.sleep(me, heard)
            finally:
                board.asleep[me] = 0
            if ready():
                return
            if board.closed[peer] or self._ended(peer):
                if ready():  # it may have done its part just before it ended
                    return
                raise PeerLost(peer, f"while waiting for {what}")
            for other in (
                () if self.tolerant else self.descriptors
            ):  # whoever else is gone will keep the awaited one waiting too
                if other != peer and not board.closed[other] and self._ended(other):
                    raise PeerLost(other, f"while waiting for {what}")
            look()

    def wait_any(
        self, found: Callable[[], int | None], peers: Sequence[int], patience_s: float | None
    ) -> int | None:
        """Until `found` says which, or one of the peers is gone (its index), or patience ends
        (None).
        """
        for look in range(LOOKS + self._yields):
            if (which := found()) is not None:
                return which
            if look >= LOOKS:
                os.sched_yield()
        board, me = self._board, self._me
        until = time.monotonic() + patience_s if patience_s is not None else float("inf")
        while True:
            heard = board.bells[me]
            board.asleep[me] = 1
            try:
                if (which := found()) is not None:
                    return which
                board.sleep(me, heard)
            finally:
                board.asleep[me] = 0
            if (which := found()) is not None:
                return which
            for index, peer in enumerate(peers):
                if board.closed[peer] or self._ended(peer):
                    return index if (which := found()) is None else which
            if time.monotonic() > until:
                return None

    def _ended(self, peer: int) -> bool:
        descriptor = self.descriptors.get(peer)
        if descriptor is None:
            return False
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
