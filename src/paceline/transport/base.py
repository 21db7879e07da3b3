"""The interface of all transports."""

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
    """A send or receive that has started."""

    def wait(self) -> None: ...


class Message(Work, Protocol):
    """A message that is prepared once and then sent or received often: start, wait, start, wait."""

    def start(self) -> None: ...


class Again:
    """A `Message` that makes a new send or receive at each start."""

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
    generation: int = 0  # counts how often the group has been formed
    own: str | None = None  # this rank's address, if it differs from the store's host
    alone: bool = False  # no other rank runs on this host, so the host's traffic is this rank's
    watched: bool = False  # a rank's end is noticed at once, so waits for slow ranks have no limit


class Transport(ABC):
    """Moves tensors between ranks 0..size-1.

    A wait for a rank that has ended raises `PeerLost`. A wait for a slow rank goes on, and is
    reported to the user after `deadline_s`.
    """

    name: ClassVar[str]
    runs_as: ClassVar[Literal["processes", "threads"]] = "processes"
    native: ClassVar[frozenset[str]] = frozenset()  # collectives of the library behind it
    shares_memory: ClassVar[bool] = False  # whether `share` works: the ranks are on one host
    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})  # whose memory it can read
    store: Any = None  # torch.distributed's store, where there is one
    tolerant: bool = False  # while waiting for one rank, ignore the death of others

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
        """The name of the transport below all wrappers."""
        return self.name

    @classmethod
    def available(cls) -> bool:
        """Whether this host has all that the transport requires."""
        return cls.missing() is None

    @classmethod
    def missing(cls) -> str | None:
        """What this host lacks for the transport, and how to get it; None: nothing is missing."""
        return None

    @classmethod
    def connect(cls, rendezvous: Rendezvous) -> Transport:
        raise TransportError(f"transport {cls.name} does not connect processes")

    @abstractmethod
    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work: ...

    @abstractmethod
    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work: ...

    def sending(self, tensor: Tensor, to: int) -> Message:
        """Prepare a message that sends the tensor's content at each start."""
        return Again(lambda: self.isend(tensor, to))

    def receiving(self, tensor: Tensor, source: int) -> Message:
        return Again(lambda: self.irecv(tensor, source))

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        self.isend(tensor, to, tag).wait()

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        self.irecv(tensor, source, tag).wait()

    def c10d(self) -> str:
        """torch.distributed's name for the backend that DistributedDataParallel uses."""
        return "gloo"

    def together(self) -> AbstractContextManager[Any]:
        """Start all sends and receives of the `with` block together, where a library needs that."""
        return nullcontext()

    def agree(self, what: str) -> None:
        """Raise on all ranks unless all give the same description of what they are about to do.

        The metered payload does not include it.
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
        """Wait until one of the works is complete and return its index; None after `patience_s`.

        A work whose peer has ended counts as complete: its `wait` raises.
        """
        raise TransportError(f"transport {self.name} cannot wait for one message out of several")

    def share(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The root's memory behind `tensor`, mapped by this rank.

        All ranks must have made the same calls of `allocate`, in the same order.
        """
        raise BadRequest(
            f"transport {self.kind} has no memory that ranks share; on one host, use"
            " --transport shm"
        )

    def assemble(self, ranks: Sequence[int], survivors_suffice: bool = False) -> tuple[int, ...]:
        """Wait for these ranks without a deadline; return the ranks that came, the same on all.

        The first rank collects the others' messages. A rank that has ended raises `PeerLost` on
        all of them, unless `survivors_suffice`.
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
        """The index of a complete work, however long that takes; slow ranks are reported."""
        with self.patience.waiting(what, gives_up=False) as look:
            while (which := self.wait_any(works, self.patience.post_s)) is None:
                look()
        return which

    def side(self, label: str) -> Transport:
        """A transport over the same ranks with separate channels, for another kind of traffic.

        All ranks must call it.
        """
        raise BadRequest(
            f"transport {self.kind} has one channel only; use --transport shm, gloo or mpi"
        )

    def twin(self) -> Transport:
        """A transport over the same channels, for a second thread of this rank.

        One thread sends, the other receives.
        """
        return self

    def pause(self) -> None:
        """Let other ranks run, where ranks take turns (inproc)."""
        return

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> Transport:
        """A transport over these ranks only, numbered from 0 in this order.

        Only its members call it.
        """

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        """All-reduce through rank 0. Transports with a better way override it."""
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
        """Bytes that this rank sends and receives in `all_reduce`, and the number of messages.

        They are counted as a ring's, the least possible.
        """
        return (*ring_bytes(length, itemsize, self.rank, self.size), 2 * (self.size - 1))

    def adds(self, dtype: torch.dtype) -> bool:
        """Whether `all_reduce` can add numbers of this type."""
        return True

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of zeros, in memory that this transport can exchange without copies."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def close(self) -> None:
        """Release all resources; peers notice at once that this rank has left."""
        return


def expect_one(said: Sequence[str]) -> None:
    """Raise unless all ranks said the same."""
    if len(set(said)) > 1:
        told = "; ".join(f"rank {rank}: {words}" for rank, words in enumerate(said))
        raise TransportError(f"the ranks call different operations ({told})")


def wording(operation: str, tensor: Tensor) -> str:
    """A description of a rank's call of a collective, for `agree`."""
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
    """Bytes that `rank` sends and receives in a chunked ring all-reduce.

    Summed over the ranks they are 2(P-1) times the buffer. In each of the two halves a rank sends
    all chunks but one.
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
        raise TransportError(
            f"a group of ranks {members}: ranks must be different, from 0 to {size - 1}"
        )
    if own not in members:
        raise TransportError(f"rank {own} asks for the group {members}, which does not contain it")
    return members
