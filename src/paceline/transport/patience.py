"""Waiting for a slow rank: a notice says who waits for whom, and the wait goes on.

After `deadline_s` the first rank that notices writes the notice for all, and again after 2, 4, 8,
... times as long. A wait ends in three ways: what was waited for comes; a rank has ended
(`PeerLost`); or `give_up_s` have passed (`PeerSlow`). Where the end of a rank cannot be noticed
(its host may be down), `give_up_s` is half an hour unless the user says otherwise.

A wait inside a blocking call of a library is watched by a thread, which aborts the call when the
wait has to end; `verdict` then says why.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.errors import PeerLost, PeerSlow, TransportError, from_plain, to_plain
from paceline.transport.activity import Activity
from paceline.transport.status.line import Line
from paceline.transport.status.picture import describer
from paceline.transport.status.stacks import give_stack
from paceline.transport.waits import Posted, Posts, duration, slow_ranks, told, who_waits

# A rank posts a wait that lasts longer. Until then other ranks take it for one that computes.
POST_S = 1.0
IDLE_S = 1.0  # the watching thread ends after so long without a wait
CLOSE_S = 2.0  # the longest wait for the watching thread to end
LOOK_S = 0.5  # how often the watching thread looks at a blocking call
ASK_S = 1.0  # how often a long wait asks the store which ranks have ended
NAME_S = 1.0  # for the board to notice which rank has ended
UNWATCHED_S = 1800.0  # a wait ends after so long where the end of a rank cannot be noticed
STILL_S = 5.0  # between two looks: a rank that stood still for longer was suspended itself

Peers = int | Sequence[int] | None


class Wait:
    """One wait. Its defaults are the class's, because most waits are short and many."""

    still_s = 0.0  # this rank was suspended for so long
    asked = 0.0  # when the store was asked which ranks have ended
    posted = False  # this rank has said that it waits
    on_board = False  # the store says so, too
    tells = False  # this rank writes the notices
    abort: Callable[[], None] | None = None  # ends the blocking call that waits

    def __init__(self, what: str, peers: Peers, due_s: float, gives_up: bool, idle: bool) -> None:
        self.what = what
        # Their ranks in the world; empty: all others.
        self.peers = () if peers is None else (peers,) if isinstance(peers, int) else tuple(peers)
        self.due_s = due_s  # when this wait has lasted so long, the next notice is due
        self.gives_up = gives_up  # False: it ends only after a `give_up_s` that the user has set
        self.idle = idle
        self.began = self.looked = time.monotonic()

    def waited_s(self) -> float:
        """Seconds of waiting, without those in which this rank was suspended (SIGSTOP)."""
        now = time.monotonic()
        self.still_s += max(0.0, now - self.looked - STILL_S)
        self.looked = now
        return now - self.began - self.still_s


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
        give_up_s: float | None = None,
        lost_s: float = 60.0,
    ) -> None:
        self.rank, self.size, self.deadline_s = rank, size, deadline_s
        self.give_up_s, self.lost_s = give_up_s, lost_s
        self._cut_off_at: float | None = None  # since then the board has not answered
        self.activity = Activity(rank)
        self.watched = watched  # whether the end of a rank is noticed at once
        self.tolerant = False  # the end of a rank matters only to those that wait for it
        self._connect = connect
        # A separate connection: the wait may be for an answer on the rank's other one.
        self._posts: Posts | None = None
        self.verdict: TransportError | None = None  # why this rank has given up
        self.say: Callable[[str], None] = lambda text: None
        self.name: Callable[[int], str] = lambda rank: f"rank {rank}"
        # What these ranks do now, as far as this rank can see it.
        self.describe: Callable[[Sequence[int]], dict[int, str]] = lambda ranks: {}
        # The number of the step in which this rank waits, if it knows.
        self.progress: Callable[[], int | None] = lambda: None
        self._blocked: Wait | None = None  # a wait inside a blocking call of a library
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def open_status(self, folder: Path, gives_stack: bool = True) -> None:
        """Write this rank's status into a folder, where `describe` reads that of the others.

        A disk that cannot be written costs the status, not the run.
        """
        with suppress(OSError):
            line = Line(folder, self.rank, self.size)
            if gives_stack:
                give_stack(line, folder)
            self.activity.line, self.describe = line, describer(folder)

    @property
    def post_s(self) -> float:
        """Seconds after which a wait is posted on the store."""
        return min(POST_S, self.deadline_s / 2)

    @property
    def limit_s(self) -> float:
        """Seconds after which a wait ends; infinite: never."""
        if self.give_up_s is not None:
            return self.give_up_s
        return float("inf") if self.watched else UNWATCHED_S

    @contextmanager
    def waiting(
        self, what: str, peers: Peers = None, *, gives_up: bool = True, idle: bool = False
    ) -> Iterator[Callable[[], None]]:
        """Give the function that a waiting loop must call again and again.

        It raises `PeerLost` or `PeerSlow` when the wait has to end. `peers`: the ranks in the world
        that are waited for. Without `gives_up` only a `give_up_s` of the user's ends the wait.
        `idle`: the wait delays no other rank (a server without requests), so it is not reported.
        """
        wait = Wait(what, peers, self.deadline_s, gives_up, idle)

        def look() -> None:
            if (error := self._look(wait)) is not None:
                if isinstance(error, PeerSlow):
                    self.verdict = error
                raise error

        try:
            yield look
        finally:
            if wait.posted:
                self._take_back(wait)

    def enter(
        self, what: str, peers: Peers = None, abort: Callable[[], None] | None = None
    ) -> Wait:
        """Begin a wait inside one blocking call. A thread watches it, and may `abort` it."""
        # Set this before looking at `_watcher`, because that thread may be about to end.
        wait = Wait(what, peers, self.deadline_s, True, False)
        wait.abort, self._blocked = abort, wait
        if self._watcher is None and self._connect is not None and not self._closed.is_set():
            self._watcher = threading.Thread(target=self._watch, name="patience", daemon=True)
            self._watcher.start()
        return wait

    def leave(self, wait: Wait) -> None:
        self._blocked = None
        if wait.posted:
            self._take_back(wait)

    @contextmanager
    def blocking(self, what: str) -> Iterator[None]:
        """Let a thread watch a block that may wait for other ranks inside a library."""
        wait = self.enter(what)
        try:
            yield
        except RuntimeError as error:
            if self.verdict is None or isinstance(error, TransportError):
                raise
            raise self.verdict from None
        finally:
            self.leave(wait)

    def blame(self, error: TransportError) -> TransportError:
        """Why this rank's wait has failed: this error, or what made another rank leave before.

        A rank that gives a slow one up leaves, and its connections close. The others then report
        the slow rank too, not the one that left. A server that has lost a worker leaves, too: the
        worker is to blame.
        """
        if self.verdict is not None:
            return self.verdict
        with self._lock:
            if not isinstance(error, PeerLost) or (self.tolerant and error.rank is not None):
                return self._agreed() or error  # a tolerant rank goes on, and needs no cause
            with suppress(RuntimeError, TransportError):
                if self._posts is None and self._connect is not None:
                    self._posts = Posts(self._connect(), self.rank, self.size)
            return self._agreed() or self._first_lost(error)

    def _first_lost(self, lost: PeerLost) -> PeerLost:
        """The rank that was lost first. This rank leaves because of it, and says so on the board.

        The transport may not be able to name a rank, or name one that has left because of another.
        """
        with suppress(RuntimeError, TransportError):
            if self._posts is not None:
                lost = self._named(lost, self._posts)
                self._posts.leave_because_of(lost.rank)
        return lost

    def _named(self, lost: PeerLost, posts: Posts) -> PeerLost:
        """The lost rank by what the board knows, which notices an end a moment later."""
        until = time.monotonic() + NAME_S
        while True:
            gone = posts.gone()
            if (first := posts.first_cause(lost.rank)) not in (None, lost.rank):
                return PeerLost(first, gone.get(first, lost.detail))
            others = [rank for rank in gone if rank != self.rank]
            if lost.rank in gone or (not others and time.monotonic() >= until):
                return lost
            if others and (lost.rank is None or time.monotonic() >= until):
                return PeerLost(others[0], gone[others[0]])
            time.sleep(NAME_S / 20)

    def _agreed(self) -> TransportError | None:
        """Why another rank has given up, if one has."""
        with suppress(RuntimeError, TransportError, ValueError):
            if self._posts is not None and (said := self._posts.verdict()) is not None:
                agreed = from_plain(json.loads(said))
                return agreed if isinstance(agreed, TransportError) else None
        return None

    def close(self) -> None:
        """End the watching thread; no wait will follow."""
        self._closed.set()
        watcher = self._watcher
        if watcher is not None and watcher is not threading.current_thread():
            watcher.join(CLOSE_S)
        with self._lock:
            self._posts = None

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
                error = self._look(wait)
                if self._blocked is not wait:
                    if wait.posted:
                        self._take_back(wait)
                elif error is not None and self.verdict is None:
                    self.verdict = error
                    if wait.abort is not None:
                        wait.abort()

    def _look(self, wait: Wait) -> TransportError | None:
        """Post a long wait, write a notice that is due; return why the wait has to end now."""
        waited_s = wait.waited_s()
        if waited_s < self.post_s or self.size == 1:  # one rank alone: its process was stopped
            return None
        with self._lock:
            # Errors: the launcher has ended, and its store with it, so there is no one to notify.
            with suppress(RuntimeError, TransportError):
                self._report(wait, waited_s)
            error = self._end(wait, waited_s)
            if error is not None and self._posts is not None:
                with suppress(RuntimeError, TransportError):
                    self._posts.set_verdict(json.dumps(to_plain(error)))
                    if isinstance(error, PeerLost) and not self.tolerant:
                        self._posts.leave_because_of(error.rank)
        return error

    def _report(self, wait: Wait, waited_s: float) -> None:
        if not wait.posted and (line := self.activity.line) is not None:
            line.wait(wait.what, wait.peers, time.time() - waited_s, wait.idle)
        wait.posted = True
        if self._connect is None or self._closed.is_set():
            return
        if self._posts is None:
            self._posts = Posts(self._connect(), self.rank, self.size)
        if not wait.on_board:
            wait.on_board = True
            self._posts.post(Posted(wait.peers, wait.idle, self.progress()))
        if waited_s > wait.due_s and not wait.idle:
            while waited_s > wait.due_s:
                wait.due_s = 2 * wait.due_s or float("inf")
            posted = self._posts.read()
            wait.tells = self._posts.may_tell(posted)
            if wait.tells:
                self.say(self._sentence(wait, waited_s, posted))

    def _end(self, wait: Wait, waited_s: float) -> TransportError | None:
        """Why a wait has to end now; None: it goes on."""
        if (lost := self._lost(wait)) is not None:
            return lost
        limit_s = self.limit_s if wait.gives_up or self.give_up_s is not None else float("inf")
        if wait.idle or waited_s <= limit_s:
            return None
        slow = self._slow(wait)
        # Looked at after that: a rank that gives up says so before it takes its own wait back.
        if (agreed := self._agreed()) is not None:
            return agreed
        doing = self.describe(slow[:1]).get(slow[0]) if slow else None
        what = f"{wait.what} (it is {doing})" if doing else wait.what
        return PeerSlow(slow[0] if slow else None, limit_s, what)

    def _lost(self, wait: Wait) -> TransportError | None:
        """The end of a rank that matters to this wait, as far as the store has noticed it.

        Or the end of this rank's way to the store, and so to the others.
        """
        now = time.monotonic()
        if self._posts is None or now - wait.asked < ASK_S:
            return None
        wait.asked = now
        try:
            gone = self._posts.gone()
            awaited = [rank for rank in wait.peers if rank in gone]
            others = [] if self.tolerant else [rank for rank in gone if rank != self.rank]
            lost = next(iter(awaited + others), None)
            first = None if lost is None or self.tolerant else self._posts.first_cause(lost)
        except (RuntimeError, TransportError) as error:
            self._cut_off_at = self._cut_off_at or now
            if now - self._cut_off_at < self.lost_s:
                return None
            return TransportError(f"it is cut off from the run: {error}")
        self._cut_off_at = None
        if lost is None:
            return None
        return PeerLost(lost, gone[lost]) if first is None else PeerLost(first, gone.get(first, ""))

    def _slow(self, wait: Wait) -> list[int]:
        """The ranks that this wait is for in the end; else those that it is for directly."""
        with suppress(RuntimeError):
            if self._posts is not None:
                posted = self._posts.read() | {self.rank: Posted(wait.peers)}
                if slow := slow_ranks(posted, self.rank, self.size):
                    return slow
        return list(wait.peers) if len(wait.peers) == 1 else []

    def _take_back(self, wait: Wait) -> None:
        # The last picture of a run that has given a rank up shows who waited for it.
        if (line := self.activity.line) is not None and not isinstance(self.verdict, PeerSlow):
            line.wait_over()
        with self._lock, suppress(RuntimeError, TransportError):
            if self._posts is not None:
                self._posts.take_back(wait.tells)
        wait.posted = wait.tells = False

    def _sentence(self, wait: Wait, waited_s: float, posted: dict[int, Posted]) -> str:
        posted = posted | {self.rank: Posted(wait.peers)}
        slow = slow_ranks(posted, self.rank, self.size)
        if not slow and len(wait.peers) == 1:
            slow = list(wait.peers)
        ended = self._posts.gone() if self._posts is not None else {}
        slow = [rank for rank in slow if rank not in ended] or slow
        waiting = who_waits(posted, slow, self.size) or [self.rank]
        doing = [
            text if len(slow) == 1 else f"{self.name(rank)} {text}"
            for rank, text in self.describe(slow).items()
        ]
        limit_s = self.limit_s if wait.gives_up or self.give_up_s is not None else float("inf")
        end = (
            "the run waits on (--give-up-s S ends it)"
            if limit_s == float("inf")
            else f"the run gives up after {duration(limit_s)} (--give-up-s)"
        )
        names = [self.name(rank) for rank in waiting], [self.name(rank) for rank in slow]
        return f"{told(names[0], waited_s, names[1], wait.what, doing)}; {end}"

    def steps_of_waiting(self) -> dict[int, int]:
        """The step in which each other rank waits that has posted a wait in a step."""
        with self._lock, suppress(RuntimeError, TransportError):
            if self._posts is not None:
                posted = self._posts.read()
                return {
                    rank: own.step
                    for rank, own in posted.items()
                    if rank != self.rank and own.step is not None
                }
        return {}
