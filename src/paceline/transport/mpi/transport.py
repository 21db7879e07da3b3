"""Processes started by mpirun, over Open MPI: mpi4py on the buffers of torch's tensors, without
copies.

Messages are bytes; the all-reduce and broadcast are MPI's own. MPI's blocking calls cannot report
which rank is slow, so every wait here is a loop of tests. A native collective is entered only after
all ranks have announced the same call. When a rank dies, mpirun ends all of them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.common.allocator import keep_freed_memory
from paceline.errors import BadRequest, TransportError
from paceline.registry import transports
from paceline.transport.base import (
    Message,
    Op,
    Rendezvous,
    Traits,
    Transport,
    Work,
    check_ranks,
    check_tensor,
    wording,
)
from paceline.transport.c10d.store import connect_store, patience_for
from paceline.transport.patience import Patience
from paceline.transport.together import agree

LOOKS = 200  # tests before the rank yields its core
SIGNATURE = 4  # int64 numbers that describe a rank's call of a collective
HOW_TO_GET = "pip install 'paceline[mpi]' (mpi4py and Open MPI, from wheels)"


def mpirun() -> str | None:
    """The path of mpirun: beside this Python, otherwise from PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def load() -> Any:
    """Import and initialise mpi4py's MPI, with the settings that matter where ranks share cores.

    Yielding when idle takes a message of 4 KB from 10 ms to 0.2 ms; keeping freed memory makes
    100 MB three times as fast.
    """
    if "mpi4py.MPI" not in sys.modules and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.setenv(b"OMPI_MCA_mpi_yield_when_idle", b"1", 0)  # unless the user has set it
        keep_freed_memory()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BadRequest(f"transport mpi requires MPI: {HOW_TO_GET}. ({error})") from None
    return MPI


def buffer_of(mpi: Any, tensor: Tensor) -> Any:
    return mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def number_types(mpi: Any) -> dict[torch.dtype, Any]:
    """The types that MPI can add; half precision is not among them."""
    return {
        torch.float32: mpi.FLOAT,
        torch.float64: mpi.DOUBLE,
        torch.int64: mpi.INT64_T,
        torch.int32: mpi.INT32_T,
        torch.int16: mpi.INT16_T,
        torch.int8: mpi.INT8_T,
        torch.uint8: mpi.UINT8_T,
    }


