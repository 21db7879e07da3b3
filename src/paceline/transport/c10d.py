"""What gloo and NCCL have in common: a process group of torch.distributed, held here, so that nothing global is set."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PeerLost, TransportError
from paceline.transport.base import Op, Rendezvous, Transport, Work, check_ranks, check_tensor, wording

REDUCE: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ProcessGroupTransport(Transport):
    """A subclass says how its process group is made and what its failures look like."""

    native = frozenset({"all_reduce", "broadcast"})
    failure_words: ClassVar[tuple[str, ...]]  # in a RuntimeError, they tell of a broken connection

    def __init__(self, store: Any, host: str, rank: int, size: int, deadline_s: float, generation: int, name: str) -> None:
        super().__init__(rank, size, deadline_s, generation)
        self.store, self._host, self._label = store, host, name
        self._group = self._guard(lambda: self.make_group(dist.PrefixStore(f"{name}/{generation}", store)))
        self._agreed: set[tuple[str, int, torch.dtype, str, bool]] = set()
        self._reduce = {}
        for op, reduce_op in REDUCE.items():
            self._reduce[op] = dist.AllreduceOptions()
            self._reduce[op].reduceOp = reduce_op

    @abstractmethod
    def make_group(self, store: Any) -> Any: ...

    @classmethod
    def connect(cls, rendezvous: Rendezvous) -> Self:
        return cls(
            connect_store(rendezvous),
            rendezvous.host,
            rendezvous.rank,
            rendezvous.size,
            rendezvous.deadline_s,
            rendezvous.generation,
            f"{cls.name}/world",
        )

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        return _GroupWork(self, self._guard(lambda: self._group.send([tensor], to, tag), to), to)

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        return _GroupWork(self, self._guard(lambda: self._group.recv([tensor], source, tag), source), source)

    def barrier(self) -> None:
        self._guard(lambda: self._group.barrier().wait())

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        if self.size > 1:
            self._expect_the_same(op, tensor)
            self._guard(lambda: self._group.allreduce([tensor], self._reduce[op]).wait())

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if self.size > 1:
            self._expect_the_same("broadcast", tensor)
            self._guard(lambda: self._group.broadcast(tensor, root).wait())

    def _expect_the_same(self, operation: str, tensor: Tensor) -> None:
        """The library ends the process when ranks bring different lengths: ask before the first call of each kind."""
        key = (operation, tensor.numel(), tensor.dtype, tensor.device.type, tensor.is_contiguous())
        if key not in self._agreed:
            self.agree(wording(operation, tensor))
            check_tensor(tensor, self)
            self._agreed.add(key)

    def group(self, ranks: Sequence[int]) -> Self:
        members = check_ranks(ranks, self.size, self.rank)
        if members == tuple(range(self.size)):
            return self
        name = f"{self._label}/{'-'.join(map(str, members))}"
        return type(self)(
            self.store, self._host, members.index(self.rank), len(members), self.deadline_s, self.generation, name
        )

    def close(self) -> None:
        self._group.abort()

    def _guard(self, call: Callable[[], Any], peer: int | None = None) -> Any:
        """The libraries say everything with RuntimeError: sort out who is gone from what took too long."""
        try:
            return call()
        except RuntimeError as error:
            text = first_line(error)
            if "imed out" in text or "imeout" in text:
                raise PeerLost(peer, f"no answer within {self.deadline_s:g} s") from None
            if any(words in str(error) for words in self.failure_words):
                other = 1 - self.rank if self.size == 2 else peer
                raise PeerLost(other, "its connection closed") from None
            raise TransportError(f"{self.name}: {text}") from None


class _GroupWork:
    def __init__(self, transport: ProcessGroupTransport, work: Any, peer: int) -> None:
        self._transport, self._work, self._peer = transport, work, peer

    def wait(self) -> None:
        self._transport._guard(self._work.wait, self._peer)


def connect_store(rendezvous: Rendezvous) -> Any:
    """The launcher's key-value store."""
    try:
        return dist.TCPStore(rendezvous.host, rendezvous.port, None, False, timedelta(seconds=rendezvous.deadline_s))
    except RuntimeError as error:
        raise TransportError(f"no meeting point at {rendezvous.host}:{rendezvous.port}: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
