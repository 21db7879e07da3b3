"""Numbers with units, as users write them: `100mbit`, `1ms`, `64MB`."""

from __future__ import annotations

import re

from paceline.errors import BadRequest

RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
LONG_TIMES = {"s": 1.0, "min": 60.0, "h": 3600.0}
SIZES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}


def parse_unit(text: str, units: dict[str, float], what: str) -> float:
    """Read a number with a unit (`100mbit`, `1ms`, `0`) and return it in the base unit."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", str(text).lower())
    try:
        number = float(found[1]) if found else -1.0
    except ValueError:
        number = -1.0
    if found is None or number < 0 or (found[2] not in units and number):
        raise BadRequest(
            f"{what}={text!r} is not a number with one of the units {', '.join(units)}"
        )
    return number * units.get(found[2], 0.0)


def parse_bytes(text: str, what: str = "size") -> int:
    """Read a size such as `64MB`, of at least one byte."""
    size = int(parse_unit(text, SIZES, what))
    if size < 1:
        raise BadRequest(f"{what}={text!r}: it must be 1 byte or more")
    return size
