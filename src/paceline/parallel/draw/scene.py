"""What is drawn of a split model, as data: items in an SVG, each with the time in which it shows.

Pictures and the page are made from the same items. The page's script only shows, hides and moves
them, so a page cannot differ from a picture. Colours are written as `var(--ink)`; pictures replace
them by those of the light theme.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from typing import Any

from paceline.look import LIGHT
from paceline.look.picture import columns_for, sheet, text
from paceline.look.player import player

INK, SOFT, LINE = "var(--ink)", "var(--soft)", "var(--line)"
ACCENT, WARN, PANEL = "var(--accent)", "var(--warn)", "var(--panel)"
FAINT = 0.25  # the opacity of what is still to come
HEAD = 44.0  # above a panel of a picture: its step and its words
LEGEND = 26.0
NEVER = -1.0  # before the start: shown from the beginning


@dataclass(frozen=True)
class Item:
    """A part of a picture: shown after `start`, up to and including `until`."""

    body: str  # SVG
    start: float = NEVER
    end: float | None = None  # under way until then
    until: float | None = None
    ghost: bool = False  # faint before its start, instead of hidden
    slide: float = 0.0  # under way, it comes from so far to the right
    name: str = ""  # of a task, for tests and for readers of the SVG

    def shown(self, at: float) -> bool:
        return at > self.start and (self.until is None or at <= self.until)


@dataclass(frozen=True)
class Step:
    """A moment at which the clock stops, and what is said about it."""

    at: float
    phase: str
    words: str = ""
    sent: tuple[str, ...] = ()
    state: tuple[tuple[str, ...], ...] = ()  # a table: headings, then rows
    group: str = "steps"  # the words above its button


@dataclass(frozen=True)
class Table:
    """Figures below a page and in the terminal; the first columns are text."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    title: str = ""
    drawn: frozenset[str] = frozenset()  # rows that are emphasised, by their first cell
    words: int = 1  # how many columns are text


@dataclass(frozen=True)
class Scene:
    """Something that is played on a clock, or drawn."""

    name: str
    title: str
    summary: str
    size: tuple[float, float]
    items: tuple[Item, ...]
    steps: tuple[Step, ...]
    side: tuple[float, str] = (0.0, "")  # width and SVG of a part on the left that does not scroll
    legend: tuple[float, str] = (0.0, "")  # width and SVG of what the colours mean, above
    cursor: tuple[float, float] | None = None  # of time: its place at 0, and units per time
    whole: bool = True  # the picture is the last moment; else all steps, one beside the other

    @property
    def end(self) -> float:
        return self.steps[-1].at


@dataclass(frozen=True)
class Explained:
    """All that `paceline explain` shows of something: one or two scenes and a table."""

    scenes: tuple[Scene, ...]
    table: Table
    heading: str
    command: str
    lead: str
    unit: str = "step"
    complete: bool = False  # the page begins with the last moment

    def svg(self) -> str:
        """Return a picture of everything."""
        panels = [(s, step) for s in self.scenes for step in (s.steps[-1:] if s.whole else s.steps)]
        columns = 1 if self.scenes[0].whole else columns_for(len(panels))
        alone = len(panels) == 1  # the sheet's heading says its title
        drawn = [
            _panel(replace(s, title=s.summary, summary="") if alone else s, step)
            for s, step in panels
        ]
        return self._sheet(drawn, columns)

    def step_pictures(self) -> list[str]:
        """Return a picture for every step, all of one size; two scenes are on one clock."""
        moments = sorted({step.at for s in self.scenes for step in s.steps})
        return [
            self._sheet([_panel(s, _step_at(s, at), at) for s in self.scenes], 1) for at in moments
        ]

    def _sheet(self, panels: Sequence[str], columns: int) -> str:
        wide = max(s.side[0] + s.size[0] for s in self.scenes)
        tall = max(s.size[1] + (LEGEND if s.legend[1] else 0.0) for s in self.scenes) + HEAD
        return plain(sheet(panels, columns, (wide, tall), self.heading))

    def html(self) -> str:
        """Return a page that plays the scenes on one clock."""
        data = {
            "scenes": [_data(s) for s in self.scenes],
            "unit": self.unit,
            "begin": "end" if self.complete else "start",
            "step_ms": 450 if self.complete else 1100,
        }
        return player(
            self.heading,
            self.command,
            data,
            script=_read("page.js"),
            style=_read("page.css"),
            lead=self.lead,
            body=_html_table(self.table),
        )


