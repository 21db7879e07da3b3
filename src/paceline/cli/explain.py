"""`paceline explain`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.collectives.draw import Frame
    from paceline.collectives.schedule import Schedule

MOST_DRAWN = 16


@click.command()
@click.argument("name", metavar="NAME[:key=value,...]")
@click.option(
    "--workers",
    default=4,
    show_default=True,
    type=click.IntRange(1),
    help="how many ranks, at most 16",
)
@click.option("--svg", "svg_file", default=None, metavar="FILE", help="draw all steps as a picture")
@click.option(
    "--html", "html_file", default=None, metavar="FILE", help="write a page to step through"
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def explain(
    name: str, workers: int, svg_file: str | None, html_file: str | None, debug: bool
) -> None:
    """Show a collective step by step: which rank sends which chunk to which rank, and whose
    contributions each rank holds afterwards.

    NAME is a collective (paceline list collectives) or an operation (paceline list operations).

    \b
    Examples:
      paceline explain ring --workers 4
      paceline explain halving-doubling --workers 6 --html hd.html
      paceline explain hierarchical:group=4 --workers 8 --svg h.svg
      paceline explain broadcast:root=2
      paceline explain stepwise:start=1
    """
    from rich.console import Console

    from paceline.collectives.base import SCHEDULES, schedule_of
    from paceline.collectives.draw import describe, frames, html, svg, title
    from paceline.errors import BadRequest
    from paceline.registry import collectives, operations

    collectives.discover()
    if workers > MOST_DRAWN:
        raise BadRequest(f"--workers {workers}: up to {MOST_DRAWN} ranks can be drawn legibly")
    schedule = schedule_of(name, workers)
    for file, draw in ((svg_file, svg), (html_file, html)):
        if file:
            try:
                Path(file).write_text(draw(schedule))
            except OSError as error:
                raise BadRequest(f"{file} cannot be written: {error.strerror}") from None
            click.echo(f"written: {file}", err=True)
    if svg_file or html_file:
        return
    console = Console()
    console.print(title(schedule), style="bold", highlight=False)
    for frame in frames(schedule):
        console.print()
        console.print(f"step {frame.step}: {frame.phase}", style="bold cyan", highlight=False)
        for transfer in frame.transfers:
            console.print(f"  {describe(transfer, schedule.chunks)}", highlight=False)
        console.print(_grid(frame, schedule))
    console.print()
    comparable = schedule.name not in operations or schedule.name == "stepwise"
    others = {n: make(workers) for n, make in SCHEDULES.items()} if comparable else {}
    console.print(_comparison(schedule, others))


def _grid(frame: Frame, schedule: Schedule) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("rank", justify="right")
    for chunk in range(schedule.chunks):
        table.add_column(f"c{chunk}", justify="center")
    for rank in range(schedule.ranks):
        cells = []
        for chunk in range(schedule.chunks):
            style = (
                "green"
                if frame.complete[rank][chunk]
                else "dim"
                if frame.cells[rank][chunk] == str(rank)
                else "blue"
            )
            cells.append(
                Text(
                    frame.cells[rank][chunk],
                    style + (" bold reverse" if (rank, chunk) in frame.changed else ""),
                )
            )
        table.add_row(str(rank), *cells)
    return table


def _comparison(schedule: Schedule, all_of_them: dict[str, Schedule]) -> Table:
    from rich import box
    from rich.table import Table

    length, ranks = 1 << 20, schedule.ranks
    what = "all-reduce" if all_of_them else schedule.name
    table = Table(
        box=box.SIMPLE_HEAD, title=f"{what} with {ranks} ranks, in buffers", title_justify="left"
    )
    for heading in ("collective", "rounds", "sent, all ranks", "sent, busiest rank"):
        table.add_column(heading, justify="left" if heading == "collective" else "right")
    for name, other in sorted({**all_of_them, schedule.name: schedule}.items()):
        sent = [other.sent(r, length) / length for r in range(ranks)]
        style = "bold" if name == schedule.name else ""
        table.add_row(
            name, str(len(other.rounds)), f"{sum(sent):.2f}", f"{max(sent):.2f}", style=style
        )
    return table
