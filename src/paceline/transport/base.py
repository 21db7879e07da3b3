"""What every transport can do: narrow on purpose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from paceline.errors import BadRequest, PeerLost, TransportError
from paceline.transport.patience import Patience

Op = Literal["sum", "max", "min"]
REDUCE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
AGREEMENT_TAG, AGREEMENT_BYTES, ASSEMBLY_TAG = 99, 160, 98


class Work(Protocol):
    """Something under way."""

    def wait(self) -> None: ...


class Message(Work, Protocol):
    """A message that is made once and sent or received often: start, wait, start, wait."""

    def start(self) -> None: ...


class Again:
    """A message made anew each time."""

    def __init__(self, begin: Callable[[], Work]) -> None:
        self._begin = begin

    def start(self) -> None:
        self._work = self._begin()

    def wait(self) -> None:
        self._work.wait()


@dataclass(frozen=True)
class Rendezvous:
    """How the ranks of a run find each other: a key-value store that the launcher hosts."""

    rank: int
    size: int
    host: str
    port: int
    deadline_s: float
    generation: int = 0  # counts up when a group is formed anew
    own: str | None = None  # this rank's own address, where that is not the store's host
    alone: bool = False  # on a host of its own: what that host sends and receives is this rank's
    watched: bool = (
        False  # whether a rank that ends is noticed at once: then a wait for a slow one goes on
    )


class Transport(ABC):
    """Ranks 0..size-1. A rank that is gone is `PeerLost`; one that is slow is waited for, and told
    after `deadline_s`.
    """

    name: ClassVar[str]
    runs_as: ClassVar[Literal["processes", "threads"]] = "processes"
    native: ClassVar[frozenset[str]] = (
        frozenset()
    )  # the collectives that the library behind it brings along
    shares_memory: ClassVar[bool] = False  # `share` works: ranks are on one host
    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})  # whose memory it can read
    store: Any = None  # torch.distributed's store, where there is one
    tolerant: bool = False  # one who waits for a rank does not care that another has died

    def __init__(
        self,
        rank: int,
        size: int,
        deadline_s: float,
        generation: int = 0,
        patience: Patience | None = None,
    ) -> None:
        self.rank, self.size, self.deadline_s, self.generation = rank, size, deadline_s, generation
        self.patience = patience or Patience(rank, size, deadline_s)

    @property
    def kind(self) -> str:
        """The name of what moves the bytes in the end, below all wrappers."""
        return self.name

    @classmethod
    def available(cls) -> bool:
        """Whether this machine has what it takes."""
        return cls.missing() is None

    @classmethod
    def missing(cls) -> str | None:
        """What this machine lacks for it, and how to get it; None when it has it all."""
        return None

    @classmethod
    def connect(cls, rendezvous: Rendezvous) -> Transport:
        raise TransportError(f"transport {cls.name} does not connect processes")

    @abstractmethod
    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work: ...

    @abstractmethod
    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work: ...

    def sending(self, tensor: Tensor, to: int) -> Message:
        """A message of this tensor that can be sent again and again."""
        return Again(lambda: self.isend(tensor, to))

    def receiving(self, tensor: Tensor, source: int) -> Message:
        return Again(lambda: self.irecv(tensor, source))

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        self.isend(tensor, to, tag).wait()

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        self.irecv(tensor, source, tag).wait()

    def c10d(self) -> str:
        """torch.distributed's name for the backend that DistributedDataParallel is to talk over."""
        return "gloo"

    def together(self) -> AbstractContextManager[Any]:
        """What is sent and received inside starts at once (a library may need to be told)."""
        return nullcontext()

    def agree(self, what: str) -> None:
        """All ranks say what they are about to do; unless all say the same, all raise. Not counted
        as payload.
        """
        own = torch.zeros(AGREEMENT_BYTES, dtype=torch.uint8)
        text = what.encode()[:AGREEMENT_BYTES]
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        heard = [own if peer == self.rank else torch.empty_like(own) for peer in range(self.size)]
        others = [peer for peer in range(self.size) if peer != self.rank]
        works = [self.irecv(heard[peer], peer, AGREEMENT_TAG) for peer in others]
        works += [self.isend(own, peer, AGREEMENT_TAG) for peer in others]
        for work in works:
            work.wait()
        expect_one([bytes(h.tolist()).rstrip(b"\0").decode(errors="replace") for h in heard])

    def wait_any(self, works: Sequence[Work], patience_s: float | None = None) -> int | None:
        """The index of one that is through (or whose peer is gone: its `wait` says so); None when
        patience ends first.
        """
        raise TransportError(f"transport {self.name} cannot wait for one message out of several")

    def share(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The root's memory, here: what `allocate` gave to all ranks in the same order."""
        raise BadRequest(
            f"transport {self.kind} has no memory that ranks share: it takes one host and"
            " --transport shm"
        )

    def assemble(self, ranks: Sequence[int], survivors_suffice: bool = False) -> tuple[int, ...]:
        """A barrier of these ranks without a deadline, for ranks that come when they are done. Who
        is there, the same on all.

        The first of them collects. A rank that is gone ends it for all, unless survivors suffice.
        """
        first, word = ranks[0], torch.zeros(self.size)
        if self.rank != first:
            said, heard = self.isend(word, first, ASSEMBLY_TAG), torch.zeros(self.size)
            answer = self.irecv(heard, first, ASSEMBLY_TAG)
            self._await_one([answer], "all to come together")
            answer.wait()
            said.wait()
            return tuple(r for r in ranks if heard[r])
        awaited: dict[int, Work] = {}
        word[first] = 1
        for rank in ranks[1:]:
            with suppress(PeerLost) if survivors_suffice else nullcontext():
                awaited[rank] = self.irecv(torch.zeros(self.size), rank, ASSEMBLY_TAG)
        while awaited:
            order = list(awaited)
            rank = order[self._await_one([awaited[r] for r in order], "all to come together")]
            with suppress(PeerLost) if survivors_suffice else nullcontext():
                awaited.pop(rank).wait()
                word[rank] = 1
        here = tuple(r for r in ranks if word[r])
        for rank in here[1:]:
            self.send(word, rank, ASSEMBLY_TAG)
        return here

    def _await_one(self, works: Sequence[Work], what: str) -> int:
        """The index of one that is through, however long it takes; who is slow is told."""
        with self.patience.waiting(what, gives_up=False) as look:
            while (which := self.wait_any(works, self.patience.post_s)) is None:
                look()
        return which

    def side(self, label: str) -> Transport:
        """The same ranks over channels of their own, for another kind of traffic; called by all
        ranks.
        """
        raise BadRequest(
            f"transport {self.kind} has one channel only: it takes processes (shm, gloo, mpi)"
        )

    def twin(self) -> Transport:
        """The same channels, for another thread of this rank: one thread sends, the other
        receives.
        """
        return self

    def pause(self) -> None:
        """A moment in which others may run, where ranks take turns."""
        return

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> Transport:
        """These ranks only, numbered from 0 in this order; called by its members only."""

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        """Through rank 0, where the library behind it has nothing better."""
        if self.rank == 0:
            other = torch.empty_like(tensor)
            for peer in range(1, self.size):
                self.recv(other, peer)
                REDUCE[op](tensor, other, out=tensor)
        else:
            self.send(tensor, 0)
        Transport.broadcast(self, tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if self.rank == root:
            for work in [self.isend(tensor, peer) for peer in range(self.size) if peer != root]:
                work.wait()
        else:
            self.recv(tensor, root)

    def all_reduce_bytes(self, length: int, itemsize: int) -> tuple[int, int, int]:
        """What this rank sends and receives in its own all-reduce, and in how many messages: a
        ring's, the least possible.
        """
        return (*ring_bytes(length, itemsize, self.rank, self.size), 2 * (self.size - 1))

    def adds(self, dtype: torch.dtype) -> bool:
        """Whether its own all-reduce can add such numbers."""
        return True

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a flat buffer that will be exchanged; a transport may have a better place for
        it.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def close(self) -> None:
        """Give back what is held; others learn at once that this rank is gone."""
        return


def expect_one(said: Sequence[str]) -> None:
    """All ranks said the same."""
    if len(set(said)) > 1:
        told = "; ".join(f"rank {rank}: {words}" for rank, words in enumerate(said))
        raise TransportError(f"the ranks do not ask for the same thing ({told})")


def wording(operation: str, tensor: Tensor) -> str:
    """What a rank brings to a collective, for `agree`."""
    layout = "" if tensor.is_contiguous() else ", not contiguous"
    return (
        f"{operation} of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')} on"
        f" {tensor.device.type}{layout}"
    )


def check_tensor(tensor: Tensor, transport: Transport) -> None:
    if tensor.device.type not in transport.devices or not tensor.is_contiguous():
        raise TransportError(
            f"transport {transport.name} moves contiguous tensors on"
            f" {' and '.join(sorted(transport.devices))}; this one is on"
            f" {tensor.device.type}{'' if tensor.is_contiguous() else ' and not contiguous'}"
        )


def ring_bytes(length: int, itemsize: int, rank: int, size: int) -> tuple[int, int]:
    """What `rank` sends and receives in a chunked ring all-reduce: 2(P-1) * bytes, summed over
    ranks.

    It passes on every chunk but one in each of the two halves.
    """
    if size == 1:
        return 0, 0

    def chunk(c: int) -> int:
        c %= size
        return (c + 1) * length // size - c * length // size

    sent = 2 * length - chunk(rank + 1) - chunk(rank + 2)
    received = 2 * length - chunk(rank) - chunk(rank + 1)
    return sent * itemsize, received * itemsize


def check_ranks(ranks: Sequence[int], size: int, own: int) -> tuple[int, ...]:
    members = tuple(ranks)
    if len(set(members)) != len(members) or not all(0 <= r < size for r in members):
        raise TransportError(f"a group of ranks {members}: they must be different and below {size}")
    if own not in members:
        raise TransportError(f"rank {own} is not in the group {members} that it asks for")
    return members
