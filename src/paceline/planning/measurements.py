"""A table of step times that was measured elsewhere: workers, hosts, batch_size, step_s."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import BadRequest
from paceline.planning.compute import Steps
from paceline.planning.fit import QUANTILES, fit_line, median, quantiles

COLUMNS = ("workers", "hosts", "batch_size", "step_s")
LARGEST = 1e15


@dataclass(frozen=True)
class Row:
    """One measured setting: the seconds of a step, with `batch_size` samples per worker."""

    workers: int
    hosts: int
    batch_size: int
    step_s: float


def read_rows(path: str | Path) -> list[Row]:
    """Read a CSV file whose first line names the columns. Other columns are ignored."""
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8-sig")  # a spreadsheet writes a mark in front
    except FileNotFoundError:
        raise BadRequest(f"{path} does not exist") from None
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadRequest(f"{path} is not text: give a CSV file in UTF-8") from None
    wanted = ", ".join(COLUMNS)
    lines = [(n, line) for n, line in enumerate(content.splitlines(), 1) if line.strip()]
    if not lines:
        raise BadRequest(f"{path} is empty: its first line must name the columns {wanted}")
    try:
        table = list(csv.reader(line for _, line in lines))
    except csv.Error as error:
        raise BadRequest(f"{path} is not a CSV file: {error}") from None
    header = [name.strip() for name in table[0]]
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        other = next((mark for mark in (";", "\t") if mark in lines[0][1]), None)
        hint = f" (it is separated by {other!r}; use commas)" if other and len(header) == 1 else ""
        raise BadRequest(
            f"{path} has no column {', '.join(missing)}: its first line must name {wanted}{hint}"
        )
    twice = [name for name in COLUMNS if header.count(name) > 1]
    if twice:
        raise BadRequest(f"{path} has the column {twice[0]} twice")
    if len(table) == 1:
        raise BadRequest(f"{path} has no rows, only the names of its columns")
    rows = []
    for (number, _), cells in zip(lines[1:], table[1:], strict=True):
        if len(cells) != len(header):
            raise BadRequest(
                f"{path}, line {number}: {len(cells)} values for {len(header)} columns"
            )
        rows.append(_row(dict(zip(header, cells, strict=True)), f"{path}, line {number}"))
    return rows


def _row(cells: dict[str, str], where: str) -> Row:
    found = {name: _number(cells[name], f"{where}: {name}") for name in COLUMNS}
    for name in COLUMNS[:3]:
        if found[name] != int(found[name]) or found[name] < 1:
            raise BadRequest(f"{where}: {name}={cells[name].strip()}: a whole number of 1 or more")
    if not found["step_s"] > 0:
        raise BadRequest(f"{where}: step_s={cells['step_s'].strip()}: seconds, more than 0")
    if found["hosts"] > found["workers"]:
        raise BadRequest(
            f"{where}: {found['hosts']:g} hosts for {found['workers']:g} workers: a host has at"
            " least one"
        )
    workers, hosts, batch_size = (int(found[name]) for name in COLUMNS[:3])
    return Row(workers, hosts, batch_size, found["step_s"])


def _number(text: str, where: str) -> float:
    try:
        found = float(text)
    except ValueError:
        raise BadRequest(f"{where}={text.strip()!r} is not a number") from None
    if not math.isfinite(found) or abs(found) > LARGEST:
        raise BadRequest(f"{where}={text.strip()} is not a number that can be measured")
    return found


def steps_of(rows: Sequence[Row], name: str) -> tuple[tuple[Steps, ...], list[str]]:
    """Fit computing as a + b * batch_size to the rows with one worker; `name` is the table's.

    Returns the steps of each measured batch size on that line, and what cannot be predicted. The
    noise is the ratio of the rows to the line, for all batch sizes together.
    """
    alone = [row for row in rows if row.workers == 1]
    if not alone:
        raise BadRequest(
            f"{name} has no row with workers=1: computing and waiting for messages cannot be told"
            " apart; add rows of one worker at two batch sizes"
        )
    sizes = sorted({row.batch_size for row in alone})
    missing = []
    if len(sizes) == 1:
        missing.append(
            f"{name} has one batch size with workers=1, {sizes[0]}: only plans with {sizes[0]}"
            " samples per worker can be predicted."
        )
    medians = {
        size: median([row.step_s for row in alone if row.batch_size == size]) for size in sizes
    }
    line = fit_line(list(medians.items()))
    counts = {size: sum(row.batch_size == size for row in alone) for size in sizes}
    ratios = [1.0] * QUANTILES
    if max(counts.values()) > 1:
        repeated = [row for row in alone if counts[row.batch_size] > 1]
        found = quantiles([row.step_s / medians[row.batch_size] for row in repeated])
        ratios = [ratio / found[QUANTILES // 2] for ratio in found]
    else:
        missing.append(
            f"{name} has one row per batch size with workers=1: the noise from step to step is not"
            " known, and waiting for the slowest worker is predicted as nothing."
        )
    return tuple(
        Steps(size, tuple(line.at(size) * ratio for ratio in ratios), counts[size])
        for size in sizes
    ), missing
