"""Telling differences from noise.

A few runs say little about how much equal runs differ, but all settings of a study together say it well: the noise is the
standard deviation within settings, pooled over all of them (of the logarithm for times, so that it is relative), robustly, so
that a setting that diverges with some seeds does not hide what the others show. Two means differ when a t-test with that noise
says so with 99% confidence. Where nothing was run twice the noise is unknown: then a difference in time is told as seen once,
and only where it is larger than `ONCE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import median, variance

from paceline.report.lines import Line, Spread, Study

ONCE = 0.10  # a difference in time that is told although it was seen in one run each
POINTS = 0.005  # of accuracy: less is not called a loss
UNKNOWN_POINTS = 0.05  # ... where nothing was run twice
FEW = 5  # groups: fewer are pooled plainly
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
    """How much equal runs differ: a standard deviation, and from how many degrees of freedom it is known."""

    deviation: float
    freedom: int

    @classmethod
    def pooled(cls, groups: list[list[float]]) -> Noise | None:
        """Few groups: all deviations count. Many: the median of their variances, which a few wild ones do not move."""
        several = [g for g in groups if len(g) > 1]
        freedom = sum(len(g) - 1 for g in several)
        if not freedom:
            return None
        if len(several) < FEW:
            return cls(math.sqrt(sum((len(g) - 1) * variance(g) for g in several) / freedom), freedom)
        return cls(math.sqrt(median(variance(g) / _median_of_variance(len(g) - 1) for g in several)), max(1, freedom // 2))

    def threshold(self, one: int, other: int) -> float:
        """Means of so many runs that are farther apart than this differ, with 99% confidence."""
        quantile = next((t for freedom, t in reversed(T99) if freedom <= self.freedom), T99[0][1])
        return quantile * self.deviation * math.sqrt(1 / one + 1 / other)


def _median_of_variance(freedom: int) -> float:
    """Of the variance of normal numbers whose true variance is 1 (Wilson and Hilferty's approximation)."""
    return float((1 - 2 / (9 * freedom)) ** 3)


@cache
def time_noise(*studies: Study) -> Noise | None:
    """Every strategy with one worker and no server does what serial does: those runs are repeats of each other too."""

    def logs(line: Line) -> list[float]:
        return [math.log(v) for v in line.values(lambda r: r["result"]["train_s"]) if v > 0]

    groups = []
    for study in studies:
        alone: dict[object, list[float]] = {}
        for line in study.lines:
            if line.workers == 1 and line.threads == 1 and line.over_workers(lambda w: 1.0, "server") is None:
                alone.setdefault(line.context, []).extend(logs(line))
            else:
                groups.append(logs(line))
        groups += alone.values()
    return Noise.pooled(groups)


@cache
def accuracy_noise(*studies: Study) -> Noise | None:
    return _pooled(lambda line: line.values(lambda r: r["result"]["test_accuracy"]), studies)


def _pooled(values: Callable[[Line], list[float]], studies: tuple[Study, ...]) -> Noise | None:
    return Noise.pooled([values(line) for study in studies for line in study.lines])


def differ(noise: Noise | None, one: Line, other: Line, least: float = 0.0) -> bool:
    """Whether the training times (per sample) of two settings differ by more than noise, and by more than `least`."""
    if not one.sample_s or not other.sample_s or one.train_s is None or other.train_s is None:
        return False
    apart = abs(math.log(one.sample_s / other.sample_s))
    if noise is None:
        return apart > max(least, ONCE)
    return apart > max(least, noise.threshold(one.train_s.n, other.train_s.n))


def least_points(noise: Noise | None, one: Line, other: Line) -> float:
    """Of accuracy: what two settings must be apart to be called different."""
    if noise is None:
        return UNKNOWN_POINTS
    return max(POINTS, noise.threshold(max(1, len(one.completed)), max(1, len(other.completed))))


def lost_points(noise: Noise | None, line: Line, serial: Line) -> float | None:
    """Accuracy below serial's, where it is more than noise; None otherwise."""
    own, reference = line.accuracy, serial.accuracy
    if own is None or reference is None:
        return None
    lost = reference.mean - own.mean
    return lost if lost >= least_points(noise, line, serial) else None


def seen(*lines: Line) -> str:
    """How sure it is."""
    return "" if all(len(x.completed) >= 2 for x in lines) else " (seen in one run)"


def mean_of(spread: Spread | None) -> float:
    return spread.mean if spread is not None else 0.0
