"""Learning-rate schedules: the factor on the learning rate at a step, a pure function of (step, total steps)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

from paceline.errors import BadRequest
from paceline.registry import schedules

Schedule = Callable[[int, int | None], float]


@schedules.register("constant")
def constant() -> Schedule:
    """The learning rate stays as it is."""
    return lambda step, total: 1.0


@schedules.register("step")
def step_decay(
    every: Annotated[int, "steps between two drops"] = 1000, gamma: Annotated[float, "factor of each drop"] = 0.1
) -> Schedule:
    """Times gamma every so many steps."""
    if every < 1:
        raise BadRequest(f"lr schedule step: every={every}: 1 or more")
    return lambda step, total: gamma ** (step // every)


@schedules.register("cosine")
def cosine(
    final: Annotated[float, "the factor at the end"] = 0.0,
    warmup: Annotated[int, "steps of linear warm-up before it"] = 0,
) -> Schedule:
    """Half a cosine from 1 down to `final` over the whole run."""

    def factor(step: int, total: int | None) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if total is None:
            raise BadRequest("lr schedule cosine needs to know how long the run is: give steps, or data of known length")
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


@schedules.register("warmup")
def warmup(steps: Annotated[int, "steps until the full learning rate"] = 100) -> Schedule:
    """Linear from 1/steps up to 1, then constant."""
    if steps < 1:
        raise BadRequest(f"lr schedule warmup: steps={steps}: 1 or more")
    return lambda step, total: min(1.0, (step + 1) / steps)
