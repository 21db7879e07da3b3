"""What a plan said of a study, beside what was measured; every figure of a plan is marked as such.

A study's folder may hold `predicted.json` (results/foretold.py). The report only reads it.
"""

from __future__ import annotations

import html
import statistics
from dataclasses import dataclass
from typing import Any

from paceline.record.formats import PREDICTED, PREDICTIONS
from paceline.record.reader import read_record
from paceline.record.steady import speed_of
from paceline.report.lines import Study
from paceline.report.page.markup import breakable, table

SCHEMA = 1
ONE_MACHINE = "one machine"


@dataclass(frozen=True)
class Beside:
    """A setting that was predicted and measured: samples per second."""

    label: str
    workers: int
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def error(self) -> float:
        """By which share the prediction was too high."""
        return self.predicted / self.measured - 1


def read_predictions(study: Study) -> dict[str, Any]:
    """Return what the plan said; empty where there is no plan. A damaged file is refused."""
    if not (study.folder / PREDICTED).is_file():
        return {}
    return read_record(study.folder / PREDICTED, "plan", SCHEMA, PREDICTIONS)


def beside_measured(study: Study) -> list[Beside]:
    """The settings that were predicted before they were run, with the median of their runs."""
    found = []
    for row in read_predictions(study).get("settings", ()):
        line = study.line(row["label"], row["workers"])
        speeds = [] if line is None else line.values(speed_of)
        if speeds:
            own = (row["samples_per_s"], row["low"], row["high"])
            found.append(Beside(row["label"], row["workers"], *own, statistics.median(speeds)))
    return found


def error_sentence(rows: list[Beside]) -> str:
    """How far the predictions were off."""
    errors = [abs(row.error) for row in rows]
    covered = sum(row.low <= row.measured <= row.high for row in rows)
    return (
        f"The plan was off by {100 * statistics.median(errors):.0f}% (median of {len(rows)}"
        f" settings), at most by {100 * max(errors):.0f}%; {covered} of {len(rows)} intervals hold"
        " the measured speed."
    )


def predicted_section(study: Study) -> str:
    """Return the sections of the page; empty without a plan."""
    return _beside_section(beside_measured(study)) + _cores_section(study)


def _beside_section(rows: list[Beside]) -> str:
    if not rows:
        return ""
    cells = [
        [
            breakable(row.label),
            str(row.workers),
            f"{row.predicted:,.0f} <small>({row.low:,.0f} to {row.high:,.0f})</small>",
            f"{row.measured:,.0f}",
            f"{100 * row.error:+.0f}%",
        ]
        for row in sorted(rows, key=lambda row: abs(row.error))
    ]
    head = ("setting", "workers", "predicted samples/s", "measured", "error")
    return (
        '<section id="predicted"><h2>Predicted before it was measured</h2>'
        f"<p>{html.escape(error_sentence(rows))}</p>{table(head, cells)}</section>"
    )


def _cores_section(study: Study) -> str:
    found = read_predictions(study).get("own_cores")
    if not found or not found["rows"]:
        return ""
    rows = found["rows"]
    counts = sorted({row["workers"] for row in rows})
    places = list(dict.fromkeys(row["where"] for row in rows))
    cells = []
    for name in dict.fromkeys(row["strategy"] for row in rows):
        own = {(r["where"], r["workers"]): r["speedup"] for r in rows if r["strategy"] == name}
        speeds = [own.get((place, count)) for place in places for count in counts]
        cells.append([breakable(name), *("–" if s is None else f"{s:.1f}x" for s in speeds)])
    head = ["predicted", *(f"{_place(p)}<br>{count} workers" for p in places for count in counts)]
    return (
        '<section id="own-cores"><h2>With a core for each worker, predicted</h2>'
        "<p>Nothing in this table was measured. It is what a plan predicts from the steps of this"
        " study's own runs: the speed against serial of workers that have a core each, on one"
        " machine, or on machines with links of 1 Gbit/s between them. How many steps an accuracy"
        " takes is not in it. <code>paceline profile</code> and <code>paceline plan</code> predict"
        f" other networks and numbers of workers.</p>{table(head, cells)}</section>"
    )


def _place(where: str) -> str:
    return where if where == ONE_MACHINE else f"{html.escape(where)} of 1 Gbit/s"
