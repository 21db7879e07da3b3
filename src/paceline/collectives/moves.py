"""The messages of one run of a schedule, as sizes: what the planner costs.

They are the messages that the executor sends (`execute.py`, `wire.py`): the same peers, the same
order, the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from paceline.collectives.base import schedule_of
from paceline.collectives.execute import SEGMENT_BYTES, compile_for_rank
from paceline.collectives.schedule import Schedule

if TYPE_CHECKING:
    from paceline.collectives.wire import Wire

PeerBytes = tuple[int, int]  # (the other rank, bytes)


@dataclass(frozen=True)
class Sum:
    """One run of a schedule on a buffer."""

    schedule: str  # "ring", "hierarchical:group=4", "all-gather"
    numbers: int  # of the buffer
    itemsize: int  # bytes of one number, before it is encoded
    wire: Wire | None = None  # how its messages are encoded


@dataclass(frozen=True, slots=True)
class Moves:
    """What one rank sends, adds and takes in one round."""

    sends: tuple[PeerBytes, ...]
    adds: tuple[PeerBytes, ...]  # arrive, and are added to the buffer
    takes: tuple[PeerBytes, ...]  # arrive, and replace a part of the buffer
    decoded_bytes: int = 0  # of encoded messages: what is added when all have arrived


def moves(run: Sum, rank: int, ranks: int) -> list[Moves]:
    """One rank's rounds."""
    schedule = _schedule(run.schedule, ranks)
    return (
        _plain(schedule, rank, run.numbers, run.itemsize)
        if run.wire is None
        else _coded(schedule, rank, run.numbers, run.itemsize, run.wire)
    )


@lru_cache(maxsize=4)  # one rank after the other asks for the same schedule
def _schedule(choice: str, ranks: int) -> Schedule:
    return schedule_of(choice, ranks)


def _plain(schedule: Schedule, rank: int, numbers: int, itemsize: int) -> list[Moves]:
    def sized(spans: tuple[tuple[int, int, int], ...]) -> tuple[PeerBytes, ...]:
        return tuple((peer, (high - low) * itemsize) for peer, low, high in spans)

    rounds = compile_for_rank(schedule, rank, numbers, SEGMENT_BYTES // itemsize)
    return [Moves(sized(r.sends), sized(r.adds), sized((*r.places, *r.swaps))) for r in rounds]


def _coded(schedule: Schedule, rank: int, numbers: int, itemsize: int, wire: Wire) -> list[Moves]:
    lengths = []
    for chunk in range(schedule.chunks):
        low, high = schedule.bounds(chunk, numbers)
        lengths.append(wire.length(high - low) if high > low else 0)
    rounds = []
    for transfers in schedule.rounds:
        sends: list[PeerBytes] = []
        adds: list[PeerBytes] = []
        takes: list[PeerBytes] = []
        decoded = 0
        for t in transfers:
            size = sum(lengths[t.start : t.stop])
            if size and t.source == rank:
                sends.append((t.target, size))
            elif size and t.target == rank:
                (adds if t.adds else takes).append((t.source, size))
                decoded += itemsize * schedule.elements(t, numbers) if t.adds else 0
        if sends or adds or takes:
            rounds.append(Moves(tuple(sends), tuple(adds), tuple(takes), decoded))
    return rounds
