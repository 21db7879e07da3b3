"""Tables of settings that fit the terminal and never break a setting's name inside a word."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

INDENT = "  "  # of the lines after the first of a name
UNLIMITED = 10_000  # columns of a terminal that needs no wrapping


@dataclass(frozen=True, eq=False)
class Column:
    """Cells under a heading; `short` are narrower cells for a narrow terminal."""

    heading: str
    cells: Sequence[str | Text]
    short: Sequence[str | Text] | None = None
    short_heading: str | None = None


@dataclass(frozen=True)
class Step:
    """One way to make a table narrower: shorten a column, drop it, or wrap the names."""

    action: Literal["shorten", "drop", "wrap"]
    column: Column | None = None


WRAP = Step("wrap")


def shorten(column: Column) -> Step:
    return Step("shorten", column)


def drop(column: Column) -> Step:
    return Step("drop", column)


def plain_table() -> Table:
    """Return a table with a rule below its heading and one space between columns."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)


def fit_table(
    console: Console,
    heading: str,
    names: Sequence[str],
    columns: Sequence[Column],
    steps: Sequence[Step],
    empty: Callable[[], Table] = plain_table,
) -> Table:
    """Return a table of names and columns, narrowed by as few of the steps as it needs to fit."""
    short: set[Column] = set()
    dropped: set[Column] = set()
    wrap = False

    def build(width: int) -> Table:
        shown = [c for c in columns if c not in dropped]
        table = empty()
        table.add_column(heading, overflow="fold")
        for column in shown:
            title = column.short_heading if column in short else None
            table.add_column(title or column.heading, justify="right", no_wrap=True)
        cells = [c.short if c in short and c.short is not None else c.cells for c in shown]
        for name, *row in zip(names, *cells, strict=True):
            table.add_row(Text(wrap_name(name, width)), *row)
        return table

    narrowest = max((len(INDENT + piece) for name in names for piece in pieces(name)), default=1)
    for step in (None, *steps):
        if step is not None:
            wrap |= step.action == "wrap"
            if step.column is not None:
                (short if step.action == "shorten" else dropped).add(step.column)
        if _width(console, build(narrowest if wrap else UNLIMITED)) <= console.width:
            break
    if not wrap:
        return build(UNLIMITED)
    longest = max((len(name) for name in names), default=1)
    spare = console.width - (_width(console, build(UNLIMITED)) - longest)
    return build(max(narrowest, spare))


def pieces(name: str) -> list[str]:
    """Split a setting's name where it may be broken: after a comma or a space.

    A mark such as ` *` stays with the word before it.
    """
    return re.split(r"(?<=,)(?=[^ ])|(?<= )(?=[^*])", name)


def wrap_name(name: str, width: int) -> str:
    """Break a name after commas and spaces into lines of at most `width`, indented after the first.

    A piece that is longer than the width stays whole.
    """
    lines = [""]
    for piece in pieces(name):
        if lines[-1].strip() and len((lines[-1] + piece).rstrip()) > width:
            lines.append(INDENT)
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _width(console: Console, table: Table) -> int:
    options = console.options.update(width=UNLIMITED)
    return Measurement.get(console, options, table).maximum
