"""Decide whether two settings differ beyond noise.

`Judge` makes every verdict of the report: those of the answer, the comments, the pair table and
`results.csv`.

The noise is the standard deviation of runs within a setting. Few runs of one setting show it
badly, so it is pooled over settings: over those that fit the cores, and separately over those that
are oversubscribed. For times it is the deviation of the logarithm, which makes it relative. Pooling
is robust: a setting that diverges with some seeds does not hide what the others show. A setting
whose own runs differ more than the pooled noise is judged by its own runs.

Two settings differ (`Verdict.differs`) in one of three cases:

- A t-test with that noise says so with 99% confidence.
- Every run of one is below every run of the other, with at least two runs each: ranges that do not
  overlap are never called noise.
- No setting was run twice, and the difference is large (`Quantity.once`). The sentence then says
  "seen in one run".

Whether such a difference is large is a separate question: see `score.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median, variance

from paceline.report.lines import Line, Spread, Study

ONCE = 0.10  # with one run each, a relative difference above this counts
FEW = 5  # settings: the noise of fewer is a plain mean, of more a median
WILD = 5.0  # times the pooled variance: such a setting is judged by its own runs alone
HAIR = 1e-12  # a smaller difference is rounding
# (degrees of freedom, two-sided 99% quantile of Student's t)
T99 = (
    (1, 63.7),
    (2, 9.92),
    (3, 5.84),
    (4, 4.60),
    (5, 4.03),
    (6, 3.71),
    (8, 3.36),
    (10, 3.17),
    (15, 2.95),
    (30, 2.75),
    (60, 2.66),
)


@dataclass(frozen=True)
class Noise:
    """The standard deviation of equal runs, and the degrees of freedom of that estimate."""

    deviation: float
    freedom: int

    @classmethod
    def pooled(cls, groups: list[list[float]]) -> Noise | None:
        """Pool the noise of groups of equal runs; None where no group has two runs.

        Few groups: the mean of their variances. Many: the median, which a few outliers do not move.
        """
        several = [g for g in groups if len(g) > 1]
        freedom = sum(len(g) - 1 for g in several)
        if not freedom:
            return None
        if len(several) < FEW:
            return cls(
                math.sqrt(sum((len(g) - 1) * variance(g) for g in several) / freedom), freedom
            )
        return cls(
            math.sqrt(median(variance(g) / _median_of_variance(len(g) - 1) for g in several)),
            max(1, freedom // 2),
        )


def quantile(freedom: float) -> float:
    """Return Student's t for 99% confidence; between entries of the table, the larger one."""
    return next((t for known, t in reversed(T99) if known <= freedom), T99[0][1])


def _median_of_variance(freedom: int) -> float:
    """Return the median of the sample variance of normal numbers whose variance is 1.

    This is Wilson and Hilferty's approximation.
    """
    return float((1 - 2 / (9 * freedom)) ** 3)


@dataclass(frozen=True)
class Quantity:
    """A number of each run by which settings are compared.

    `values` returns one number per completed run; nothing where one of them has no number.
    `alone_is_serial`: single workers of all strategies do the same, so their runs are repeats.
    """

    name: str
    values: Callable[[Line], Sequence[float]]
    relative: bool = True  # compare ratios, not differences
    once: float = ONCE  # with one run each, a difference above this counts
    alone_is_serial: bool = False


@dataclass(frozen=True)
class Verdict:
    """The comparison of two settings, `one` and `other`."""

    apart: float  # log(one / other), or one - other
    limit: float  # equal settings are farther apart in 1% of all cases
    beyond_noise: bool
    split: bool  # every run of one is below, or above, every run of the other
    runs: int  # of the setting with fewer
    rounds: bool  # both have the same seeds

    @property
    def differs(self) -> bool:
        return self.beyond_noise or self.split

    @property
    def lower(self) -> bool:
        return self.differs and self.apart < 0

    @property
    def higher(self) -> bool:
        return self.differs and self.apart > 0

    @property
    def seen(self) -> str:
        """Qualifies a claim from single runs."""
        return "" if self.runs >= 2 else " (seen in one run)"

    @property
    def each_time(self) -> str:
        """`in all 3 rounds`, where every run of one is below every run of the other."""
        if not self.split:
            return ""
        if not self.rounds:
            return "in every run"
        return "in both rounds" if self.runs == 2 else f"in all {self.runs} rounds"


