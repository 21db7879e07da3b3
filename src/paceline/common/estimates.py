"""Estimates with intervals: paired and unpaired t intervals, Stein's sample size, Holm's rule.

Numbers that are compared as ratios are given as logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

LEVEL = 0.95
MOST_BLOCKS = 100  # 50 minutes


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error, and the degrees of freedom of that error."""

    mean: float
    error: float
    freedom: float
    n: int

    @property
    def half(self) -> float:
        """Half of the 95% interval."""
        return t_quantile(self.freedom) * self.error

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def p(self) -> float:
        """How often chance alone makes a mean so far from 0, if 0 is true."""
        if self.error == 0:
            return 1.0 if self.mean == 0 else 0.0
        return 2 * _tail(abs(self.mean) / self.error, self.freedom)


def variance(values: Sequence[float]) -> float:
    """Return the sample variance; 0 for equal numbers.

    `statistics.variance` adds fractions: a page compares thousands of pairs.
    """
    n, first = len(values), values[0]
    apart = [value - first for value in values]
    total = math.fsum(apart)
    return max(0.0, (math.fsum(d * d for d in apart) - total * total / n) / (n - 1))


def t_quantile(freedom: float, level: float = LEVEL) -> float:
    """Return Student's t for a two-sided interval."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + level) / 2)) if math.isfinite(freedom) else _normal(level)


def _normal(level: float) -> float:
    from scipy.special import ndtri

    return float(ndtri((1 + level) / 2))


def _tail(t: float, freedom: float) -> float:
    from scipy.special import ndtr, stdtr

    return float(stdtr(freedom, -t) if math.isfinite(freedom) else ndtr(-t))


def paired(differences: Sequence[float]) -> Estimate | None:
    """Estimate the mean of paired differences; None for fewer than two."""
    n = len(differences)
    if n < 2:
        return None
    return Estimate(fmean(differences), math.sqrt(variance(differences) / n), n - 1, n)


def unpaired(one: Sequence[float], other: Sequence[float]) -> Estimate | None:
    """Estimate the difference of two means by Welch's test; None for fewer than two of each."""
    if min(len(one), len(other)) < 2:
        return None
    parts = [variance(each) / len(each) for each in (one, other)]
    spread = sum(part**2 / (len(each) - 1) for part, each in zip(parts, (one, other), strict=True))
    n = min(len(one), len(other))
    freedom = sum(parts) ** 2 / spread if spread else n - 1
    return Estimate(fmean(one) - fmean(other), math.sqrt(sum(parts)), freedom, n)


def blocks_needed(pilot: Sequence[float], half: float) -> int:
    """Return the number of blocks for an interval of +-half, by Stein's two-stage rule.

    The variance is that of the pilot's differences alone, so the number does not depend on what
    the blocks after it show, nor on whether anything has become significant.
    """
    t = t_quantile(len(pilot) - 1)
    needed = math.ceil(t**2 * variance(pilot) / half**2)
    return min(MOST_BLOCKS, max(len(pilot), needed))


def holm(ps: Sequence[float]) -> list[float]:
    """Adjust p values for their number by Holm's rule: at 0.05, all claims hold in 95% of cases."""
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    adjusted, least = [0.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = least
    return adjusted


@dataclass(frozen=True)
class Prior:
    """What the variances of many groups say about the variance of each.

    A group's own variance, from few numbers, is drawn towards the common one; the more alike the
    groups are, the more (Smyth 2004, "Linear models and empirical Bayes methods").
    """

    variance: float
    freedom: float  # infinite where the groups do not differ beyond chance

    @classmethod
    def of(cls, groups: Sequence[Sequence[float]]) -> Prior | None:
        """Learn from groups of numbers; None where no group has two that differ."""
        from scipy.special import digamma, polygamma

        known = [(variance(g), len(g) - 1) for g in groups if len(g) > 1]
        known = [(v, d) for v, d in known if v > 0]
        if not known:
            return None
        logs = [math.log(v) - float(digamma(d / 2)) + math.log(d / 2) for v, d in known]
        mean = fmean(logs)
        if len(known) == 1:
            return cls(math.exp(mean), 0.0)
        beyond = variance(logs) - fmean(float(polygamma(1, d / 2)) for _, d in known)
        if beyond <= 0:
            return cls(math.exp(mean), math.inf)
        half = _inverse_trigamma(beyond)
        return cls(math.exp(mean + float(digamma(half)) - math.log(half)), 2 * half)

    def drawn(self, own: float, freedom: int) -> tuple[float, float]:
        """Return a group's variance, drawn towards the common one, and its degrees of freedom."""
        if math.isinf(self.freedom):
            return self.variance, math.inf
        total = self.freedom + freedom
        return (self.freedom * self.variance + freedom * own) / total, total


def _inverse_trigamma(value: float) -> float:
    """Solve trigamma(x) = value by Newton's method (Smyth 2004, appendix)."""
    from scipy.special import polygamma

    x = 0.5 + 1 / value
    for _ in range(50):
        at = float(polygamma(1, x))
        step = at * (1 - at / value) / float(polygamma(2, x))
        x += step
        if -step / x < 1e-8:
            break
    return x
