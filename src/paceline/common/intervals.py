"""How often something happens during training: every so many steps or epochs."""

from __future__ import annotations

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


def due(interval: str | None, step: int, epoch: int, epoch_ended: bool) -> bool:
    """Whether what happens at `interval` is due after this step; steps and epochs count from 1."""
    if interval is None:
        return False
    if "epoch" in interval:
        every = int(interval.removesuffix("s").removesuffix("epoch") or 1)
        return epoch_ended and epoch % every == 0
    return step % int(interval) == 0
