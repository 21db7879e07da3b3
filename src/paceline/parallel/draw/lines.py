"""A timetable in the terminal: rows of characters, each with the task that it shows."""

from __future__ import annotations

from paceline.parallel.draw.facts import Facts
from paceline.parallel.timetable import Task

Piece = tuple[str, Task | None]  # characters, and the task that they show; None: idle


def blocks(facts: Facts, columns: int) -> list[tuple[int, int, list[list[Piece]]]]:
    """The grid in blocks that fit `columns`: from, to (in forward passes), a row per worker.

    A stage's forward pass takes as many characters as its name needs: "F3", "F12".
    """
    times = facts.timing
    wide = 1 + len(str(facts.table.micros - 1))
    total = round(times.total)
    most = max(1, columns // wide)
    made = []
    for low in range(0, total, most):
        high = min(total, low + most)
        made.append((low, high, [_row(facts, rank, low, high, wide) for rank in _ranks(facts)]))
    return made


def mark(facts: Facts, task: Task) -> str:
    """The name of a task: upper case for the worker's first stage, lower case for the others."""
    kind = task.kind if task.stage < facts.workers else task.kind.lower()
    return f"{kind}{task.micro}"


def legend(facts: Facts) -> str:
    """What the letters mean."""
    words = "F forward, B backward"
    if facts.table.weights_apart:
        words += ", W gradient of the weights"
    if facts.each > 1:
        words += "; lower case: a worker's further stages"
    return f"{words}; number: micro-batch"


def _ranks(facts: Facts) -> range:
    return range(facts.workers)


def _row(facts: Facts, rank: int, low: int, high: int, wide: int) -> list[Piece]:
    row: list[Piece] = []
    at = low
    for task in facts.table.ranks[rank]:
        start, end = (round(t) for t in facts.timing.spans[task])
        if end <= low or start >= high:
            continue
        if start > at:
            row.append((" " * wide * (start - at), None))
        first, at = max(start, low), min(end, high)
        words = mark(facts, task) if start >= low else ""
        row.append((words.ljust(wide) + "-" * wide * (at - first - 1), task))
        if not words:
            row[-1] = ("-" * wide * (at - first), task)
    if at < high:
        row.append((" " * wide * (high - at), None))
    return row
