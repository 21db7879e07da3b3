"""1F1B (Narayanan et al., 2019): after some forward passes, one forward, one backward, in turns.

The idle share is GPipe's, (p-1)/(m+p-1), but stage s keeps only p - s activations.
"""

from __future__ import annotations

from paceline.parallel.timetable import Formula, Task, Timetable
from paceline.registry import timetables


@timetables.register("1f1b")
def one_f_one_b(ranks: int, micros: int) -> Timetable:
    """One forward pass, one backward pass, in turns; stage s keeps p - s activations."""

    def tasks(stage: int) -> tuple[Task, ...]:
        first = min(micros, ranks - stage - 1)  # forward passes before the first backward pass
        made = [Task("F", stage, m) for m in range(first)]
        for m in range(micros):
            if first + m < micros:
                made.append(Task("F", stage, first + m))
            made.append(Task("B", stage, m))
        return tuple(made)

    formula = Formula("(p-1)/(m+p-1)", (ranks - 1) / (micros + ranks - 1))
    return Timetable("1f1b", ranks, micros, tuple(map(tasks, range(ranks))), formula)
