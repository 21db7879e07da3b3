"""Signals that ask a run to end.

The first one interrupts the run. Further ones do not disturb it while it writes its record.

SIGUSR1, and the first SIGTERM of a run whose workers train, ask it to leave with a checkpoint: they
are passed on to the ranks. After a second SIGTERM, or `LEAVE_S` after the first, the run is
interrupted.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from paceline.errors import Interrupted

# Sent by Ctrl-C; by a batch system or a container; by a terminal that is closed.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LEAVING = signal.SIGUSR1
LEAVE_S = 20.0  # for the workers to agree on a step; batch systems kill after 30 s
AGAIN_S = 0.002  # between two looks whether an import has ended
IMPORT_S = 30.0  # the longest import that is waited for
_relays: list[Callable[[int], None]] = []  # what tells the ranks of this process


class Ending:
    """The first signal that arrived, and whether one may interrupt now."""

    def __init__(self) -> None:
        self.heard: signal.Signals | None = None
        self.settling = False  # True while the record is written: no signal interrupts that
        self.raised = False  # the signal has interrupted something
        self._heard_at = 0.0
        self._imports = _imports(sys._getframe())  # those that this block itself is part of
        self._alarm: Any = None  # the handler of SIGALRM while this object uses it
        self.wish: int | None = None  # the signal that asked to leave
        self._leaves = False  # the workers train, so that they can leave
        self._leave_s: float | None = None
        self._timer: threading.Timer | None = None

    def hear(self, number: int, frame: FrameType | None) -> None:
        if number == LEAVING or (number == signal.SIGTERM and self._may_leave()):
            self._ask_to_leave(number)
            return
        if self.heard is None:
            self.heard, self._heard_at = signal.Signals(number), time.monotonic()
        self._interrupt(frame)

    def can_leave(self, leave_s: float | None = LEAVE_S) -> None:
        """From now on the ranks can leave; within so many seconds after a SIGTERM (None: any)."""
        self._leaves, self._leave_s = True, leave_s
        if self.wish is not None:
            relay(self.wish)

    def is_leaving(self) -> None:
        """The ranks have agreed on a step. Their checkpoint takes as long as it takes."""
        if self._timer is not None:
            self._timer.cancel()

    def cannot_leave(self) -> None:
        """The ranks have ended: from now on every signal interrupts."""
        self._leaves = False
        self.is_leaving()

    def _may_leave(self) -> bool:
        return self._leaves and self.wish != signal.SIGTERM and self.heard is None

    def _ask_to_leave(self, number: int) -> None:
        if self.wish != signal.SIGTERM:
            self.wish = number
        if not self._leaves:
            return
        relay(number)
        if number == signal.SIGTERM and self._leave_s is not None:
            main = threading.main_thread().ident or 0
            self._timer = threading.Timer(
                self._leave_s, signal.pthread_kill, (main, signal.SIGTERM)
            )
            self._timer.daemon = True
            self._timer.start()

    def _interrupt(self, frame: FrameType | None) -> None:
        """Raise a KeyboardInterrupt, at once or after the imports that are under way.

        An import of PyTorch that is interrupted cannot be repeated, and may abort the process.
        """
        if self.settling or self.raised:
            return
        importing = _imports(frame) > self._imports
        if importing and time.monotonic() < self._heard_at + IMPORT_S and self._look_again():
            return
        self.raised = True
        raise KeyboardInterrupt

    def _look_again(self) -> bool:
        """Interrupt a moment later. Returns False where the user's program has the alarm clock."""
        if self._alarm is None:
            if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
                return False
            if signal.getitimer(signal.ITIMER_REAL)[0]:
                return False
            self._alarm = signal.signal(signal.SIGALRM, lambda _, frame: self._interrupt(frame))
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        return True

    def swallowed(self) -> None:
        """The interruption hit a function whose exceptions Python drops: interrupt again."""
        self.raised = False
        self._look_again()

    def settled(self) -> None:
        """The record is written: a signal that came meanwhile interrupts what comes next."""
        self.settling = False
        if self.heard is not None and not self.raised:
            self.raised = True
            raise KeyboardInterrupt

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Delay an interruption until the end of the block."""
        if self.settling:
            yield
            return
        self.settling = True
        try:
            yield
        finally:
            self.settled()

    def close(self) -> None:
        """Give the alarm clock back."""
        self.cannot_leave()
        if self._alarm is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, self._alarm)

    @property
    def reason(self) -> str:
        if self.heard in (None, signal.SIGINT):
            return "interrupted"
        return f"interrupted by {self.heard.name}"


def _imports(frame: FrameType | None) -> int:
    """How many imports are under way."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return count


@contextmanager
def ending() -> Iterator[Ending]:
    """Turn the first of these signals inside the block into a KeyboardInterrupt; ignore the rest.

    Signals that the user's program handles itself or ignores (`nohup`) are left alone. Only the
    main thread can set handlers; in other threads this does nothing. A nested block shares the
    state of the outer one.
    """
    if (outer := _current()) is not None:
        try:
            yield outer
        finally:
            outer.settled()
        return
    state = Ending()
    if threading.current_thread() is not threading.main_thread():
        yield state
        return
    before: dict[signal.Signals, Any] = {}
    usual_hook = sys.unraisablehook

    def hook(told: Any) -> None:
        # Python drops exceptions in `__del__` and in callbacks of the garbage collector.
        if state.raised and not state.settling and told.exc_type is KeyboardInterrupt:
            state.swallowed()
        else:
            usual_hook(told)

    for number in (*ENDING, LEAVING):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            before[number] = signal.signal(number, state.hear)
    sys.unraisablehook = hook
    try:
        yield state
    finally:
        state.close()
        if sys.unraisablehook is hook:
            sys.unraisablehook = usual_hook
        for number, handler in before.items():
            if signal.getsignal(number) == state.hear:
                signal.signal(number, handler)


@contextmanager
def delayed() -> Iterator[None]:
    """Delay an interruption until the end of the block.

    For the start of a process: an interruption between its start and the lines that end it would
    leave it behind.
    """
    state = _current()
    if state is None:
        yield
        return
    with state.delayed():
        yield


def interrupted(more: str = "") -> Interrupted:
    """Return the error that tells of the signal that was heard."""
    state = _current() or Ending()
    return Interrupted(state.reason + more, state.heard or signal.SIGINT)


def ignore() -> None:
    """Ignore all these signals from now on: the process is about to end."""
    for number in (*ENDING, LEAVING):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def relaying(tell: Callable[[int], None]) -> Iterator[None]:
    """While the body runs, a request to leave is passed on: `tell` gets the signal's number."""
    _relays.append(tell)
    try:
        yield
    finally:
        _relays.remove(tell)


def relay(number: int, frame: FrameType | None = None) -> None:
    """Pass a request to leave on to the ranks; may be the signal's handler."""
    for tell in tuple(_relays):
        tell(number)


def _current() -> Ending | None:
    """Return the state of the `ending` block that this process is in; None outside one."""
    owners = [getattr(signal.getsignal(number), "__self__", None) for number in ENDING]
    return next((owner for owner in owners if isinstance(owner, Ending)), None)
