"""LR schedules: the factor on the learning rate, a pure function of (step, total steps)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


@schedules.register("one-cycle")
def one_cycle(
    rise: Annotated[float, "the share of the run in which the learning rate rises"] = 0.3,
    start: Annotated[float, "the first learning rate is lr / start"] = 25.0,
    end: Annotated[float, "the last learning rate is the first / end"] = 1e4,
) -> LRSchedule:
    """Rise along a cosine to lr, then fall far below the start (Smith and Topin, 2018)."""
    if not 0.0 < rise < 1.0 or not start > 0.0 or not end > 0.0:
        raise BadRequest(
            f"lr schedule one-cycle: rise={rise:g} must be between 0 and 1, start={start:g} and"
            f" end={end:g} more than 0"
        )

    def factor(step: int, total: int | None) -> float:
        if total is None:
            raise BadRequest(
                "lr schedule one-cycle needs to know how long the run is: give --steps, or data of"
                " known length"
            )
        top, last, first = rise * total - 1.0, total - 1.0, 1.0 / start
        if step <= top:
            return _between(first, 1.0, step / top if top else 1.0)
        return _between(1.0, first / end, min(1.0, (step - top) / (last - top)))

    return factor


def _between(start: float, end: float, progress: float) -> float:
    """Go from `start` to `end` along half a cosine."""
    return end + (start - end) / 2.0 * (math.cos(math.pi * progress) + 1.0)


@schedules.register("plateau")
class Plateau:
    """Multiply the learning rate by gamma where evaluations stop improving."""

    def __init__(
        self,
        gamma: Annotated[float, "factor of each drop"] = 0.1,
        patience: Annotated[int, "evaluations without a better one before a drop"] = 10,
        threshold: Annotated[float, "a smaller relative change is no improvement"] = 1e-4,
        least: Annotated[float, "the smallest factor"] = 0.0,
    ) -> None:
        if not 0.0 < gamma < 1.0 or patience < 0:
            raise BadRequest(
                f"lr schedule plateau: gamma={gamma:g} must be between 0 and 1, and"
                f" patience={patience} 0 or more"
            )
        self.gamma, self.patience, self.threshold, self.least = gamma, patience, threshold, least
        self.factor, self.best, self.bad = 1.0, math.nan, 0

    def __call__(self, step: int, total: int | None) -> float:
        return self.factor

    def saw(self, value: float, higher_is_better: bool) -> None:
        """Take note of an evaluation."""
        goal = self.best * (1.0 + self.threshold if higher_is_better else 1.0 - self.threshold)
        if math.isnan(self.best) or (value > goal if higher_is_better else value < goal):
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        if self.bad > self.patience:
            self.factor, self.bad = max(self.least, self.factor * self.gamma), 0

    def state(self) -> list[float]:
        return [self.factor, self.best, float(self.bad)]

    def restore(self, state: Sequence[float]) -> None:
        self.factor, self.best, self.bad = state[0], state[1], int(state[2])


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
