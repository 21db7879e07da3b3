"""Pipelines (Huang et al., 2019): stages on different workers, and micro-batches that pass them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.errors import BadRequest
from paceline.parallel.staged import Staged
from paceline.parallel.timetable import Timetable, alone
from paceline.parallel.torch_engine import SCHEDULES
from paceline.registry import Spec, forms, timetables


@forms.register("pipeline")
@dataclass
class Pipeline(Staged):
    """Consecutive layers on different workers; micro-batches keep all of them busy."""

    stages: Annotated[int, "workers that hold the model together; 0: all"] = 0
    micro: Annotated[int, "micro-batches per batch"] = 4
    schedule: Annotated[str, "the timetable: gpipe, 1f1b, interleaved, zero-bubble"] = "1f1b"
    each: Annotated[int, "stages per worker (interleaved: 2)"] = 0
    cut: Annotated[str, "first layers of the stages, as 3;6 (default: by measured time)"] = ""
    engine: Annotated[Literal["ours", "torch"], "torch: PyTorch's own, for comparison"] = "ours"

    def __post_init__(self) -> None:
        for name in ("stages", "each"):
            if getattr(self, name) < 0:
                raise BadRequest(f"pipeline: {name}={getattr(self, name)}: 1 or more")
        if self.micro < 1:
            raise BadRequest(f"pipeline: micro={self.micro}: 1 or more")
        timetables.entry(self.schedule)  # raises with the names that there are
        if self.engine == "torch" and self.schedule not in SCHEDULES:
            raise BadRequest(
                f"engine=torch with schedule={self.schedule}: it runs {', '.join(SCHEDULES)}"
            )
        if self.each and self.schedule != "interleaved":
            raise BadRequest(
                f"each={self.each}: only schedule=interleaved has several stages per worker"
            )

    def timetable(self, parts: int, samples: int | None = None) -> Timetable:
        options = {"each": self.each} if self.each else {}
        spec, micros = Spec(self.schedule, options), self.micro
        if samples is not None and samples < micros:
            micros = samples
            if self.schedule == "interleaved" and (micros := micros - micros % parts) == 0:
                whole: Timetable = timetables.build(spec, ranks=parts, micros=parts)
                return alone(whole.place)
        made: Timetable = timetables.build(spec, ranks=parts, micros=max(1, micros))
        return made
