"""Numbers with units, as people write them: `100mbit`, `1ms`."""

from __future__ import annotations

import re

from paceline.errors import BadRequest

RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def parse_unit(text: str, units: dict[str, float], what: str) -> float:
    """`100mbit`, `1ms`, `0`."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", str(text).lower())
    try:
        number = float(found[1]) if found else -1.0
    except ValueError:
        number = -1.0
    if found is None or number < 0 or (found[2] not in units and number):
        raise BadRequest(f"{what}={text!r} is not a number with one of the units {', '.join(units)}")
    return number * units.get(found[2], 0.0)
