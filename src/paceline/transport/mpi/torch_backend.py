"""MPI as a backend of torch.distributed, without building PyTorch: `torch.distributed` and DDP run
over it.

    import paceline.transport.mpi.torch_backend       # registers the backend
    torch.distributed.init_process_group(             # under mpirun
        "paceline-mpi", store=..., rank=..., world_size=...
    )

One thread makes MPI's blocking collective calls, in the order in which they were queued. Sends and
receives are MPI's nonblocking ones on a second communicator. Contiguous tensors are used in place,
others through a copy; a work holds them until it is done. MPI cannot add numbers of half precision:
they are combined as float32 and rounded once. The thread is joined before MPI is finalised.
"""

from __future__ import annotations

import atexit
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.transport.mpi.torch_wire import NAME as NAME
from paceline.transport.mpi.torch_wire import WIDER, checked, deal, fill, joined, on_wire, plain
from paceline.transport.mpi.torch_work import MessageWork, QueuedWork, until_complete
from paceline.transport.mpi.transport import buffer_of, load, number_types

_Base: Any = dist.ProcessGroup  # its stubs have overloads that only C++ can have
BITWISE = ("BAND", "BOR", "BXOR")
STUCK_S = 1.0  # after a timeout: for the thread to come back from MPI


class MpiProcessGroup(_Base):  # type: ignore[misc]
    """The ranks of an MPI communicator as a process group."""

    def __init__(self, comm: Any, name: str, timeout_s: float) -> None:
        super().__init__(comm.rank, comm.size)
        self._name, self._timeout_s, self._stuck = name, timeout_s, False
        self._mpi, self._comm, self._messages = load(), comm, comm.Dup()
        self._types = number_types(self._mpi)
        mpi = self._mpi
        self._ops = {
            "SUM": mpi.SUM, "AVG": mpi.SUM, "MAX": mpi.MAX, "MIN": mpi.MIN, "PRODUCT": mpi.PROD,
            "BAND": mpi.BAND, "BOR": mpi.BOR, "BXOR": mpi.BXOR,
        }  # fmt: skip
        self._queue: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=NAME, daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)  # after mpi4py's, so it runs before MPI is finalised

    def _work(self) -> None:
        with torch.no_grad():
            while (work := self._queue.get()) is not None:
                work.run()

    def shutdown(self) -> None:
        """Do what is queued, then end the thread and free the communicators."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._queue.put(None)
            self._thread.join(STUCK_S if self._stuck else self._timeout_s)
            if not self._thread.is_alive() and not self._stuck:
                atexit.unregister(self._at_exit)
                self._comm.Free()
                self._messages.Free()

    def abort(self) -> None:
        self.shutdown()

    def _at_exit(self) -> None:
        self.shutdown()
        if self._thread.is_alive():
            # MPI cannot be finalised beside a collective that never ends: the process would hang.
            sys.stderr.write(f"{NAME}: a collective has not ended; MPI ends all ranks\n")
            sys.stderr.flush()
            self._mpi.COMM_WORLD.Abort(1)

    # --- what torch.distributed asks a group about itself; getGroupName is for C++

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    # --- helpers

    def _later(
        self, call: Callable[[], None], result: Any, what: str, opts: Any = None
    ) -> QueuedWork:
        if self._stuck:
            raise RuntimeError(
                f"{NAME}: a collective of this group has timed out before: make a new group"
            )
        work = QueuedWork(call, result, what, self._seconds(opts), self._give_up)
        self._queue.put(work)
        return work

    def _seconds(self, opts: Any) -> float:
        """The timeout of a call; torch.distributed says "that of the group" by -1 ms."""
        own = opts.timeout.total_seconds() if opts is not None else 0.0
        return own if own > 0 else self._timeout_s

    def _give_up(self) -> None:
        self._stuck = True

    def _op(self, opts: Any, tensors: Sequence[Tensor]) -> tuple[Any, bool]:
        """MPI's operation, and whether to divide its result by the number of ranks.

        MPI has no mean. What cannot be combined raises before anything is sent, so it raises on
        every rank.
        """
        wanted = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        name = next(
            (n for n, kind in dist.ReduceOp.RedOpType.__members__.items() if wanted == kind),
            str(wanted),
        )
        if name not in self._ops:
            raise RuntimeError(f"{NAME} cannot combine by {name}: use {', '.join(self._ops)}")
        for tensor in checked(tensors):
            dtype = tensor.dtype
            if WIDER.get(dtype, dtype) not in self._types:
                raise RuntimeError(f"{NAME} cannot combine {dtype}: use float32 or float64")
            if name == "AVG" and not dtype.is_floating_point:
                raise RuntimeError(
                    f"{NAME} cannot average {dtype}: use SUM and divide, or float32 or float64"
                )
            if name in BITWISE and dtype.is_floating_point:
                raise RuntimeError(f"{NAME} cannot combine {dtype} by {name}: use integers")
        if tensors and tensors[0].dtype is torch.bool:  # True + True is True, not 2
            name = {"SUM": "MAX", "PRODUCT": "MIN"}.get(name, name)
        return self._ops[name], name == "AVG"

    # MPI's descriptions of memory; the caller keeps the tensor alive.

    def _numbers(self, wire: Tensor) -> list[Any]:
        return [buffer_of(self._mpi, wire), wire.numel(), self._types[wire.dtype]]

    def _bytes(self, wire: Tensor) -> list[Any]:
        return [buffer_of(self._mpi, wire), wire.nbytes, self._mpi.BYTE]

    def _chunks(self, wire: Tensor) -> list[Any]:
        """A buffer with one chunk per rank; mpi4py computes the length of a chunk."""
        return [buffer_of(self._mpi, wire), self._mpi.BYTE]

    # --- what torch.distributed calls

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> QueuedWork:
        op, mean = self._op(opts, tensors)

        def call() -> None:
            for tensor in tensors:
                wire = on_wire(tensor)
                self._comm.Allreduce(self._mpi.IN_PLACE, self._numbers(wire), op)
                fill(tensor, wire.div_(self.size()) if mean else wire)

        return self._later(call, tensors, "all_reduce", opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> QueuedWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> QueuedWork:
        root = opts.rootRank if opts is not None else 0
        checked(tensors)

        def call() -> None:
            for tensor in tensors:
                wire = plain(tensor)
                self._comm.Bcast(self._bytes(wire), root)
                fill(tensor, wire)

        return self._later(call, tensors, "broadcast", opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> QueuedWork:
        op, mean = self._op(opts, tensors)

        def call() -> None:
            for tensor in tensors:
                wire = on_wire(tensor)
                if self.rank() != opts.rootRank:
                    self._comm.Reduce(self._numbers(wire), None, op, opts.rootRank)
                    continue
                self._comm.Reduce(self._mpi.IN_PLACE, self._numbers(wire), op, opts.rootRank)
                fill(tensor, wire.div_(self.size()) if mean else wire)

        return self._later(call, tensors, "reduce", opts)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> QueuedWork:
        checked([*inputs, *(t for row in outputs for t in row)])

        def call() -> None:
            for gathered, own in zip(outputs, inputs, strict=True):
                flat, wire = torch.empty(self.size() * own.numel(), dtype=own.dtype), plain(own)
                self._comm.Allgather(self._bytes(wire), self._chunks(flat))
                deal(flat, gathered)

        return self._later(call, outputs, "all_gather", opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> QueuedWork:
        """As `allgather`, but `outputs` has a list for each rank instead of for each input."""
        return self.allgather([list(row) for row in zip(*outputs, strict=True)], inputs, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> QueuedWork:
        checked([*outputs, *inputs])

        def call() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                wire, out_of = plain(output), plain(own)
                self._comm.Allgather(self._bytes(out_of), self._chunks(wire))
                fill(output, wire)

        return self._later(call, outputs, "all_gather", opts)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> QueuedWork:
        return self.allgather_into_tensor_coalesced([output], [own], opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> QueuedWork:
        own, here = inputs[0], self.rank() == opts.rootRank
        checked([own, *(outputs[0] if here else [])])

        def call() -> None:
            wire = plain(own)
            flat = torch.empty(self.size() * own.numel() if here else 0, dtype=own.dtype)
            chunks = self._chunks(flat) if here else None
            self._comm.Gather(self._bytes(wire), chunks, opts.rootRank)
            if here:
                deal(flat, outputs[0])

        return self._later(call, outputs, "gather", opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> QueuedWork:
        here = self.rank() == opts.rootRank
        checked([*outputs, *(inputs[0] if here else [])])

        def call() -> None:
            wire = plain(outputs[0])
            flat = joined(inputs[0]) if here else None
            chunks = self._chunks(flat) if flat is not None else None
            self._comm.Scatter(chunks, self._bytes(wire), opts.rootRank)
            fill(outputs[0], wire)

        return self._later(call, outputs, "scatter", opts)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> QueuedWork:
        how = self._op(opts, [*outputs, *(t for row in inputs for t in row)])

        def call() -> None:
            for output, chunks in zip(outputs, inputs, strict=True):
                counts = [chunk.numel() for chunk in chunks]
                self._reduce_scatter(output, joined(chunks), counts, *how)

        return self._later(call, outputs, "reduce_scatter", opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> QueuedWork:
        how = self._op(opts, [*outputs, *inputs])

        def call() -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, whole, [output.numel()] * self.size(), *how)

        return self._later(call, outputs, "reduce_scatter", opts)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> QueuedWork:
        return self.reduce_scatter_tensor_coalesced([output], [whole], opts)

    def _reduce_scatter(
        self, output: Tensor, whole: Tensor, counts: list[int], op: Any, mean: bool
    ) -> None:
        wire, out_of = on_wire(output), on_wire(whole)
        self._comm.Reduce_scatter(self._numbers(out_of), self._numbers(wire), counts, op)
        fill(output, wire.div_(self.size()) if mean else wire)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> QueuedWork:
        checked([*outputs, *inputs])

        def call() -> None:
            into, out_of = [plain(t) for t in outputs], [plain(t) for t in inputs]
            works = [self._messages.Irecv(self._bytes(t), p, 1) for p, t in enumerate(into)]
            works += [self._messages.Isend(self._bytes(t), p, 1) for p, t in enumerate(out_of)]
            self._mpi.Request.Waitall(works)
            for output, wire in zip(outputs, into, strict=True):
                fill(output, wire)

        return self._later(call, outputs, "all_to_all", opts)

    def alltoall_base(
        self,
        output: Tensor,
        whole: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> QueuedWork:
        checked([output, whole])
        into = list(output.split(output_sizes or [output.shape[0] // self.size()] * self.size()))
        out_of = list(whole.split(input_sizes or [whole.shape[0] // self.size()] * self.size()))
        return self.alltoall(into, out_of, opts)

    # PyTorch 2.13 calls these names, older versions the ones above.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def barrier(self, opts: Any = None) -> QueuedWork:
        seconds = self._seconds(opts)

        def call() -> None:
            request = self._comm.Ibarrier()
            try:
                until_complete(request.Test, seconds, "barrier")
            except RuntimeError:
                self._give_up()
                raise

        return self._later(call, [], "barrier", opts)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> MessageWork:
        return self._message("send", self._messages.Isend, tensors, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> MessageWork:
        return self._message("recv", self._messages.Irecv, tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MessageWork:
        return self.recv(tensors, self._mpi.ANY_SOURCE, tag)

    def _message(
        self, what: str, start: Any, tensors: list[Tensor], peer: int, tag: int
    ) -> MessageWork:
        """Start a message; tag 1 is for all_to_all."""
        (tensor,) = checked(tensors)
        wire = plain(tensor)
        request = start(self._bytes(wire), peer, tag + 2)
        return MessageWork(request, self._mpi.Status(), tensor, wire, what, self._timeout_s)


def create(options: Any, _: Any = None) -> MpiProcessGroup:
    """Make a process group; torch.distributed calls this on the group's ranks, which are MPI's."""
    world = load().COMM_WORLD
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if len(ranks) == world.size and ranks == list(range(world.size)):
        comm = world.Dup()
    else:
        comm = world.Create_group(world.group.Incl(ranks))
    return MpiProcessGroup(comm, options.group_id, options.timeout.total_seconds())


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
