"""Every operation on a buffer that all ranks hold, over any transport: what a program calls."""

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
    """In place, on one flat buffer per rank, cut into as many chunks as there are ranks where an
    operation needs chunks.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._executors: dict[str, Executor] = {}

    def all_reduce(self, buffer: Tensor, op: Op = "sum", collective: str = "auto") -> Tensor:
        choose(collective, self.transport).all_reduce(buffer, op)
        return buffer

    def mean(self, buffer: Tensor, weight: float = 1.0, collective: str = "auto") -> Tensor:
        """The ranks' mean, weighted."""
        total = torch.tensor([weight], dtype=torch.float64)
        self.transport.all_reduce(total)
        if not float(total) > 0:
            raise BadRequest("a weighted mean needs weights that add up to more than nothing")
        return self.all_reduce(buffer.mul_(weight / float(total)), "sum", collective)

    def broadcast(self, buffer: Tensor, root: int = 0) -> Tensor:
        return self._run("broadcast", buffer, "sum", root=root)

    def reduce(self, buffer: Tensor, root: int = 0, op: Op = "sum") -> Tensor:
        """The root's buffer ends as the combination; the others' are used up."""
        return self._run("reduce", buffer, op, root=root)

    def gather(self, buffer: Tensor, root: int = 0) -> Tensor:
        return self._run("gather", buffer, "sum", root=root)

    def scatter(self, buffer: Tensor, root: int = 0) -> Tensor:
        return self.chunk(self._run("scatter", buffer, "sum", root=root))

    def reduce_scatter(self, buffer: Tensor, op: Op = "sum") -> Tensor:
        """This rank's chunk, combined; the rest of the buffer is used up."""
        return self.chunk(self._run("reduce-scatter", buffer, op))

    def all_gather(self, buffer: Tensor) -> Tensor:
        """Each rank has filled its own chunk; afterwards all are."""
        return self._run("all-gather", buffer, "sum")

    def all_to_all(self, buffer: Tensor) -> Tensor:
        if buffer.numel() % self.transport.size:
            raise BadRequest(
                f"all-to-all: {buffer.numel()} elements do not divide into {self.transport.size}"
                " equal chunks"
            )
        return self._run("all-to-all", buffer, "sum")

    def chunk(self, buffer: Tensor) -> Tensor:
        """This rank's part of a buffer."""
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
