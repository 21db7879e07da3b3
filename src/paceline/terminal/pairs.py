"""A table of names and values, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table


def pairs_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table without a header: names on the left, values on the right."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, value)
    return table
