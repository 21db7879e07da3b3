"""The list of past runs on a terminal: a line per run, and a second one for a long folder."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.text import Text

from paceline.report.words import percent
from paceline.results.past import PastRun

STYLES = {"failed": "red", "interrupted": "yellow", "killed": "yellow", "running": "green"}
HEADINGS = ("started", "model", "data", "strategy", "test", "samples/s", "status", "folder")
ON_THE_RIGHT = (4, 5)  # numbers
LONGEST = (40, 24, 20, 17, 15, 13, 12, 11, 10, 8)  # of names, from a wide terminal to a narrow


def runs_lines(runs: Sequence[PastRun], width: int) -> list[Text]:
    """Return the lines of the list: headings, then each run.

    Where the folder does not fit into the line it is on a line of its own, whole, so that it can
    be copied. Long names are cut; `paceline show` has them whole.
    """
    rows: list[tuple[str, ...]] = []
    apart, gap = False, " "
    for longest, apart in [(LONGEST[0], False), *((longest, True) for longest in LONGEST)]:
        rows = [HEADINGS, *(_cells(run, longest) for run in runs)]
        shown = [row[:-1] for row in rows] if apart else rows
        gap = " " if apart else "  "
        if sum(_widths(shown)) + len(gap) * (len(shown[0]) - 1) <= width:
            break
    widths = _widths([row[:-1] for row in rows])
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.rjust(wide) if column in ON_THE_RIGHT else cell.ljust(wide)
            for column, (cell, wide) in enumerate(zip(row, widths, strict=False))
        ]
        style = "dim" if number == 0 else STYLES.get(runs[number - 1].status, "")
        ends = [] if apart else [row[-1]]
        lines.append(Text(gap.join([*cells, *ends]).rstrip(), style=style))
        if apart and number:
            lines.append(Text(f"  {row[-1]}", style="dim"))
    return lines


def _widths(rows: Sequence[tuple[str, ...]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _cells(run: PastRun, longest: int) -> tuple[str, ...]:
    score = "–"
    if run.score is not None:
        plain = run.metric == "accuracy"
        score = percent(run.score) if plain else f"{run.metric} {run.score:.4g}"
    rate = "–" if run.samples_per_s is None else f"{run.samples_per_s:,.0f}"
    return (
        time.strftime("%m-%d %H:%M", time.localtime(run.started)),
        _cut(run.model, longest),
        _cut(run.data, longest),
        f"{_cut(run.strategy, longest)} x {'?' if run.workers is None else run.workers}",
        score,
        rate,
        run.status,
        run.folder,
    )


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
