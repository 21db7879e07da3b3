"""Figures of a timetable: its length, the bubble, activations that are kept, messages.

Time is counted in forward passes of all layers that a worker has. So a stage of a timetable with
two stages per worker takes half of it, and timetables can be compared on one clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paceline.collectives.draw.frames import counted
from paceline.errors import BadRequest
from paceline.parallel.draw.scene import Table
from paceline.parallel.prove import prove
from paceline.parallel.timetable import Task, Timetable, Timing, timing
from paceline.registry import Spec, timetables

MOST_STAGES = 16
MOST_MICROS = 64
DIGITS = 9  # of a time: sums of thirds are not exact


@dataclass(frozen=True)
class Facts:
    """A timetable, as it is named on the command line, and what it costs."""

    name: str
    table: Timetable

    @property
    def workers(self) -> int:
        return len(self.table.ranks)

    @property
    def each(self) -> int:
        """Stages per worker."""
        return max(1, self.table.stages // self.workers)

    @cached_property
    def timing(self) -> Timing:
        return timing(self.table)

    @cached_property
    def spans(self) -> dict[Task, tuple[float, float]]:
        """When each task begins and ends, in forward passes of all layers of a worker."""
        return {
            task: (round(start / self.each, DIGITS), round(end / self.each, DIGITS))
            for task, (start, end) in self.timing.spans.items()
        }

    @property
    def total(self) -> float:
        return round(self.timing.total / self.each, DIGITS)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """For each worker, the most activations that it keeps at once."""
        proof = prove(self.table, self.table.stages * self.table.micros)
        if not proof.holds:
            raise BadRequest(f"timetable {self.name} cannot be drawn: {proof.wrong[0]}")
        return proof.live

    @cached_property
    def messages(self) -> int:
        ranks = range(self.workers)
        return sum(len(self.table.sends(a, b)) for a in ranks for b in ranks)

    @property
    def formula(self) -> str:
        found = self.table.formula
        return f"{found.words} = {percent(found.value)}" if found else "none"

    @property
    def summary(self) -> str:
        """The bubble beside the formula, and the messages, in a line."""
        return (
            f"idle {percent(self.timing.idle)}, formula {self.formula};"
            f" time {self.total:g}; {counted(self.messages, 'message')}"
        )

    @property
    def size(self) -> str:
        micros = "micro-batch" if self.table.micros == 1 else "micro-batches"
        return f"{counted(self.workers, 'worker')}, {self.table.micros} {micros}"

    @property
    def title(self) -> str:
        more = f", {self.each} stages each" if self.each > 1 else ""
        return f"{self.name}: {self.size}{more}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def facts_of(name: str, stages: int, micros: int) -> Facts:
    """Build a timetable by its name. Raises BadRequest for more than can be drawn legibly."""
    for option, value in (("stages", stages), ("micro", micros)):
        if value < 1:
            raise BadRequest(f"--{option} {value}: it must be 1 or more")
    if stages > MOST_STAGES:
        raise BadRequest(f"--stages {stages}: up to {MOST_STAGES} stages can be drawn legibly")
    if micros > MOST_MICROS:
        raise BadRequest(
            f"--micro {micros}: up to {MOST_MICROS} micro-batches can be drawn legibly"
        )
    made: Timetable = timetables.build(name, ranks=stages, micros=micros)
    if made.stages > MOST_STAGES:
        raise BadRequest(
            f"{name} with {counted(stages, 'worker')} has {made.stages} stages: up to {MOST_STAGES}"
            " can be drawn legibly"
        )
    return Facts(name, made)


def comparison(shown: tuple[Facts, ...]) -> Table:
    """What these timetables cost, beside all others of as many workers and micro-batches."""
    rows = {facts.name: facts for facts in shown}
    first = shown[0]
    plain = {Spec.of(name).name for name in rows}
    for name in timetables.names():
        if name in plain:
            continue
        try:
            rows[name] = facts_of(name, first.workers, first.table.micros)
        except BadRequest:
            continue  # it cannot have so many workers or micro-batches
    return Table(
        ("timetable", "time", "idle", "formula", "kept", "messages"),
        tuple(
            (
                name,
                f"{facts.total:g}",
                percent(facts.timing.idle),
                facts.formula,
                _kept(facts),
                str(facts.messages),
            )
            for name, facts in sorted(rows.items())
        ),
        "time: in forward passes of a worker's layers; a backward pass takes two, B and W one each."
        " formula: of the idle share; p workers, m micro-batches, v stages per worker. kept: the"
        " most activations at once, by worker; with v stages per worker each is of 1/v of its"
        " layers.",
        f"Timetables of {first.size}",
        frozenset(facts.name for facts in shown),
    )


def _kept(facts: Facts) -> str:
    live = facts.live
    if len(set(live)) == 1 and len(live) > 1:
        return f"{live[0]} each"
    return " ".join(map(str, live)) if len(live) <= 4 else f"{live[0]} ... {live[-1]}"
