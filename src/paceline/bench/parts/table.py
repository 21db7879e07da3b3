"""Tables and notes of a benchmark on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Table:
    """Rows of text under headings. The columns in `left` hold words, the others numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    left: tuple[int, ...] = (0,)
    framed: bool = True  # False saves width: a line under the headings only, and no wrapping
    unbroken: tuple[int, ...] = ()  # columns that never wrap


def against_goal(
    spread: Mapping[str, float], goal: float | None, digits: int
) -> tuple[str, str, str]:
    """Return the cells of a spread: its median, its range, and the goal (empty without one)."""
    low, high = f"{spread['min']:.{digits}f}", f"{spread['max']:.{digits}f}"
    return f"{spread['median']:.{digits}f}", f"{low} - {high}", f"{goal:g}" if goal else ""


def print_parts(console: Console, parts: Iterable[Table | str]) -> None:
    """Print tables and notes, in the order in which a benchmark yields them."""
    from rich import box
    from rich.table import Table as RichTable

    for part in parts:
        if isinstance(part, str):
            console.print(part, highlight=False, markup=False)
            continue
        shown = RichTable(
            title=part.title or None,
            title_justify="left",
            box=box.HEAVY_HEAD if part.framed else box.SIMPLE_HEAD,
            show_edge=part.framed,
        )
        for number, heading in enumerate(part.columns):
            shown.add_column(
                heading,
                justify="left" if number in part.left else "right",
                no_wrap=not part.framed or number in part.unbroken,
            )
        for row in part.rows:
            shown.add_row(*row)
        console.print(shown)
