"""Telling differences from noise.

A difference is called one only when the ranges of the runs do not touch, there being two or more of each. With single runs
it is told as seen once, and only where it is larger than `ONCE`.
"""

from __future__ import annotations

from paceline.report.lines import Line, Spread

ONCE = 0.10  # a difference in time that is told although it was seen in one run each
POINTS = 0.005  # of accuracy: less is not called a loss


def differ(one: Spread, other: Spread, least: float = 0.0) -> bool:
    """Whether two measurements differ by more than their runs do, and by more than `least` (relative)."""
    if abs(one.mean - other.mean) <= least * abs(other.mean):
        return False
    if one.n >= 2 and other.n >= 2:
        return one.low > other.high or other.low > one.high
    return abs(one.mean - other.mean) > max(least, ONCE) * abs(other.mean)


def lost_points(line: Line, serial: Line) -> float | None:
    """Accuracy below serial's, where it is more than noise; None otherwise."""
    own, reference = line.accuracy, serial.accuracy
    if own is None or reference is None or reference.mean - own.mean < POINTS:
        return None
    if own.n >= 2 and reference.n >= 2:
        return reference.mean - own.mean if own.high < reference.low else None
    return reference.mean - own.mean if reference.mean - own.mean >= 2 * POINTS else None


def seen(*lines: Line) -> str:
    """How sure it is."""
    return "" if all(len(x.completed) >= 2 for x in lines) else " (seen in one run each)"


def mean_of(spread: Spread | None) -> float:
    return spread.mean if spread is not None else 0.0
