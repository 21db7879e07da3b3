"""Waiting for a slow rank: the user is notified once and the wait goes on.

A rank that waits for more than `POST_S` posts that on the store, and removes it when the wait is
over. After `deadline_s` the slow ranks are those that have not posted a wait. That holds for every
pattern of messages: in a ring a rank waits for its neighbour, which waits for the slow rank. The
first rank that notices writes the notice for all.

Where the end of a rank cannot be noticed (its host may be down), a wait ends after `deadline_s`
with `PeerSlow`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from paceline.errors import PeerSlow, TransportError
from paceline.transport.activity import Activity

# A rank posts a wait that lasts longer. Until then other ranks take it for one that computes.
POST_S = 1.0
IDLE_S = 1.0  # the watching thread ends after so long without a wait
CLOSE_S = 2.0  # the longest wait for the watching thread to end
LOOK_S = 0.5  # how often the watching thread looks at a blocking call


@dataclass
class Wait:
    what: str
    peer: int | None  # its rank in the world; None: all ranks
    began: float  # by time.monotonic
    idle: bool = False
    posted: bool = False  # the store says that this rank waits
    told: bool = False  # the ranks have decided which of them writes the notice
    tells: bool = False  # this rank writes it


class Patience:
    """Reports one rank's long waits, for all transports that are made from its first one.

    It does nothing until a wait lasts a second.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        deadline_s: float,
        connect: Callable[[], Any] | None = None,
        watched: bool = False,
    ) -> None:
        self.rank, self.size, self.deadline_s = rank, size, deadline_s
        self.activity = Activity(rank)
        self.watched = watched  # whether the end of a rank is noticed at once
        self._connect = connect
        # A separate connection: the wait may be for an answer on the rank's other one.
        self._store: Any = None
        self.say: Callable[[str], None] = lambda text: None
        self.name: Callable[[int], str] = lambda rank: f"rank {rank}"
        # The number of the step in which this rank waits, if it knows.
        self.progress: Callable[[], int | None] = lambda: None
        self._blocked: Wait | None = None  # a wait inside a blocking call of a library
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    @property
    def post_s(self) -> float:
        """Seconds after which a wait is posted on the store."""
        return min(POST_S, self.deadline_s / 2)

    @contextmanager
    def waiting(
        self, what: str, peer: int | None = None, *, gives_up: bool = True, idle: bool = False
    ) -> Iterator[Callable[[], None]]:
        """Give the function that a waiting loop must call again and again.

        It raises `PeerSlow` after the deadline, if `gives_up` and the peer's end cannot be noticed.
        `idle`: the wait delays no other rank (a server without requests), so it is not reported.
        """
        wait = Wait(what, peer, time.monotonic(), idle)

        def look() -> None:
            waited_s = time.monotonic() - wait.began
            if gives_up and not self.watched and waited_s > self.deadline_s:
                raise PeerSlow(peer, self.deadline_s, what)
            self._look(wait, waited_s)

        try:
            yield look
        finally:
            if wait.posted:
                self._take_back(wait)

    def enter(self, what: str, peer: int | None = None) -> Wait:
        """Begin a wait inside one blocking call, which has its own timeout. A thread watches it."""
        # Set this before looking at `_watcher`, because that thread may be about to end.
        wait = self._blocked = Wait(what, peer, time.monotonic())
        if self._watcher is None and self._connect is not None and not self._closed.is_set():
            self._watcher = threading.Thread(target=self._watch, name="patience", daemon=True)
            self._watcher.start()
        return wait

    def leave(self, wait: Wait) -> None:
        self._blocked = None
        if wait.posted:
            self._take_back(wait)

    def close(self) -> None:
        """End the watching thread; no wait will follow."""
        self._closed.set()
        watcher = self._watcher
        if watcher is not None and watcher is not threading.current_thread():
            watcher.join(CLOSE_S)
        with self._lock:
            self._store = None

    def _watch(self) -> None:
        """Watch blocking calls until a while after the last one.

        The thread does not stay longer, because a process with threads cannot be forked safely.
        """
        idle_s, nap_s = 0.0, min(LOOK_S, self.post_s / 4)
        while not self._closed.wait(nap_s):
            wait = self._blocked
            idle_s = 0.0 if wait is not None else idle_s + nap_s
            if idle_s > IDLE_S:
                self._watcher = None  # from here on the next wait starts another thread
                if self._blocked is None:
                    return
                self._watcher = threading.current_thread()  # a wait began just before that
            if wait is not None:
                self._look(wait, time.monotonic() - wait.began)
                if self._blocked is not wait and wait.posted:
                    self._take_back(wait)

    def _look(self, wait: Wait, waited_s: float) -> None:
        if waited_s < self.post_s or self._connect is None:
            return
        # Errors: the launcher has ended, and its store with it, so there is no one to notify.
        with self._lock, suppress(RuntimeError, TransportError):
            if self._closed.is_set():
                return
            if self._store is None:
                self._store = self._connect()
            if not wait.posted:
                wait.posted = True
                self._store.set(
                    f"waits/{self.rank}", json.dumps({"idle": wait.idle, "step": self.progress()})
                )
            if waited_s > self.deadline_s and not wait.told and not wait.idle:
                wait.told = True
                wait.tells = (
                    self._store.compare_set("teller", "", str(self.rank)) == str(self.rank).encode()
                )
                if wait.tells:
                    self.say(self._sentence(wait, waited_s))

    def _take_back(self, wait: Wait) -> None:
        with self._lock, suppress(RuntimeError, TransportError):
            if self._store is not None:
                self._store.set(f"waits/{self.rank}", "")
                if wait.tells:
                    self._store.set("teller", "")
        wait.posted = wait.tells = False

    def _sentence(self, wait: Wait, waited_s: float) -> str:
        posted = self._posted()
        slow = [rank for rank in range(self.size) if rank not in posted]
        if not slow and wait.peer is not None:
            slow = [wait.peer]
        waiting = [rank for rank, idle in posted.items() if not idle and rank not in slow]
        have = "has" if len(waiting) == 1 else "have"
        whom = _listed([self.name(rank) for rank in slow]) if slow else "each other"
        end = "" if self.watched else "; the wait ends soon"
        return (
            f"{_listed([self.name(rank) for rank in waiting])} {have} waited"
            f" {waited_s:.{waited_s < 10:d}f} s for {whom} ({wait.what}): alive, but slow, so the"
            f" run waits on{end} (--deadline-s {self.deadline_s:g})"
        )

    def steps_of_waiting(self) -> dict[int, int]:
        """The step in which each other rank waits that has posted a wait in a step."""
        with self._lock, suppress(RuntimeError, TransportError):
            if self._store is not None:
                said = {rank: self._said(rank) for rank in range(self.size) if rank != self.rank}
                return {r: s["step"] for r, s in said.items() if s.get("step") is not None}
        return {}

    def _posted(self) -> dict[int, bool]:
        """The ranks that have posted a wait on the store, and whether each wait is idle."""
        found = {self.rank: False}
        for rank in range(self.size):
            if rank != self.rank and (said := self._said(rank)):
                found[rank] = bool(said["idle"])
        return dict(sorted(found.items()))

    def _said(self, rank: int) -> dict[str, Any]:
        """What a rank has posted about its wait; empty if it has posted none."""
        key = f"waits/{rank}"
        with suppress(ValueError, LookupError, TypeError):
            if self._store.check([key]) and (said := self._store.get(key)):
                return {"idle": False, **json.loads(said)}
        return {}


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
