"""Calls a run's callbacks with what worker 0 records, in the process that starts the run.

Worker 0 writes its events line by line whether callbacks exist or not. A thread of this process
follows that file, so the workers do nothing for callbacks and do not wait for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakSet

from paceline.callbacks.base import Callback, Event, RunInfo
from paceline.errors import BadRequest
from paceline.record.following import Tail

POLL_S = 0.2
END_S = 10.0  # after a failure or Ctrl-C: for the events that are left, then for `on_end`
METHODS = {"step": "on_step", "evaluation": "on_evaluation", "checkpoint": "on_checkpoint"}
STOP = "stop"  # in the queue: call nothing more

Say = Callable[[str], None]

_left: WeakSet[threading.Thread] = WeakSet()  # of loggers of earlier runs, and of hung callbacks


def threads_left() -> bool:
    """Whether the callbacks of an earlier run have left threads, so that this process must not be
    forked.
    """
    return any(thread.is_alive() for thread in _left)


class Calls:
    """Calls the callbacks of one session of a run, all from one thread.

    `begin` starts the thread. This process must have forked all workers before, because a process
    with threads must not be forked.
    """

    def __init__(
        self,
        callbacks: tuple[Callback, ...],
        out: Path,
        config: Callable[[], dict[str, Any]],
        deadline_s: float,
        say: Say,
    ) -> None:
        self.failure: BadRequest | None = None  # the first that a callback has raised
        self._wanted = callbacks  # without those that have raised
        self._out, self._config, self._deadline_s, self._say = out, config, deadline_s, say
        self._tail = Tail(out / "events" / "worker-0.jsonl")
        self._tail.skip()  # the events of earlier sessions
        self._run: RunInfo | None = None  # once `on_start` has been called
        self._asked: SimpleQueue[threading.Event | dict[str, Any] | str] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._now = ""  # the method that is being called
        self._behind = False  # the run has ended, and there is no time for the events that are left

    def begin(self) -> None:
        """Start to follow worker 0; does nothing the second time."""
        if self._wanted and self._thread is None:
            self._before = set(threading.enumerate())
            self._thread = threading.Thread(target=self._follow, name="callbacks", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raise what a callback has raised."""
        if self.failure is not None:
            raise BadRequest(str(self.failure)) from self.failure.__cause__

    def drain(self) -> None:
        """Wait until the callbacks have seen all events that worker 0 has written."""
        if self._thread is not None:
            drained = threading.Event()
            self._asked.put(drained)
            self._wait(drained.is_set, lambda: False)
            self.check()

    def end(self, record: dict[str, Any], hurry: Callable[[], bool]) -> BadRequest | None:
        """Call `on_end`, after the events that are left. Returns what a callback has raised.

        Once `hurry()` holds, events that are left after END_S are left out, and callbacks that
        have not returned after another END_S are left alone.
        """
        self.begin()
        if self._thread is not None:
            self._asked.put(record)
            self._wait(lambda: not self._running, hurry)
        return self.failure

    def close(self) -> None:
        """Call nothing more, also where `end` has left a callback alone."""
        self._wanted = ()
        self._asked.put(STOP)
        if self._thread is not None:
            _left.update(thread for thread in threading.enumerate() if thread not in self._before)

    @property
    def _running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _wait(self, over: Callable[[], bool], hurry: Callable[[], bool]) -> None:
        """Wait for the thread. Tells, after the deadline, for which callback."""
        tell, give_up = time.monotonic() + self._deadline_s, float("inf")
        assert self._thread is not None
        while not over() and self._running:
            self._thread.join(0.01)
            now = time.monotonic()
            if now > tell:
                self._say(f"waiting for callback {self._now}; Ctrl-C ends the run without it")
                tell = float("inf")
            if hurry() and give_up == float("inf"):
                give_up = now + END_S
            if now > give_up and not self._behind:
                self._behind, give_up = True, now + END_S
            elif now > give_up:
                self._say(
                    f"callback {self._now} did not return within {END_S:g} s: the run has ended"
                    " without it"
                )
                return

    # --- in the thread

    def _follow(self) -> None:
        while True:
            self._deliver()
            try:
                asked = self._asked.get(timeout=POLL_S)
            except Empty:
                continue
            if asked == STOP:
                return
            self._deliver()
            if isinstance(asked, threading.Event):
                asked.set()
            elif isinstance(asked, dict):
                run = self._run or self._start({})
                self._call("on_end", replace(run, record=asked))
                return

    def _deliver(self) -> None:
        """Pass on the events that worker 0 has written since the last time."""
        self._tail.replaced()
        while self._tail.left_bytes:
            for event in self._tail.more():
                if self._behind:
                    return
                if event["kind"] == "start":
                    self._start(event)
                elif event["kind"] in METHODS:
                    self._call(METHODS[event["kind"]], event)

    def _start(self, event: Event) -> RunInfo:
        self._run = RunInfo(
            self._out, self._config(), event.get("total_steps"), event.get("from_step", 0)
        )
        self._call("on_start", self._run)
        return self._run

    def _call(self, method: str, content: Event | RunInfo) -> None:
        """Call a method of all callbacks. One that raises is not called again."""
        for callback in self._wanted:
            self._now = f"{name_of(callback)}.{method}"
            try:
                own = dict(content) if isinstance(content, dict) else content
                getattr(callback, method)(own)
            except BaseException as error:  # also SystemExit, which would end only this thread
                self._wanted = tuple(other for other in self._wanted if other is not callback)
                failed = BadRequest(f"callback {self._now} raised {described(error)}")
                failed.__cause__ = error
                self.failure = self.failure or failed


def name_of(callback: Callback) -> str:
    """Return a callback's name in the registry, or its class."""
    return str(getattr(callback, "name", "") or type(callback).__name__)


def described(error: BaseException) -> str:
    """Return an error in one line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
