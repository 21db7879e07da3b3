"""The transport of a program that no launcher started: one rank, so that it runs unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.errors import TransportError
from paceline.transport.base import Op, Traits, Transport, Work


class Alone(Transport):
    """A world of one rank: collectives return at once."""

    name = "alone"
    traits = Traits(
        devices=("cpu", "cuda", "mps", "xpu"),
        native=("all_reduce", "broadcast"),
        shares_memory=True,
    )

    def __init__(self, deadline_s: float = 30.0) -> None:
        super().__init__(0, 1, deadline_s)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        raise TransportError(f"there is no rank {to}: this run has one rank")

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        raise TransportError(f"there is no rank {source}: this run has one rank")

    def wait_any(self, works: Sequence[Work], patience_s: float | None = None) -> int | None:
        raise TransportError("this run has one rank, so no message can come")

    def barrier(self) -> None:
        return

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        return

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        return

    def share(self, tensor: Tensor, root: int = 0) -> Tensor:
        return tensor

    def group(self, ranks: Sequence[int]) -> Transport:
        return self
