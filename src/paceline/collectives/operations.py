"""All operations on a buffer that every rank holds, over any transport, as methods."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.collectives.base import choose, schedule_of
from paceline.collectives.execute import Executor
from paceline.errors import BadRequest
from paceline.registry import Spec
from paceline.transport.base import Op, Transport


class Operations:
    """Collective operations, in place, on one flat buffer per rank.

    Operations that need chunks cut the buffer into as many as there are ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._executors: dict[str, Executor] = {}

    def all_reduce(self, buffer: Tensor, op: Op = "sum", collective: str = "auto") -> Tensor:
        choose(collective, self.transport).all_reduce(buffer, op)
        return buffer

    def mean(self, buffer: Tensor, weight: float = 1.0, collective: str = "auto") -> Tensor:
        """The weighted mean of the ranks' buffers; `weight` is this rank's."""
        total = torch.tensor([weight], dtype=torch.float64)
        self.transport.control.all_reduce(total)
        if not float(total) > 0:
            raise BadRequest(
                f"mean: the ranks' weights add up to {float(total):g}; the sum must be above 0"
            )
        return self.all_reduce(buffer.mul_(weight / float(total)), "sum", collective)

    def broadcast(self, buffer: Tensor, root: int = 0) -> Tensor:
        return self._run("broadcast", buffer, "sum", root=root)

    def reduce(self, buffer: Tensor, root: int = 0, op: Op = "sum") -> Tensor:
        """Combine all buffers into the root's. The other ranks' buffers are overwritten."""
        return self._run("reduce", buffer, op, root=root)

    def gather(self, buffer: Tensor, root: int = 0) -> Tensor:
        return self._run("gather", buffer, "sum", root=root)

    def scatter(self, buffer: Tensor, root: int = 0) -> Tensor:
        return self.chunk(self._run("scatter", buffer, "sum", root=root))

    def reduce_scatter(self, buffer: Tensor, op: Op = "sum") -> Tensor:
        """This rank's chunk, combined over all ranks. The rest of the buffer is overwritten."""
        return self.chunk(self._run("reduce-scatter", buffer, op))

    def all_gather(self, buffer: Tensor) -> Tensor:
        """Copy each rank's own chunk to all ranks."""
        return self._run("all-gather", buffer, "sum")

    def all_to_all(self, buffer: Tensor) -> Tensor:
        if buffer.numel() % self.transport.size:
            raise BadRequest(
                f"all-to-all: {buffer.numel()} elements cannot be cut into {self.transport.size}"
                " equal chunks"
            )
        return self._run("all-to-all", buffer, "sum")

    def chunk(self, buffer: Tensor) -> Tensor:
        """This rank's chunk of a buffer."""
        rank, size, length = self.transport.rank, self.transport.size, buffer.numel()
        return buffer.view(-1)[rank * length // size : (rank + 1) * length // size]

    def _run(self, name: str, buffer: Tensor, op: Op, **options: Any) -> Tensor:
        key = str(Spec(name, options))
        if key not in self._executors:
            self._executors[key] = Executor(
                schedule_of(Spec(name, options), self.transport.size), self.transport
            )
        self._executors[key].run(buffer, op)
        return buffer
