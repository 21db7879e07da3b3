"""Memory that the processes of one host share.

The memory belongs to unnamed files (memfd). The kernel frees them with the last process that holds
them, so nothing is left behind when a process is killed. The files are not in /dev/shm, so its size
limit (64 MB in many containers) does not matter. `SharedBytes` checks the host's free memory before
it allocates.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import Any

import psutil
import torch
from torch import Tensor

from paceline.errors import PeerLost, TransportError
from paceline.transport.patience import Patience

POLL_S = 0.002  # between two looks at the store for what a rank publishes
TOGETHER = 1 << 24  # the first number of allocations that all ranks make at the same call


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
    means the same buffer on all of them. What all ranks allocate at the same call (`together`) has
    numbers of its own, so that it does not depend on what each rank has allocated for itself.
    """

    def __init__(self, store: Any, rank: int, ranks: int, patience: Patience) -> None:
        self._store, self._rank, self.ranks, self.patience = store, rank, ranks, patience
        # By number: the first address, the last address, the bytes.
        self._own: dict[int, tuple[int, int, SharedBytes]] = {}
        self._others: dict[tuple[int, int], SharedBytes] = {}

    def allocate(self, size: int, together: bool = False) -> tuple[SharedBytes, int]:
        first = TOGETHER if together else 0
        number = first + sum((known >= TOGETHER) == together for known in self._own)
        shared = SharedBytes(size)
        start = shared.tensor().data_ptr()
        self._store.set(
            f"shm/{self._rank}/{number}", f"{shared.address[0]} {shared.address[1]} {shared.size}"
        )
        self._own[number] = (start, start + shared.size, shared)
        return shared, number

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """The number of this rank's allocation that holds a tensor, and the offset in bytes."""
        address = tensor.data_ptr()
        for number, (start, end, _) in self._own.items():
            if start <= address and address + tensor.nbytes <= end:
                return number, address - start
        return None

    def of(self, rank: int, number: int) -> SharedBytes:
        """Map a rank's allocation of that number; wait until the rank has made it."""
        if rank == self._rank:
            return self._own[number][2]
        key = (rank, number)
        if key not in self._others:
            process, file, size = self.published(f"shm/{rank}/{number}", rank)
            self._others[key] = SharedBytes(size, (process, file))
        return self._others[key]

    def published(self, key: str, rank: int) -> list[int]:
        """The numbers that a rank has written to the store under `key`; waits for them."""
        try:
            with self.patience.waiting("the address of its memory", rank) as look:
                while not self._store.check([key]):
                    look()
                    time.sleep(POLL_S)
            return [int(v) for v in self._store.get(key).split()]
        except RuntimeError:
            raise PeerLost(rank, "it did not publish the address of its memory") from None
