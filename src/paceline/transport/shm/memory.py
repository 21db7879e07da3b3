"""Memory that the processes of one host share.

The memory belongs to unnamed files (memfd). The kernel frees them with the last process that holds
them, so nothing is left behind when a process is killed. The files are not in /dev/shm, so its size
limit (64 MB in many containers) does not matter. `SharedBytes` checks the host's free memory before
it allocates.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import Tensor

from paceline.errors import PeerLost, TransportError
from paceline.transport.patience import Patience

POLL_S = 0.002  # between two looks at the store for what a rank publishes
EXIT_S = 5.0  # the longest time that the kernel takes to end a process


class SharedBytes:
    """Memory that other processes can map, given its address (process, file descriptor) and size.

    Without an address it is allocated; with one, another process's memory is mapped.
    """

    def __init__(self, size: int, address: tuple[int, int] | None = None) -> None:
        self.size = max(1, size)
        try:
            if address is None:
                free = psutil.virtual_memory().available
                if self.size > free:
                    raise TransportError(
                        f"{self.size:,} bytes of shared memory are not available: {free:,} bytes"
                        " are free on this host"
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
                f"{self.size:,} bytes of shared memory are not available: {error.strerror}"
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
    """The memory that one rank shares, and the other ranks' memory that it has mapped.

    Allocations are numbered. Where all ranks make the same allocations in the same order, a number
    means the same buffer on all of them. What the ranks of a group allocate at the same call
    (`allocate_for`) is found by its name, so that it does not depend on other allocations.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        patience: Patience,
        ended: Callable[[], frozenset[int]] | None = None,
    ) -> None:
        self._store, self._rank, self.ranks, self.patience = store, rank, ranks, patience
        # By number: the first address, the last address, the bytes.
        self._own: dict[int, tuple[int, int, SharedBytes]] = {}
        self._named: dict[str, SharedBytes] = {}
        self._others: dict[tuple[int, int | str], SharedBytes] = {}
        self._ended = ended
        self.descriptors: dict[int, int] = {}  # of the processes of all ranks

    def allocate(self, size: int) -> SharedBytes:
        number, shared = len(self._own), SharedBytes(size)
        start = shared.tensor().data_ptr()
        self._publish(number, shared)
        self._own[number] = (start, start + shared.size, shared)
        return shared

    def allocate_for(self, name: str, size: int) -> None:
        """Allocate memory that other ranks find by a name."""
        self._named[name] = SharedBytes(size)
        self._publish(name, self._named[name])

    def _publish(self, label: int | str, shared: SharedBytes) -> None:
        self._store.set(
            f"shm/{self._rank}/{label}", f"{shared.address[0]} {shared.address[1]} {shared.size}"
        )

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """The number of this rank's allocation that holds a tensor, and the offset in bytes."""
        address = tensor.data_ptr()
        for number, (start, end, _) in self._own.items():
            if start <= address and address + tensor.nbytes <= end:
                return number, address - start
        return None

    def of(self, rank: int, label: int | str) -> SharedBytes:
        """Map a rank's allocation of that number or name; wait until the rank has made it."""
        if rank == self._rank:
            return self._own[label][2] if isinstance(label, int) else self._named[label]
        key = (rank, label)
        if key not in self._others:
            process, file, size = self.published(f"shm/{rank}/{label}", rank)
            self._others[key] = self.map(size, (process, file), rank)
        return self._others[key]

    def map(self, size: int, address: tuple[int, int], rank: int) -> SharedBytes:
        """Map a rank's memory; it goes with the rank's process.

        A process that ends closes its files first, and is seen to have ended a moment later.
        """
        try:
            return SharedBytes(size, address)
        except TransportError:
            until = time.monotonic() + EXIT_S
            while os.path.isdir(f"/proc/{address[0]}") and not self.has_ended(rank):
                if time.monotonic() > until:
                    raise
                time.sleep(POLL_S)
            raise PeerLost(rank, "its memory has gone with it") from None

    def watches(self, rank: int) -> bool:
        """Whether the end of a rank is noticed."""
        return rank in self.descriptors or self._ended is not None

    def watch(self, rank: int, process: int) -> None:
        """Open a descriptor of a rank's process: it becomes readable when the process ends."""
        try:
            self.descriptors[rank] = os.pidfd_open(process)
        except OSError as error:
            raise PeerLost(rank, error.strerror or "") from None

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process has ended, as its descriptor or the launcher says."""
        descriptor = self.descriptors.get(rank)
        if descriptor is None:
            return self._ended is not None and rank in self._ended()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors.clear()

    def published(self, key: str, rank: int) -> list[int]:
        """The numbers that a rank has written to the store under `key`; waits for them."""
        try:
            with self.patience.waiting("the address of its memory", rank) as look:
                while not self._store.check([key]):
                    if self.has_ended(rank):
                        raise PeerLost(rank, "it did not publish the address of its memory")
                    look()
                    time.sleep(POLL_S)
            return [int(v) for v in self._store.get(key).split()]
        except TransportError:
            raise
        except RuntimeError:
            raise PeerLost(rank, "it did not publish the address of its memory") from None
