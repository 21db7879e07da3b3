"""GPUs through NCCL, NVIDIA's library. Not run yet: written to torch.distributed's interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from paceline.registry import transports
from paceline.transport.base import expect_one
from paceline.transport.c10d.transport import ProcessGroupTransport


@transports.register("nccl")
class NcclTransport(ProcessGroupTransport):
    """GPUs, one per process."""

    devices = frozenset({"cuda"})
    failure_words = ("NCCL", "Connection", "ead error", "losed")

    @classmethod
    def missing(cls) -> str | None:
        if not torch.cuda.is_available():
            return "this host has no CUDA device"
        return None if dist.is_nccl_available() else "this build of PyTorch has no NCCL"

    def make_group(self, store: Any) -> Any:
        self._agreements = 0
        self._device = torch.device("cuda", torch.cuda.current_device())
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def c10d(self) -> str:
        return "nccl"

    @contextmanager
    def together(self) -> Iterator[None]:
        """Coalesce: two ranks that both send first would otherwise wait for each other."""
        self._group._start_coalescing(self._device)
        yield
        self._group._end_coalescing(self._device)

    def agree(self, what: str) -> None:
        """Compare the descriptions through the store, because NCCL moves GPU tensors only."""
        self._agreements += 1
        store = dist.PrefixStore(f"{self._label}/agree/{self._agreements}", self.store)
        store.set(str(self.rank), what)
        expect_one([store.get(str(rank)).decode() for rank in range(self.size)])
