"""The picture of a run under way, on request: Ctrl-\\ shows what each rank does."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from paceline.transport.status.line import FOLDER
from paceline.transport.status.picture import lines, take_picture


@contextmanager
def shown_on_request(out: Path, alone: bool = True) -> Iterator[None]:
    """While the block runs, SIGQUIT (Ctrl-\\) prints what each rank does; the run goes on.

    A program that handles SIGQUIT itself keeps its handler. `alone`: this process starts the ranks
    and is none of them.
    """
    process = os.getpid()

    def show(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:  # not in a rank that has just been forked
            with suppress(OSError):
                text = "\n".join(lines(take_picture(out / FOLDER)))
                print(text, file=sys.stderr, flush=True)

    free = signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL
    if not (alone and free and threading.current_thread() is threading.main_thread()):
        yield
        return
    signal.signal(signal.SIGQUIT, show)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGQUIT) is show:
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
