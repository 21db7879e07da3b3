"""GPUs through NCCL, NVIDIA's library. Not run yet: written to torch.distributed's interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from paceline.common.devices import cuda_names
from paceline.registry import transports
from paceline.transport.base import Traits
from paceline.transport.c10d.gloo import GlooTransport
from paceline.transport.c10d.transport import ProcessGroupTransport


@transports.register("nccl")
class NcclTransport(ProcessGroupTransport):
    """GPUs, one per process."""

    traits = Traits(
        crosses_hosts=True,
        over_network=True,
        devices=("cuda",),
        native=("all_reduce", "broadcast"),
        second_channel=True,
        preference=30,
    )
    failure_words = ("NCCL", "Connection", "ead error", "losed")

    @classmethod
    def missing(cls) -> str | None:
        if not cuda_names():
            return "this host has no CUDA device"
        return None if dist.is_nccl_available() else "this build of PyTorch has no NCCL"

    def make_group(self, store: Any) -> Any:
        # Made here, where all ranks are: later some ranks may need it before others do.
        self._control = self.over(GlooTransport, "control", range(self.size))
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

    @property
    def control(self) -> GlooTransport:
        """gloo over the same ranks, for small tensors on the CPU, which NCCL does not move."""
        return self._control

    def close(self) -> None:
        self._control.close()
        super().close()
