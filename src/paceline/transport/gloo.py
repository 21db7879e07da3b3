"""Processes over TCP by gloo, PyTorch's library for CPUs. The process group is held here: nothing global is set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.errors import PeerLost, TransportError
from paceline.registry import transports
from paceline.transport.base import Op, Rendezvous, Transport, Work, check_ranks

REDUCE: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@transports.register("gloo")
class GlooTransport(Transport):
    """Processes on one host or several, over TCP."""

    native = frozenset({"all_reduce", "broadcast"})

    def __init__(self, store: Any, host: str, rank: int, size: int, deadline_s: float, generation: int, name: str) -> None:
        super().__init__(rank, size, deadline_s, generation)
        self.store, self._host, self._name = store, host, name
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=deadline_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        self._group = self._guard(
            lambda: dist.ProcessGroupGloo(dist.PrefixStore(f"{name}/{generation}", store), rank, size, options)
        )
        self._reduce = {}
        for op, reduce_op in REDUCE.items():
            self._reduce[op] = dist.AllreduceOptions()
            self._reduce[op].reduceOp = reduce_op

    @classmethod
    def connect(cls, rendezvous: Rendezvous) -> GlooTransport:
        wait = timedelta(seconds=rendezvous.deadline_s)
        try:
            store = dist.TCPStore(rendezvous.host, rendezvous.port, None, False, wait)
        except RuntimeError as error:
            raise TransportError(f"no meeting point at {rendezvous.host}:{rendezvous.port}: {_first_line(error)}") from None
        return cls(
            store,
            rendezvous.host,
            rendezvous.rank,
            rendezvous.size,
            rendezvous.deadline_s,
            rendezvous.generation,
            "world",
        )

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        return _GlooWork(self, self._guard(lambda: self._group.send([tensor], to, tag), to), to)

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        return _GlooWork(self, self._guard(lambda: self._group.recv([tensor], source, tag), source), source)

    def barrier(self) -> None:
        self._guard(lambda: self._group.barrier().wait())

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        if self.size > 1:
            self._guard(lambda: self._group.allreduce([tensor], self._reduce[op]).wait())

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if self.size > 1:
            self._guard(lambda: self._group.broadcast(tensor, root).wait())

    def group(self, ranks: Sequence[int]) -> GlooTransport:
        members = check_ranks(ranks, self.size, self.rank)
        if members == tuple(range(self.size)):
            return self
        name = f"{self._name}/{'-'.join(map(str, members))}"
        return GlooTransport(
            self.store, self._host, members.index(self.rank), len(members), self.deadline_s, self.generation, name
        )

    def close(self) -> None:
        self._group.abort()

    def _guard(self, call: Callable[[], Any], peer: int | None = None) -> Any:
        """gloo says everything with RuntimeError: sort out who is gone from what took too long."""
        try:
            return call()
        except RuntimeError as error:
            text = _first_line(error)
            if "imed out" in text or "imeout" in text:
                raise PeerLost(peer, f"no answer within {self.deadline_s:g} s") from None
            if is_gloo_failure(error):
                other = 1 - self.rank if self.size == 2 else peer
                raise PeerLost(other, "its connection closed") from None
            raise TransportError(f"gloo: {text}") from None


class _GlooWork:
    def __init__(self, transport: GlooTransport, work: Any, peer: int) -> None:
        self._transport, self._work, self._peer = transport, work, peer

    def wait(self) -> None:
        self._transport._guard(self._work.wait, self._peer)


def is_gloo_failure(error: RuntimeError) -> bool:
    """Whether a RuntimeError tells of a broken connection."""
    text = str(error)
    return "gloo" in text or "Connection" in text or "ead error" in text or "losed" in text


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
