"""Processes on one host through shared memory.

Buffers that are exchanged live in memory that all ranks map (`allocate`), so an all-reduce copies
nothing in or out: each rank sums its own slice of everybody's buffers and writes the result into
all of them. Buffers that live elsewhere are copied through a shared one; small ones travel with a
single barrier.

The memory belongs to unnamed files (memfd) that vanish with their processes: nothing can be left
behind, whatever dies. They are not in /dev/shm, so a small one (64 MB in many containers) does no
harm; what counts is the machine's free memory, which is looked at before any is taken.
"""

from __future__ import annotations

import copy
import mmap
import os
import time
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PeerLost, TransportError
from paceline.registry import transports
from paceline.transport.base import (
    REDUCE,
    Op,
    Rendezvous,
    Transport,
    Work,
    check_ranks,
    check_tensor,
    wording,
)
from paceline.transport.c10d.transport import connect_store, patience_for
from paceline.transport.patience import Patience
from paceline.transport.shm.channels import ChannelMessage, channels_bytes
from paceline.transport.shm.doorbell import Board, Column, Waiter

SMALL_BYTES = 32 << 10  # up to here everybody sums everything, with one barrier instead of two
LOOK_S = 0.002  # between two looks at whether a rank has published something
BLOCK_BYTES = 256 << 10  # the slice is summed and handed out in pieces that stay in the cache


class SharedBytes:
    """A stretch of memory that other processes can map, given its address (process, file number,
    size).
    """

    def __init__(self, size: int, address: tuple[int, int] | None = None) -> None:
        self.size = max(1, size)
        try:
            if address is None:
                free = psutil.virtual_memory().available
                if self.size > free:
                    raise TransportError(
                        f"shared memory of {self.size:,} bytes is not to be had: {free:,} are free"
                    )
                self._file = os.memfd_create("paceline")
                os.ftruncate(self._file, self.size)
                self._map = mmap.mmap(self._file, self.size)
            else:
                file = os.open(f"/proc/{address[0]}/fd/{address[1]}", os.O_RDWR)
                try:
                    self._map = mmap.mmap(file, self.size)
                finally:
                    os.close(file)
        except OSError as error:
            raise TransportError(
                f"shared memory of {self.size:,} bytes is not to be had: {error.strerror}"
            ) from None
        self.address = address or (os.getpid(), self._file)

    def tensor(
        self, dtype: torch.dtype = torch.uint8, offset: int = 0, count: int | None = None
    ) -> Tensor:
        length = (self.size - offset) // dtype.itemsize if count is None else count
        return (
            torch.frombuffer(self._map, dtype=dtype, count=length, offset=offset)
            if length
            else torch.empty(0, dtype=dtype)
        )

    def words(self) -> memoryview:
        return memoryview(self._map).cast("B").cast("I")


class SharedMemory:
    """What one process shares, and what it has mapped of others. Allocations are numbered: all
    ranks make the same ones.
    """

    def __init__(self, store: Any, rank: int, ranks: int, patience: Patience) -> None:
        self._store, self._rank, self.ranks, self.patience = store, rank, ranks, patience
        self._own: list[tuple[int, int, SharedBytes]] = []  # (first address, last address, bytes)
        self._others: dict[tuple[int, int], SharedBytes] = {}

    def allocate(self, size: int) -> tuple[SharedBytes, int]:
        shared, number = SharedBytes(size), len(self._own)
        start = shared.tensor().data_ptr()
        self._store.set(
            f"shm/{self._rank}/{number}", f"{shared.address[0]} {shared.address[1]} {shared.size}"
        )
        self._own.append((start, start + shared.size, shared))
        return shared, number

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """The number of the allocation that a tensor lies in, and where in it."""
        address = tensor.data_ptr()
        for number, (start, end, _) in enumerate(self._own):
            if start <= address and address + tensor.nbytes <= end:
                return number, address - start
        return None

    def of(self, rank: int, number: int) -> SharedBytes:
        """A rank's allocation of that number; waits until it has been made."""
        if rank == self._rank:
            return self._own[number][2]
        key = (rank, number)
        if key not in self._others:
            process, file, size = self.published(f"shm/{rank}/{number}", rank)
            self._others[key] = SharedBytes(size, (process, file))
        return self._others[key]

    def published(self, key: str, rank: int) -> list[int]:
        """What a rank has published; waits for it."""
        try:
            with self.patience.waiting("the place of its memory", rank) as look:
                while not self._store.check([key]):
                    look()
                    time.sleep(LOOK_S)
            return [int(v) for v in self._store.get(key).split()]
        except RuntimeError:
            raise PeerLost(rank, "it did not say where its memory is") from None