@transports.register("mpi")
class MpiTransport(Transport):
    """Processes under mpirun, over Open MPI."""

    traits = Traits(
        started_by="mpirun",
        crosses_hosts=True,
        native=("all_reduce", "broadcast"),
        second_channel=True,
    )

    def __init__(
        self,
        comm: Any,
        store: Any,
        deadline_s: float,
        patience: Patience | None = None,
        members: tuple[int, ...] = (),
    ) -> None:
        super().__init__(comm.rank, comm.size, deadline_s, patience=patience)
        self.store, self._comm, self._mpi = store, comm, load()
        self._members = members or tuple(range(comm.size))  # the ranks in the world
        self._types = number_types(self._mpi)
        self._ops = {"sum": self._mpi.SUM, "max": self._mpi.MAX, "min": self._mpi.MIN}
        self._signature = torch.zeros(2 * SIGNATURE, dtype=torch.int64)

    @classmethod
    def missing(cls) -> str | None:
        if importlib.util.find_spec("mpi4py") is None:
            return f"mpi4py is not installed: {HOW_TO_GET}"
        return None if mpirun() else f"mpirun is not installed: {HOW_TO_GET}"

    @classmethod
    def connect(cls, rendezvous: Rendezvous) -> MpiTransport:
        world = load().COMM_WORLD
        if (world.rank, world.size) != (rendezvous.rank, rendezvous.size):
            raise TransportError(
                f"MPI reports rank {world.rank} of {world.size}, the launcher rank"
                f" {rendezvous.rank} of {rendezvous.size}: was this process started by mpirun?"
            )
        board = connect_store(rendezvous)
        patience = patience_for(rendezvous, board)
        patience.watched = True  # when a rank ends, mpirun ends the others
        return cls(world.Dup(), board, rendezvous.waits.deadline_s, patience)

    def close(self) -> None:
        if self.store is not None and self.size == self._mpi.COMM_WORLD.size:
            self.store.close()

    def c10d(self) -> str:
        from paceline.transport.mpi.torch_backend import NAME

        return NAME

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        check_tensor(tensor, self)
        request = self._comm.Isend(
            [buffer_of(self._mpi, tensor), tensor.nbytes, self._mpi.BYTE], to, tag
        )
        return _MpiWork(self, request, tensor, to, receives=False)

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        check_tensor(tensor, self)
        request = self._comm.Irecv(
            [buffer_of(self._mpi, tensor), tensor.nbytes, self._mpi.BYTE], source, tag
        )
        return _MpiWork(self, request, tensor, source, receives=True)

    def wait_any(self, works: Sequence[Work], patience_s: float | None = None) -> int | None:
        mine = [w for w in works if isinstance(w, _MpiWork)]
        until = time.monotonic() + patience_s if patience_s is not None else float("inf")
        looks = 0
        while True:
            for index, work in enumerate(mine):
                if work.test():
                    return index
            looks += 1
            if looks > LOOKS:
                os.sched_yield()
                if time.monotonic() > until:
                    return None

    def sending(self, tensor: Tensor, to: int) -> Message:
        check_tensor(tensor, self)
        return _Persistent(self, self._comm.Send_init, tensor, to)

    def receiving(self, tensor: Tensor, source: int) -> Message:
        check_tensor(tensor, self)
        return _Persistent(self, self._comm.Recv_init, tensor, source)

    def barrier(self) -> None:
        self.finish(self._comm.Ibarrier(), None, "a barrier")

    def adds(self, dtype: torch.dtype) -> bool:
        return dtype in self._types

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        if self.size == 1:
            return
        self._enter_together(op, tensor)
        kind = self._types.get(tensor.dtype)
        if kind is None:
            super().all_reduce(tensor, op)
        elif tensor.numel():
            message = [buffer_of(self._mpi, tensor), tensor.numel(), kind]
            self._comm.Allreduce(self._mpi.IN_PLACE, message, self._ops[op])

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if self.size == 1:
            return
        self._enter_together(f"broadcast from {root}", tensor)
        if tensor.numel():
            self._comm.Bcast([buffer_of(self._mpi, tensor), tensor.nbytes, self._mpi.BYTE], root)

    def _enter_together(self, operation: str, tensor: Tensor) -> None:
        """Wait for all ranks, and raise on all of them unless all make the same call."""
        own = hash_of(operation, tensor)
        self._signature[:SIGNATURE] = own
        self._signature[SIGNATURE:] = -own
        message = [buffer_of(self._mpi, self._signature), 2 * SIGNATURE, self._mpi.INT64_T]
        self.finish(
            self._comm.Iallreduce(self._mpi.IN_PLACE, message, self._mpi.MAX), None, operation
        )
        if not torch.equal(self._signature[:SIGNATURE], -self._signature[SIGNATURE:]):
            agree(self, wording(operation, tensor))
        check_tensor(tensor, self)

    def finish(self, request: Any, peer: int | None, what: str, status: Any = None) -> None:
        """Test a request until it is complete; yield the core after the first `LOOKS` tests."""
        test = request.Test
        for _ in range(LOOKS):
            if test(status):
                return
        members = self._members
        peers = (
            members[peer] if peer is not None else [r for r in members if r != members[self.rank]]
        )
        try:
            with self.patience.waiting(what, peers) as look:
                while not test(status):
                    os.sched_yield()
                    look()
        except BaseException:
            if peer is not None:
                request.Cancel()  # a message that comes later must not write to this memory
            raise

    def side(self, label: str) -> MpiTransport:
        return MpiTransport(
            self._comm.Dup(), self.store, self.deadline_s, self.patience, self._members
        )

    def group(self, ranks: Sequence[int]) -> MpiTransport:
        members = check_ranks(ranks, self.size, self.rank)
        if members == tuple(range(self.size)):
            return self
        own = self._comm.Create_group(self._comm.group.Incl(members))
        world = tuple(self._members[r] for r in members)
        return MpiTransport(own, self.store, self.deadline_s, self.patience, world)


def hash_of(operation: str, tensor: Tensor) -> Tensor:
    kind = int.from_bytes(f"{tensor.dtype}"[-7:].encode())
    place = 2 * int(tensor.is_contiguous()) + int(tensor.device.type == "cpu")
    return torch.tensor(
        [int.from_bytes(operation.encode()[-7:]), tensor.numel(), kind, place], dtype=torch.int64
    )


class _MpiWork:
    """A send or receive. It holds the tensor until MPI is done with its memory."""

    def __init__(
        self, transport: MpiTransport, request: Any, tensor: Tensor, peer: int, receives: bool
    ) -> None:
        self._transport, self._request, self._tensor, self._peer = transport, request, tensor, peer
        self._status = transport._mpi.Status() if receives else None
        self._done = False

    def test(self) -> bool:
        self._done = self._done or bool(self._request.Test(self._status))
        return self._done

    def wait(self) -> None:
        transport, mpi = self._transport, self._transport._mpi
        try:
            if not self._done:
                transport.finish(self._request, self._peer, "a message", self._status)
        except mpi.Exception as error:
            raise TransportError(
                f"rank {self._peer} sent a message of another length than expected ({error})"
            ) from None
        if self._status is not None:
            got = self._status.Get_count(mpi.BYTE)
            if got != self._tensor.nbytes:
                raise TransportError(
                    f"rank {self._peer} sent {got} bytes; {self._tensor.nbytes} were expected"
                )


class _Persistent:
    """MPI's persistent request, for the chunks of a schedule. The ranks have agreed on lengths."""

    def __init__(self, transport: MpiTransport, make: Any, tensor: Tensor, peer: int) -> None:
        self._transport, self._peer, self._tensor = transport, peer, tensor
        self._request = make(
            [buffer_of(transport._mpi, tensor), tensor.nbytes, transport._mpi.BYTE], peer
        )

    def start(self) -> None:
        self._request.Start()

    def wait(self) -> None:
        self._transport.finish(self._request, self._peer, "a message")
