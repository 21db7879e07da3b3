"""`paceline explain`"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.collectives.draw import Frame
    from paceline.collectives.schedule import Schedule

MOST_NAMES = 2


@click.command()
@click.argument("names", metavar="NAME[:key=value,...] [NAME]", nargs=-1, required=True)
@click.option(
    "--workers",
    default=4,
    show_default=True,
    type=click.IntRange(1),
    help="how many ranks, at most 16",
)
@click.option(
    "--html", "html_file", default=None, metavar="FILE", help="write a page that plays it"
)
@click.option("--open", "opens", is_flag=True, help="open the page in a browser")
@click.option(
    "--svg",
    default=None,
    metavar="FILE|DIR/",
    help="draw all steps as one picture; into a folder: one picture per step",
)
@click.option("--png", default=None, metavar="FILE|DIR/", help="the same as PNG")
@click.option("--latency", default="50us", show_default=True, help="of a link, for the seconds")
@click.option("--bandwidth", default="1gbit", show_default=True, help="of a link, each direction")
@click.option("--size", default="4MB", show_default=True, help="of the buffer")
@click.option("--plugin", multiple=True, metavar="FILE", help="a Python file that registers more")
@click.option("--debug", is_flag=True, help="show tracebacks")
def explain(
    names: tuple[str, ...],
    workers: int,
    html_file: str | None,
    opens: bool,
    svg: str | None,
    png: str | None,
    latency: str,
    bandwidth: str,
    size: str,
    plugin: tuple[str, ...],
    debug: bool,
) -> None:
    """Show a collective step by step: which rank sends which chunk to which rank, and whose
    contributions each rank holds afterwards; how many rounds, bytes and seconds it takes.

    NAME is a collective (paceline list collectives) or an operation (paceline list operations).
    Two names are shown side by side.

    \b
    Examples:
      paceline explain ring --workers 4
      paceline explain ring tree --workers 8 --open
      paceline explain halving-doubling --workers 6 --html hd.html
      paceline explain ring --svg slides/ --latency 1ms --bandwidth 100mbit
      paceline explain hierarchical:group=4 --workers 8 --png h.png
      paceline explain stepwise:start=1
    """
    from paceline.collectives.base import schedule_of
    from paceline.collectives.draw import MOST_RANKS, html, step_pictures
    from paceline.collectives.draw import png as png_of
    from paceline.collectives.draw import svg as svg_of
    from paceline.common.units import RATES, TIMES, parse_bytes, parse_unit
    from paceline.errors import BadRequest
    from paceline.registry import collectives, load_plugin

    for file in plugin:
        load_plugin(file)
    collectives.discover()
    if len(names) > MOST_NAMES:
        raise BadRequest(f"explain shows one or two algorithms, not {len(names)}")
    if len(set(names)) < len(names):
        raise BadRequest(f"{names[0]} is named twice; name two different algorithms")
    if workers > MOST_RANKS:
        raise BadRequest(f"--workers {workers}: up to {MOST_RANKS} ranks can be drawn legibly")
    link = {
        "latency_s": parse_unit(latency, TIMES, "--latency"),
        "bandwidth": parse_unit(bandwidth, RATES, "--bandwidth"),
        "size_bytes": float(parse_bytes(size, "--size")),
    }
    if not link["bandwidth"]:
        raise BadRequest(f"--bandwidth {bandwidth}: it must be more than 0, such as 1gbit")
    schedules = [replace(schedule_of(name, workers), name=name) for name in names]
    if opens and not html_file:
        html_file = str(Path(tempfile.mkdtemp(prefix="paceline-")) / "explain.html")
    if html_file:
        _write(Path(html_file), html(*schedules, **link).encode())
    for where, ending, draw in (
        (svg, "svg", str.encode),
        (png, "png", png_of),
    ):
        if where and (where.endswith("/") or Path(where).is_dir()):
            _write_steps(Path(where), ending, [draw(p) for p in step_pictures(*schedules)])
        elif where:
            _write(Path(where), draw(svg_of(*schedules)))
    if opens and html_file:
        _open(Path(html_file))
    if not (svg or png or html_file):
        _print(schedules, link)


def _write(file: Path, content: bytes) -> None:
    from paceline.common.files import write_whole
    from paceline.errors import BadRequest

    if file.is_dir():
        raise BadRequest(f"{file} cannot be written: it is a folder; name a file in it")
    try:
        write_whole(file, content)
    except OSError as error:
        raise BadRequest(f"{file} cannot be written: {error.strerror}") from None
    click.echo(f"written: {file}", err=True)


def _write_steps(folder: Path, ending: str, pictures: Sequence[bytes]) -> None:
    """Write step-00, step-01, ...; remove those of a longer algorithm that was drawn before."""
    from paceline.common.files import write_whole
    from paceline.errors import BadRequest

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for step, picture in enumerate(pictures):
            write_whole(folder / f"step-{step:02}.{ending}", picture)
        for old in folder.glob(f"step-[0-9][0-9].{ending}"):
            if int(old.stem.removeprefix("step-")) >= len(pictures):
                old.unlink()
    except OSError as error:
        raise BadRequest(f"{folder} cannot be written: {error.strerror}") from None
    click.echo(f"written: {folder}/step-00.{ending} to {len(pictures) - 1:02}", err=True)


def _open(page: Path) -> None:
    import webbrowser

    from paceline.errors import BadRequest

    if not webbrowser.open(page.resolve().as_uri()):
        raise BadRequest(f"no browser could be started; open {page} yourself")


def _print(schedules: list[Schedule], link: dict[str, float]) -> None:
    from rich.console import Console

    from paceline.collectives.draw import describe, frames, title

    console = Console()
    for schedule in schedules:
        console.print(title(schedule), style="bold", highlight=False)
        for frame in frames(schedule):
            console.print()
            console.print(f"step {frame.step}: {frame.phase}", style="bold cyan", highlight=False)
            for transfer in frame.transfers:
                console.print(f"  {describe(transfer, schedule.chunks)}", highlight=False)
            console.print(_grid(frame, schedule))
        console.print()
    console.print(_comparison(schedules, link))


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


def _comparison(schedules: list[Schedule], link: dict[str, float]) -> Table:
    """What these schedules cost, beside all other all-reduces if they are such."""
    from rich import box
    from rich.table import Table

    from paceline.collectives.cost import cost
    from paceline.collectives.draw.frames import counted
    from paceline.collectives.draw.page import (
        bytes_words,
        comparable,
        rate_words,
        seconds_words,
    )

    rows = comparable(tuple(schedules))
    drawn = [schedule.name for schedule in schedules]
    size = link["size_bytes"]
    what = "all-reduce" if len(rows) > len(drawn) else " and ".join(drawn)
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{what} with {counted(schedules[0].ranks, 'rank')}, in buffers",
        title_justify="left",
        caption=f"seconds: for a buffer of {bytes_words(size)} over links of"
        f" {rate_words(link['bandwidth'])} with a latency of {seconds_words(link['latency_s'])}",
        caption_justify="left",
    )
    for heading in ("collective", "rounds", "sent, all ranks", "sent, busiest rank", "seconds"):
        table.add_column(heading, justify="left" if heading == "collective" else "right")
    for name, schedule in rows.items():
        found = cost(schedule, size, link["latency_s"], 8 / link["bandwidth"])
        table.add_row(
            name,
            str(found.rounds),
            f"{sum(found.sent_bytes) / size:.2f}",
            f"{found.busiest_bytes / size:.2f}",
            f"{found.seconds:.3g}",
            style="bold" if name in drawn else "",
        )
    return table
