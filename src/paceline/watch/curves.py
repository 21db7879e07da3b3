"""Curves that stay small however long a run is."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_POINTS = 400

Point = list[float]  # step, seconds of training, value


@dataclass
class Means:
    """The mean of a value over bins of steps, for values that several workers report.

    When there are more than `MOST_POINTS` bins, neighbours are merged and bins are twice as wide.
    """

    width: int = 1
    _bins: dict[int, list[float]] = field(default_factory=dict)  # weight, sum, last step, seconds

    def add(self, step: int, train_s: float, value: float, weight: float) -> None:
        place = step // self.width
        found = self._bins.get(place)
        if found is None:
            self._bins[place] = [weight, weight * value, step, train_s]
            if len(self._bins) > MOST_POINTS:
                self._widen()
        else:
            found[0] += weight
            found[1] += weight * value
            found[2] = max(found[2], step)
            found[3] = max(found[3], train_s)

    def cut(self, after: int) -> None:
        """Drop the bins that begin after this step: a resume has undone them."""
        self._bins = {k: b for k, b in self._bins.items() if k * self.width <= after}

    def points(self) -> list[Point]:
        """Return the points in the order of steps."""
        return [[b[2], b[3], b[1] / b[0]] for _, b in sorted(self._bins.items()) if b[0]]

    def _widen(self) -> None:
        while len(self._bins) > MOST_POINTS:
            self.width *= 2
            merged: dict[int, list[float]] = {}
            for place, (weight, total, step, train_s) in self._bins.items():
                there = merged.setdefault(place // 2, [0.0, 0.0, 0, 0.0])
                there[0] += weight
                there[1] += total
                there[2] = max(there[2], step)
                there[3] = max(there[3], train_s)
            self._bins = merged


@dataclass
class Points:
    """Single values. When there are too many, every second one is dropped; the last one stays."""

    stride: int = 1
    _points: list[Point] = field(default_factory=list)
    _last: Point | None = None
    _seen: int = 0

    def add(self, step: int, train_s: float, value: float) -> None:
        self._last = [step, train_s, value]
        if self._seen % self.stride == 0:
            self._points.append(self._last)
        self._seen += 1
        if len(self._points) >= MOST_POINTS:
            self._points = self._points[::2]
            self.stride *= 2

    def cut(self, after: int) -> None:
        """Drop the values of later steps: a resume has undone them."""
        self._points = [p for p in self._points if p[0] <= after]
        if self._last is not None and self._last[0] > after:
            self._last = self._points[-1] if self._points else None

    def points(self) -> list[Point]:
        """Return the values in the order in which they came."""
        last = [] if self._last is None or self._last in self._points[-1:] else [self._last]
        return [*self._points, *last]
