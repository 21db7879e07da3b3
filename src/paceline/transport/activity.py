"""What one rank does now: the point of the run at which it is, and the step.

A rank enters a point before each part of its work. Notices about slow ranks, `paceline status` and
injected faults go by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from paceline.transport.status.line import Line

Point = Literal["connect", "set up", "load", "compute", "exchange", "evaluate", "save", "finish"]


class Activity:
    """The point at which a rank is. `heard` is called with every point that it enters."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.point: Point = "connect"
        self.step = 0  # counted from 1; 0: before the first
        self.heard: Callable[[Point, int], None] | None = None
        self.line: Line | None = None  # where others can read it

    def enter(self, point: Point, step: int | None = None) -> None:
        self.point = point
        if step is not None:
            self.step = step
        if self.line is not None:
            self.line.enter(point, self.step)
        if self.heard is not None:
            self.heard(point, self.step)

    def end(self) -> None:
        """The rank has done its part of the run."""
        if self.line is not None:
            self.line.end(self.step)
