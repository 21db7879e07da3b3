"""A board in a small process beside rank 0, and the sockets that boards listen on.

This module imports no PyTorch: the supervisor of a host that SSH reaches (launch/ssh/) uses it.
"""

from __future__ import annotations

import atexit
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from paceline.errors import TransportError
from paceline.launch.addresses import LOOPBACK, is_loopback
from paceline.transport.board.wire import TCP, UNIX

MAIN = "from paceline.transport.board.server import main; main()"
BACKLOG = 256


def listen_here() -> tuple[socket.socket, str]:
    """Listen for ranks of this host only; return the socket and its address.

    On Linux it is a Unix socket with an abstract name, which leaves no file behind.
    """
    if hasattr(socket, "SO_PEERCRED"):  # Linux
        name = f"paceline-{secrets.token_hex(16)}"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(f"\0{name}")
        listening.listen(BACKLOG)
        return listening, UNIX + name
    listening = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
    return listening, f"{TCP}{LOOPBACK}:{listening.getsockname()[1]}"


def listen_for(host: str, port: int = 0) -> tuple[socket.socket, str]:
    """Listen for ranks on other hosts, which know this one as `host`.

    Only the address behind that name is used. A name that is loopback here may be another address
    for other hosts, so that all addresses are used for it.
    """
    found = [""]
    with suppress(OSError):
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, socket.AF_INET)]
    own = next((address for address in found if address and not is_loopback(address)), "")
    if is_loopback(host):  # an address, or localhost: the same for all
        own = found[0] or LOOPBACK
    try:
        listening = socket.create_server((own or "0.0.0.0", port), backlog=BACKLOG)
    except OSError as error:
        raise TransportError(
            f"rank 0 cannot listen on {own or host}:{port} for the other ranks: {error.strerror}"
        ) from None
    return listening, f"{TCP}{own or host}:{listening.getsockname()[1]}"


class HostedApart:
    """A small process that serves a board. It ends with this process.

    `say` is called with its notices; without it they appear on standard error.
    """

    def __init__(
        self,
        listening: socket.socket,
        address: str,
        secret: bytes,
        lost_s: float,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.address, self.secret = address, secret
        descriptor = listening.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", MAIN, str(descriptor), str(lost_s)],
            pass_fds=[descriptor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if say is not None else None,
        )
        listening.close()
        if say is not None:
            threading.Thread(target=self._tell, args=(say,), name="board", daemon=True).start()
        atexit.register(self.end)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(secret.hex().encode() + b"\n")
        self._process.stdin.flush()  # and stays open: the process ends when it is closed
        with self._process.stdout as answer:
            if not answer.readline():
                raise TransportError("the board of this run could not be started")

    def _tell(self, say: Callable[[str], None]) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            say(line.decode(errors="replace").rstrip())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()  # a child of this process may hold a copy of that pipe
        self._process.wait()
