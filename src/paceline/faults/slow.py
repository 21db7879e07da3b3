"""A slow worker: its compute time is multiplied by a factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.errors import BadRequest
from paceline.faults.base import Fault
from paceline.registry import faults
from paceline.transport.base import Transport


@faults.register("slow")
@dataclass
class Slow(Fault):
    """One worker's compute time is multiplied by a factor."""

    rank: Annotated[int, "which worker"] = 0
    factor: Annotated[float, "its compute time is multiplied by this"] = 2.0

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise BadRequest(f"fault slow: factor={self.factor:g}: it must be 1 or more")

    def after_compute(self, seconds: float, transport: Transport) -> None:
        if transport.rank == self.rank:
            transport.charge((self.factor - 1) * seconds)
