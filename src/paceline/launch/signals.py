"""Signals that ask a run to end: the first one interrupts it; those that follow do not disturb what
it then puts in order.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Ctrl-C; a batch system, a container; a terminal that is closed
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ending:
    """What has been heard."""

    def __init__(self) -> None:
        self.heard: signal.Signals | None = None
        self.settling = False  # the record is being written: nothing may interrupt that

    def hear(self, number: int, frame: FrameType | None) -> None:
        first, self.heard = self.heard is None, self.heard or signal.Signals(number)
        if first and not self.settling:
            raise KeyboardInterrupt

    @property
    def reason(self) -> str:
        return (
            "interrupted"
            if self.heard in (None, signal.SIGINT)
            else f"interrupted by {self.heard.name}"
        )


@contextmanager
def ending() -> Iterator[Ending]:
    """Meanwhile each of these signals is an interruption (KeyboardInterrupt), and only the first of
    them.

    Where a person's program has a handler of its own, or ignores the signal (`nohup`), it stays as
    it is; and only a program's main thread can have handlers at all. Inside another `ending` it is
    the same one.
    """
    if (outer := _current()) is not None:
        try:
            yield outer
        finally:
            outer.settling = False
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
    """From now on none of them has an effect: the process is about to end."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def _current() -> Ending | None:
    """The one that this process is in already."""
    owners = [getattr(signal.getsignal(number), "__self__", None) for number in ENDING]
    return next((owner for owner in owners if isinstance(owner, Ending)), None)


@contextmanager
def held_back() -> Iterator[None]:
    """Signals that come meanwhile take effect afterwards: an import of PyTorch that is interrupted
    leaves half of it behind.
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
