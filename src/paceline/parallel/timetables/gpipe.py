"""GPipe (Huang et al., 2019): all forward passes, then all backward passes.

Idle share (p-1)/(m+p-1); every rank keeps the activations of all m micro-batches.
"""

from __future__ import annotations

from paceline.parallel.timetable import Formula, Task, Timetable
from paceline.registry import timetables


@timetables.register("gpipe")
def gpipe(ranks: int, micros: int) -> Timetable:
    """All forward passes, then all backward passes; keeps m activations."""
    return Timetable(
        "gpipe",
        ranks,
        micros,
        tuple(
            tuple(Task(kind, stage, m) for kind in ("F", "B") for m in range(micros))
            for stage in range(ranks)
        ),
        Formula("(p-1)/(m+p-1)", (ranks - 1) / (micros + ranks - 1)),
    )
