"""The interface of all transports.

A transport must have `isend`, `irecv`, `wait_any`, `barrier` and `group`; ranks that are processes
also need `connect`. Everything else has a default, which is written on top of these (together.py),
or is a capability that the transport declares in its `Traits` (shared memory, native collectives, a
second channel).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from paceline.common.waits import WAITS as WAITS
from paceline.common.waits import Waits as Waits
from paceline.errors import BadRequest, TransportError
from paceline.transport import together
from paceline.transport.patience import Patience
from paceline.transport.together import REDUCE as REDUCE
from paceline.transport.together import Op as Op
from paceline.types import Phase

NOTE_TAG = 1


@dataclass(frozen=True)
class Traits:
    """What a transport declares about itself; launchers, `auto` and reports go by it."""

    started_by: Literal["fork", "threads", "mpirun"] = "fork"
    crosses_hosts: bool = False
    over_network: bool = False  # no payload goes through memory that ranks share
    devices: tuple[str, ...] = ("cpu",)  # whose memory it moves
    native: tuple[str, ...] = ()  # collectives of the library behind it
    shares_memory: bool = False  # `share` works: the ranks are on one host
    second_channel: bool = False  # `side` works
    take_turns: bool = False  # one rank runs at a time, so times that are measured say nothing
    virtual_time: bool = False  # times are computed for a network that is only described
    real_compute: bool = False  # in virtual time, computing takes the processor time that it took
    # Where several fit, `auto` takes the highest; None: only when the user names it.
    preference: int | None = None

    @property
    def runs_as(self) -> Literal["processes", "threads"]:
        return "threads" if self.started_by == "threads" else "processes"


class Work(Protocol):
    """A send or receive that has started.

    After a `wait` that raised, a receive's memory is not written any more.
    """

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
    """How the ranks of a run find each other: through a board that a launcher or rank 0 hosts."""

    rank: int
    size: int
    board: str  # its address: unix:NAME or tcp:HOST:PORT; empty: there is none
    secret: bytes = field(repr=False)
    waits: Waits = WAITS
    generation: int = 0  # counts how often the group has been formed
    own: str = "127.0.0.1"  # this rank's address, by which other ranks reach it
    alone: bool = False  # no other rank runs on this host, so the host's traffic is this rank's
    watched: bool = False  # a rank's end is noticed at once, so waits for slow ranks have no limit
    joined: bool = False  # the rank's connection to the board is held open already
    status: Path | None = None  # the folder where each rank says what it does
    say: Callable[[str], None] | None = None  # takes notices about slow ranks
    # The ranks that have ended, as the launcher knows it; None: it does not tell.
    ended: Callable[[], frozenset[int]] | None = None
    present: tuple[int, ...] | None = None  # the ranks that connect; None: all

    @property
    def members(self) -> tuple[int, ...]:
        return self.present if self.present is not None else tuple(range(self.size))


class Transport(ABC):
    """Moves tensors between ranks 0..size-1.

    A wait for a rank that has ended raises `PeerLost`. A wait for a slow rank goes on, and is
    reported to the user after `deadline_s`.
    """

    name: ClassVar[str]
    traits: Traits = Traits()
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

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks that connected; the others had ended before."""
        return tuple(range(self.size))

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

    # --- the core

    @abstractmethod
    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work: ...

    @abstractmethod
    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work: ...

    @abstractmethod
    def wait_any(self, works: Sequence[Work], patience_s: float | None = None) -> int | None:
        """Wait until one of the works is complete and return its index; None after `patience_s`.

        A work whose peer has ended counts as complete: its `wait` raises.
        """

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> Transport:
        """A transport over these ranks only, numbered from 0 in this order.

        Only its members call it.
        """

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of zeros, in memory that this transport can exchange without copies."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def close(self) -> None:
        """Release all resources; peers notice at once that this rank has left."""
        return

    # --- on top of the core

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        self.isend(tensor, to, tag).wait()

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        self.irecv(tensor, source, tag).wait()

    def expect(self, tensor: Tensor, source: int) -> Work:
        """Start a receive long before its message is sent."""
        return self.irecv(tensor, source)

    def send_note(self, tensor: Tensor, to: int) -> Work:
        """Send a few numbers that accompany the payload. They are not counted as payload."""
        return self.control.isend(tensor, to, NOTE_TAG)

    def recv_note(self, tensor: Tensor, source: int) -> Work:
        return self.control.irecv(tensor, source, NOTE_TAG)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        """Replace the tensor by the combination of all ranks' tensors."""
        together.all_reduce(self, tensor, op)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        together.broadcast(self, tensor, root)

    # --- capabilities

    @property
    def control(self) -> Transport:
        """A transport over the same ranks for small tensors on the CPU.

        It is this one, unless this one moves other memory only.
        """
        return self

    def share(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The root's memory behind `tensor`, mapped by this rank.

        All ranks must have made the same calls of `allocate`, in the same order.
        """
        raise BadRequest(
            f"transport {self.kind} has no memory that ranks share; on one host, use"
            " --transport shm"
        )

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

    @property
    def now(self) -> Callable[[], float]:
        """The function that returns this rank's time in seconds: real, or virtual (simulated)."""
        return time.perf_counter

    def charge(self, seconds: float) -> None:
        """Let this rank compute for so long, without a computation: sleep, or in virtual time."""
        time.sleep(seconds)

    def added(self, size_bytes: int) -> None:
        """This rank has added so many received bytes to its own; that may take virtual time."""
        return

    def sending(self, tensor: Tensor, to: int) -> Message:
        """Prepare a message that sends the tensor's content at each start."""
        return Again(lambda: self.isend(tensor, to))

    def receiving(self, tensor: Tensor, source: int) -> Message:
        return Again(lambda: self.irecv(tensor, source))

    def c10d(self) -> str:
        """torch.distributed's name for the backend that DistributedDataParallel uses."""
        return "gloo"

    def together(self) -> AbstractContextManager[Any]:
        """Start all sends and receives of the `with` block together, where a library needs that."""
        return nullcontext()

    def all_reduce_bytes(self, length: int, itemsize: int) -> tuple[int, int, int]:
        """Bytes that this rank sends and receives in `all_reduce`, and the number of messages.

        They are counted as a ring's, the least possible.
        """
        return (*ring_bytes(length, itemsize, self.rank, self.size), 2 * (self.size - 1))

    def adds(self, dtype: torch.dtype) -> bool:
        """Whether `all_reduce` can add numbers of this type."""
        return True

    # --- what a wrapper may count

    def during(self, phase: Phase) -> AbstractContextManager[Any]:
        """Count the exchanges of the `with` block as those of a phase."""
        return nullcontext()

    def enter(self, phase: Phase) -> None:
        """Count all exchanges from now on as those of a phase."""
        return

    def counted(self, phase: Phase) -> Any:
        """The bytes, messages and seconds of a phase so far; None where nothing counts them."""
        return None

    def uncounted(self) -> Transport:
        """The same transport for exchanges that are not the run's: nothing counts them."""
        return self

    def aside(self) -> Transport:
        """The same transport for exchanges beside computing, which `take` and `settle` count."""
        return self

    def take(self) -> Any:
        """What this transport has exchanged since the last call; its own thread calls this."""
        return None

    def settle(self, taken: Any, waited_s: float) -> None:
        """Count what a transport aside has exchanged, and how long the rank waited for it."""
        return

    def note_all_reduce(self, length: int, itemsize: int) -> None:
        """Count an all-reduce that PyTorch's DDP makes, whose time cannot be measured from here."""
        return


def wording(operation: str, tensor: Tensor) -> str:
    """A description of a rank's call of a collective, for `agree`."""
    layout = "" if tensor.is_contiguous() else ", not contiguous"
    return (
        f"{operation} of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')} on"
        f" {tensor.device.type}{layout}"
    )


def check_tensor(tensor: Tensor, transport: Transport) -> None:
    devices = transport.traits.devices
    if tensor.device.type not in devices or not tensor.is_contiguous():
        raise TransportError(
            f"transport {transport.name} moves contiguous tensors on"
            f" {' and '.join(sorted(devices))}; this one is on"
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
