"""Proof of a timetable by symbolic execution: every pass is made once, no rank waits forever.

The ranks make their tasks in order. A message waits in the buffer of its pair of ranks until the
task that needs it begins; a rank whose buffer is full waits until there is room.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from paceline.parallel.timetable import Task, Timetable


@dataclass(frozen=True)
class Proof:
    wrong: tuple[str, ...]  # what is wrong; empty: the timetable is proved
    live: tuple[int, ...]  # for each rank, the most activations that it keeps at once

    @property
    def holds(self) -> bool:
        return not self.wrong


def prove(timetable: Timetable, buffers: int = 1) -> Proof:
    """Run a timetable symbolically, with room for `buffers` messages per pair of ranks.

    It shows that every micro-batch passes every stage once in each direction, that messages arrive
    in the order in which they are needed or can be kept, and that no ranks wait in a circle.
    """
    wrong = [*_misplaced(timetable)]
    done: set[Task] = set()
    kept: list[set[tuple[int, int]]] = [set() for _ in timetable.ranks]
    most = [0] * len(timetable.ranks)
    queues: dict[tuple[int, int], deque[Task]] = {}
    arrived: list[set[Task]] = [set() for _ in timetable.ranks]  # taken out of a buffer early
    position = [0] * len(timetable.ranks)
    ends = "W" if timetable.weights_apart else "B"

    def possible(rank: int, task: Task) -> bool:
        message = timetable.message(task)
        if any(t not in done for t in timetable.before(task) if t != message):
            return False
        if message is not None:
            source = timetable.place[message.stage]
            if source == rank:
                if message not in done:
                    return False
            elif message not in arrived[rank]:
                # Messages of a pair come in the order of sending: earlier ones are put aside.
                queue = queues.get((source, rank), deque())
                if message not in queue:
                    return False
        after = timetable.after(task)
        if after is None or timetable.place[after.stage] == rank:
            return True
        return len(queues.get((rank, timetable.place[after.stage]), ())) < buffers

    def make(rank: int, task: Task) -> None:
        message = timetable.message(task)
        if message is not None and (source := timetable.place[message.stage]) != rank:
            queue = queues.get((source, rank), deque())
            while message not in arrived[rank]:
                arrived[rank].add(queue.popleft())
            arrived[rank].discard(message)
        if task in done:
            wrong.append(f"rank {rank} makes {task} twice")
        done.add(task)
        if task.kind == "F":
            kept[rank].add((task.stage, task.micro))
            most[rank] = max(most[rank], len(kept[rank]))
        if task.kind == ends:
            kept[rank].discard((task.stage, task.micro))
        after = timetable.after(task)
        if after is not None and (target := timetable.place[after.stage]) != rank:
            queues.setdefault((rank, target), deque()).append(task)

    moved = True
    while moved:
        moved = False
        for rank, tasks in enumerate(timetable.ranks):
            while position[rank] < len(tasks) and possible(rank, tasks[position[rank]]):
                make(rank, tasks[position[rank]])
                position[rank] += 1
                moved = True
    for rank, tasks in enumerate(timetable.ranks):
        if position[rank] < len(tasks):
            wrong.append(f"rank {rank} waits forever before {tasks[position[rank]]}")
    kinds = "FBW" if timetable.weights_apart else "FB"
    everything = {
        Task(kind, stage, micro)  # type: ignore[arg-type]
        for kind in kinds
        for stage in range(timetable.stages)
        for micro in range(timetable.micros)
    }
    wrong += [f"{task} is never made" for task in sorted(everything - done, key=str)]
    wrong += [f"{task} is not part of it" for task in sorted(done - everything, key=str)]
    return Proof(tuple(wrong), tuple(most))


def room(timetable: Timetable) -> int:
    """The least number of messages per pair of ranks that must have room in a buffer."""
    low, high = 1, max(1, timetable.stages * timetable.micros)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if prove(timetable, middle).holds else (middle + 1, high)
    return low


def _misplaced(timetable: Timetable) -> list[str]:
    """A stage has one rank: that is where its weights are."""
    places: dict[int, set[int]] = {}
    for rank, tasks in enumerate(timetable.ranks):
        for task in tasks:
            places.setdefault(task.stage, set()).add(rank)
    return [
        f"stage {stage} is on ranks {', '.join(map(str, sorted(ranks)))}"
        for stage, ranks in sorted(places.items())
        if len(ranks) > 1
    ]
