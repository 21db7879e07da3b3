"""Zero bubble, form H1 (Qi et al., 2023): the gradients of weights fill a part of 1F1B's bubble.

A backward pass is cut in two: B, for which the stage before waits, and W, for which no stage waits.
Stage s makes W of a micro-batch s backward passes after its B. So every rank keeps at most p
activations, as the first rank of 1F1B does. If F, B and W take equally long, and there are at least
as many micro-batches as ranks, the idle share is (p-1)/(3m+p-1).
"""

from __future__ import annotations

from paceline.parallel.timetable import Formula, Task, Timetable
from paceline.registry import timetables


@timetables.register("zero-bubble")
def zero_bubble(ranks: int, micros: int) -> Timetable:
    """1F1B whose weight gradients are computed apart, where a rank would be idle."""

    def tasks(stage: int) -> tuple[Task, ...]:
        first = min(micros, ranks - stage - 1)
        made = [Task("F", stage, m) for m in range(first)]
        for m in range(micros):
            if first + m < micros:
                made.append(Task("F", stage, first + m))
            made.append(Task("B", stage, m))
            if m >= stage:
                made.append(Task("W", stage, m - stage))
        made += [Task("W", stage, m) for m in range(max(0, micros - stage), micros)]
        return tuple(made)

    formula = Formula("(p-1)/(3m+p-1)", (ranks - 1) / (3 * micros + ranks - 1))
    holds = formula if micros >= ranks else None
    return Timetable("zero-bubble", ranks, micros, tuple(map(tasks, range(ranks))), holds)
