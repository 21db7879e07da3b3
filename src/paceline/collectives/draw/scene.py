"""A schedule as data for a drawing: places, steps, contents of chunks, arrows, loads.

Pictures and the page are both drawn from this description, so they show the same.
"""

from __future__ import annotations

from typing import Any

from paceline.collectives.cost import loads, sent_shares
from paceline.collectives.draw.frames import contributions, describe, frames
from paceline.collectives.draw.layout import WIDTH, arrow, layout
from paceline.collectives.schedule import Schedule, states
from paceline.errors import BadRequest
from paceline.registry import collectives, operations

MOST_RANKS = 16
MOST_CHUNKS = 16
MESSAGE_HEIGHT = 26.0
LABEL = 17.0  # the height of a rank's name

Scene = dict[str, Any]  # as JSON: the page's script reads it


def scene(schedule: Schedule) -> Scene:
    """Return what a drawing of a schedule needs."""
    _check(schedule)
    drawn = layout(schedule)
    history = states(schedule)
    kinds: dict[tuple[int, ...], int] = {}

    def kind(holding: tuple[int, ...]) -> int:
        return kinds.setdefault(holding, len(kinds))

    steps = []
    for frame in frames(schedule):
        before, state = history[max(0, frame.step - 1)], history[frame.step]
        ways = {(t.source, t.target) for t in frame.transfers}
        messages = []
        for t in frame.transfers:
            line = arrow(drawn, t.source, t.target, (t.target, t.source) in ways)
            messages.append(
                {
                    "path": line.path,
                    "curve": [*line.start, *line.bend, *line.end],
                    "kinds": [kind(before[t.source][c]) for c in range(t.start, t.stop)],
                    "adds": t.adds,
                    "width": _message_width(t.stop - t.start, schedule.ranks),
                    "label": _label(t.start, t.stop, schedule.chunks),
                    "words": describe(t, schedule.chunks),
                }
            )
        steps.append(
            {
                "phase": frame.phase,
                "place": frame.place,
                "cells": [[kind(holding) for holding in row] for row in state],
                "changed": sorted(frame.changed),
                "messages": messages,
            }
        )
    return {
        "name": schedule.name,
        "summary": _summary(schedule.name.partition(":")[0]),
        "ranks": schedule.ranks,
        "chunks": schedule.chunks,
        "rules": {phase: schedule.rules.get(phase, "") for phase in schedule.phases},
        # narrow ranks have room for a number only
        "names": [f"rank {r}" if drawn.size[0] > 72 else str(r) for r in range(schedule.ranks)],
        "width": WIDTH,
        "height": drawn.height,
        "size": list(drawn.size),
        "places": [list(place) for place in drawn.places],
        "links": [[*drawn.places[a], *drawn.places[b]] for a, b in drawn.links],
        "groups": [[list(point) for point in group] for group in drawn.groups],
        "kinds": [
            {
                "text": contributions(holding),
                "ranks": [rank for rank, times in enumerate(holding) if times],
                "complete": min(holding) > 0,
            }
            for holding in kinds
        ],
        "steps": steps,
        "loads": loads(schedule),
        "sent": sent_shares(schedule),
    }


def _message_width(chunks: int, ranks: int) -> float:
    return min(12.0 * chunks, 36.0 if ranks <= 8 else 22.0) if chunks > 1 else 14.0


def _label(start: int, stop: int, chunks: int) -> str:
    """A message's chunks, in a few letters."""
    if stop - start == chunks:
        return "all"
    return f"c{start}" if stop - start == 1 else f"c{start}-{stop - 1}"


def _check(schedule: Schedule) -> None:
    """Raise if a schedule cannot be drawn."""
    if schedule.ranks > MOST_RANKS:
        raise BadRequest(
            f"{schedule.name} with {schedule.ranks} ranks: up to {MOST_RANKS} ranks can be drawn"
            " legibly"
        )
    if schedule.chunks > MOST_CHUNKS:
        raise BadRequest(
            f"{schedule.name} cuts a buffer into {schedule.chunks} chunks: up to {MOST_CHUNKS} can"
            " be drawn legibly"
        )
    shape = schedule.shape
    placed = sorted(rank for group in shape.order for rank in group) if shape else None
    if placed is not None and placed != list(range(schedule.ranks)):
        raise BadRequest(
            f"{schedule.name} cannot be drawn: the order of its shape must name each of its"
            f" {schedule.ranks} ranks once"
        )
    for transfers in schedule.rounds:
        for t in transfers:
            last = max(t.stop, t.lands + t.stop - t.start)
            if max(t.source, t.target) >= schedule.ranks or last > schedule.chunks:
                raise BadRequest(
                    f"{schedule.name} cannot be drawn: rank {t.source} sends chunks"
                    f" {t.start}-{t.stop - 1} to rank {t.target}, but there are"
                    f" {schedule.ranks} ranks and {schedule.chunks} chunks"
                )


def _summary(name: str) -> str:
    """The first sentence that an algorithm's documentation says about it."""
    for registry in (collectives, operations):
        if name in registry:
            return registry.entry(name).summary
    return ""
