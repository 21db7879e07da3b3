"""Learning-rate schedules: the factor on the learning rate at a step, a pure function of (step,
total steps).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from paceline.common.values import convert, parse_pairs
from paceline.errors import BadRequest, UnknownName
from paceline.registry import schedules

LRSchedule = Callable[[int, int | None], float]


@schedules.register("constant")
def constant() -> LRSchedule:
    """The learning rate stays as it is."""
    return lambda step, total: 1.0


@schedules.register("step")
def step_decay(
    every: Annotated[int, "steps between two drops"] = 1000,
    gamma: Annotated[float, "factor of each drop"] = 0.1,
) -> LRSchedule:
    """Times gamma every so many steps."""
    if every < 1:
        raise BadRequest(f"lr schedule step: every={every}: 1 or more")
    return lambda step, total: gamma ** (step // every)


@schedules.register("cosine")
def cosine(
    final: Annotated[float, "the factor at the end"] = 0.0,
    warmup: Annotated[int, "steps of linear warm-up before it"] = 0,
) -> LRSchedule:
    """Half a cosine from 1 down to `final` over the whole run."""

    def factor(step: int, total: int | None) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if total is None:
            raise BadRequest(
                "lr schedule cosine needs to know how long the run is: give steps, or data of known"
                " length"
            )
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


@schedules.register("warmup")
def warmup(steps: Annotated[int, "steps until the full learning rate"] = 100) -> LRSchedule:
    """Linear from 1/steps up to 1, then constant."""
    if steps < 1:
        raise BadRequest(f"lr schedule warmup: steps={steps}: 1 or more")
    return lambda step, total: min(1.0, (step + 1) / steps)


@dataclass(frozen=True)
class Scaling:
    """The learning rate against the number of workers, when each brings a batch of its own:
    `linear`, `sqrt` or `none`.

    Twice the batch is half the steps, so each must go twice as far (Goyal et al., 2017), or sqrt(2)
    times where noise is what counts (Krizhevsky, 2014). The first steps would not bear it: a linear
    warm-up from the plain learning rate.
    """

    rule: str = "none"
    warmup: int | None = None  # steps; None: a tenth of the run

    @classmethod
    def read(cls, text: str) -> Scaling:
        name, _, rest = text.partition(":")
        if name not in RULES:
            raise UnknownName("lr_scaling", name, RULES)
        options = parse_pairs(rest, f"lr_scaling={text}") if rest else {}
        if unknown := set(options) - {"warmup"}:
            raise BadRequest(
                f"lr_scaling={text}: it knows warmup, not {', '.join(sorted(unknown))}"
            )
        warmup = options.get("warmup")
        found = cls(name, None if warmup is None else convert(warmup, int, "lr_scaling: warmup"))
        if found.warmup is not None and found.warmup < 0:
            raise BadRequest(f"lr_scaling={text}: warmup is 0 or more steps")
        return found

    def factor(self, batches: float) -> float:
        """For a global batch of so many single ones."""
        return RULES[self.rule](batches)

    def applied(self, schedule: LRSchedule, batches: float) -> LRSchedule:
        goal = self.factor(batches)
        if goal == 1.0:
            return schedule

        def scaled(step: int, total: int | None) -> float:
            steps = (
                self.warmup
                if self.warmup is not None
                else DEFAULT_WARMUP
                if total is None
                else max(1, total // 10)
            )
            reached = min(1.0, (step + 1) / steps) if steps else 1.0
            return schedule(step, total) * (1.0 + (goal - 1.0) * reached)

        return scaled


RULES: dict[str, Callable[[float], float]] = {
    "none": lambda k: 1.0,
    "linear": lambda k: k,
    "sqrt": math.sqrt,
}
DEFAULT_WARMUP = 100  # steps, where nobody knows how long the run is