@dataclass(frozen=True)
class Known:
    """Statistics of one setting's runs; of their logarithms where the quantity is relative."""

    mean: float
    low: float
    high: float
    seeds: tuple[int, ...]
    variance: float | None  # of one run; None where no setting was run twice
    freedom: int
    source: object  # the pool or the setting that the variance was estimated from

    @property
    def n(self) -> int:
        return len(self.seeds)


class Judge:
    """Compares settings by one quantity, with the noise of one study or of several together."""

    def __init__(self, quantity: Quantity, *studies: Study) -> None:
        self.quantity = quantity
        groups: dict[bool, list[list[float]]] = {False: [], True: []}
        for study in studies:
            alone: dict[object, list[float]] = {}
            for line in study.lines:
                if quantity.alone_is_serial and _is_alone(line):
                    alone.setdefault(line.context, []).extend(self._scaled(line))
                else:
                    groups[line.oversubscribed].append(self._scaled(line))
            groups[False] += alone.values()
        self.all = Noise.pooled([g for group in groups.values() for g in group])
        self.noise = {crowded: Noise.pooled(group) or self.all for crowded, group in groups.items()}

    def __call__(self, one: Line, other: Line) -> Verdict | None:
        """Compare two settings; None where one of them lacks a number."""
        a, b = self.known(one), self.known(other)
        return self.compare(a, b) if a and b else None

    def known(self, line: Line) -> Known | None:
        found = self._scaled(line)
        if not found:
            return None
        mean = (
            math.log(fmean(self.quantity.values(line))) if self.quantity.relative else fmean(found)
        )
        seeds = tuple(sorted(r.seed for r in line.completed))
        pooled = self.noise[line.oversubscribed]
        if pooled is None:
            return Known(mean, min(found), max(found), seeds, None, 0, None)
        own, common = variance(found) if len(found) > 1 else 0.0, pooled.deviation**2
        if own > WILD * common:
            return Known(mean, min(found), max(found), seeds, own, len(found) - 1, line.id)
        return Known(
            mean,
            min(found),
            max(found),
            seeds,
            max(own, common),
            pooled.freedom,
            line.oversubscribed,
        )

    def compare(self, a: Known, b: Known) -> Verdict:
        apart, runs = a.mean - b.mean, min(a.n, b.n)
        split = runs >= 2 and (a.high < b.low - HAIR or b.high < a.low - HAIR)
        limit = self.quantity.once if a.variance is None or b.variance is None else _limit(a, b)
        return Verdict(apart, limit, abs(apart) > limit + HAIR, split, runs, a.seeds == b.seeds)

    def _scaled(self, line: Line) -> list[float]:
        values = self.quantity.values(line)
        return [math.log(v) for v in values] if self.quantity.relative else list(values)


def _limit(a: Known, b: Known) -> float:
    """Return the limit of Welch's t-test.

    Two settings with the variance of the same pool share its degrees of freedom.
    """
    assert a.variance is not None
    assert b.variance is not None
    one, other = a.variance / a.n, b.variance / b.n
    if a.source == b.source:
        return quantile(a.freedom) * math.sqrt(one + other)
    spread = one**2 / a.freedom + other**2 / b.freedom
    freedom = (one + other) ** 2 / spread if spread else min(a.freedom, b.freedom)
    return quantile(freedom) * math.sqrt(one + other)


def _is_alone(line: Line) -> bool:
    return (
        line.workers == 1
        and line.threads == 1
        and line.over_workers(lambda w: 1.0, "server") is None
    )


def _per_sample(line: Line) -> list[float]:
    results = [r.record["result"] for r in line.completed]
    found = [r["train_s"] / r["samples"] for r in results if r["train_s"] and r["samples"]]
    return found if len(found) == len(results) and all(v > 0 for v in found) else []


def _to_accuracy(line: Line) -> list[float]:
    found = [r.record["result"]["time_to_accuracy_s"] for r in line.completed]
    return found if all(found) else []


SPEED = Quantity("seconds of training per sample", _per_sample, alone_is_serial=True)
TO_ACCURACY = Quantity("seconds to the accuracy", _to_accuracy)


@cache
def judge(quantity: Quantity, *studies: Study) -> Judge:
    return Judge(quantity, *studies)


def speed(study: Study, one: Line, other: Line | None) -> Verdict | None:
    """Compare the training times per sample of two settings: lower is faster."""
    return judge(SPEED, study)(one, other) if other is not None else None


def mean_of(spread: Spread | None) -> float:
    return spread.mean if spread is not None else 0.0
