"""Layers on different workers, one batch at a time: model parallelism as textbooks draw it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.errors import BadRequest
from paceline.parallel.staged import Staged
from paceline.parallel.timetable import Timetable, alone
from paceline.registry import forms


@forms.register("layers")
@dataclass
class Layers(Staged):
    """Consecutive layers on different workers, one batch at a time: one worker computes at once."""

    stages: Annotated[int, "workers that hold the model together; 0: all"] = 0
    cut: Annotated[str, "first layers of the stages, as 3;6 (default: by measured time)"] = ""

    def __post_init__(self) -> None:
        if self.stages < 0:
            raise BadRequest(f"layers: stages={self.stages}: 1 or more")

    def timetable(self, parts: int, samples: int | None = None) -> Timetable:
        return alone(range(parts))
