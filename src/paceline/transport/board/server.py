"""The board's server: one thread, or one small process, that answers ranks with the run's secret.

A connection that has not shown the secret may send a few hundred bytes within a few seconds, and
there are few of those at a time: a stranger costs the run nothing but a notice.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.transport.board import wire
from paceline.transport.board.wire import NotARank, Sealed

CREDENTIALS = struct.Struct("3i")  # process, user, group
HELLO_S = 10.0  # for a connection to show the secret
ACCEPTED = 32  # connections at once, before ranks are answered again
MOST_STRANGERS = 64  # connections that have not shown it yet
MOST_WAITING_BYTES = 256 << 20  # of answers that a rank does not read
TELL_EVERY_S = 60.0  # between two notices about strangers


@dataclass(eq=False)
class Line:
    """One connection. `sealed` is None until its other end has shown the secret."""

    socket: socket.socket
    where: str
    since: float
    of_board: bytes = field(default_factory=wire.nonce)
    sealed: Sealed | None = None
    rank: int = -1
    alive: bool = False  # the rank holds it open as long as it lives
    left: bool = False  # the rank has said goodbye
    came: bytearray = field(default_factory=bytearray)
    out: bytearray = field(default_factory=bytearray)


class Server:
    """Keys and values, ranks that are gone, and requests that wait for a key."""

    def __init__(
        self, listening: socket.socket, secret: bytes, lost_s: float, say: Callable[[str], None]
    ) -> None:
        self._listening, self._secret, self._lost_s, self._say = listening, secret, lost_s, say
        self._values: dict[str, str] = {}
        self._waiting: list[tuple[Line, str, float]] = []  # requests for keys, until when
        self._gone: dict[int, str] = {}
        self._lines: set[Line] = set()
        self._strangers, self._told_at = 0, -TELL_EVERY_S
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closing = False

    # --- its thread

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name="board", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close all connections."""
        self._closing = True
        with suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(5.0)

    def run(self, lifeline: int | None = None) -> None:
        """Answer until `close`, or until the other end of `lifeline` (a pipe) is closed."""
        if lifeline is not None:
            self._selector.register(lifeline, selectors.EVENT_READ)
        try:
            while not self._closing:
                for key, events in self._selector.select(self._patience_s()):
                    if key.fileobj == lifeline:
                        return
                    if key.fileobj is self._listening:
                        for _ in range(ACCEPTED):
                            self._accept()
                    elif isinstance(key.data, Line):
                        self._serve(key.data, events)
                self._look_at_the_clock()
        finally:
            for line in tuple(self._lines):
                self._drop(line)
            self._selector.close()
            for one in (self._listening, self._wake, self._woken):
                one.close()

    def _patience_s(self) -> float | None:
        now, times = time.monotonic(), [until for _, _, until in self._waiting]
        times += [line.since + HELLO_S for line in self._lines if line.sealed is None]
        return max(0.0, min(times) - now) if times else None

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for line in [one for one in self._lines if one.sealed is None]:
            if now > line.since + HELLO_S:
                self._turn_away(line)
        over = [wait for wait in self._waiting if now >= wait[2]]
        self._waiting = [wait for wait in self._waiting if now < wait[2]]
        for line, _, _ in over:
            self._answer(line, {"value": None})

    # --- connections

    def _accept(self) -> None:
        try:
            accepted, where = self._listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.05)  # a flood: the oldest strangers will be turned away
            return
        if not _same_user(accepted):
            self._strangers += 1
            self._tell("another user of this host")
            accepted.close()
            return
        accepted.setblocking(False)
        wire.keep_alive(accepted, self._lost_s)
        name = f"{where[0]}:{where[1]}" if isinstance(where, tuple) else "this host"
        line = Line(accepted, name, time.monotonic())
        self._lines.add(line)
        self._selector.register(accepted, selectors.EVENT_READ, line)
        unknown = sorted((one for one in self._lines if one.sealed is None), key=_age)
        for oldest in unknown[:-MOST_STRANGERS]:
            self._turn_away(oldest)
        if line in self._lines:
            self._send(line, wire.GREETING + line.of_board)

    def _serve(self, line: Line, events: int) -> None:
        if line not in self._lines:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._send(line, b"")
            if events & selectors.EVENT_READ and line in self._lines:
                part = line.socket.recv(1 << 16)
                if not part:
                    self._ended(line, "its process has ended")
                    return
                line.came += part
                self._read(line)
        except BlockingIOError:
            return
        except NotARank:
            self._turn_away(line)
        except (ValueError, KeyError, TypeError, LookupError):
            self._turn_away(line)  # not of our making
        except OSError as error:
            silent = error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
            host = f"its host has not answered for {self._lost_s:g} s"
            self._ended(line, host if silent else "its connection to the board closed")

    def _read(self, line: Line) -> None:
        """Take all whole messages that have come."""
        while line in self._lines and len(line.came) >= wire.HEAD.size:
            (length,) = wire.HEAD.unpack_from(line.came)
            nonce = wire.NONCE_BYTES if line.sealed is None else 0
            most = wire.MOST_HELLO_BYTES if line.sealed is None else wire.MOST_BYTES
            if length > most:
                raise NotARank("too long")
            start = wire.HEAD.size + nonce + wire.MAC_BYTES
            if len(line.came) < start + length:
                return
            whole = bytes(line.came[: start + length])
            del line.came[: start + length]
            mac, body = whole[start - wire.MAC_BYTES : start], whole[start:]
            if line.sealed is None:
                self._shake_hands(line, whole[wire.HEAD.size : wire.HEAD.size + nonce], mac, body)
            else:
                self._obey(line, line.sealed.open(mac, body))

    def _shake_hands(self, line: Line, of_rank: bytes, mac: bytes, body: bytes) -> None:
        right = wire.proof(self._secret, b"rank", line.of_board, of_rank, body)
        if not wire.same(mac, right):
            raise NotARank("another secret, or none")
        said = json.loads(body)
        line.rank, line.alive = int(said["rank"]), bool(said["alive"])
        line.sealed = wire.session(self._secret, line.of_board, of_rank, board=True)
        if line.alive:
            self._gone.pop(line.rank, None)  # a rank that was started again
        self._send(line, wire.welcome(self._secret, line.of_board, of_rank))

    def _ended(self, line: Line, reason: str) -> None:
        """A connection is over: its rank is gone, unless it has said goodbye."""
        if line.alive and not line.left:
            self._gone.setdefault(line.rank, reason)
        self._drop(line)

    def _turn_away(self, line: Line) -> None:
        if line.sealed is None:
            self._strangers += 1
            self._tell(f"something at {line.where} that does not know this run's secret")
        self._ended(line, "it sent a message that is not authenticated")

    def _tell(self, what: str) -> None:
        now = time.monotonic()
        if now > self._told_at + TELL_EVERY_S:
            self._told_at = now
            often = "" if self._strangers == 1 else f" ({self._strangers} times so far)"
            self._say(f"{what} has tried to join this run and was turned away{often}")

    def _drop(self, line: Line) -> None:
        self._lines.discard(line)
        self._waiting = [wait for wait in self._waiting if wait[0] is not line]
        with suppress(KeyError, ValueError):
            self._selector.unregister(line.socket)
        line.socket.close()

    def _send(self, line: Line, content: bytes) -> None:
        """Send as much as the connection takes, and the rest when it takes more."""
        line.out += content
        if len(line.out) > MOST_WAITING_BYTES:
            self._ended(line, "it does not read the board's answers")
            return
        try:
            while line.out:
                del line.out[: line.socket.send(line.out)]
        except BlockingIOError:
            pass
        except OSError:
            self._ended(line, "its connection to the board closed")
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.out else 0)
        self._selector.modify(line.socket, events, line)

    # --- what ranks ask for

    def _answer(self, line: Line, content: dict[str, Any]) -> None:
        assert line.sealed is not None
        if line in self._lines:
            self._send(line, line.sealed.seal(content))

    def _obey(self, line: Line, asked: dict[str, Any]) -> None:
        operation, key, values = asked["do"], str(asked.get("key", "")), self._values
        answer: Any = None
        if operation == "set":
            self._set(key, str(asked["value"]))
        elif operation == "get":
            if key not in values and asked["wait_s"] > 0:
                self._waiting.append((line, key, time.monotonic() + float(asked["wait_s"])))
                return
            answer = values.get(key)
        elif operation == "check":
            answer = all(one in values for one in asked["keys"])
        elif operation == "add":
            answer = int(wire.raw(values.get(key, "")) or b"0") + int(asked["value"])
            self._set(key, wire.text(str(answer)))
        elif operation == "swap":
            now = values.get(key)
            if now == asked["expected"] or (now is None and not asked["expected"]):
                self._set(key, str(asked["value"]))
            answer = values.get(key, asked["expected"])
        elif operation == "delete":
            answer = values.pop(key, None) is not None
        elif operation == "count":
            answer = len(values)
        elif operation == "gone":
            answer = {str(rank): reason for rank, reason in self._gone.items()}
        elif operation == "bye":
            line.left = True
            self._gone.pop(line.rank, None)
        else:
            raise NotARank(f"no such request: {operation}")
        self._answer(line, {"value": answer})

    def _set(self, key: str, value: str) -> None:
        self._values[key] = value
        here = [wait for wait in self._waiting if wait[1] == key]
        self._waiting = [wait for wait in self._waiting if wait[1] != key]
        for line, _, _ in here:
            self._answer(line, {"value": value})


def _age(line: Line) -> float:
    return line.since


def _same_user(line: socket.socket) -> bool:
    """Whether the other end of a connection on this host is this user, or root."""
    if line.family != getattr(socket, "AF_UNIX", None) or not hasattr(socket, "SO_PEERCRED"):
        return True
    found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return CREDENTIALS.unpack(found)[1] in (os.geteuid(), 0)


def main() -> None:
    """Serve in a process of its own: `python -c ... DESCRIPTOR LOST_S`.

    The secret comes on the standard input, which stays open as long as the parent lives.
    """
    # Launchers signal all processes of a rank; the parent's end is this process's end.
    ignored = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    listening = socket.socket(fileno=int(sys.argv[1]))
    secret = bytes.fromhex(os.read(0, 1 << 12).decode().strip())
    print("ready", flush=True)
    os.dup2(2, 1)

    def say(text: str) -> None:
        print(f"paceline: {text}", file=sys.stderr, flush=True)

    Server(listening, secret, float(sys.argv[2]), say).run(lifeline=0)
