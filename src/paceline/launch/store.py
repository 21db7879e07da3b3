"""The key-value store through which the ranks of a run meet: which process hosts it, and where."""

from __future__ import annotations

import json
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from paceline.errors import BadRequest, RunFailed, TransportError
from paceline.launch.addresses import LOOPBACK, keep_to_loopback
from paceline.launch.processes import end_processes, obey_parent
from paceline.launch.seat import Seat
from paceline.testbed.hosts import LAUNCHER, Testbed
from paceline.transport.base import Rendezvous
from paceline.transport.c10d.store import first_line, open_store
from paceline.transport.mpi.transport import load as load_mpi

MEET_S = 300.0  # ranks read their data before they meet, and some disks are slow
PLACE_BYTES = 512  # of the message that tells MPI's ranks where the store is

# --- ranks that Paceline starts: this process hosts the store


def store_for(bed: Testbed | None, deadline_s: float) -> Any:
    """Open the store on loopback, or at the launcher's end of a testbed's network."""
    return open_store(LOOPBACK, 0, deadline_s) if bed is None else StoreInTestbed(bed, deadline_s)


def rendezvous_for(
    bed: Testbed | None, rank: int, size: int, port: int, deadline_s: float
) -> Rendezvous:
    """Return how a rank finds the others: on this host, or across a testbed's network."""
    if bed is None:
        return Rendezvous(rank, size, LOOPBACK, port, deadline_s, watched=True)
    own = bed.address(bed.host(rank))
    return Rendezvous(
        rank, size, bed.launcher, port, deadline_s, own=own, alone=bed.hosts >= size, watched=True
    )


class StoreInTestbed:
    """A process inside the testbed's network that hosts the store."""

    def __init__(self, bed: Testbed, deadline_s: float) -> None:
        context = get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_host_in_testbed, args=(bed, deadline_s, theirs, os.getpid()), name="store"
        )
        self._process.start()
        theirs.close()
        try:
            self.port = int(self._pipe.recv())
        except EOFError:
            raise RunFailed("the ranks' store in the testbed could not be opened") from None

    def close(self) -> None:
        self._pipe.close()
        end_processes([self._process])


def _host_in_testbed(bed: Testbed, deadline_s: float, pipe: Connection, parent: int) -> None:
    obey_parent(parent)
    bed.enter(LAUNCHER)
    store = open_store(bed.launcher, 0, deadline_s)
    pipe.send(store.port)
    with suppress(EOFError, OSError):
        pipe.recv()  # returns when the parent closes its end
    os._exit(0)


# --- ranks that torchrun, mpirun or srun has started: the launcher or rank 0 hosts the store


@dataclass(frozen=True)
class Place:
    """Where the ranks of a launcher meet, and this rank's connection to the store there."""

    host: str
    port: int
    store: Any
    secret: bytes  # known to the ranks of this run only; empty: the launcher passes none on


def find_place(seat: Seat) -> Place:
    """Connect to the store of the seat's run; rank 0 first opens it, unless the launcher has."""
    if seat.meets_on_loopback:
        keep_to_loopback()
    if not seat.host:
        return _place_through_mpi(seat)
    local = seat.meets_on_loopback and not seat.store_exists
    host = LOOPBACK if local else seat.host
    if seat.rank == 0 and not seat.store_exists:
        store = host_store(seat.port, local)
    else:
        store = _connect(seat, host, seat.port)
    return Place(host, seat.port, store, seat.secret)


def _place_through_mpi(seat: Seat) -> Place:
    """Rank 0 opens a store on a free port and broadcasts its address and a new secret by MPI."""
    try:
        world = load_mpi().COMM_WORLD
    except BadRequest as error:
        raise BadRequest(f"inside mpirun the ranks meet through MPI: {error}") from None
    if world.size != seat.size:
        raise BadRequest(
            f"mpirun has started {seat.size} processes, but mpi4py sees {world.size}: mpi4py"
            " seems to use another MPI than this mpirun; start the ranks with the mpirun of its MPI"
        )
    store, place = None, ("", 0, "")
    if seat.rank == 0:
        store = host_store(0, seat.meets_on_loopback)
        name = LOOPBACK if seat.meets_on_loopback else socket.gethostname()
        place = (name, store.port, secrets.token_hex(32))
    message = bytearray(json.dumps(place).encode().ljust(PLACE_BYTES))
    world.Bcast(message)
    host, port, secret = json.loads(message)
    return Place(host, port, store or _connect(seat, host, port), bytes.fromhex(secret))


def _connect(seat: Seat, host: str, port: int) -> Any:
    try:
        return dist.TCPStore(host, port, None, False, timedelta(seconds=MEET_S))
    except RuntimeError as error:
        raise TransportError(
            f"rank {seat.rank} cannot reach the ranks' store at {host}:{port}: {first_line(error)}"
        ) from None


@cache
def host_store(port: int, one_host: bool) -> Any:
    """Open rank 0's store. It lasts as long as the process, since further runs in it use it too."""
    try:
        return open_store(LOOPBACK if one_host else "0.0.0.0", port, MEET_S)
    except (OSError, RuntimeError) as error:
        raise TransportError(
            f"rank 0 cannot listen on port {port} for the other ranks: {first_line(error)}"
        ) from None
