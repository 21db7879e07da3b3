"""A timetable as the grid that people know: a row per worker, time to the right, a box per task."""

from __future__ import annotations

from paceline.look import LIGHT
from paceline.look.picture import ink_on
from paceline.parallel.draw.facts import Facts, comparison
from paceline.parallel.draw.scene import (
    INK,
    LINE,
    PANEL,
    SOFT,
    Explained,
    Item,
    Scene,
    Step,
    box,
    label,
)
from paceline.parallel.timetable import Task

WIDTH = 1090.0  # of a grid on a large screen, if its boxes stay legible
ROW, APART = 32.0, 6.0
TOP = 6.0
SIDE = 84.0  # names of workers
NARROWEST, WIDEST = 16.0, 44.0  # of a box that lasts a forward pass
KINDS = {"F": "forward", "B": "backward", "W": "gradient of weights"}
LEAD = """A row is a worker, a box is a task on one micro-batch, with its number.
Empty places are idle time: the bubble."""


def explained(shown: tuple[Facts, ...], command: str) -> Explained:
    """Return the drawings of one timetable, or of two on one clock."""
    longest = max(facts.total for facts in shown)
    least = NARROWEST * max(facts.each for facts in shown)
    unit = max(least, min(WIDEST, WIDTH / max(1.0, longest)))
    width = unit * longest + 20
    return Explained(
        tuple(scene(facts, unit, width) for facts in shown),
        comparison(shown),
        heading(shown),
        command,
        LEAD,
        unit="time",
        complete=True,
    )


def heading(shown: tuple[Facts, ...]) -> str:
    """A title for one timetable, or for two of as many workers and micro-batches."""
    if len(shown) == 1:
        return shown[0].title
    names = " and ".join(facts.name for facts in shown)
    return f"{names}: {shown[0].size}"


def scene(facts: Facts, unit: float, width: float) -> Scene:
    """Draw a timetable; a forward pass of all layers of a worker is `unit` wide."""
    place = facts.table.place
    rows = range(facts.workers)
    bottom = TOP + facts.workers * (ROW + APART)
    items = [Item(_axis(facts, unit, bottom))]
    items += [
        Item(box(0, _top(rank), unit * facts.total, ROW, PANEL, LINE, 'stroke-width="0.5"'))
        for rank in rows
    ]
    for task, (start, end) in facts.spans.items():
        x, wide = start * unit, (end - start) * unit
        items.append(
            Item(_task(facts, task, x, _top(place[task.stage]), wide), start, end, None, True,
                 name=str(task))
        )  # fmt: skip
    side = "".join(
        label(0, _top(rank) + 14, f"worker {rank}", 12, weight=600)
        + label(0, _top(rank) + 28, f"keeps {facts.live[rank]}", 10.5, SOFT)
        for rank in rows
    )
    return Scene(
        facts.name,
        facts.title,
        facts.summary,
        (round(width, 2), bottom + 20),
        tuple(items),
        steps(facts),
        (SIDE, side),
        _legend(facts),
        (0.0, unit),
    )


def steps(facts: Facts) -> tuple[Step, ...]:
    """Every moment at which a task begins or ends, and what each worker does before it."""
    moments = sorted({0.0} | {time for span in facts.spans.values() for time in span})
    made = []
    for at in moments:
        now = {
            facts.table.place[task.stage]: task
            for task, (start, end) in facts.spans.items()
            if start < at <= end
        }
        lines = tuple(
            f"worker {rank}: {described(facts, now.get(rank))}; keeps {kept(facts, rank, at)}"
            for rank in range(facts.workers)
        )
        made.append(Step(at, f"time {at:g} of {facts.total:g}", _words(facts, at, now), lines))
    return tuple(made)


def kept(facts: Facts, rank: int, at: float) -> int:
    """The activations that a worker keeps at a time."""
    last = "W" if facts.table.weights_apart else "B"
    own = [(t, span) for t, span in facts.spans.items() if facts.table.place[t.stage] == rank]
    begun = sum(task.kind == "F" and start < at for task, (start, _) in own)
    return begun - sum(task.kind == last and end <= at for task, (_, end) in own)


def described(facts: Facts, task: Task | None) -> str:
    """What a worker does, in words."""
    if task is None:
        return "idle"
    stage = f", stage {task.stage}" if facts.each > 1 else ""
    return f"{task.kind}{task.micro}{stage}"


def shade(task: Task, workers: int, each: int) -> str:
    """The colour of a task: its pass, lighter for each further stage of its worker."""
    colour = LIGHT[f"pass-{task.kind.lower()}"]
    share = 0.62 * (task.stage // workers) / each
    mixed = (round(int(colour[i : i + 2], 16) * (1 - share) + 255 * share) for i in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _words(facts: Facts, at: float, now: dict[int, Task]) -> str:
    if not at:
        return "Nothing has begun."
    if at == facts.total:
        return f"Complete: the workers were idle for {100 * facts.timing.idle:.1f}% of their time."
    return f"{len(now)} of {facts.workers} workers compute."


def _top(rank: int) -> float:
    return TOP + rank * (ROW + APART)


def _task(facts: Facts, task: Task, x: float, y: float, width: float) -> str:
    colour = shade(task, facts.workers, facts.each)
    size = min(13.0, (width - 2) / (0.72 * max(2, len(str(task.micro)))))
    frame = 'stroke-width="0.6" rx="2" class="task"'
    return box(x + 0.5, y, width - 1, ROW, colour, INK, frame) + label(
        x + width / 2, y + ROW / 2 + size * 0.36, str(task.micro), size, ink_on(colour), "middle"
    )


def _legend(facts: Facts) -> tuple[float, str]:
    """The width and the SVG of what the colours mean."""
    kinds = "FBW" if facts.table.weights_apart else "FB"
    x, parts = 0.0, []
    for kind in kinds:
        for chunk in range(facts.each):
            task = Task(kind, chunk * facts.workers, 0)  # type: ignore[arg-type]
            colour = shade(task, facts.workers, facts.each)
            parts.append(box(x, 4, 14, 14, colour, INK, 'stroke-width="0.6" rx="2"'))
            x += 18
        words = f"{kind} {KINDS[kind]}"
        parts.append(label(x + 2, 15, words))
        x += 24 + 6.8 * len(words)
    if facts.each > 1:
        parts.append(label(x, 15, "dark: a worker's first stage", 12, SOFT))
        x += 190
    return x, "".join(parts)


def _axis(facts: Facts, unit: float, bottom: float) -> str:
    every = next(n for n in (1, 2, 3, 5, 10, 20, 50, 100) if n * unit >= 34 or n == 100)
    return "".join(
        f'<line x1="{at * unit:.5g}" y1="0" x2="{at * unit:.5g}" y2="{bottom:g}"'
        f' stroke="{LINE}" stroke-width="0.7"/>'
        + label(at * unit, bottom + 12, str(at), 10, SOFT, "middle" if at else "start")
        for at in range(0, int(facts.total) + 1, every)
    )
