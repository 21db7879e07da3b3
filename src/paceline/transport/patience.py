"""Waiting for a rank that is slow: it is told, once, and the wait goes on; only a rank that is gone
ends it.

A rank that waits for more than a moment says so on the ranks' common store, and takes it back when
the wait is over. When a wait has lasted `deadline_s`, the ranks that do not wait themselves are the
ones that all others wait for, whatever the exchange looks like (in a ring a rank waits for its
neighbour, who waits for the slow one). The first rank to notice tells it for all.

Where nothing would notice that a rank has ended (its host may be gone), a wait ends after
`deadline_s` with `PeerSlow`.
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

# a wait that lasts longer stands on the store: the longest that one rank can be taken for computing
# by mistake
POST_S = 1.0
IDLE_S = 1.0  # after so long without a wait that thread ends
CLOSE_S = 2.0  # for the thread that watches to end
LOOK_S = 0.5  # between two looks of the thread that watches calls which block


@dataclass
class Wait:
    what: str
    peer: int | None  # of the whole line; None: all of them
    began: float  # by time.monotonic
    idle: bool = False
    posted: bool = False  # it stands on the store
    told: bool = False  # it has been decided who tells of it
    tells: bool = False  # ... and it is this rank


class Patience:
    """One rank's, for all transports that it makes of the first one. Its cost is nothing until a
    wait lasts a second.
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
        self.watched = watched  # whether a rank that ends is noticed at once
        self._connect = connect
        self._store: Any = (
            None  # a connection of its own: the rank's other one may be what the wait is about
        )
        self.say: Callable[[str], None] = lambda text: None
        self.name: Callable[[int], str] = lambda rank: f"rank {rank}"
        self._blocked: Wait | None = None  # in a call that cannot look at the clock itself
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    @property
    def post_s(self) -> float:
        """After so long a wait stands on the store."""
        return min(POST_S, self.deadline_s / 2)

    @contextmanager
    def waiting(
        self, what: str, peer: int | None = None, *, gives_up: bool = True, idle: bool = False
    ) -> Iterator[Callable[[], None]]:
        """A wait in a loop that calls what this gives, again and again. It raises `PeerSlow` where
        a wait must end.

        `idle`: nothing is held up by it (a server without questions), so it is not told, however
        long it lasts.
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
        """A wait inside one call begins: a thread looks at the clock. The call itself ends it where
        it must end.
        """
        wait = self._blocked = Wait(
            what, peer, time.monotonic()
        )  # before the thread is looked for: it may be ending
        if self._watcher is None and self._connect is not None and not self._closed.is_set():
            self._watcher = threading.Thread(target=self._watch, name="patience", daemon=True)
            self._watcher.start()
        return wait

    def leave(self, wait: Wait) -> None:
        self._blocked = None
        if wait.posted:
            self._take_back(wait)

    def close(self) -> None:
        """No wait will follow."""
        self._closed.set()
        watcher = self._watcher
        if watcher is not None and watcher is not threading.current_thread():
            watcher.join(CLOSE_S)
        with self._lock:
            self._store = None

    def _watch(self) -> None:
        """Until a while after the last wait: a process with threads cannot be forked safely."""
        idle_s, nap_s = 0.0, min(LOOK_S, self.post_s / 4)
        while not self._closed.wait(nap_s):
            wait = self._blocked
            idle_s = 0.0 if wait is not None else idle_s + nap_s
            if idle_s > IDLE_S:
                self._watcher = None  # the next wait starts another, unless it began just now
                if self._blocked is None:
                    return
                self._watcher = threading.current_thread()
            if wait is not None:
                self._look(wait, time.monotonic() - wait.began)
                if self._blocked is not wait and wait.posted:
                    self._take_back(wait)

    def _look(self, wait: Wait, waited_s: float) -> None:
        if waited_s < self.post_s or self._connect is None:
            return
        with (
            self._lock,
            suppress(RuntimeError, TransportError),
        ):  # the store is gone with its launcher: nobody is left to tell
            if self._closed.is_set():
                return
            if self._store is None:
                self._store = self._connect()
            if not wait.posted:
                wait.posted = True
                self._store.set(f"waits/{self.rank}", json.dumps({"idle": wait.idle}))
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

    def _posted(self) -> dict[int, bool]:
        """The ranks that wait, by what stands on the store; whether each is idle."""
        found = {self.rank: False}
        for rank in range(self.size):
            key = f"waits/{rank}"
            with suppress(ValueError, LookupError, TypeError):
                if (
                    rank != self.rank
                    and self._store.check([key])
                    and (said := self._store.get(key))
                ):
                    found[rank] = bool(json.loads(said)["idle"])
        return dict(sorted(found.items()))


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
