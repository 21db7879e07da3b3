"""How long a worker computes in a step, as a distribution, by batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import BadRequest
from paceline.planning.fit import MEDIAN, Line, fit_line

FAR = 2.0  # beyond this factor from the measured batch sizes, a prediction comes with a notice
PARTS = ("load_s", "forward_s", "backward_s", "update_s")
MEDIANS = ("cpu_s", *PARTS)


@dataclass(frozen=True)
class Steps:
    """The steps of one batch size.

    `quantiles_s` are 101 quantiles (0%, 1%, ..., 100%) of the whole compute step of a worker of
    speed 1: the noise from step to step, without the difference between workers. A worker of speed
    v takes 1/v of it. `cpu_s` and the parts are medians; None where they were not measured. On a
    quiet machine `cpu_s` is the median of the step; it is what remains true on a busy one.
    """

    batch_size: int  # samples per worker and step
    quantiles_s: tuple[float, ...]
    count: int  # how many steps were measured
    cpu_s: float | None = None  # CPU seconds of the worker's process
    load_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None

    @property
    def median_s(self) -> float:
        return self.quantiles_s[MEDIAN]

    def scaled(self, batch_size: int, median_s: float) -> Steps:
        """The same distribution for another batch size, with another median."""
        factor = median_s / self.median_s
        parts = {
            part: value * factor for part in MEDIANS if (value := getattr(self, part)) is not None
        }
        scaled = tuple(q * factor for q in self.quantiles_s)
        return replace(self, batch_size=batch_size, quantiles_s=scaled, **parts)


@dataclass(frozen=True)
class Compute:
    """What computing costs a worker that has a core of its own."""

    steps: tuple[Steps, ...]  # by batch size, rising
    threads: int = 1  # of each worker
    # How fast each worker was, steadily, while it computed alone: 1 is the mean. A difference that
    # stays, apart from the noise from step to step.
    speeds: tuple[float, ...] = (1.0,)
    # How many times as long a step takes while the other worker computes, too; None: not measured.
    together: float | None = None
    # CPU seconds per second of a worker that computed alone: less than 1 where other processes took
    # the core, or where it waited for data. None: not measured.
    core_share: float | None = None
    # When each gradient is complete, as a fraction of the backward pass, in the order of the
    # layout; empty: not measured.
    ready: tuple[float, ...] = ()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return tuple(s.batch_size for s in self.steps)

    @property
    def line(self) -> Line | None:
        """Seconds per step and per sample, fitted to the medians; None for one batch size."""
        if len(self.steps) < 2:
            return None
        return fit_line([(s.batch_size, s.median_s) for s in self.steps])

    def at(self, batch_size: int) -> tuple[Steps, str | None]:
        """Return the steps of a batch size, and a notice where it is far from those measured.

        Between two measured batch sizes every quantile is linear in the batch size. Outside, the
        median is on the line through the two nearest, and the quantiles are scaled with it.
        """
        if batch_size < 1:
            raise BadRequest(f"batch_size={batch_size}: it must be 1 or more")
        for steps in self.steps:
            if steps.batch_size == batch_size:
                return steps, None
        if len(self.steps) == 1:
            raise BadRequest(
                f"the profile has one batch size, {self.steps[0].batch_size}: steps of batch size"
                f" {batch_size} cannot be predicted; profile that size too, or use --batch-size"
                f" {self.steps[0].batch_size}"
            )
        low, high = self.steps[0].batch_size, self.steps[-1].batch_size
        if low < batch_size < high:
            above = next(i for i, s in enumerate(self.steps) if s.batch_size > batch_size)
            return _between(self.steps[above - 1], self.steps[above], batch_size), None
        notice = None
        if batch_size > FAR * high or batch_size * FAR < low:
            measured = f"{low} to {high}"
            notice = (
                f"batch size {batch_size} is far from the profile's, {measured}: its steps are"
                " extrapolated, and may be quite different"
            )
        return _outside(self.steps, batch_size), notice


def _between(one: Steps, other: Steps, batch_size: int) -> Steps:
    share = (batch_size - one.batch_size) / (other.batch_size - one.batch_size)

    def mixed(a: float, b: float) -> float:
        return a * (1 - share) + b * share

    parts = {}
    for part in MEDIANS:
        a, b = getattr(one, part), getattr(other, part)
        parts[part] = mixed(a, b) if a is not None and b is not None else None
    pairs = zip(one.quantiles_s, other.quantiles_s, strict=True)
    return Steps(
        batch_size, tuple(mixed(a, b) for a, b in pairs), min(one.count, other.count), **parts
    )


def _outside(steps: Sequence[Steps], batch_size: int) -> Steps:
    """Extrapolate from the nearest two, within what a cost per step and one per sample allow."""
    below = batch_size < steps[0].batch_size
    near, far = (steps[0], steps[1]) if below else (steps[-1], steps[-2])
    slope = (far.median_s - near.median_s) / (far.batch_size - near.batch_size)
    median = near.median_s + slope * (batch_size - near.batch_size)
    in_proportion = near.median_s * batch_size / near.batch_size
    median = min(max(median, in_proportion), near.median_s) if below else max(median, near.median_s)
    return near.scaled(batch_size, median)
