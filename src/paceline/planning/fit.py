"""Lines through measured points, and quantiles of measured times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import BadRequest

QUANTILES = 101  # 0%, 1%, ..., 100%
MEDIAN = QUANTILES // 2


@dataclass(frozen=True)
class Line:
    """fixed + slope * x: seconds per message and per byte, or per step and per sample."""

    fixed: float
    slope: float

    def at(self, x: float) -> float:
        return self.fixed + self.slope * x

    def times(self, factor: float) -> Line:
        return Line(factor * self.fixed, factor * self.slope)


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Fit a line with neither part below 0, by the least squares of the *relative* errors.

    Relative, because the sizes of messages span four powers of ten: by absolute errors the longest
    messages alone would decide. With one value of x the line goes through the origin.
    """
    if not points or any(not (x >= 0 and y > 0 and x + y < math.inf) for x, y in points):
        raise BadRequest("a line needs points with x of 0 or more and y above 0")
    weights = [1 / (y * y) for _, y in points]
    total = math.fsum(weights)
    mean_x = math.fsum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = math.fsum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    apart = math.fsum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    along = math.fsum(
        w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)
    )
    flat = Line(mean_y, 0.0)
    square = math.fsum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
    if not square:
        return flat
    rising = math.fsum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / square
    through_origin = Line(0.0, rising)
    if len({x for x, _ in points}) < 2:
        return through_origin
    slope = along / apart
    fixed = mean_y - slope * mean_x
    if fixed >= 0 and slope >= 0:
        return Line(fixed, slope)
    return min((through_origin, flat), key=lambda line: error_of(line, points))


def error_of(line: Line, points: Sequence[tuple[float, float]]) -> float:
    """Return the sum of the squared relative errors of a line."""
    return math.fsum((line.at(x) / y - 1) ** 2 for x, y in points)


def quantiles(values: Sequence[float], count: int = QUANTILES) -> tuple[float, ...]:
    """Return evenly spaced quantiles, from the least value to the largest."""
    if not values:
        raise BadRequest("there are no quantiles of nothing")
    ordered = sorted(values)
    found = []
    for number in range(count):
        place = number * (len(ordered) - 1) / (count - 1)
        below = ordered[math.floor(place)]
        above = ordered[math.ceil(place)]
        between = below + (place - math.floor(place)) * (above - below)
        found.append(min(max(between, below), above))
    return tuple(found)


def median(values: Sequence[float]) -> float:
    return quantiles(values, 3)[1]
