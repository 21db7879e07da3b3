"""The transport's own all-reduce."""

from __future__ import annotations

from torch import Tensor

from paceline.collectives.base import Collective
from paceline.errors import BadRequest
from paceline.registry import collectives
from paceline.transport.base import Op, Transport


@collectives.register("native")
class Native(Collective):
    """The all-reduce of the library behind the transport (gloo's, MPI's, ...)."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        if "all_reduce" not in transport.traits.native:
            raise BadRequest(
                f"collective native: transport {transport.kind} has no all-reduce of its own; use"
                " ring, tree or halving-doubling"
            )

    def all_reduce(self, buffer: Tensor, op: Op = "sum") -> None:
        self.transport.all_reduce(buffer, op)
