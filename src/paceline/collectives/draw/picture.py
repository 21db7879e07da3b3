"""Pictures of schedules for slides: SVG and PNG, one per step or all steps in one."""

from __future__ import annotations

from typing import Any

from paceline.collectives.draw.frames import counted, title
from paceline.collectives.draw.layout import Arrow
from paceline.collectives.draw.scene import LABEL, MESSAGE_HEIGHT, Scene, scene
from paceline.collectives.schedule import Schedule
from paceline.look import LIGHT, worker
from paceline.look.picture import columns_for, ink_on, sheet, text, wrapped

HEAD = 62.0  # above a panel: its step and its phase
RULE_HEIGHT, RULE_CHARACTERS = 17.0, 78
NARROW = 6.0  # a chunk in which a frame would hide the colours


def svg(*schedules: Schedule) -> str:
    """Return an SVG with all steps. Two schedules stand side by side, a step per row."""
    scenes = [scene(schedule) for schedule in schedules]
    last = max(len(s["steps"]) for s in scenes)
    columns = len(scenes) if len(scenes) > 1 else columns_for(last)
    panels = [(s, step) for step in range(last) for s in scenes]
    return _sheet(panels, columns, " and ".join(map(title, schedules)))


def step_pictures(*schedules: Schedule) -> list[str]:
    """Return an SVG for every step, all of one size. Two schedules stand side by side."""
    scenes = [scene(schedule) for schedule in schedules]
    last = max(len(s["steps"]) for s in scenes)
    heading = " and ".join(map(title, schedules))
    return [_sheet([(s, step) for s in scenes], len(scenes), heading) for step in range(last)]


def _sheet(panels: list[tuple[Scene, int]], columns: int, heading: str) -> str:
    """Panels in rows, below a heading."""
    scenes = [s for s, _ in panels]
    rules = [rule for s in scenes for rule in s["rules"].values()]
    lines = max((len(wrapped(rule, RULE_CHARACTERS)) for rule in rules), default=0)
    tall = max(s["height"] for s in scenes) + HEAD + lines * RULE_HEIGHT + 16
    drawn = [panel(s, step) for s, step in panels]
    return sheet(drawn, columns, (scenes[0]["width"], tall), heading)


def panel(s: Scene, step: int) -> str:
    """One step: the state after it, the messages half-way, the rule of its phase below."""
    last = len(s["steps"]) - 1
    after = step > last
    shown = s["steps"][min(step, last)]
    phase = "done" if after else shown["phase"]
    parts = [
        text(0, 18, f"step {min(step, last)}: {phase}", 16, weight=700),
        text(0, 38, _where(s, step), 12, LIGHT["soft"]),
    ]
    inner = [_group(points, s["size"]) for points in s["groups"]]
    inner += [
        f'<line x1="{a:.5g}" y1="{b:.5g}" x2="{c:.5g}" y2="{d:.5g}" stroke="{LIGHT["line"]}"/>'
        for a, b, c, d in s["links"]
    ]
    messages = [] if after else shown["messages"]
    inner += [_arrow(message) for message in messages]
    changed = set() if after else {tuple(pair) for pair in shown["changed"]}
    inner += [_rank(s, shown, rank, changed) for rank in range(s["ranks"])]
    inner += [_message(s, message) for message in messages]
    parts.append(f'<g transform="translate(0 {HEAD - 6:g})">{"".join(inner)}</g>')
    rule = s["rules"].get(shown["phase"], "") if step and not after else ""
    lines = wrapped(rule, RULE_CHARACTERS)
    top = HEAD + s["height"] + 16
    parts += [text(0, top + i * RULE_HEIGHT, line, 13) for i, line in enumerate(lines)]
    return "".join(parts)


def _where(s: Scene, step: int) -> str:
    last = len(s["steps"]) - 1
    if step > last:
        return f"{s['name']} was complete after {counted(last, 'round')}"
    if step == 0:
        return f"{s['name']}: every rank holds its own buffer, in its own colour"
    return f"{s['name']}, step {step} of {last}: round r = {s['steps'][step]['place']} of its phase"


