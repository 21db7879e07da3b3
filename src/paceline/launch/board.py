"""Hosting the board of a run: in a thread of the launcher, or in a small process beside rank 0."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from multiprocessing import Pipe, get_context

from paceline.errors import RunFailed
from paceline.launch.addresses import LOOPBACK
from paceline.launch.apart import BACKLOG
from paceline.launch.apart import HostedApart as HostedApart
from paceline.launch.apart import listen_for as listen_for
from paceline.launch.apart import listen_here as listen_here
from paceline.launch.processes import end_processes, obey_parent
from paceline.testbed.hosts import LAUNCHER, Testbed
from paceline.transport.base import Rendezvous, Waits
from paceline.transport.board.server import Server
from paceline.transport.board.wire import TCP


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
