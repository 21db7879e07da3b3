"""The interface of faults: a few hooks into a run, each with a default that does nothing."""

from __future__ import annotations

from typing import ClassVar

from paceline.transport.activity import Point
from paceline.transport.base import Transport


class Fault:
    """`--faults "slow:rank=1,factor=3"`; a subclass's dataclass fields are its options."""

    name: ClassVar[str]

    def wrap(self, transport: Transport) -> Transport:
        """Return the transport that the run uses instead of this one."""
        return transport

    def reached(self, point: Point, step: int, rank: int) -> None:
        """Called when a rank enters a point of its run (transport/activity.py)."""
        return

    def before_step(self, step: int, transport: Transport) -> None:
        """Called before step `step` (counted from 1) of this rank."""
        return

    def after_compute(self, seconds: float, transport: Transport) -> None:
        """Called after a forward and backward pass that took `seconds`."""
        return
