"""MPI as a backend of torch.distributed, without building PyTorch: `torch.distributed` and DDP run
over it.

    import paceline.transport.mpi.torch_backend       # registers the backend
    torch.distributed.init_process_group(             # under mpirun
        "paceline-mpi", store=..., rank=..., world_size=...
    )

One thread makes MPI's blocking collective calls, in the order in which they were queued. Sends and
receives are MPI's nonblocking ones on a second communicator. Tensors are used in place; a work
holds them until it is done. The thread is joined before MPI is finalised.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from paceline.transport.mpi.transport import buffer_of, load, number_types

NAME = "paceline-mpi"
_Base: Any = dist.ProcessGroup  # its stubs have overloads that only C++ can have
BITWISE = ("BAND", "BOR", "BXOR")
LOOKS, NAP_S = 2000, 0.00005


class QueuedWork(dist._Work):
    """A collective in the queue of the thread that calls MPI."""

    def __init__(self, call: Callable[[], None], result: Any) -> None:
        super().__init__()
        self._call, self._result = call, result
        self._future: Future[Any] = Future()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # `wait` raises it
            self._error = error
            self._done.set()
            self._future.set_exception(error)
            return
        self._done.set()
        self._future.set_result(self._result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._done.wait(seconds or None):
            raise RuntimeError(f"{NAME}: timed out after {seconds:g} s")
        if self._error is not None:
            raise RuntimeError(f"{NAME}: {self._error}") from self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def get_future(self) -> Future[Any]:
        return self._future

    def result(self) -> Any:
        return self._result


class MessageWork(dist._Work):
    """A send or receive that has started; `wait` tests it until it is complete."""

    def __init__(self, request: Any, tensors: list[Tensor], status: Any) -> None:
        super().__init__()
        self._request, self._tensors, self._status, self._done = request, tensors, status, False

    def is_completed(self) -> bool:
        self._done = self._done or bool(self._request.Test(self._status))
        return self._done

    def wait(self, timeout: timedelta | None = None) -> bool:
        until = time.monotonic() + timeout.total_seconds() if timeout else float("inf")
        looks = 0
        while not self.is_completed():
            looks += 1
            if looks > LOOKS:
                time.sleep(NAP_S)
            if time.monotonic() > until:
                raise RuntimeError(f"{NAME}: timed out")
        return True

    def source_rank(self) -> int:
        return int(self._status.Get_source())

    def get_future(self) -> Future[Any]:
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._tensors)
        return future


class MpiProcessGroup(_Base):  # type: ignore[misc]
    """The ranks of an MPI communicator as a process group."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm.rank, comm.size)
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
        atexit.register(self.shutdown)  # after mpi4py's, so it runs before MPI is finalised

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()

    def shutdown(self) -> None:
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._queue.put(None)
            self._thread.join()

    def abort(self) -> None:
        self.shutdown()

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    # --- helpers

    def _later(self, call: Callable[[], None], result: Any) -> QueuedWork:
        work = QueuedWork(call, result)
        self._queue.put(work)
        return work

    def _numbers(self, tensor: Tensor) -> list[Any]:
        kind = self._types.get(tensor.dtype)
        if kind is None:
            raise RuntimeError(f"{NAME} cannot combine {tensor.dtype}: use float32 or float64")
        return [buffer_of(self._mpi, _plain(tensor)), tensor.numel(), kind]

    def _op(self, wanted: Any, tensors: list[Tensor]) -> tuple[Any, bool]:
        """MPI's operation, and whether to divide its result by the number of ranks.

        MPI has no mean. Operations whose result would be wrong raise before anything is sent, so
        they raise on every rank.
        """
        name = next(
            (n for n, kind in dist.ReduceOp.RedOpType.__members__.items() if wanted == kind),
            str(wanted),
        )
        if name not in self._ops:
            raise RuntimeError(f"{NAME} cannot combine by {name}: use {', '.join(self._ops)}")
        for tensor in tensors:
            if name == "AVG" and not tensor.is_floating_point():
                raise RuntimeError(
                    f"{NAME} cannot average {tensor.dtype}: use SUM and divide, or float32 or"
                    " float64"
                )
            if name in BITWISE and tensor.is_floating_point():
                raise RuntimeError(f"{NAME} cannot combine {tensor.dtype} by {name}: use integers")
        return self._ops[name], name == "AVG"

    def _bytes(self, tensor: Tensor) -> list[Any]:
        return [buffer_of(self._mpi, _plain(tensor)), tensor.nbytes, self._mpi.BYTE]

    def _chunks(self, tensor: Tensor) -> list[Any]:
        """A buffer with one chunk per rank; mpi4py computes the length of a chunk."""
        return [buffer_of(self._mpi, _plain(tensor)), self._mpi.BYTE]

    # --- what torch.distributed calls

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> QueuedWork:
        op, mean = self._op(opts.reduceOp if opts is not None else dist.ReduceOp.SUM, tensors)

        def call() -> None:
            for tensor in tensors:
                self._comm.Allreduce(self._mpi.IN_PLACE, self._numbers(tensor), op)
                if mean:
                    tensor.div_(self.size())

        return self._later(call, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> QueuedWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> QueuedWork:
        root = opts.rootRank if opts is not None else 0

        def call() -> None:
            for tensor in tensors:
                self._comm.Bcast(self._bytes(tensor), root)

        return self._later(call, tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> QueuedWork:
        op, mean = self._op(opts.reduceOp, tensors)

        def call() -> None:
            for tensor in tensors:
                numbers = self._numbers(tensor)
                if self.rank() != opts.rootRank:
                    self._comm.Reduce(numbers, None, op, opts.rootRank)
                    continue
                self._comm.Reduce(self._mpi.IN_PLACE, numbers, op, opts.rootRank)
                if mean:
                    tensor.div_(self.size())

        return self._later(call, tensors)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> QueuedWork:
        def call() -> None:
            for gathered, own in zip(outputs, inputs, strict=True):
                flat = torch.empty(len(gathered) * own.numel(), dtype=own.dtype)
                self._comm.Allgather(self._bytes(own), self._chunks(flat))
                chunks = flat.split(own.numel()) if own.numel() else gathered
                for output, chunk in zip(gathered, chunks, strict=True):
                    output.copy_(chunk.view(output.shape))

        return self._later(call, outputs)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> QueuedWork:
        return self._later(
            lambda: self._comm.Allgather(self._bytes(own), self._chunks(output)), output
        )

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> QueuedWork:
        def call() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                self._comm.Allgather(self._bytes(own), self._chunks(output))

        return self._later(call, outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> QueuedWork:
        def call() -> None:
            own, here = inputs[0], self.rank() == opts.rootRank
            flat = torch.empty(self.size() * own.numel() if here else 0, dtype=own.dtype)
            self._comm.Gather(self._bytes(own), self._chunks(flat) if here else None, opts.rootRank)
            if here:
                for output, chunk in zip(outputs[0], flat.split(own.numel()), strict=True):
                    output.copy_(chunk.view(output.shape))

        return self._later(call, outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> QueuedWork:
        def call() -> None:
            here = self.rank() == opts.rootRank
            flat = torch.cat([t.reshape(-1) for t in inputs[0]]) if here else None
            self._comm.Scatter(
                self._chunks(flat) if flat is not None else None,
                self._bytes(outputs[0]),
                opts.rootRank,
            )

        return self._later(call, outputs)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> QueuedWork:
        how = self._op(opts.reduceOp, outputs)

        def call() -> None:
            for output, chunks in zip(outputs, inputs, strict=True):
                self._reduce_scatter(
                    output,
                    torch.cat([c.reshape(-1) for c in chunks]),
                    [c.numel() for c in chunks],
                    *how,
                )

        return self._later(call, outputs)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any) -> QueuedWork:
        counts, how = [output.numel()] * self.size(), self._op(opts.reduceOp, [output])
        return self._later(lambda: self._reduce_scatter(output, whole, counts, *how), output)

    def _reduce_scatter(
        self, output: Tensor, whole: Tensor, counts: list[int], op: Any, mean: bool
    ) -> None:
        self._comm.Reduce_scatter(self._numbers(whole), self._numbers(output), counts, op)
        if mean:
            output.div_(self.size())

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> QueuedWork:
        def call() -> None:
            works = [self._messages.Irecv(self._bytes(t), p, 1) for p, t in enumerate(outputs)]
            works += [self._messages.Isend(self._bytes(t), p, 1) for p, t in enumerate(inputs)]
            self._mpi.Request.Waitall(works)

        return self._later(call, outputs)

    def alltoall_base(
        self,
        output: Tensor,
        whole: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> QueuedWork:
        into = list(output.split(output_sizes or [output.shape[0] // self.size()] * self.size()))
        out_of = list(whole.split(input_sizes or [whole.shape[0] // self.size()] * self.size()))
        return self.alltoall(into, out_of, opts)

    # PyTorch 2.13 calls these names, older versions the ones above.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def barrier(self, opts: Any = None) -> QueuedWork:
        return self._later(self._comm.Barrier, [])

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> MessageWork:
        return MessageWork(
            self._messages.Isend(self._bytes(tensors[0]), to, tag + 2), tensors, self._mpi.Status()
        )

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> MessageWork:
        return MessageWork(
            self._messages.Irecv(self._bytes(tensors[0]), source, tag + 2),
            tensors,
            self._mpi.Status(),
        )

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MessageWork:
        return self.recv(tensors, self._mpi.ANY_SOURCE, tag)


def _plain(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise RuntimeError(f"{NAME} moves contiguous CPU tensors only: call .cpu().contiguous()")
    return tensor


def create(options: Any, _: Any = None) -> MpiProcessGroup:
    """Make a process group; torch.distributed calls this on the group's ranks, which are MPI's."""
    world = load().COMM_WORLD
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if len(ranks) == world.size and ranks == list(range(world.size)):
        return MpiProcessGroup(world.Dup())
    return MpiProcessGroup(world.Create_group(world.group.Incl(ranks)))


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
