"""Signals that ask a run to end.

The first one interrupts the run. Further ones do not disturb it while it writes its record.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from paceline.errors import Interrupted

# Sent by Ctrl-C; by a batch system or a container; by a terminal that is closed.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN_S = 0.002  # between two looks whether an import has ended
IMPORT_S = 30.0  # the longest import that is waited for


class Ending:
    """The first signal that arrived, and whether one may interrupt now."""

    def __init__(self) -> None:
        self.heard: signal.Signals | None = None
        self.settling = False  # True while the record is written: no signal interrupts that
        self.raised = False  # the signal has interrupted something
        self._heard_at = 0.0
        self._imports = _imports(sys._getframe())  # those that this block itself is part of
        self._alarm: Any = None  # the handler of SIGALRM while this object uses it

    def hear(self, number: int, frame: FrameType | None) -> None:
        if self.heard is None:
            self.heard, self._heard_at = signal.Signals(number), time.monotonic()
        self._interrupt(frame)

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

    for number in ENDING:
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
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def _current() -> Ending | None:
    """Return the state of the `ending` block that this process is in; None outside one."""
    owners = [getattr(signal.getsignal(number), "__self__", None) for number in ENDING]
    return next((owner for owner in owners if isinstance(owner, Ending)), None)
