"""Check that a record read from disk has the shape it should have.

A shape is a kind (`number`, `text`, ...), a dict of named fields, a list with the one shape of all
its elements, or one of those wrapped in `Values`, `Maybe`, `OrNull` or `IfThere`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

LARGEST = 1e18  # no count of seconds or bytes is larger; sums of such numbers stay finite
MISSING = object()

Kind = Callable[[Any], bool]


def number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def finite(value: Any) -> bool:
    """Whether it is a loss or a metric: any float but nan and inf."""
    return number(value) or (isinstance(value, float) and math.isfinite(value))


def whole(value: Any) -> bool:
    return isinstance(value, int) and number(value) and value >= 0


def positive(value: Any) -> bool:
    return whole(value) and value > 0


def speed(value: Any) -> bool:
    return number(value) and value > 0


def not_negative(value: Any) -> bool:
    return number(value) and value >= 0


def seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def text(value: Any) -> bool:
    return isinstance(value, str)


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def rate(value: Any) -> bool:
    """Whether it says if something happened (true, false), or how often (a number)."""
    return flag(value) or number(value)


def anything(value: Any) -> bool:
    return value is not MISSING


WORDS: dict[Kind, str] = {
    number: "a number",
    finite: "a number",
    whole: "a whole number",
    positive: "a whole number above 0",
    speed: "a number above 0",
    not_negative: "a number of 0 or more",
    seed: "a whole number",
    text: "text",
    flag: "true or false",
    rate: "true, false or a number",
    anything: "there",
}


@dataclass(frozen=True)
class Values:
    """A table with any names, whose values have one shape."""

    of: Any


@dataclass(frozen=True)
class Maybe:
    """It may be left out, or be null."""

    of: Any


@dataclass(frozen=True)
class OrNull:
    """It may be null."""

    of: Any


@dataclass(frozen=True)
class IfThere:
    """It may be left out."""

    of: Any


Wrong = tuple[str, Any, str]  # where, what is there, what should be


def fault(value: Any, shape: Any) -> str | None:
    """Describe the first part of `value` that does not have its `shape`; None if all have."""
    found = _wrong(value, shape)
    if found is None:
        return None
    where, there, wanted = found[0].removeprefix(".") or "it", found[1], found[2]
    return (
        f"{where} is missing"
        if there is MISSING
        else f"{where} is {repr(there)[:40]}, not {wanted}"
    )


def _wrong(value: Any, shape: Any) -> Wrong | None:
    if callable(shape):
        return None if shape(value) else ("", value, WORDS[shape])
    if isinstance(shape, Maybe):
        return None if value is MISSING or value is None else _wrong(value, shape.of)
    if isinstance(shape, OrNull):
        return None if value is None else _wrong(value, shape.of)
    if isinstance(shape, IfThere):
        return None if value is MISSING else _wrong(value, shape.of)
    parts: Iterable[tuple[Any, Any, Any]]  # where, what is there, its shape
    if isinstance(shape, list):
        if not isinstance(value, list):
            return "", value, "a list"
        parts = ((f"[{place}]", inner, shape[0]) for place, inner in enumerate(value))
    elif not isinstance(value, dict):
        return "", value, "a table"
    elif isinstance(shape, Values):
        parts = ((f".{name}", inner, shape.of) for name, inner in value.items())
    else:
        parts = ((f".{name}", value.get(name, MISSING), inner) for name, inner in shape.items())
    for where, inner, wanted in parts:
        if (found := _wrong(inner, wanted)) is not None:
            return where + found[0], found[1], found[2]
    return None
