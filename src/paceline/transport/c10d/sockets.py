"""The TCP connections of one process group of gloo.

`ProcessGroupGloo.abort()` does not end a call that waits (torch 2.13). A call does end when its
connections are shut down. gloo does not tell which are its own, so they are taken to be the
sockets that appear while the group is made, without those that lead to the run's board.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from types import TracebackType

from paceline.transport.board.client import descriptors


class Sockets:
    """The sockets that this process has opened inside a `with` block."""

    def __init__(self) -> None:
        self._before: dict[int, str] = {}
        self._ports: set[int] = set()  # where this process listened before (the ranks' store)
        self._made: dict[int, str] | None = None  # None: the block is not left yet

    def __enter__(self) -> Sockets:
        self._before = _sockets()
        for descriptor in self._before:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as own:
                if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    self._ports |= {_port(own)}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._made = self._new()

    def _new(self) -> dict[int, str]:
        return {fd: name for fd, name in _sockets().items() if self._before.get(fd) != name}

    def shut(self) -> None:
        """Shut the connections down: calls of the library that wait for them raise."""
        now, of_board = _sockets(), descriptors()
        for descriptor, name in (self._made if self._made is not None else self._new()).items():
            if now.get(descriptor) == name and descriptor not in of_board:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as own:
                    own.getpeername()  # raises for a listening socket, which gloo must not lose
                    if _port(own) not in self._ports | {0}:
                        own.shutdown(socket.SHUT_RDWR)


def _port(own: socket.socket) -> int:
    """The local port of a TCP socket; 0: it is another kind of socket."""
    return int(own.getsockname()[1]) if own.family in (socket.AF_INET, socket.AF_INET6) else 0


def _sockets() -> dict[int, str]:
    """The sockets of this process: the name of each (its number in the kernel) by descriptor."""
    found = {}
    with suppress(OSError):
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{entry}")
                if name.startswith("socket:"):
                    found[int(entry)] = name
    return found
