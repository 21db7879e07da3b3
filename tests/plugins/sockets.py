"""A transport of one's own in one file: TCP sockets, with nothing but the core.

It has `isend`, `irecv`, `wait_any`, `barrier`, `group`, `connect` and `close`; all else is what
Paceline writes on top of these. A thread per peer reads all that comes, so a send never blocks.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PeerLost
from paceline.registry import transports
from paceline.transport.base import Rendezvous, Traits, Transport, Work, check_ranks
from paceline.transport.c10d.store import connect_store, patience_for

HEAD = struct.Struct("<iiq")  # group, tag, bytes
BARRIER = 7


class Line:
    """This process's sockets, shared by the world and all groups of it."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rank, self.arrived = rendezvous.rank, threading.Condition()
        self.inbox: dict[tuple[int, int, int], deque[bytes]] = defaultdict(deque)
        self.gone: set[int] = set()
        store = self.store = connect_store(rendezvous)
        listening = socket.create_server((rendezvous.own, 0))
        prefix = f"sockets/{rendezvous.generation}"
        store.set(f"{prefix}/{self.rank}", str(listening.getsockname()[1]))
        self.peers: dict[int, socket.socket] = {}
        for peer in range(self.rank):
            port = int(store.get(f"{prefix}/{peer}"))
            self.peers[peer] = socket.create_connection((rendezvous.own, port))
            self.peers[peer].sendall(struct.pack("<i", self.rank))
        for _ in range(self.rank + 1, rendezvous.size):
            connection, _ = listening.accept()
            self.peers[struct.unpack("<i", connection.recv(4, socket.MSG_WAITALL))[0]] = connection
        listening.close()
        for peer, connection in self.peers.items():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._read, args=(peer, connection), daemon=True).start()

    def _read(self, peer: int, connection: socket.socket) -> None:
        file = connection.makefile("rb")
        while len(head := file.read(HEAD.size)) == HEAD.size:
            group, tag, length = HEAD.unpack(head)
            content = file.read(length)
            with self.arrived:
                self.inbox[peer, group, tag].append(content)
                self.arrived.notify_all()
        with self.arrived:
            self.gone.add(peer)
            self.arrived.notify_all()


class Sent:
    def wait(self) -> None:
        return


class Receive:
    def __init__(self, transport: Sockets, tensor: Tensor, source: int, tag: int) -> None:
        self.line, self.tensor, self.source = transport.line, tensor, source
        self.key = (source, transport.number, tag)

    def ready(self) -> bool:
        return bool(self.line.inbox[self.key]) or self.source in self.line.gone

    def wait(self) -> None:
        with self.line.arrived:
            self.line.arrived.wait_for(self.ready)
            if not self.line.inbox[self.key]:
                raise PeerLost(self.source, "its connection closed")
            content = self.line.inbox[self.key].popleft()
        if content:
            flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            self.tensor.view(-1).view(torch.uint8).copy_(flat)


@transports.register("sockets")
class Sockets(Transport):
    """Processes over plain TCP sockets."""

    traits = Traits(crosses_hosts=True, over_network=True)

    def __init__(
        self, line: Line, members: tuple[int, ...], deadline_s: float, patience: Any, number: int
    ) -> None:
        super().__init__(members.index(line.rank), len(members), deadline_s, patience=patience)
        self.line, self.members, self.number = line, members, number

    @classmethod
    def connect(cls, rendezvous: Rendezvous) -> Sockets:
        world = tuple(range(rendezvous.size))
        line = Line(rendezvous)
        patience = patience_for(rendezvous, line.store)
        return cls(line, world, rendezvous.waits.deadline_s, patience, 0)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        try:
            connection = self.line.peers[self.members[to]]
            connection.sendall(HEAD.pack(self.number, tag, content.nbytes) + content.tobytes())
        except OSError:
            raise PeerLost(self.members[to], "its connection closed") from None
        return Sent()

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        return Receive(self, tensor, self.members[source], tag)

    def wait_any(self, works: Sequence[Work], patience_s: float | None = None) -> int | None:
        def found() -> int | None:
            done = (i for i, w in enumerate(works) if not isinstance(w, Receive) or w.ready())
            return next(done, None)

        with self.line.arrived:
            self.line.arrived.wait_for(lambda: found() is not None, patience_s)
            return found()

    def barrier(self) -> None:
        word = torch.zeros(1)
        for peer in range(1, self.size) if self.rank == 0 else ():
            self.irecv(word, peer, BARRIER).wait()
        if self.rank:
            self.isend(word, 0, BARRIER)
            self.irecv(word, 0, BARRIER).wait()
        for peer in range(1, self.size) if self.rank == 0 else ():
            self.isend(word, peer, BARRIER)

    def group(self, ranks: Sequence[int]) -> Sockets:
        members = tuple(self.members[r] for r in check_ranks(ranks, self.size, self.rank))
        number = hash(members) & 0x7FFFFFFF
        return Sockets(self.line, members, self.deadline_s, self.patience, number)

    def close(self) -> None:
        for connection in self.line.peers.values():
            connection.close()
