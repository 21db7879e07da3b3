"""What a drawing shows: for each round, the transfers and the contributions in every chunk.

A test compares the frames with the symbolic state. The terminal, the pictures and the page are made
from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.collectives.schedule import Schedule, Transfer, states


@dataclass(frozen=True)
class Frame:
    """The state after round `step` (0: the start) and the transfers of that round."""

    step: int
    phase: str
    cells: tuple[tuple[str, ...], ...]  # [rank][chunk]: the contributions, as "0-2,4"
    complete: tuple[tuple[bool, ...], ...]
    changed: frozenset[tuple[int, int]]  # (rank, chunk) that this round wrote
    transfers: tuple[Transfer, ...]
    place: int  # the number of the round within its phase, from 0


def frames(schedule: Schedule) -> list[Frame]:
    """The start (step 0) and the state after every round."""
    drawn = []
    for step, state in enumerate(states(schedule)):
        transfers = schedule.rounds[step - 1] if step else ()
        drawn.append(
            Frame(
                step,
                schedule.phases[step - 1] if step else "start",
                tuple(tuple(contributions(c) for c in row) for row in state),
                tuple(tuple(min(c) > 0 for c in row) for row in state),
                frozenset(
                    (t.target, t.lands + offset)
                    for t in transfers
                    for offset in range(t.stop - t.start)
                ),
                transfers,
                step - 1 - schedule.phases.index(schedule.phases[step - 1]) if step else 0,
            )
        )
    return drawn


def contributions(holding: tuple[int, ...]) -> str:
    """The ranks whose contributions a chunk holds, as text: (1, 1, 1, 0, 1) is "0-2,4".

    "x2" marks contributions that it holds twice.
    """
    runs: list[str] = []
    rank = 0
    while rank < len(holding):
        if not holding[rank]:
            rank += 1
            continue
        last = rank
        while last + 1 < len(holding) and holding[last + 1] == holding[rank]:
            last += 1
        times = f"x{holding[rank]}" if holding[rank] > 1 else ""
        runs.append((str(rank) if last == rank else f"{rank}-{last}") + times)
        rank = last + 1
    return ",".join(runs) or "-"


def describe(transfer: Transfer, chunks: int) -> str:
    if transfer.stop - transfer.start == chunks:
        what = "everything" if chunks > 1 else "the buffer"
    elif transfer.stop - transfer.start == 1:
        what = f"chunk {transfer.start}"
    else:
        what = f"chunks {transfer.start}-{transfer.stop - 1}"
    then = (
        "added"
        if transfer.adds
        else "kept"
        if transfer.at is None
        else f"becomes chunk {transfer.at}"
    )
    return f"{transfer.source} -> {transfer.target}: {what}, {then}"


def title(schedule: Schedule) -> str:
    """A heading: "ring, 4 ranks: 6 rounds"."""
    rounds = counted(len(schedule.rounds), "round")
    return f"{schedule.name}, {counted(schedule.ranks, 'rank')}: {rounds}"


def counted(number: int, what: str) -> str:
    """A number of things: 1 rank, 2 ranks."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
