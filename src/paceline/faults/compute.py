"""Compute times that are given: synthetic compute, for planning and for the transport simulated."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
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
    times: Annotated[str, "a JSON file with quantiles of a step's seconds, to draw from"] = ""

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
        self._quantiles = _read(Path(self.times)) if self.times else []

    def drawn_s(self, rank: int, step: int) -> float:
        """The time of one step, a function of rank and step.

        It is drawn from the given quantiles; without them it is log-normal with the given mean.
        """
        own = random.Random(f"{self.seed}/{rank}/{step}")
        if self._quantiles:
            return _between(self._quantiles, own.random())
        variance = math.log1p(self.noise**2)
        return self.seconds * math.exp(own.gauss(0.0, 1.0) * math.sqrt(variance) - variance / 2)

    def before_step(self, step: int, transport: Transport) -> None:
        self._step = step

    def after_compute(self, seconds: float, transport: Transport) -> None:
        if self.rank in (None, transport.rank):
            transport.charge(max(0.0, self.drawn_s(transport.rank, self._step) - seconds))


def _read(path: Path) -> list[float]:
    wrong = f"fault compute: times={path}: it must be a JSON file with a list of seconds"
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise BadRequest(f"{wrong}: {error.strerror}") from None
    except ValueError:
        raise BadRequest(wrong) from None
    if not isinstance(found, list) or not found or not all(_is_time(each) for each in found):
        raise BadRequest(f"{wrong}, from 0 to {LONGEST_S:g}")
    return sorted(float(each) for each in found)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= LONGEST_S


def _between(quantiles: list[float], share: float) -> float:
    """The quantile of a share between 0 and 1, on the line between the two nearest."""
    at = share * (len(quantiles) - 1)
    low = min(int(at), len(quantiles) - 1)
    high = min(low + 1, len(quantiles) - 1)
    return quantiles[low] + (at - low) * (quantiles[high] - quantiles[low])
