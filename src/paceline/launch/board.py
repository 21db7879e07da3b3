"""Hosting the board of a run: in a thread of the launcher, or in a small process beside rank 0."""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe, get_context

from paceline.errors import RunFailed, TransportError
from paceline.launch.addresses import LOOPBACK, is_loopback
from paceline.launch.processes import end_processes, obey_parent
from paceline.testbed.hosts import LAUNCHER, Testbed
from paceline.transport.base import Rendezvous, Waits
from paceline.transport.board.server import Server
from paceline.transport.board.wire import TCP, UNIX

MAIN = "from paceline.transport.board.server import main; main()"
BACKLOG = 256


class Hosted:
    """A board that a thread of this process serves. Its notices arrive at `told`."""

    def __init__(
        self, listening: socket.socket, address: str, lost_s: float, secret: bytes = b""
    ) -> None:
        self.address, self.secret = address, secret or secrets.token_bytes(32)
        self.told, self._tell = Pipe(duplex=False)
        self._server = Server(listening, self.secret, lost_s, self._say)
        self._server.start()

    def _say(self, text: str) -> None:
        with suppress(OSError):
            self._tell.send(text)

    def notices(self) -> list[str]:
        """What the board has told since the last call."""
        found = []
        while self.told.poll():
            found.append(str(self.told.recv()))
        return found

    def close(self) -> None:
        self._server.close()
        self._tell.close()
        self.told.close()


def board_for(bed: Testbed | None, lost_s: float) -> Hosted:
    """Host the board of ranks that this process starts, here or in a testbed's network.

    This starts a thread, so that nothing may be forked afterwards.
    """
    if bed is None:
        return Hosted(*listen_here(), lost_s)
    listening = _listening_in(bed)
    return Hosted(listening, f"{TCP}{bed.launcher}:{listening.getsockname()[1]}", lost_s)


def rendezvous_for(
    board: Hosted, bed: Testbed | None, rank: int, size: int, waits: Waits
) -> Rendezvous:
    """Return how a rank finds the others: on this host, or across a testbed's network."""
    own = LOOPBACK if bed is None else bed.address(bed.host(rank))
    alone = bed is not None and bed.hosts >= size
    return Rendezvous(
        rank, size, board.address, board.secret, waits, own=own, alone=alone, watched=True
    )


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

    Only the address behind that name is used, unless it is loopback here.
    """
    found = [""]
    with suppress(OSError):
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, socket.AF_INET)]
    own = next((address for address in found if address and not is_loopback(address)), "")
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


def _listening_in(bed: Testbed) -> socket.socket:
    """Open a socket inside the testbed's network. A short-lived child goes there to make it."""
    ours, theirs = socket.socketpair()
    process = get_context("fork").Process(
        target=_listen_there, args=(bed, theirs, os.getpid()), name="board"
    )
    process.start()
    theirs.close()
    try:
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    finally:
        ours.close()
        end_processes([process])
    if not descriptors:
        raise RunFailed("the ranks' board in the testbed could not be opened")
    return socket.socket(fileno=descriptors[0])


def _listen_there(bed: Testbed, answer: socket.socket, parent: int) -> None:
    obey_parent(parent)
    bed.enter(LAUNCHER)
    listening = socket.create_server((bed.launcher, 0), backlog=BACKLOG)
    socket.send_fds(answer, [b"x"], [listening.fileno()])
    os._exit(0)