@transports.register("shm")
class ShmTransport(Transport):
    """Processes on one host, through shared memory: several times as fast as TCP."""

    native = frozenset({"all_reduce", "broadcast"})
    shares_memory = True

    def __init__(
        self,
        memory: SharedMemory,
        store: Any,
        members: tuple[int, ...],
        world_rank: int,
        deadline_s: float,
        name: str,
    ) -> None:
        super().__init__(
            members.index(world_rank), len(members), deadline_s, patience=memory.patience
        )
        self.store, self._memory, self._members, self._name = store, memory, members, name
        board, channels = self._meeting_place(store, name)
        self._board = Board(board.words(), self.size)
        self._keep = (board, channels)
        self._channels = channels.tensor()
        crowded = memory.ranks > len(os.sched_getaffinity(0))
        self._waiter: Waiter = Waiter(self._board, self.rank, members, memory.patience, crowded)
        self._board.pids[self.rank] = os.getpid()
        self._calls = 0
        self._words: dict[tuple[Any, ...], int] = {}  # what can be said at a meeting, in 32 bits
        self._scratch: dict[
            tuple[str, int], int
        ] = {}  # allocations that all ranks have made for copying through
        self._slices: dict[tuple[int, int, int, torch.dtype], list[Tensor]] = {}
        self._pending: list[ChannelMessage] = []
        self._barrier_number = 0
        self._meet()
        self._watch()

    @classmethod
    def missing(cls) -> str | None:
        if (
            hasattr(os, "memfd_create")
            and hasattr(os, "pidfd_open")
            and os.path.isdir("/proc/self/fd")
        ):
            return None
        return "it needs Linux, with memfd, pidfd and /proc: use --transport gloo"

    @classmethod
    def connect(cls, rendezvous: Rendezvous) -> ShmTransport:
        if (missing := cls.missing()) is not None:
            raise TransportError(f"transport shm is not to be had here: {missing}")
        store = dist.PrefixStore(f"shm-{rendezvous.generation}", connect_store(rendezvous))
        memory = SharedMemory(store, rendezvous.rank, rendezvous.size, patience_for(rendezvous))
        return cls(
            memory,
            store,
            tuple(range(rendezvous.size)),
            rendezvous.rank,
            rendezvous.deadline_s,
            "world",
        )

    def _meeting_place(self, store: Any, name: str) -> tuple[SharedBytes, SharedBytes]:
        """Made by rank 0, mapped by all: the board of counters, and a channel for each pair."""
        key = f"place/{name}"
        sizes = (Board.size(self.size), channels_bytes(self.size))
        if self.rank == 0:
            made = tuple(SharedBytes(s) for s in sizes)
            store.set(key, " ".join(f"{m.address[0]} {m.address[1]}" for m in made))
            return made[0], made[1]
        numbers = self._memory.published(key, self._members[0])
        return SharedBytes(sizes[0], (numbers[0], numbers[1])), SharedBytes(
            sizes[1], (numbers[2], numbers[3])
        )

    def _meet(self) -> None:
        """Everybody is there, and everybody's process is known."""
        self.barrier()

    def _watch(self) -> None:
        """From now on a peer's death is noticed: a process descriptor becomes readable when its
        process ends.
        """
        for peer in range(self.size):
            if peer != self.rank:
                try:
                    self._waiter.descriptors[peer] = os.pidfd_open(self._board.pids[peer])
                except OSError as error:
                    raise PeerLost(self._members[peer], error.strerror or "") from None

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        return self._memory.allocate(numel * dtype.itemsize)[0].tensor(dtype, 0, numel).zero_()

    def barrier(self) -> None:
        self._barrier_number += 1
        number, arrived = self._barrier_number & 0xFFFFFFFF, self._board.arrived
        arrived[self.rank] = number
        self._board.ring_all(self.rank)
        for peer in range(self.size):
            if peer != self.rank:
                has_arrived = partial(_is_past, arrived, peer, number)
                self._waiter.wait(has_arrived, peer, "a barrier")

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        if self.size == 1:
            return
        if not movable(tensor):
            self._come_together(op, tensor)  # all ranks raise
        elif tensor.nbytes <= SMALL_BYTES:
            self._reduce_small(tensor, op)
        elif (place := self._memory.find(tensor)) is not None:
            self._come_together(op, tensor)
            self._reduce_slices(place, tensor.numel(), tensor.dtype, op)
        else:
            number = self._copying_place(tensor.nbytes)
            shared = self._memory.of(self._members[self.rank], number).tensor(
                tensor.dtype, 0, tensor.numel()
            )
            shared.copy_(tensor.view(-1))
            self._come_together(op, tensor)
            self._reduce_slices((number, 0), tensor.numel(), tensor.dtype, op)
            tensor.view(-1).copy_(shared)

    def _come_together(self, operation: str, tensor: Tensor) -> None:
        """A barrier at which everybody also says what it brings: all raise when it is not the same.

        Two words per rank, used in turn: whoever writes one again has met, at the other, everybody
        who read it.
        """
        self._calls += 1
        key = (operation, tensor.numel(), tensor.dtype, tensor.device.type, tensor.is_contiguous())
        word = self._words.get(key)
        if word is None:
            word = self._words[key] = zlib.crc32(wording(operation, tensor).encode())
        said = self._board.said[self._calls % 2]
        said[self.rank] = word
        self.barrier()
        for peer in range(self.size):
            if said[peer] != word:
                self.agree(wording(operation, tensor))
        check_tensor(tensor, self)

    def _reduce_slices(
        self, place: tuple[int, int], length: int, dtype: torch.dtype, op: Op
    ) -> None:
        """Every rank sums its slice of everybody's buffers and writes the result into all
        of them.
        """
        key = (*place, length, dtype)
        parts = self._slices.get(key)
        if parts is None:
            low, high = self.rank * length // self.size, (self.rank + 1) * length // self.size
            number, offset = place
            parts = [
                self._memory.of(m, number).tensor(dtype, offset, length)[low:high]
                for m in self._members
            ]
            self._slices[key] = parts
        reduce, block = REDUCE[op], BLOCK_BYTES // dtype.itemsize
        for start in range(0, parts[0].numel(), block):
            pieces = [p[start : start + block] for p in parts]
            total = pieces[0]
            for piece in pieces[1:]:
                reduce(total, piece, out=total)
            for piece in pieces[1:]:
                piece.copy_(total)
        self.barrier()

    def _reduce_small(self, tensor: Tensor, op: Op) -> None:
        """Everybody puts its part on the table and sums all parts, in rank order. Two tables, used
        in turn, as above.
        """
        number, flat = self._copying_place(2 * SMALL_BYTES, "tables"), tensor.view(-1)
        offset = (self._calls % 2) * SMALL_BYTES
        self._memory.of(self._members[self.rank], number).tensor(
            flat.dtype, offset, flat.numel()
        ).copy_(flat)
        self._come_together(op, tensor)
        if not flat.numel():
            return
        parts = [
            self._memory.of(m, number).tensor(flat.dtype, offset, flat.numel())
            for m in self._members
        ]
        flat.copy_(parts[0])
        for part in parts[1:]:
            REDUCE[op](flat, part, out=flat)

    def _copying_place(self, size: int, purpose: str = "copies") -> int:
        """The number of an allocation large enough, made by all ranks at the same call."""
        key = (purpose, 1 << (size - 1).bit_length())
        if key not in self._scratch:
            self._scratch[key] = self._memory.allocate(key[1])[1]
        return self._scratch[key]

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if self.size == 1:
            return
        here = movable(tensor) and tensor.numel() > 0
        number = self._copying_place(tensor.nbytes) if here else 0
        if here and self.rank == root:
            self._memory.of(self._members[root], number).tensor(
                tensor.dtype, 0, tensor.numel()
            ).copy_(tensor.view(-1))
        self._come_together(f"broadcast from {root}", tensor)
        if here and self.rank != root:
            tensor.view(-1).copy_(
                self._memory.of(self._members[root], number).tensor(tensor.dtype, 0, tensor.numel())
            )
        self.barrier()

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        return self._enqueue(ChannelMessage(self, tensor, to, True, tag))

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        return self._enqueue(ChannelMessage(self, tensor, source, False, tag))

    def wait_any(self, works: Sequence[Work], patience_s: float | None = None) -> int | None:
        pieces = [w for w in works if isinstance(w, ChannelMessage)]

        def found() -> int | None:
            self._progress()
            return next((i for i, w in enumerate(pieces) if w.done), None)

        return self._waiter.wait_any(found, [w.peer for w in pieces], patience_s)

    def share(self, tensor: Tensor, root: int = 0) -> Tensor:
        place = self._memory.find(tensor)
        if place is None:
            raise TransportError("transport shm shares only what it has allocated")
        number, offset = place
        self.barrier()  # everybody has allocated it
        return self._memory.of(self._members[root], number).tensor(
            tensor.dtype, offset, tensor.numel()
        )

    @property
    def tolerant(self) -> bool:
        return self._waiter.tolerant

    @tolerant.setter
    def tolerant(self, value: bool) -> None:
        self._waiter.tolerant = value

    def _enqueue(self, work: ChannelMessage) -> ChannelMessage:
        self._pending.append(work)
        self._progress()
        return work

    def _progress(self) -> None:
        """Move whatever can be moved; messages between two ranks keep their order."""
        blocked: set[tuple[int, bool]] = set()
        for work in self._pending:
            key = (work.channel, work.sending)
            if key not in blocked and not work.advance():
                blocked.add(key)
        self._pending = [w for w in self._pending if not w.done]

    def group(self, ranks: Sequence[int]) -> ShmTransport:
        members = check_ranks(ranks, self.size, self.rank)
        if members == tuple(range(self.size)):
            return self
        world = tuple(self._members[r] for r in members)
        name = f"{self._name}/{'-'.join(map(str, members))}"
        return ShmTransport(
            self._memory, self.store, world, self._members[self.rank], self.deadline_s, name
        )

    def side(self, label: str) -> ShmTransport:
        world = self._members[self.rank]
        return ShmTransport(
            self._memory,
            self.store,
            self._members,
            world,
            self.deadline_s,
            f"{self._name}/side/{label}",
        )

    def twin(self) -> ShmTransport:
        other = copy.copy(self)
        other._pending, other._waiter = [], copy.copy(self._waiter)
        other._waiter.patience = Patience(
            self.rank, self.size, self.deadline_s, watched=True
        )  # one thread of a rank tells
        return other

    def close(self) -> None:
        self._board.closed[self.rank] = 1
        self._board.ring_all(self.rank)
        for descriptor in self._waiter.descriptors.values():
            os.close(descriptor)
        self._waiter.descriptors.clear()


def _is_past(counters: Column, rank: int, number: int) -> bool:
    """Whether a rank's 32-bit counter has reached `number`; counters wrap around."""
    return (counters[rank] - number) & 0xFFFFFFFF < 0x80000000


def movable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()
