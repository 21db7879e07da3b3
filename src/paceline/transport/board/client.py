"""A rank's side of the board, which PyTorch's libraries use as their key-value store.

Each thread has a connection of its own, because one thread may wait for a key while another asks
for something else. One further connection is only held open: the board takes its end for the end of
the rank.
"""

from __future__ import annotations

import atexit
import errno
import os
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.errors import TransportError
from paceline.transport.board import wire

CONNECT_S = 30.0  # for one attempt to connect and shake hands
MOST_WAIT_S = 20.0  # of one request that waits for a key; longer waits ask again
SUSPENDED_S, ATTEMPTS = 5.0, 5  # a handshake that took longer is tried again
# No way leads there: at the start of a rank the link may be about to come up. (Refused: the host is
# there, and no board is.)
AWAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
AWAY_S, AGAIN_S = 10.0, 0.2  # it is tried for so long, so often
# PyTorch's libraries hold stores without holding the Python object behind them.
_OPEN: list[Board] = []
_LINES: weakref.WeakSet[_Line] = weakref.WeakSet()


class Board(dist.Store):
    """Connects one rank to the board at an address; `under` separates kinds of keys."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        rank: int,
        *,
        lost_s: float = 60.0,
        wait_s: float = 300.0,
        alive: bool = False,
    ) -> None:
        """Connect. `wait_s`: for a key that is not there yet. `alive`: end with this connection."""
        super().__init__()
        self._prefix, self._wait_s = "", wait_s
        self._lines = _Lines(address, secret, rank, lost_s)
        if alive:
            self._lines.hold()
        _OPEN.append(self)

    def under(self, prefix: str) -> Board:
        """The same board with a prefix before all keys."""
        other = Board.__new__(Board)
        dist.Store.__init__(other)
        other._prefix, other._wait_s = f"{self._prefix}{prefix}/", self._wait_s
        other._lines = self._lines
        _OPEN.append(other)
        return other

    def close(self) -> None:
        """Say goodbye: the end of this rank's connection is not taken for a loss."""
        self._lines.let_go()

    def leave(self) -> None:
        """Leave without a goodbye: this rank has failed, and the board takes that for a loss."""
        self._lines.forget()

    def gone(self) -> dict[int, str]:
        """The ranks that have ended without a goodbye, and how that was noticed."""
        found: dict[str, str] = self._ask("gone")
        return {int(rank): reason for rank, reason in found.items()}

    def _ask(self, operation: str, key: str = "", **said: Any) -> Any:
        return self._lines.ask({"do": operation, "key": self._prefix + key, **said})

    # --- the interface of PyTorch's stores

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value=wire.text(value))

    def get(self, key: str) -> bytes:
        return self._get(key, self._wait_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        until = time.monotonic() + (timeout.total_seconds() if timeout else self._wait_s)
        for key in keys:
            self._get(key, max(0.0, until - time.monotonic()))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys=[self._prefix + key for key in keys]))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, value=amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        said = {"expected": wire.text(expected), "value": wire.text(desired)}
        return wire.raw(self._ask("swap", key, **said))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        return int(self._ask("count"))

    def _get(self, key: str, wait_s: float) -> bytes:
        until = time.monotonic() + wait_s
        while True:
            left = until - time.monotonic()
            found = self._ask("get", key, wait_s=max(0.0, min(left, MOST_WAIT_S)))
            if found is not None:
                return wire.raw(found)
            if left <= 0:
                raise TransportError(f"timed out: {key} was not on the board within {wait_s:g} s")


