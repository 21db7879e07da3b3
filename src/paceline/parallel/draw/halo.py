"""Images that are split by rows: which worker owns which rows, and which rows travel."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import nn

from paceline.collectives.draw.frames import counted
from paceline.collectives.draw.page import bytes_words
from paceline.errors import BadRequest
from paceline.look import worker
from paceline.look.picture import ink_on
from paceline.parallel.domain import Domain, heights_after, steps_of
from paceline.parallel.draw.built import NUMBER_BYTES, Built, kind_of, needs_gradients, size_words
from paceline.parallel.draw.scene import (
    ACCENT,
    INK,
    LINE,
    PANEL,
    SOFT,
    Explained,
    Item,
    Scene,
    Step,
    Table,
    box,
    label,
)  # fmt: skip
from paceline.parallel.rows import Halo, Rows, Span, even, halo

MOST_WORKERS = 16
BLOCK, GAP, AXIS = 270.0, 36.0, 30.0  # the widths of a block of columns, between two, of numbers
HIGH = 280.0  # of the rows of the largest image
TOP = 40.0  # above the rows: what they are, and the workers
TALLEST = 16.0  # a row
LEAD = """A column is a worker, from the first row of an image on top to its last row.
Before a layer, rows that a worker needs and another one owns are sent; they keep the colour of
their owner. In the backward pass their gradients go back the same way, and are added."""


@dataclass(frozen=True)
class Moved:
    """One layer: the rows that move before it, and who owns the rows of its output."""

    layer: str
    kind: str
    rows: int  # of its input
    outputs: int
    movement: Halo
    made: tuple[Span, ...]
    row_bytes: int  # of a row of its input, for one sample
    back: bool  # whether the backward pass sends the gradients of the rows

    @property
    def sends(self) -> tuple[Rows, ...]:
        return tuple(t for t in self.movement.transfers if t.source != t.target)

    @property
    def sent_rows(self) -> int:
        return sum(t.high - t.low for t in self.sends)

    @property
    def sent_bytes(self) -> int:
        return self.sent_rows * self.row_bytes

    def sentence(self, t: Rows) -> str:
        size = bytes_words((t.high - t.low) * self.row_bytes)
        return f"{t.source} -> {t.target}: {rows_words((t.low, t.high))}, {size}"

    @property
    def state(self) -> tuple[tuple[str, ...], ...]:
        """For each worker: the rows that it owns, needs and computes."""
        spans = zip(self.movement.owned, self.movement.held, self.made, strict=True)
        lines = [(str(rank), *map(span_words, own)) for rank, own in enumerate(spans)]
        return (("worker", "owns", "needs", "computes"), *lines)

    @property
    def title(self) -> str:
        return f"{self.layer} {self.kind}: {self.rows} -> {self.outputs} rows"

    @property
    def words(self) -> str:
        if not self.sends:
            return "No rows are sent: each worker owns what it needs."
        size = bytes_words(self.sent_bytes)
        return f"{counted(self.sent_rows, 'row')} sent, {size} per sample."


def moves(built: Built, workers: int) -> tuple[Moved, ...]:
    """The movements before the layers of a model, and the last one, before its head."""
    if workers > MOST_WORKERS:
        raise BadRequest(f"--workers {workers}: up to {MOST_WORKERS} workers can be drawn legibly")
    Domain().check(built.model, workers)
    heights = {name: a[1] for name, (a, _) in built.shapes.items() if len(a) == 3}
    trunk, steps = steps_of(built.model, built.layers, heights, workers)
    if not steps:
        rows = heights.get(built.layers[0].name, 0)
        raise BadRequest(
            f"the {counted(rows, 'row')} of the first layer of {built.name} cannot be split over"
            f" {workers} workers: each layer needs as many rows as there are workers"
        )
    modules, back = dict(built.model.named_modules()), needs_gradients(built.model)
    made = []
    for step in steps:
        depth, _, wide = built.shapes[step.layer][0]
        outputs = step.window.outputs(step.rows)
        made.append(
            Moved(step.layer, kind_of(modules[step.layer]), step.rows, outputs, step.movement,
                  even(outputs, workers), depth * wide * NUMBER_BYTES, back[step.layer])
        )  # fmt: skip
    last = built.shapes[built.layers[trunk - 1].name][1]
    rows = heights_after(built.layers, trunk, heights, steps[-1])
    everything = ((0, rows),) * workers
    names = [layer.name for layer in built.layers[trunk:]]
    head = "head (" + " to ".join(dict.fromkeys((names[0], names[-1]))) + ")" if names else "end"
    return (
        *made,
        Moved(head, "whole images", rows, rows,
              halo(even(rows, workers), everything), everything,
              prod((last[0], *last[2:])) * NUMBER_BYTES, False),
    )  # fmt: skip


def explained(built: Built, workers: int, command: str) -> Explained:
    """Return the drawings of a model whose images are split."""
    found = moves(built, workers)
    return Explained(
        (scene(built, found),), table(built, found), heading(built, workers), command, LEAD
    )


def heading(built: Built, workers: int) -> str:
    return f"Rows of {built.title} over {counted(workers, 'worker')}"


def rows_words(span: Span) -> str:
    """Rows as people write them: rows 9-12."""
    low, high = span
    if high <= low:
        return "no rows"
    return f"row {low}" if high - low == 1 else f"rows {low}-{high - 1}"


def span_words(span: Span) -> str:
    """The same without the word: 9-12."""
    return rows_words(span).removeprefix("rows ").removeprefix("row ").replace("no rows", "none")


def table(built: Built, found: tuple[Moved, ...]) -> Table:
    """Rows and bytes by layer, forward and backward."""
    sizes = [(m.sent_bytes, m.sent_bytes if m.back else 0) for m in found]
    lines = [
        (m.layer, m.kind, f"{m.rows} -> {m.outputs}", str(m.sent_rows), *map(size_words, both))
        for m, both in zip(found, sizes, strict=True)
    ]
    totals = [sum(both[way] for both in sizes) for way in (0, 1)]
    rows = sum(m.sent_rows for m in found)
    lines.append(("all", "", "", str(rows), *map(size_words, totals)))
    norms = any(isinstance(m, nn.BatchNorm2d) for m in built.model.modules())
    return Table(
        ("layer", "kind", "rows", "rows sent", "forward", "backward"),
        tuple(lines),
        "Bytes are those of one sample, sent by all workers. Images need no gradients, and each"
        " worker computes the head by itself, so these rows are not sent back."
        + (" Batch norm sums two numbers per channel over the workers, too." if norms else "")
        + " After the backward pass the gradients of the weights are summed.",
        "What each layer sends",
        words=2,
    )


def scene(built: Built, found: tuple[Moved, ...]) -> Scene:
    """Draw the movements: a step per layer."""
    items: list[Item] = []
    owned = tuple((str(r), span_words(s)) for r, s in enumerate(found[0].movement.owned))
    begins = "Each worker owns an even part of the rows of every image."
    steps = [Step(0.0, "step 0: the start", begins, (), (("worker", "owns"), *owned))]
    for number, m in enumerate(found):
        items += _movement(m, number)
        lines = tuple(map(m.sentence, m.sends))
        steps.append(Step(number + 1.0, f"step {number + 1}: {m.title}", m.words, lines, m.state))
    size = (2 * AXIS + 2 * BLOCK + GAP, TOP + HIGH + 10)
    return Scene(
        "halo", heading(built, len(found[0].made)), "", size, tuple(items), tuple(steps),
        whole=False,
    )  # fmt: skip


def _movement(m: Moved, number: int) -> list[Item]:
    """The items of a layer, which are shown from one step to the next."""
    start, end = float(number), number + 1.0
    since = start if number else -1.0
    unit = min(TALLEST, HIGH / max(m.rows, m.outputs))
    workers = len(m.made)
    left, right = AXIS, 2 * AXIS + BLOCK + GAP
    pitch = min(70.0, BLOCK / workers)
    items = [
        Item(_block(left, pitch, f"needed: {m.rows} rows, by worker", workers), since, None, end),
        Item(_block(right, pitch, f"computed: {m.outputs} rows", workers), since, None, end),
        Item(_axis(left, m.movement.owned, unit), since, None, end),
    ]
    for rank, span in enumerate(m.movement.owned):
        held = m.movement.held[rank]
        items.append(Item(_column(left, pitch, rank, m.rows, unit), since, None, end))
        items.append(Item(_rows(left, pitch, unit, rank, rank, span), since, None, end))
        if held[0] < held[1]:
            frame = box(
                left + rank * pitch + 1, TOP + held[0] * unit - 1, pitch - 2,
                (held[1] - held[0]) * unit + 2, "none", INK, 'stroke-width="1.6" rx="2"',
            )  # fmt: skip
            items.append(Item(frame, end - 1e-6, None, end))
        items.append(Item(_column(right, pitch, rank, m.outputs, unit), since, None, end))
        made = _rows(right, pitch, unit, rank, rank, m.made[rank])
        items.append(Item(made, end - 1e-6, None, end))
    for t in m.sends:
        body = _rows(left, pitch, unit, t.target, t.source, (t.low, t.high), guest=True)
        slide = (t.source - t.target) * pitch
        items.append(Item(body, start, end, end, slide=slide, name=m.sentence(t).split(",")[0]))
    items.append(Item(_axis(right, m.made, unit), end - 1e-6, None, end))
    return items


def _block(x: float, pitch: float, words: str, workers: int) -> str:
    names = "".join(
        label(x + (rank + 0.5) * pitch, TOP - 8, str(rank), 11, INK, "middle", 600)
        for rank in range(workers)
    )
    return label(x, 12, words, 12, SOFT) + names


def _column(x: float, pitch: float, rank: int, rows: int, unit: float) -> str:
    frame = f'stroke-width="0.6" opacity="{0.9:g}"'
    return box(x + rank * pitch + 3, TOP, pitch - 6, rows * unit, PANEL, LINE, frame)


def _axis(x: float, spans: tuple[Span, ...], unit: float) -> str:
    """The first row of each worker, beside the column."""
    firsts = sorted({low for low, high in spans if low < high})
    return "".join(
        label(x - 4, TOP + low * unit + 9, str(low), 9.5, SOFT, "end")
        for low in firsts
        if unit * (firsts[1] - firsts[0] if len(firsts) > 1 else 99) >= 9 or low == 0
    )


def _rows(
    x: float, pitch: float, unit: float, column: int, owner: int, span: Span, guest: bool = False
) -> str:
    """Rows in the colour of their owner; those of another worker are narrower."""
    low, high = span
    colour = worker(owner)
    inset = 6.0 if guest and pitch > 24 else 3.0
    left, top = x + column * pitch + inset, TOP + low * unit
    wide, tall = pitch - 2 * inset, (high - low) * unit
    edge = ACCENT if guest else "none"
    body = box(left, top, wide, tall, colour, edge, 'stroke-width="1"')
    if unit >= 4:
        body += "".join(
            f'<line x1="{left:.5g}" y1="{TOP + row * unit:.5g}" x2="{left + wide:.5g}"'
            f' y2="{TOP + row * unit:.5g}" stroke="var(--paper)" stroke-width="0.5"/>'
            for row in range(low + 1, high)
        )
    words = span_words(span)
    if tall >= 10 and wide >= 6.2 * len(words) and high > low:
        body += label(
            left + wide / 2, top + tall / 2 + 3.5, words, 10, ink_on(colour), "middle", 600
        )
    return body
