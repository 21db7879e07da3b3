"""Compute times that are given: synthetic compute, for planning and for the transport simulated."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Annotated

from paceline.errors import BadRequest
from paceline.faults.base import Fault
from paceline.registry import faults
from paceline.transport.base import Transport

LONGEST_S, MOST_NOISE = 1e6, 10.0


@faults.register("compute")
@dataclass
class Compute(Fault):
    """The forward and backward pass of a step takes a given time.

    In virtual time (transport simulated) it takes exactly that. On other transports the worker
    sleeps for what is left of it.
    """

    seconds: Annotated[float, "of one step"] = 0.01
    noise: Annotated[float, "standard deviation over the mean, drawn for each step"] = 0.0
    rank: Annotated[int | None, "which worker; all if it is not given"] = None
    seed: Annotated[int, "of the noise"] = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seconds <= LONGEST_S:
            raise BadRequest(
                f"fault compute: seconds={self.seconds:g}: it must be from 0 to {LONGEST_S:g}"
            )
        if not 0 <= self.noise <= MOST_NOISE:
            raise BadRequest(
                f"fault compute: noise={self.noise:g}: it must be from 0 to {MOST_NOISE:g}"
            )
        self._step = 0

    def drawn_s(self, rank: int, step: int) -> float:
        """The time of one step: log-normal with the given mean, a function of rank and step."""
        variance = math.log1p(self.noise**2)
        own = random.Random(f"{self.seed}/{rank}/{step}")
        return self.seconds * math.exp(own.gauss(0.0, 1.0) * math.sqrt(variance) - variance / 2)

    def before_step(self, step: int, transport: Transport) -> None:
        self._step = step

    def after_compute(self, seconds: float, transport: Transport) -> None:
        if self.rank in (None, transport.rank):
            transport.charge(max(0.0, self.drawn_s(transport.rank, self._step) - seconds))
