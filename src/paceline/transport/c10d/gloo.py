"""Processes over TCP through gloo, PyTorch's library for CPUs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from paceline.registry import transports
from paceline.transport.base import Traits
from paceline.transport.c10d.transport import ProcessGroupTransport


@transports.register("gloo")
class GlooTransport(ProcessGroupTransport):
    """Processes on one host or several, over TCP."""

    traits = Traits(
        crosses_hosts=True,
        over_network=True,
        native=("all_reduce", "broadcast"),
        second_channel=True,
        preference=10,
    )
    failure_words = ("gloo", "Connection", "ead error", "losed")

    def make_group(self, store: Any) -> Any:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self.timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)