def _rank(s: Scene, shown: dict[str, Any], rank: int, changed: set[tuple[int, ...]]) -> str:
    (width, height), (x, y) = s["size"], s["places"][rank]
    left, top = x - width / 2, y - height / 2
    parts = [
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="7"'
        f' fill="{LIGHT["panel"]}" stroke="{LIGHT["line"]}"/>',
        f'<rect x="{left + 5:g}" y="{top + 5:g}" width="8" height="8" rx="2"'
        f' fill="{worker(rank)}"/>',
        text(left + 17, top + 13, s["names"][rank], 11, weight=600),
    ]
    pitch = (width - 8) / s["chunks"]
    gap = min(3.0, pitch * 0.2)
    for chunk, kind in enumerate(shown["cells"][rank]):
        parts.append(
            _bands(
                s["kinds"][kind],
                left + 4 + chunk * pitch + gap / 2,
                top + LABEL,
                pitch - gap,
                height - LABEL - 5,
                (rank, chunk) in changed,
            )
        )
    return "".join(parts)


def _bands(
    kind: dict[str, Any], x: float, y: float, width: float, height: float, changed: bool
) -> str:
    """One chunk: a band of colour for each contribution that it holds."""
    ranks = kind["ranks"]
    parts = []
    tall = height / max(1, len(ranks))
    for i, rank in enumerate(ranks):
        parts.append(
            f'<rect x="{x:.2f}" y="{y + i * tall:.2f}" width="{width:.2f}" height="{tall:.2f}"'
            f' fill="{worker(rank)}"/>'
        )
        if tall >= 9 and width >= 7 * len(str(rank)):
            parts.append(
                text(
                    x + width / 2,
                    y + (i + 0.5) * tall + 3,
                    str(rank),
                    9,
                    ink_on(worker(rank)),
                    "middle",
                )
            )
    narrow = width < NARROW
    stroke, thick = LIGHT["ink"], 0.3 if narrow else 0.4
    if changed:
        thick = 0.9 if narrow else 1.6
    if kind["complete"] and narrow:
        parts.append(
            f'<rect x="{x - 0.4:.2f}" y="{y + height + 0.8:.2f}" width="{width + 0.8:.2f}"'
            f' height="3" fill="{LIGHT["good"]}"/>'
        )
    elif kind["complete"]:
        stroke, thick = LIGHT["good"], 2.0
    parts.append(
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" rx="1.5"'
        f' fill="none" stroke="{stroke}" stroke-width="{thick:g}"/>'
    )
    return "".join(parts)


def _arrow(message: dict[str, Any]) -> str:
    dash = "" if message["adds"] else ' stroke-dasharray="5 4"'
    return (
        f'<path d="{message["path"]}" fill="none" stroke="{LIGHT["soft"]}" stroke-width="1.6"'
        f'{dash} marker-end="url(#head)"/>'
    )


def _message(s: Scene, message: dict[str, Any]) -> str:
    """What travels, half-way along its arrow."""
    a, b, c, d, e, f = message["curve"]
    x, y = Arrow((a, b), (c, d), (e, f)).at(0.5)
    width = message["width"]
    left, top = x - width / 2, y - MESSAGE_HEIGHT / 2
    each = width / len(message["kinds"])
    parts = [
        f'<rect x="{left - 2:.2f}" y="{top - 2:.2f}" width="{width + 4:.2f}"'
        f' height="{MESSAGE_HEIGHT + 4:g}" rx="3" fill="{LIGHT["paper"]}"'
        f' stroke="{LIGHT["soft"]}"/>'
    ]
    parts += [
        _bands(s["kinds"][kind], left + i * each, top, each, MESSAGE_HEIGHT, False)
        for i, kind in enumerate(message["kinds"])
    ]
    if s["ranks"] <= 8:
        parts.append(text(x, top - 5, message["label"], 10, LIGHT["ink"], "middle"))
    return "".join(parts)


def _group(points: list[list[float]], size: list[float]) -> str:
    around = " ".join(f"{x:g},{y:g}" for x, y in points)
    return (
        f'<polygon points="{around}" fill="{LIGHT["line"]}" stroke="{LIGHT["line"]}" opacity="0.5"'
        f' stroke-width="{size[1] + 14:g}" stroke-linejoin="round" stroke-linecap="round"/>'
    )