class _Lines:
    """The connections of one process: one per thread, and one that is only held open."""

    def __init__(self, address: str, secret: bytes, rank: int, lost_s: float) -> None:
        self.address, self._secret, self._rank, self._lost_s = address, secret, rank, lost_s
        self._met = False  # the board has answered once
        self._own = threading.local()
        self._held: _Line | None = None

    def hold(self) -> None:
        """Hold a connection open until `let_go`, or until the program has ended without an error.

        Where the process ends in another way, the board takes that for a loss.
        """
        self._held = self._line(alive=True)
        atexit.register(self._end)

    def _end(self) -> None:
        if getattr(sys, "last_value", None) is None:
            self.let_go()

    def let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            with suppress(OSError):
                held.ask({"do": "bye"})
            held.close()

    def forget(self) -> None:
        """Close the connections silently.

        In a forked child these are copies: closed, they do not hide the end of the parent.
        """
        if self._held is not None:
            self._held.close()
            self._held = None
        self._own = threading.local()

    def ask(self, request: dict[str, Any]) -> Any:
        line: _Line | None = getattr(self._own, "line", None)
        if line is None:
            line = self._own.line = self._line()
        try:
            return line.ask(request)
        except BaseException as error:
            line.close()  # an answer may still come, which must not be taken for the next one
            self._own.line = None
            if not isinstance(error, OSError):
                raise
            raise TransportError(
                f"the board of this run does not answer at {self.address} (rank 0 or the launcher"
                f" may have ended): {error.strerror or error}"
            ) from None

    def _line(self, alive: bool = False) -> _Line:
        said = {"rank": self._rank, "alive": alive}
        until, late = time.monotonic() + (0.0 if self._met else min(self._lost_s, AWAY_S)), 0
        while True:
            began = time.monotonic()
            try:
                line = _Line(self.address, self._secret, said, self._lost_s)
                self._met = True
                return line
            except (OSError, ValueError) as error:
                ended = time.monotonic()
                if getattr(error, "errno", None) in AWAY and ended < until:
                    time.sleep(AGAIN_S)
                    continue
                # A process that was stopped during the handshake may have come too late.
                late += 1
                if ended - began < SUSPENDED_S or late == ATTEMPTS:
                    reason = getattr(error, "strerror", None) or error
                    raise TransportError(
                        f"no board of this run answers at {self.address}: {reason}"
                    ) from None


class _Line:
    """One authenticated connection to the board."""

    def __init__(self, address: str, secret: bytes, said: dict[str, Any], lost_s: float) -> None:
        self._socket: socket.socket = wire.reach(address, CONNECT_S, lost_s)
        try:
            if wire.read_exactly(self._socket, len(wire.GREETING)) != wire.GREETING:
                raise ValueError("what listens there is not a board of this version")
            of_board, of_rank = wire.read_exactly(self._socket, wire.NONCE_BYTES), wire.nonce()
            self._socket.sendall(wire.hello(secret, of_board, of_rank, said))
            try:
                answer = wire.read_exactly(self._socket, wire.MAC_BYTES)
            except ConnectionResetError:
                raise ValueError("it does not accept this rank's secret") from None
            if not wire.same(answer, wire.welcome(secret, of_board, of_rank)):
                raise ValueError("it does not know this run's secret")
            self._sealed = wire.session(secret, of_board, of_rank, board=False)
            self._socket.settimeout(None)
            _LINES.add(self)
        except BaseException:
            self._socket.close()
            raise

    def ask(self, request: dict[str, Any]) -> Any:
        """Send a request and return the answer. The kernel ends the wait if the board is gone."""
        self._socket.sendall(self._sealed.seal(request))
        head = wire.read_exactly(self._socket, wire.HEAD.size + wire.MAC_BYTES)
        (length,) = wire.HEAD.unpack_from(head)
        body = wire.read_exactly(self._socket, length)
        return self._sealed.open(head[wire.HEAD.size :], body)["value"]

    def close(self) -> None:
        self._socket.close()

    def __del__(self) -> None:  # a thread has ended, and its connection with it
        if hasattr(self, "_socket"):
            self._socket.close()


def descriptors() -> set[int]:
    """The sockets of this process that lead to a board."""
    return {line._socket.fileno() for line in tuple(_LINES)}


def _forget_connections() -> None:
    for board in _OPEN:
        board._lines.forget()


os.register_at_fork(after_in_child=_forget_connections)