def plain(picture: str) -> str:
    """The picture with the colours of the light theme instead of CSS variables."""
    return re.sub(r"var\(--([\w-]+)\)", lambda found: LIGHT[found[1]], picture)


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    stroke: str = "none",
    more: str = "",
) -> str:
    """Return a rectangle."""
    return (
        f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}" fill="{fill}"'
        f' stroke="{stroke}"{" " + more if more else ""}/>'
    )


def label(
    x: float, y: float, words: str, size: float = 12, ink: str = INK, anchor: str = "start",
    weight: int = 400,
) -> str:  # fmt: skip
    """Return a line of text in a colour of the theme."""
    return text(x, y, words, size, ink, anchor, weight)


def _step_at(scene: Scene, at: float) -> Step:
    """The step that is under way, or complete, at a time."""
    return next((step for step in scene.steps if step.at >= at - 1e-9), scene.steps[-1])


def _panel(scene: Scene, step: Step, moment: float | None = None) -> str:
    """One moment of a scene (or all of it), below what is said about it."""
    at = moment if moment is not None else math.inf if scene.whole else step.at
    whole = moment is None and scene.whole
    over = " (complete)" if at > scene.end else ""
    first, second = (scene.title, scene.summary) if whole else (step.phase + over, step.words)
    if scene.cursor and not whole:
        first = f"{scene.name}, time {min(at, scene.end):g} of {scene.end:g}{over}"
    parts = []
    for item in scene.items:
        if item.shown(at):
            parts.append(f'<g class="{item.name}">{item.body}</g>' if item.name else item.body)
        elif item.ghost:
            parts.append(f'<g opacity="{FAINT}">{item.body}</g>')
    wide, side = scene.side
    legend = scene.legend[1]
    top = HEAD + (LEGEND if legend else 0.0)
    return (
        label(0, 14, first, 15, weight=700)
        + label(0, 32, second, 12, SOFT)
        + f'<g transform="translate({wide:g} {HEAD:g})">{legend}</g>'
        + f'<g transform="translate(0 {top:g})">{side}</g>'
        + f'<g transform="translate({wide:g} {top:g})">{"".join(parts)}</g>'
    )


def _data(scene: Scene) -> dict[str, Any]:
    """A scene as the page's script reads it."""
    return {
        "name": scene.name,
        "title": scene.title,
        "summary": scene.summary,
        "size": scene.size,
        "side": scene.side,
        "legend": scene.legend,
        "cursor": scene.cursor,
        "whole": scene.whole,
        "items": [[i.body, i.start, i.end, i.until, i.ghost, i.slide, i.name] for i in scene.items],
        "steps": [[s.at, s.phase, s.words, s.sent, s.state, s.group] for s in scene.steps],
    }


def _html_table(table: Table) -> str:
    def cells(tag: str, row: tuple[str, ...]) -> str:
        texts = [f"<{tag} class=text>" if i < table.words else f"<{tag}>" for i in range(len(row))]
        return "".join(
            f"{start}{escape(cell)}</{tag}>" for start, cell in zip(texts, row, strict=True)
        )

    rows = "".join(
        f"<tr{' class=drawn' if row[0] in table.drawn else ''}>{cells('td', row)}</tr>"
        for row in table.rows
    )
    return (
        f'<section id="costs"><h2>{escape(table.title)}</h2><div class="scroll"><table id="facts">'
        f"<thead><tr>{cells('th', table.headings)}</tr></thead><tbody>{rows}</tbody></table></div>"
        f'<p class="soft">{escape(table.caption)}</p></section>'
    )


def _read(name: str) -> str:
    return files("paceline.parallel.draw").joinpath(name).read_text("utf-8")
