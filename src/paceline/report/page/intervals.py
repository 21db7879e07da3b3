"""Dots with intervals, as inline SVG: the pictures inside the main table.

Positions are percentages of the cell's width, so that a picture follows its column without
distortion. Colours come from the page's style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

HEIGHT = 22  # pixels
MARGIN = 5.0  # percent of the width, left and right
ROOM = 0.6  # an interval may reach beyond all dots by this share of their span
RATIOS = (
    (0.01, 0.1, 1, 10, 100, 1000),
    (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
    (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50),
    (0.125, 0.25, 0.5, 1, 2, 4, 8, 16),
    (0.5, 0.7, 1, 1.5, 2, 3),
    (0.6, 0.8, 1, 1.2, 1.4, 1.6),
    (0.8, 0.9, 1, 1.1, 1.2),
    (0.95, 1, 1.05),
)
MOST_TICKS = 4
APART = 20.0  # percent of the width between two ticks


@dataclass(frozen=True)
class Dot:
    """A mean with its interval; `kind` is good, bad, same or base."""

    mean: float
    low: float
    high: float
    kind: str
    base: float | None = None  # serial's mean


@dataclass(frozen=True)
class Scale:
    """Maps numbers to positions in percent; `log` for ratios."""

    low: float  # as logarithms where `log`
    high: float
    log: bool
    form: Callable[[float], str]

    @classmethod
    def of(cls, dots: Sequence[Dot], log: bool, form: Callable[[float], str]) -> Scale | None:
        """Return a scale that shows every dot, and intervals as far as there is room."""
        if not dots:
            return None
        to = math.log if log else float
        centres = [to(v) for d in dots for v in (d.mean, d.base) if v is not None]
        first, last = min(centres), max(centres)
        least = 0.1 if log else 0.01 * max(1e-9, abs(last))
        room = max(ROOM * (last - first), least)
        ends = [to(v) for d in dots for v in (d.low, d.high) if not log or v > 0]
        low = max(min([first, *ends]), first - room)
        high = min(max([last, *ends]), last + room)
        if high - low < least:
            low, high = low - least / 2, high + least / 2
        return cls(low, high, log, form)

    def at(self, value: float) -> float:
        """Return a position in percent, never outside the picture."""
        if self.log:
            value = math.log(value) if value > 0 else -math.inf
        share = (value - self.low) / (self.high - self.low)
        return MARGIN + (100 - 2 * MARGIN) * min(1.0, max(0.0, share))

    def inside(self, value: float) -> bool:
        shown = math.log(value) if self.log and value > 0 else value
        slack = 1e-6 * (self.high - self.low)
        return self.low - slack <= shown <= self.high + slack

    def ticks(self) -> list[tuple[float, str]]:
        """Return two to four round numbers with their texts."""
        if self.log:
            sets = [[v for v in ticks if self.inside(v)] for ticks in RATIOS]
        else:
            unit = 10.0 ** math.ceil(math.log10(self.high - self.low))
            sets = [self._multiples(unit / part) for part in (1, 2, 5, 10, 20)]
        fitting = [s for s in sets if 2 <= len(s) <= MOST_TICKS and self._apart(s)]
        return [(v, self.form(v)) for v in max(fitting, key=len, default=[])]

    def _apart(self, values: Sequence[float]) -> bool:
        return all(self.at(b) - self.at(a) >= APART for a, b in pairwise(values))

    def _multiples(self, step: float) -> list[float]:
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [n * step for n in range(first, last + 1)] if last - first < 50 else []


def picture(scale: Scale, dot: Dot, label: str) -> Markup:
    """Return a dot with its interval beside serial's line; an arrow where the interval is cut."""
    parts = [Markup('<svg class="dot {}" role="img" aria-label="{}">').format(dot.kind, label)]
    if dot.base is not None:
        parts.append(_line("base", scale.at(dot.base), 0, scale.at(dot.base), HEIGHT))
    if dot.low < dot.high:
        left, right = scale.at(dot.low), scale.at(dot.high)
        parts.append(_line("bar", left, HEIGHT / 2, right, HEIGHT / 2))
        for value, x, sign in ((dot.low, left, -1), (dot.high, right, 1)):
            if not scale.inside(value):
                parts.append(_arrow(x, sign))
    parts.append(
        Markup('<circle cx="{}%" cy="{}" r="4.5"/></svg>').format(
            round(scale.at(dot.mean), 2), HEIGHT // 2
        )
    )
    return Markup("").join(parts)


def axis(scale: Scale) -> Markup:
    """Return the numbers above a column of pictures."""
    texts = [
        Markup('<text x="{}%" y="12">{}</text>').format(round(scale.at(value), 2), text)
        for value, text in scale.ticks()
    ]
    return Markup('<svg class="ticks" aria-hidden="true">{}</svg>').format(Markup("").join(texts))


def _line(kind: str, x: float, y: float, x2: float, y2: float) -> Markup:
    return Markup('<line class="{}" x1="{}%" y1="{:g}" x2="{}%" y2="{:g}"/>').format(
        kind, round(x, 2), y, round(x2, 2), y2
    )


def _arrow(x: float, sign: int) -> Markup:
    """Return an arrow head; the nested svg places it at a percentage."""
    tip = f"M0 -4L{7 * sign} 0L0 4z"
    return Markup('<svg class="arrow" x="{}%" y="{}"><path d="{}"/></svg>').format(
        round(x, 2), HEIGHT // 2, tip
    )
