"""A collective as data: in round r, rank a sends chunks to rank b, which adds them to its own
chunks or replaces its own by them.

A schedule is written once and used four times: the executor runs it on any transport, property
tests prove it by symbolic execution, `paceline explain` draws it, and the planner computes its
cost. All transfers of a round send the state at the round's beginning. A schedule never sends and
overwrites the same chunk of the same rank in one round (except swaps), so the executor needs no
copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Transfer:
    source: int
    target: int
    start: int  # chunks [start, stop)
    stop: int
    adds: bool  # the receiver adds them to its own chunks; otherwise they replace them
    at: int | None = None  # the receiver's first chunk, if it differs from the sender's

    @property
    def lands(self) -> int:
        return self.start if self.at is None else self.at


@dataclass(frozen=True)
class Shape:
    """How a schedule is drawn.

    `order` lists the ranks in the order of drawing: around a circle, along a line, the root of a
    star or tree first. `groups` has several such lists, each with its leader first.
    """

    kind: Literal["circle", "line", "star", "tree", "groups"]
    order: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Schedule:
    name: str
    ranks: int
    chunks: int
    rounds: tuple[tuple[Transfer, ...], ...]
    phases: tuple[str, ...]  # for each round, the name of its phase
    # For each phase, its rule in words. p is a rank, P the number of ranks, r the round within the
    # phase, counted from 0.
    rules: Mapping[str, str] = field(default_factory=dict, compare=False)
    shape: Shape | None = field(default=None, compare=False)  # None: a circle

    def bounds(self, chunk: int, length: int) -> tuple[int, int]:
        """A chunk's span of a buffer; empty ones occur if a buffer is shorter than `chunks`."""
        return chunk * length // self.chunks, (chunk + 1) * length // self.chunks

    def elements(self, transfer: Transfer, length: int) -> int:
        return transfer.stop * length // self.chunks - transfer.start * length // self.chunks

    def sent(self, rank: int, length: int) -> int:
        """Elements that a rank sends."""
        return sum(self.elements(t, length) for r in self.rounds for t in r if t.source == rank)

    def received(self, rank: int, length: int) -> int:
        return sum(self.elements(t, length) for r in self.rounds for t in r if t.target == rank)

    def messages(self, rank: int) -> int:
        return sum(1 for r in self.rounds for t in r if t.source == rank)


Holding = tuple[int, ...]  # how often each rank's contribution is in a chunk
State = list[list[Holding]]  # [rank][chunk]


def start_state(schedule: Schedule) -> State:
    """The state at the start: every rank holds its own contribution to every chunk."""
    own = [tuple(int(r == rank) for r in range(schedule.ranks)) for rank in range(schedule.ranks)]
    return [[own[rank]] * schedule.chunks for rank in range(schedule.ranks)]


def states(schedule: Schedule) -> list[State]:
    """Execute a schedule symbolically; return the states at the start and after each round."""
    history = [start_state(schedule)]
    for transfers in schedule.rounds:
        before = history[-1]
        after = [list(row) for row in before]
        for t in transfers:
            for offset in range(t.stop - t.start):
                arriving, chunk = before[t.source][t.start + offset], t.lands + offset
                if t.adds:
                    after[t.target][chunk] = tuple(
                        a + b for a, b in zip(after[t.target][chunk], arriving, strict=True)
                    )
                else:
                    after[t.target][chunk] = arriving
        history.append(after)
    return history


def conflicts(schedule: Schedule) -> list[str]:
    """The places where a rank sends and overwrites a chunk in one round, or gets one twice.

    Two ranks may swap chunks: the executor receives into scratch memory until the old content has
    been sent.
    """
    found = []
    for number, transfers in enumerate(schedule.rounds):
        sent = {(t.source, c) for t in transfers for c in range(t.start, t.stop)}
        placed: set[tuple[int, int]] = set()
        moves = {(t.source, t.target, t.start, t.stop) for t in transfers}
        for t in transfers:
            swap = not t.adds and (t.target, t.source, t.lands, t.lands + t.stop - t.start) in moves
            for chunk in range(t.lands, t.lands + t.stop - t.start):
                key = (t.target, chunk)
                if key in sent and not swap:
                    found.append(
                        f"round {number}: rank {t.target} sends and receives chunk {chunk}"
                    )
                if key in placed and not t.adds:
                    found.append(f"round {number}: rank {t.target} gets chunk {chunk} twice")
                placed.add(key)
            if t.source == t.target:
                found.append(f"round {number}: rank {t.source} sends to itself")
    return found


Round = tuple[Transfer, ...]


def followed_by(
    name: str,
    chunks: int,
    ranks: int,
    *phases: tuple[str, list[Round]],
    rules: Mapping[str, str] | None = None,
    shape: Shape | None = None,
) -> Schedule:
    """A schedule of these phases, one after the other. Empty rounds are left out."""
    rounds = [(label, r) for label, phase in phases for r in phase if r]
    return Schedule(
        name,
        ranks,
        chunks,
        tuple(r for _, r in rounds),
        tuple(label for label, _ in rounds),
        rules or {},
        shape,
    )
