"""What `paceline explain` prints in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.collectives.draw import Frame
    from paceline.collectives.schedule import Schedule
    from paceline.parallel.draw.scene import Explained
    from paceline.parallel.draw.scene import Table as Figures


def print_schedules(schedules: list[Schedule], link: dict[str, float]) -> None:
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


def print_steps(shown: Explained) -> None:
    """Print what a split model does, step by step, and its figures."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(shown.heading, style="bold", highlight=False)
    for scene in shown.scenes:
        for step in scene.steps:
            console.print()
            console.print(step.phase, style="bold cyan", highlight=False)
            console.print(f"  {step.words}", highlight=False)
            for line in step.sent:
                console.print(f"  {line}", highlight=False)
            table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
            for heading in step.state[0]:
                table.add_column(heading, justify="right")
            for row in step.state[1:]:
                table.add_row(*row)
            console.print(table)
    console.print()
    console.print(_figures(shown.table))


def print_figures(shown: Explained) -> None:
    """Print the figures of a split model."""
    from rich.console import Console

    Console().print(_figures(shown.table))


def print_timetables(shown: Explained, names: tuple[str, ...], stages: int, micros: int) -> None:
    """Print the grid of each timetable, in blocks that fit the terminal, and the figures."""
    from rich.console import Console
    from rich.text import Text

    from paceline.look.picture import ink_on
    from paceline.parallel.draw.facts import facts_of
    from paceline.parallel.draw.lines import blocks, legend
    from paceline.parallel.draw.timeline import shade

    console = Console()
    for name in names:
        facts = facts_of(name, stages, micros)
        console.print(facts.title, style="bold", highlight=False)
        console.print(facts.summary, highlight=False)
        side = len(str(facts.workers - 1)) + 1
        cut = blocks(facts, console.width - side)
        for low, high, rows in cut:
            console.print()
            if len(cut) > 1:
                span = f"time {low / facts.each:g} to {high / facts.each:g}"
                console.print(span, style="bold cyan", highlight=False)
            for rank, row in enumerate(rows):
                line = Text.assemble((f"{rank:>{side - 1}} ", "bold"))
                for words, task in row:
                    colour = shade(task, facts.workers, facts.each) if task else ""
                    line.append(words, f"{ink_on(colour)} on {colour}" if task else "")
                console.print(line, no_wrap=True, crop=True)
        console.print()
        console.print(legend(facts), style="dim", highlight=False)
        kept = " ".join(map(str, facts.live))
        console.print(f"activations kept, by worker: {kept}", highlight=False)
        console.print()
    console.print(_figures(shown.table))


def _figures(figures: Figures) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        title=figures.title,
        title_justify="left",
        caption=figures.caption,
        caption_justify="left",
        padding=(0, 1, 0, 0),
    )
    for number, heading in enumerate(figures.headings):
        table.add_column(
            heading, justify="left" if number < figures.words else "right", overflow="fold"
        )
    for row in figures.rows:
        table.add_row(*row, style="bold" if row[0] in figures.drawn else "")
    return table
