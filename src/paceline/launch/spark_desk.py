"""The desk of a run on Spark: where the driver asks the ranks to leave, and hears that they did.

It is a board on the driver's address, with a secret that only the ranks of this run know. Spark
itself has no way to tell a task to end with a checkpoint: it kills the task.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import (
    Interrupted,
    PacelineError,
    RunFailed,
    TransportError,
    from_plain,
    to_plain,
)
from paceline.launch.apart import BACKLOG
from paceline.launch.board import Hosted
from paceline.launch.signals import relay
from paceline.transport.board.client import Board
from paceline.transport.board.wire import TCP

LOOK_S = 0.2  # between two looks at the desk
LOST_S = 60.0  # for a host that no longer answers
END_S = 20.0  # for the ranks to end after the driver has asked them to stop
LEAVE, STOP, LEFT, HERE, FAILED = "leave", "stop", "left", "here", "failed"
DRIVER = -1


@dataclass(frozen=True)
class Address:
    """What a rank needs to find the desk."""

    address: str
    secret: bytes = field(repr=False)


class Desk:
    """The driver's side of the desk, for a `with` block. `say` is called with its notices."""

    def __init__(self, host: str, say: Callable[[str], None]) -> None:
        self._host, self._say = host, say
        self._wish: int | None = None
        self._board: Board | None = None
        self._began = False

    def __enter__(self) -> Desk:
        try:
            listening = socket.create_server((self._host, 0), backlog=BACKLOG)
        except OSError as error:
            raise RunFailed(
                f"the driver cannot listen on {self._host} (spark.driver.host) for the ranks:"
                f" {error.strerror}"
            ) from None
        address = f"{TCP}{self._host}:{listening.getsockname()[1]}"
        self._hosted = Hosted(listening, address, LOST_S)
        self._board = Board(address, self._hosted.secret, DRIVER)
        return self

    def __exit__(self, *_: Any) -> None:
        self._hosted.close()

    @property
    def address(self) -> Address:
        return Address(self._hosted.address, self._hosted.secret)

    def ask(self, number: int) -> None:
        """Ask the ranks to leave with a checkpoint. A handler of signals may call this."""
        self._wish = number

    def begun(self) -> bool:
        """Whether a rank has come, so that the ranks hear what is asked."""
        self._began = self._began or self._on_board.check([HERE])
        return self._began

    def look(self) -> None:
        """Pass on what was asked, and the board's notices. Only the driver's thread calls this."""
        for text in self._hosted.notices():
            self._say(f"paceline: {text}")
        if self._wish is not None:
            wish, self._wish = self._wish, None
            self._on_board.set(LEAVE, str(int(wish)))

    def stop(self) -> None:
        """Ask the ranks to end at once. The driver writes the record."""
        self._on_board.set(STOP, "now")

    def left(self) -> Interrupted | None:
        """Return why the ranks have left; None: they have not."""
        if not self._on_board.check([LEFT]):
            return None
        text, number = json.loads(self._on_board.get(LEFT))
        return Interrupted(text, number)

    def failures(self, ranks: int) -> dict[int, PacelineError]:
        """Return why ranks have failed, as they say it themselves."""
        told = [rank for rank in range(ranks) if self._on_board.check([f"{FAILED}/{rank}"])]
        found = {rank: json.loads(self._on_board.get(f"{FAILED}/{rank}")) for rank in told}
        return {rank: from_plain(failure) for rank, failure in found.items()}

    @property
    def _on_board(self) -> Board:
        assert self._board is not None
        return self._board


class AtDesk:
    """As a rank, obey the desk while a `with` block runs; end with the driver."""

    def __init__(self, desk: Address, rank: int) -> None:
        self._desk, self._rank = desk, rank
        self._asked, self._over = threading.Event(), threading.Event()
        self._board: Board | None = None

    def __enter__(self) -> AtDesk:
        with suppress(TransportError):  # without the desk a run can be trained, and not be left
            board = Board(self._desk.address, self._desk.secret, self._rank, lost_s=LOST_S)
            board.set(HERE, "yes")
            self._board = board
            threading.Thread(target=self._look, args=(board,), name="desk", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()

    def _look(self, board: Board) -> None:
        passed_on = False
        while not self._over.wait(LOOK_S):
            try:
                if board.check([STOP]):
                    os._exit(1)  # ranks that end one after the other would tell of lost ranks
                if not passed_on and board.check([LEAVE]):
                    passed_on = True
                    self._asked.set()
                    relay(int(board.get(LEAVE)))
            except (TransportError, RuntimeError):
                if not self._over.is_set():  # the driver is gone: leave with a checkpoint
                    os.kill(os.getpid(), signal.SIGTERM)
                return

    def left(self, stop: KeyboardInterrupt) -> bool:
        """Tell why this rank has left early. Returns False: the driver has not asked for that.

        Another rank may have looked at the desk earlier, and this one leaves because all do.
        """
        if not self._asked.is_set() and not self._is_asked():
            return False
        if self._rank == 0:
            number = int(getattr(stop, "number", signal.SIGINT))
            self._put(LEFT, [str(stop), number])
        return True

    def _is_asked(self) -> bool:
        with suppress(TransportError, RuntimeError):
            return self._board is not None and self._board.check([LEAVE])
        return False

    def failed(self, failure: PacelineError) -> bool:
        """Tell why this rank has failed. Returns whether the driver has heard it."""
        return self._put(f"{FAILED}/{self._rank}", to_plain(failure))

    def _put(self, key: str, content: Any) -> bool:
        if self._board is None:
            return False
        try:
            self._board.set(key, json.dumps(content, default=str))
        except (TransportError, RuntimeError):
            return False
        return True


def finished(over: threading.Event, desk: Desk, deadline_s: float) -> bool:
    """Look at the desk until something is over; False: it is not within the deadline.

    Not `Thread.join`: a signal that interrupts it makes Python 3.11 take the thread for ended.
    """
    until = time.monotonic() + deadline_s
    while True:
        ended = over.wait(min(LOOK_S, deadline_s))
        with suppress(TransportError):
            desk.look()
        if ended or time.monotonic() >= until:
            return ended
