"""LR schedules: the factor on the learning rate, a pure function of (step, total steps)."""

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
    """Keep the learning rate constant."""
    return lambda step, total: 1.0


@schedules.register("step")
def step_decay(
    every: Annotated[int, "steps between two drops"] = 1000,
    gamma: Annotated[float, "factor of each drop"] = 0.1,
) -> LRSchedule:
    """Multiply the learning rate by gamma every so many steps."""
    if every < 1:
        raise BadRequest(f"lr schedule step: every={every}: it must be 1 or more")
    return lambda step, total: gamma ** (step // every)


@schedules.register("cosine")
def cosine(
    final: Annotated[float, "the factor at the end"] = 0.0,
    warmup: Annotated[int, "steps of linear warm-up before it"] = 0,
) -> LRSchedule:
    """Decay along half a cosine from 1 to `final` over the whole run."""

    def factor(step: int, total: int | None) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if total is None:
            raise BadRequest(
                "lr schedule cosine needs to know how long the run is: give --steps, or data of"
                " known length"
            )
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


@schedules.register("warmup")
def warmup(steps: Annotated[int, "steps until the full learning rate"] = 100) -> LRSchedule:
    """Rise linearly from 1/steps to 1, then stay constant."""
    if steps < 1:
        raise BadRequest(f"lr schedule warmup: steps={steps}: it must be 1 or more")
    return lambda step, total: min(1.0, (step + 1) / steps)


@dataclass(frozen=True)
class Scaling:
    """Scales the learning rate with the size of the global batch.

    With `linear` (Goyal et al., 2017) twice the batch means twice the learning rate, with `sqrt`
    (Krizhevsky, 2014) sqrt(2) times. Training would diverge in the first steps, so the factor rises
    linearly from 1.
    """

    rule: str = "none"
    warmup: int | None = None  # steps; None: a tenth of the run

    @classmethod
    def read(cls, text: str) -> Scaling:
        """Read `none`, `linear`, `sqrt` or `linear:warmup=100`."""
        name, _, rest = text.partition(":")
        if name not in RULES:
            raise UnknownName("lr_scaling", name, RULES)
        options = parse_pairs(rest, f"lr_scaling={text}") if rest else {}
        if unknown := set(options) - {"warmup"}:
            raise BadRequest(
                f"lr_scaling={text}: its only option is warmup, not {', '.join(sorted(unknown))}"
            )
        warmup = options.get("warmup")
        found = cls(name, None if warmup is None else convert(warmup, int, "lr_scaling: warmup"))
        if found.warmup is not None and found.warmup < 0:
            raise BadRequest(f"lr_scaling={text}: warmup must be 0 or more steps")
        return found

    def factor(self, batches: float) -> float:
        """Return the factor for a global batch as large as so many batches of one worker."""
        return RULES[self.rule](batches)

    def applied(self, schedule: LRSchedule, batches: float) -> LRSchedule:
        """Return the schedule times this factor."""
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
DEFAULT_WARMUP = 100  # steps, if the length of the run is not known
