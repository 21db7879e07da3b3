"""Signals that ask a run to end.

The first one interrupts the run. Further ones do not disturb it while it writes its record.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Sent by Ctrl-C; by a batch system or a container; by a terminal that is closed.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ending:
    """The first signal that arrived, and whether one may interrupt now."""

    def __init__(self) -> None:
        self.heard: signal.Signals | None = None
        self.settling = False  # True while the record is written: no signal interrupts that
        self.raised = False  # the signal has interrupted something

    def hear(self, number: int, frame: FrameType | None) -> None:
        first, self.heard = self.heard is None, self.heard or signal.Signals(number)
        if first and not self.settling:
            self.raised = True
            raise KeyboardInterrupt

    def settled(self) -> None:
        """The record is written: a signal that came meanwhile interrupts what comes next."""
        self.settling = False
        if self.heard is not None and not self.raised:
            self.raised = True
            raise KeyboardInterrupt

    @property
    def reason(self) -> str:
        if self.heard in (None, signal.SIGINT):
            return "interrupted"
        return f"interrupted by {self.heard.name}"


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
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, state.hear)
    try:
        yield state
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) == state.hear:
                signal.signal(number, handler)


def ignore() -> None:
    """Ignore all these signals from now on: the process is about to end."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def _current() -> Ending | None:
    """Return the state of the `ending` block that this process is in; None outside one."""
    owners = [getattr(signal.getsignal(number), "__self__", None) for number in ENDING]
    return next((owner for owner in owners if isinstance(owner, Ending)), None)


@contextmanager
def held_back() -> Iterator[None]:
    """Delay signals until the end of the block.

    For imports of PyTorch, which cannot be repeated after an interruption.
    """
    state = Ending()
    state.settling = True
    before = {
        number: signal.signal(number, state.hear)
        for number in ENDING
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if state.heard is not None:
        signal.raise_signal(state.heard)
