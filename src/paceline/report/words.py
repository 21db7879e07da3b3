"""Numbers and lists as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.report.lines import Spread

if TYPE_CHECKING:
    from paceline.report.judge import Verdict


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"


def milliseconds(value: float) -> str:
    return f"{1e3 * value:.2f} ms" if value < 0.1 else f"{1e3 * value:.0f} ms"


def percent(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def size(value: float | None) -> str:
    """Return bytes with a fitting unit."""
    if value is None:
        return "–"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return (
                f"{value / scale:,.1f} {unit}"
                if value < 100 * scale
                else f"{value / scale:,.0f} {unit}"
            )
    return f"{value:.0f} B"


def with_range(spread: Spread | None, form: str = ".2f", scale: float = 1.0, unit: str = "") -> str:
    """Return the mean with the range over several runs: `1.70 s (1.41-1.90)`."""
    if spread is None:
        return "–"
    mean, low, high = (
        f"{value * scale:{form}}" for value in (spread.mean, spread.low, spread.high)
    )
    return f"{mean}{unit}" if spread.n < 2 or low == high else f"{mean}{unit} ({low}-{high})"


def entries(value: Any) -> str:
    """Return a value of the record as text: `job 7, nodes n1 n2` for a table of two entries."""
    if isinstance(value, dict):
        known = ((name, inner) for name, inner in value.items() if inner not in (None, "", []))
        return ", ".join(f"{name} {entries(inner)}" for name, inner in known)
    if isinstance(value, list):
        return " ".join(entries(inner) for inner in value)
    return str(value)


def count(number: int, noun: str) -> str:
    """`1 run`, `2 runs`"""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """`a`, `b` and `c`"""
    shown = [f"`{n}`" for n in names[:most]]
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    return (
        shown[0]
        if len(shown) == 1
        else ", ".join(shown[:-1]) + " and " + shown[-1]
        if shown
        else ""
    )


def workers(number: int) -> str:
    return count(number, "worker")


def as_fast(verdict: Verdict, than: str = "serial") -> str:
    """`1.55x as fast as serial (95% interval 1.38 to 1.74, faster in 9 of 9 blocks)`"""
    text = f"{times(math.exp(-verdict.apart))} as fast as {than}"
    if verdict.estimate is None:
        return text + verdict.seen
    return f"{text} ({interval(verdict)})"


def interval(verdict: Verdict) -> str:
    """`95% interval 1.38 to 1.74, faster in 9 of 9 blocks`, of a comparison of speeds."""
    low, high = math.exp(-verdict.high), math.exp(-verdict.low)
    side = "faster" if verdict.apart < 0 else "slower"
    counted = f", {side} {verdict.counted}" if verdict.counted else ""
    return f"95% interval {low:.2f} to {high:.2f}{counted}"
