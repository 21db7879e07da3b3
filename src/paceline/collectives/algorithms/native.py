"""The transport's own all-reduce."""

from __future__ import annotations

from torch import Tensor

from paceline.collectives.base import Collective
from paceline.errors import BadRequest
from paceline.registry import collectives
from paceline.transport.base import Op, Transport


@collectives.register("native")
class Native(Collective):
    """What the library behind the transport brings along (gloo's own, MPI's own, ...)."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        if "all_reduce" not in transport.native:
            raise BadRequest(
                "collective native: this transport has no all-reduce of its own; choose another"
                " collective"
            )

    def all_reduce(self, buffer: Tensor, op: Op = "sum") -> None:
        self.transport.all_reduce(buffer, op)
