"""Processes on one host through shared memory.

Buffers that are exchanged live in memory that all ranks map (`allocate`), so an all-reduce copies
nothing in or out: each rank sums one slice over all ranks' buffers and writes the result into all
of them. Buffers that live elsewhere are copied through shared memory. Small buffers need a single
barrier.
"""

from __future__ import annotations

import copy
import os
import platform
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.errors import TransportError
from paceline.registry import transports
from paceline.transport.base import (
    REDUCE,
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
from paceline.transport.shm.channels import ChannelMessage, channels_bytes
from paceline.transport.shm.doorbell import Column, Counters, Waiter
from paceline.transport.shm.memory import SharedBytes, SharedMemory
from paceline.transport.together import agree

# Up to this size every rank sums the whole buffer: one barrier instead of two.
SMALL_BYTES = 32 << 10
X86_64 = ("x86_64", "AMD64")  # as platform.machine() calls it
CACHED_BYTES = 256 << 10  # a slice is summed and copied in spans that stay in the cache


@transports.register("shm")
class ShmTransport(Transport):
    """Processes on one host, through shared memory: several times as fast as TCP."""

    traits = Traits(
        native=("all_reduce", "broadcast"), shares_memory=True, second_channel=True, preference=20
    )

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
        counters, channels = self._map_common_memory(store, name)
        self._counters = Counters(counters.words(), self.size)
        self._keep = (counters, channels)
        self._channels = channels.tensor()
        self._waiter: Waiter = Waiter(self._counters, self.rank, members, memory.patience, memory)
        self._counters.pids[self.rank] = os.getpid()
        self._calls = 0
        self._hashes: dict[tuple[Any, ...], int] = {}  # of operations, in 32 bits
        # The names of allocations that all ranks have made to copy through.
        self._scratch: dict[tuple[str, int], str] = {}
        self._groups: Counter[tuple[int, ...]] = Counter()  # made so far, by members
        self._slices: dict[tuple[int | str, int, int, torch.dtype], list[Tensor]] = {}
        self._pending: list[ChannelMessage] = []
        self._barrier_number = 0
        self.barrier()  # all ranks have written their process id
        for peer, member in enumerate(members):
            if peer != self.rank and member not in memory.descriptors:
                memory.watch(member, self._counters.pids[peer])

    @classmethod
    def missing(cls) -> str | None:
        """What this host lacks. Counters and data are written without memory barriers.

        That is right on x86-64, where other cores see a core's writes in their order. Elsewhere a
        rank could see a counter before the data that it counts.
        """
        if (machine := platform.machine()) not in X86_64:
            return f"it relies on the memory order of x86-64, and this machine is {machine}"
        if (
            hasattr(os, "memfd_create")
            and hasattr(os, "pidfd_open")
            and os.path.isdir("/proc/self/fd")
        ):
            return None
        return "it requires Linux with memfd, pidfd and /proc"

    @classmethod
    def connect(cls, rendezvous: Rendezvous) -> ShmTransport:
        if (missing := cls.missing()) is not None:
            raise TransportError(
                f"transport shm is not available here: {missing}; use --transport gloo"
            )
        board = connect_store(rendezvous)
        store = board.under(f"shm-{rendezvous.generation}")
        patience = patience_for(rendezvous, board)
        members = rendezvous.members
        memory = SharedMemory(store, rendezvous.rank, len(members), patience, rendezvous.ended)
        return cls(
            memory,
            store,
            members,
            rendezvous.rank,
            rendezvous.waits.deadline_s,
            "world",
        )

    def _map_common_memory(self, store: Any, name: str) -> tuple[SharedBytes, SharedBytes]:
        """Memory for the counters and for the channels: rank 0 allocates it, all ranks map it."""
        key = f"place/{name}"
        sizes = (Counters.size(self.size), channels_bytes(self.size))
        if self.rank == 0:
            made = tuple(SharedBytes(s) for s in sizes)
            store.set(key, " ".join(f"{m.address[0]} {m.address[1]}" for m in made))
            return made[0], made[1]
        memory, first = self._memory, self._members[0]
        numbers = memory.published(key, first)
        return (
            memory.map(sizes[0], (numbers[0], numbers[1]), first),
            memory.map(sizes[1], (numbers[2], numbers[3]), first),
        )

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        return self._memory.allocate(numel * dtype.itemsize).tensor(dtype, 0, numel).zero_()

    def barrier(self) -> None:
        self._barrier_number += 1
        number, arrived = self._barrier_number & 0xFFFFFFFF, self._counters.arrived
        arrived[self.rank] = number
        self._counters.ring_all(self.rank)
        for peer in range(self.size):
            if peer != self.rank:
                has_arrived = partial(_is_past, arrived, peer, number)
                self._waiter.wait(has_arrived, peer, "a barrier")

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        if self.size == 1:
            return
        if not movable(tensor):
            self._enter_together(op, tensor)  # all ranks raise
        elif tensor.nbytes <= SMALL_BYTES:
            self._reduce_small(tensor, op)
        else:
            place = self._memory.find(tensor)
            copied = self._copied(tensor) if place is None else None
            if not self._enter_together(op, tensor, place):
                copied = copied or self._copied(tensor)
                self.barrier()
            if copied is None and place is not None:
                self._reduce_slices(place, tensor.numel(), tensor.dtype, op)
            elif copied is not None:
                name, shared = copied
                self._reduce_slices((name, 0), tensor.numel(), tensor.dtype, op)
                tensor.view(-1).copy_(shared)

    def _copied(self, tensor: Tensor) -> tuple[str, Tensor]:
        """A copy in memory that all ranks have allocated for copies, and its name."""
        name = self._scratch_name(tensor.nbytes)
        shared = self._memory.of(self._members[self.rank], name).tensor(
            tensor.dtype, 0, tensor.numel()
        )
        return name, shared.copy_(tensor.view(-1))

    def _enter_together(
        self, operation: str, tensor: Tensor, place: tuple[int, int] | None = None
    ) -> bool:
        """Wait for all ranks, and raise on all of them unless all make the same call.

        Returns whether all ranks' tensors are at the same place in their shared memory.

        Each rank publishes a hash of its operation. It has two words for that and alternates
        between them. A rank overwrites word A only after the barrier on word B, and by then every
        rank has read A.
        """
        self._calls += 1
        key = (
            operation,
            tensor.numel(),
            tensor.dtype,
            tensor.device.type,
            tensor.is_contiguous(),
            place,
        )
        word = self._hashes.get(key)
        if word is None:
            word = self._hashes[key] = zlib.crc32(f"{wording(operation, tensor)} {place}".encode())
        said = self._counters.said[self._calls % 2]
        said[self.rank] = word
        self.barrier()
        same = True
        for peer in range(self.size):
            same = same and said[peer] == word
        if not same:
            agree(self, wording(operation, tensor))
        check_tensor(tensor, self)
        return same

    def _reduce_slices(
        self, place: tuple[int | str, int], length: int, dtype: torch.dtype, op: Op
    ) -> None:
        """Sum this rank's slice over all ranks' buffers and write the result into all of them."""
        key = (*place, length, dtype)
        slices = self._slices.get(key)
        if slices is None:
            low, high = self.rank * length // self.size, (self.rank + 1) * length // self.size
            label, offset = place
            slices = [
                self._memory.of(m, label).tensor(dtype, offset, length)[low:high]
                for m in self._members
            ]
            self._slices[key] = slices
        reduce, step = REDUCE[op], CACHED_BYTES // dtype.itemsize
        for start in range(0, slices[0].numel(), step):
            spans = [s[start : start + step] for s in slices]
            total = spans[0]
            for span in spans[1:]:
                reduce(total, span, out=total)
            for span in spans[1:]:
                span.copy_(total)
        self.barrier()

    def _reduce_small(self, tensor: Tensor, op: Op) -> None:
        """Copy the tensor to shared memory, then sum all ranks' copies in rank order.

        There are two places for copies, used alternately, as in `_enter_together`.
        """
        name, flat = self._scratch_name(2 * SMALL_BYTES, "small"), tensor.view(-1)
        offset = (self._calls % 2) * SMALL_BYTES
        self._memory.of(self._members[self.rank], name).tensor(
            flat.dtype, offset, flat.numel()
        ).copy_(flat)
        self._enter_together(op, tensor)
        if not flat.numel():
            return
        copies = [
            self._memory.of(m, name).tensor(flat.dtype, offset, flat.numel()) for m in self._members
        ]
        flat.copy_(copies[0])
        for other in copies[1:]:
            REDUCE[op](flat, other, out=flat)

    def _scratch_name(self, size: int, purpose: str = "copies") -> str:
        """The name of an allocation that is large enough; all ranks make it at the same call."""
        key = (purpose, 1 << (size - 1).bit_length())
        if key not in self._scratch:
            self._scratch[key] = f"{self._name}/{purpose}/{key[1]}"
            self._memory.allocate_for(self._scratch[key], key[1])
        return self._scratch[key]

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if self.size == 1:
            return
        here = movable(tensor) and tensor.numel() > 0
        name = self._scratch_name(tensor.nbytes) if here else ""
        if here and self.rank == root:
            self._memory.of(self._members[root], name).tensor(
                tensor.dtype, 0, tensor.numel()
            ).copy_(tensor.view(-1))
        self._enter_together(f"broadcast from {root}", tensor)
        if here and self.rank != root:
            tensor.view(-1).copy_(
                self._memory.of(self._members[root], name).tensor(tensor.dtype, 0, tensor.numel())
            )
        self.barrier()

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        return self._enqueue(ChannelMessage(self, tensor, to, True, tag))

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        return self._enqueue(ChannelMessage(self, tensor, source, False, tag))

    def wait_any(self, works: Sequence[Work], patience_s: float | None = None) -> int | None:
        messages = [w for w in works if isinstance(w, ChannelMessage)]

        def found() -> int | None:
            self._progress()
            return next((i for i, w in enumerate(messages) if w.done), None)

        return self._waiter.wait_any(found, [w.peer for w in messages], patience_s)

    def share(self, tensor: Tensor, root: int = 0) -> Tensor:
        place = self._memory.find(tensor)
        if place is None:
            raise TransportError(
                "transport shm shares only memory that it has allocated (transport.allocate)"
            )
        number, offset = place
        self.barrier()  # all ranks have allocated it
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
        """Advance all pending messages; the messages of a channel keep their order."""
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
        self._groups[members] += 1
        name = f"{self._name}/{'-'.join(map(str, members))}/{self._groups[members]}"
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
        # Without a store: only the rank's first thread reports slow ranks.
        other._waiter.patience = Patience(self.rank, self.size, self.deadline_s, watched=True)
        return other

    def close(self) -> None:
        self._counters.closed[self.rank] = 1
        self._counters.ring_all(self.rank)
        if self._name == "world":
            self._memory.close()
            self.store.close()


def _is_past(counters: Column, rank: int, number: int) -> bool:
    """Whether a rank's 32-bit counter has reached `number`; counters wrap around."""
    return (counters[rank] - number) & 0xFFFFFFFF < 0x80000000


def movable(tensor: Tensor) -> bool:
    """Whether the tensor's bytes can be copied to shared memory as they are."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()
