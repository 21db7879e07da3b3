"""A pipeline as data: for each rank a list of tasks, each of one stage and one micro-batch.

    F   the forward pass of a stage
    B   its backward pass: the gradient of its input, and of its weights unless W does that
    W   the gradient of its weights, in timetables that compute it apart

A timetable is to stages what a schedule is to chunks: the executor runs it (execute.py), tests
prove it by symbolic execution (prove.py), `paceline explain` draws it, and `timing` computes its
cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from paceline.errors import BadRequest

Kind = Literal["F", "B", "W"]
KINDS: tuple[Kind, Kind] = ("F", "B")  # of timetables whose weight gradients are not apart


@dataclass(frozen=True, slots=True)
class Task:
    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


@dataclass(frozen=True)
class Formula:
    """What the literature says about the idle share, in words and as a number."""

    words: str  # p: ranks, m: micro-batches, v: stages per rank
    value: float


@dataclass(frozen=True)
class Timetable:
    name: str
    stages: int
    micros: int
    ranks: tuple[tuple[Task, ...], ...]  # what each rank does, in this order
    formula: Formula | None = None  # of the idle share, if there is one

    @cached_property
    def place(self) -> tuple[int, ...]:
        """The rank of each stage."""
        places = {task.stage: rank for rank, tasks in enumerate(self.ranks) for task in tasks}
        return tuple(places[stage] for stage in range(self.stages))

    @cached_property
    def weights_apart(self) -> bool:
        """Whether W tasks compute the gradients of the weights."""
        return any(task.kind == "W" for tasks in self.ranks for task in tasks)

    def before(self, task: Task) -> Iterator[Task]:
        """The tasks whose results a task needs."""
        if task.kind == "F":
            if task.stage > 0:
                yield Task("F", task.stage - 1, task.micro)
            return
        if task.kind == "W":
            yield Task("B", task.stage, task.micro)
            return
        yield Task("F", task.stage, task.micro)
        if task.stage < self.stages - 1:
            yield Task("B", task.stage + 1, task.micro)

    def message(self, task: Task) -> Task | None:
        """The task of another stage whose result this one takes; None: there is no such task."""
        return next((t for t in self.before(task) if t.stage != task.stage), None)

    def after(self, task: Task) -> Task | None:
        """The task of another stage that takes this one's result."""
        if task.kind == "F" and task.stage < self.stages - 1:
            return Task("F", task.stage + 1, task.micro)
        if task.kind == "B" and task.stage > 0:
            return Task("B", task.stage - 1, task.micro)
        return None

    def sends(self, source: int, target: int) -> tuple[Task, ...]:
        """The tasks of rank `source` whose results go to rank `target`, in the order of sending."""
        return tuple(
            task
            for task in self.ranks[source]
            if source != target
            and (after := self.after(task)) is not None
            and self.place[after.stage] == target
        )


def in_turns(forward: Sequence[Task], backward: Sequence[Task], first: int) -> Iterator[Task]:
    """Some forward passes, then one forward and one backward pass in turns (1F1B)."""
    yield from forward[:first]
    for number, back in enumerate(backward):
        yield from forward[first + number : first + number + 1]
        yield back


def alone(place: Sequence[int]) -> Timetable:
    """The timetable of a batch that passes all stages in one piece. `place`: their ranks."""
    ranks: list[list[Task]] = [[] for _ in range(max(place) + 1)]
    for stage, rank in enumerate(place):
        ranks[rank].append(Task("F", stage, 0))
    for stage, rank in reversed(list(enumerate(place))):
        ranks[rank].append(Task("B", stage, 0))
    return Timetable("layers", len(place), 1, tuple(map(tuple, ranks)))


Cost = Callable[[Task], float]


def usual(task: Task) -> float:
    """A backward pass takes as long as two forward passes; so do B and W together."""
    return 1.0


@dataclass(frozen=True)
class Timing:
    """When each task begins and ends."""

    spans: dict[Task, tuple[float, float]]
    ranks: int

    @property
    def total(self) -> float:
        return max((end for _, end in self.spans.values()), default=0.0)

    @property
    def idle(self) -> float:
        """The share of the ranks' time in which they do nothing: the bubble."""
        busy = sum(end - start for start, end in self.spans.values())
        return 1.0 - busy / (self.ranks * self.total) if self.total else 0.0


def timing(timetable: Timetable, cost: Cost | None = None, transfer: float = 0.0) -> Timing:
    """Compute when each task begins and ends if it begins as early as it can.

    `cost`: the seconds of a task; by default 1 for F, 2 for B, or 1 for B and 1 for W.
    `transfer`: the seconds of a message between two ranks, which does not keep them busy.
    """
    by_default: Cost = usual if timetable.weights_apart else lambda t: 2.0 if t.kind == "B" else 1.0
    seconds = cost or by_default
    spans: dict[Task, tuple[float, float]] = {}
    clock, done = [0.0] * len(timetable.ranks), [0] * len(timetable.ranks)
    left = sum(map(len, timetable.ranks))
    while left:
        before = left
        for rank, tasks in enumerate(timetable.ranks):
            while done[rank] < len(tasks):
                task = tasks[done[rank]]
                needed = list(timetable.before(task))
                if any(other not in spans for other in needed):
                    break
                ready = [
                    spans[other][1] + transfer * (timetable.place[other.stage] != rank)
                    for other in needed
                ]
                start = max(clock[rank], *ready, 0.0)
                clock[rank] = start + seconds(task)
                spans[task] = (start, clock[rank])
                done[rank] += 1
                left -= 1
        if left == before:
            raise BadRequest(f"timetable {timetable.name}: its ranks wait for each other forever")
    return Timing(spans, len(timetable.ranks))


def listed(tasks: Sequence[Task]) -> str:
    """The tasks as people write them: 0F0 0F1 0B0."""
    return " ".join(map(str, tasks))
