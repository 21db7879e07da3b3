"""Interleaved 1F1B (Narayanan et al., 2021): each rank has v stages, so the bubble is v times less.

Rank r has the stages r, r + p, r + 2p, ... Micro-batches go in groups of p: a group passes the
rank's first stage, then its second, and so on. Idle share (p-1)/(vm+p-1).
"""

from __future__ import annotations

from typing import Annotated

from paceline.errors import BadRequest
from paceline.parallel.timetable import KINDS, Formula, Kind, Task, Timetable, in_turns
from paceline.registry import timetables


@timetables.register("interleaved")
def interleaved(
    ranks: int, micros: int, each: Annotated[int, "stages per worker"] = 2
) -> Timetable:
    """1F1B with several stages per rank: a smaller bubble for more messages."""
    if micros % ranks:
        raise BadRequest(
            f"schedule interleaved takes micro-batches in groups of {ranks}, one per worker:"
            f" micro={micros} is not a multiple of {ranks}"
        )
    if each < 1:
        raise BadRequest(f"schedule interleaved: each={each}: at least one stage per worker")
    total = micros * each

    def task(kind: Kind, rank: int, number: int) -> Task:
        """The number-th forward or backward pass of a rank."""
        group, within = divmod(number, ranks * each)
        chunk = within // ranks if kind == "F" else each - 1 - within // ranks
        micro = group * ranks + within % ranks
        return Task(kind, chunk * ranks + rank, micro)

    def tasks(rank: int) -> tuple[Task, ...]:
        forward, backward = ([task(kind, rank, k) for k in range(total)] for kind in KINDS)
        first = min(total, 2 * (ranks - rank - 1) + (each - 1) * ranks)
        return tuple(in_turns(forward, backward, first))

    formula = Formula("(p-1)/(vm+p-1)", (ranks - 1) / (total + ranks - 1))
    return Timetable("interleaved", ranks * each, micros, tuple(map(tasks, range(ranks))), formula)
