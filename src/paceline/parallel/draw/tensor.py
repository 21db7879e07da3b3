"""Draws a model whose weights are split: a row per layer, each worker's part of its weights."""

from __future__ import annotations

from paceline.collectives.draw.frames import counted
from paceline.look import worker
from paceline.parallel.draw.built import Built
from paceline.parallel.draw.scene import (
    ACCENT,
    INK,
    LINE,
    PANEL,
    SOFT,
    WARN,
    Explained,
    Item,
    Scene,
    Step,
    box,
    label,
)  # fmt: skip
from paceline.parallel.draw.split import Exchange, Part, parts, table
from paceline.parallel.rows import even

LEFT, BLOCK, RIGHT = 190.0, 260.0, 190.0  # the widths of names, of weights, of what is said
TALL, FLAT, LANE = 44.0, 26.0, 20.0  # a layer with weights, one without, an exchange
TOP = 24.0
LEAD = """A row is a layer. Each worker's column shows the part of the weights that it has: a band
across is split by outputs, a band down by inputs; grey is whole. Lines are exchanges of all
workers: <span style="color:var(--accent)">downwards in the forward pass</span>,
<span style="color:var(--warn)">upwards in the backward pass</span>."""


def explained(built: Built, workers: int, command: str) -> Explained:
    """Return the drawings of a model whose weights are split."""
    found = parts(built, workers)
    heading = f"Weights of {built.title} over {counted(workers, 'worker')}"
    return Explained(
        (scene(found, workers, heading),), table(built, found, workers), heading, command, LEAD
    )


def scene(found: tuple[Part, ...], workers: int, heading: str) -> Scene:
    """Draw the layers; the clock passes them forwards, then backwards."""
    pitch = min(64.0, BLOCK / workers)
    width = LEFT + workers * pitch + RIGHT
    items = [Item(_names(workers, pitch))]
    steps = [
        Step(0.0, "step 0: the start", "Each worker has its part of the weights.", group="start")
    ]
    y, last = TOP, len(found)
    for number, part in enumerate(found):
        forth, back = number + 1.0, 2.0 * last - number
        top = y
        if part.backward:
            items.append(_exchange(part.backward, y, workers, pitch, back, forward=False))
            y += LANE
        tall = TALL if part.weights else FLAT
        items.append(Item(_layer(part, y, tall, workers, pitch)))
        y += tall
        if part.forward:
            items.append(_exchange(part.forward, y, workers, pitch, forth, forward=True))
            y += LANE
        frame = box(1, top + 1, width - 2, y - top - 2, "none", ACCENT, 'stroke-width="2" rx="4"')
        items += [
            Item(frame, forth - 1, None, forth),
            Item(frame.replace(ACCENT, WARN), back - 1, None, back),
        ]
    for way, order in (("forward", found), ("backward", found[::-1])):
        for part in order:
            made = part.forward if way == "forward" else part.backward
            words = f"All workers {made.words}." if made else "No exchange."
            at = float(len(steps))
            phase = f"step {at:g}: {way}, {part.layer} {part.kind}, {part.split}"
            steps.append(Step(at, phase, words, group=way))
    return Scene(
        "tensor", heading, f"{counted(last, 'layer')}, {counted(exchanges(found), 'exchange')}",
        (width, y + 8), tuple(items), tuple(steps),
    )  # fmt: skip


def exchanges(found: tuple[Part, ...]) -> int:
    """How many exchanges a forward and a backward pass have."""
    return sum((p.forward is not None) + (p.backward is not None) for p in found)


def _names(workers: int, pitch: float) -> str:
    return "".join(
        label(LEFT + (rank + 0.5) * pitch, 14, f"worker {rank}" if pitch > 54 else str(rank), 11,
              INK, "middle", 600)
        for rank in range(workers)
    )  # fmt: skip


def _layer(part: Part, y: float, tall: float, workers: int, pitch: float) -> str:
    middle = y + tall / 2
    width = LEFT + workers * pitch + RIGHT
    edge = f'stroke="{LINE}" stroke-width="0.7"'
    line = f'<line x1="0" y1="{y:g}" x2="{width:g}" y2="{y:g}" {edge}/>'
    body = line + label(6, middle + (-2 if part.weights else 4), part.layer, 12, INK, weight=600)
    if part.weights:
        body += label(6, middle + 13, part.kind, 10.5, SOFT)
        body += "".join(_matrix(part, rank, y, tall, workers, pitch) for rank in range(workers))
    else:
        body += label(12 + 7.4 * len(part.layer), middle + 4, part.kind, 10.5, SOFT)
    return body + label(LEFT + workers * pitch + 12, middle + 4, part.split, 12, INK)


def _matrix(part: Part, rank: int, y: float, tall: float, workers: int, pitch: float) -> str:
    """The weights of a layer, outputs downwards and inputs to the right; a worker's part of it."""
    x, top, wide, high = LEFT + rank * pitch + 3, y + 6, pitch - 6, tall - 12
    body = box(x, top, wide, high, PANEL, LINE)
    if part.role == "whole":
        return body + box(x, top, wide, high, SOFT, "none", 'opacity="0.45"')
    low, high_share = (n / 1000 for n in even(1000, workers)[rank])
    if part.role == "inputs":
        own = box(x + low * wide, top, (high_share - low) * wide, high, worker(rank))
    else:
        own = box(x, top + low * high, wide, (high_share - low) * high, worker(rank))
    return body + own


def _exchange(
    made: Exchange, y: float, workers: int, pitch: float, at: float, forward: bool
) -> Item:
    """A line through all workers' columns, with an arrow in the direction of the pass."""
    colour, middle = (ACCENT if forward else WARN), y + LANE / 2
    first, last = LEFT + pitch / 2, LEFT + (workers - 0.5) * pitch
    tip = 8 if forward else -8
    arrows = "".join(
        f'<path d="M{x - 5:.5g} {middle - tip * 0.4:.5g}h10l-5 {tip}z" fill="{colour}"/>'
        for x in (LEFT + (rank + 0.5) * pitch for rank in range(workers))
    )
    body = (
        f'<line x1="{first:.5g}" y1="{middle:g}" x2="{last:.5g}" y2="{middle:g}"'
        f' stroke="{colour}" stroke-width="1.8"/>{arrows}'
        + label(LEFT + workers * pitch + 12, middle + 4, made.words, 10.5, colour)
    )
    return Item(body, at - 1, at, None, True)
