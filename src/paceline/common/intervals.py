"""How often something happens during training: every so many steps or epochs."""

from __future__ import annotations

import re
from typing import Any

from paceline.errors import BadRequest


def interval(name: str, value: Any) -> str:
    """Check an interval and return it as `100` (steps), `epoch` or `2epochs`."""
    text = str(value).strip()
    count = text.removesuffix("s").removesuffix("epoch").strip() if "epoch" in text else text
    if count == "" and "epoch" in text:
        return "epoch"
    if not (count.isascii() and count.isdecimal()) or int(count) < 1:
        raise BadRequest(
            f"{name}={value}: write a number of steps (100), epoch, or a number of epochs (2epochs)"
        )
    return f"{int(count)}epochs" if "epoch" in text else count


def interval_or_time(name: str, value: Any) -> str:
    """Check an interval in steps, epochs or time; time is returned in seconds: `600s`."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+) *(s|min|minutes?|h)", str(value).strip())
    if found is None:
        try:
            return interval(name, value)
        except BadRequest as error:
            raise BadRequest(f"{error}, or a time (10min, 90s)") from None
    seconds = float(found[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[found[2][0]]
    if not seconds > 0:
        raise BadRequest(f"{name}={value}: it must be more than 0 s")
    return f"{seconds:g}s"


def seconds_of(interval: str | None) -> float | None:
    """Return the seconds of an interval of time; None for one in steps or epochs."""
    is_time = interval is not None and interval.endswith("s") and "epoch" not in interval
    return float(str(interval)[:-1]) if is_time else None


def due(interval: str | None, step: int, epoch: int, epoch_ended: bool) -> bool:
    """Whether what happens at `interval` is due after this step; steps and epochs count from 1."""
    if interval is None or seconds_of(interval) is not None:
        return False
    if "epoch" in interval:
        every = int(interval.removesuffix("s").removesuffix("epoch") or 1)
        return epoch_ended and epoch % every == 0
    return step % int(interval) == 0
