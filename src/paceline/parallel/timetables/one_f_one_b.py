"""1F1B (Narayanan et al., 2019): after some forward passes, one forward, one backward, in turns.

The idle share is GPipe's, (p-1)/(m+p-1), but stage s keeps only p - s activations.
"""

from __future__ import annotations

from paceline.parallel.timetable import KINDS, Formula, Task, Timetable, in_turns
from paceline.registry import timetables


@timetables.register("1f1b")
def one_f_one_b(ranks: int, micros: int) -> Timetable:
    """One forward pass, one backward pass, in turns; stage s keeps p - s activations."""

    def tasks(stage: int) -> tuple[Task, ...]:
        forward, backward = ([Task(kind, stage, m) for m in range(micros)] for kind in KINDS)
        return tuple(in_turns(forward, backward, min(micros, ranks - stage - 1)))

    formula = Formula("(p-1)/(m+p-1)", (ranks - 1) / (micros + ranks - 1))
    return Timetable("1f1b", ranks, micros, tuple(map(tasks, range(ranks))), formula)
