"""A table of the run: OUT/metrics.csv."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from paceline.callbacks.base import Callback, Event, RunInfo, inside
from paceline.registry import callbacks

COLUMNS = (
    *("kind", "step", "epoch", "on", "t", "train_s", "loss", "accuracy", "metric", "value"),
    *("samples", "compute_s", "sync_s", "sent_bytes", "received_bytes"),
)


@callbacks.register("csv")
@dataclass(repr=False)
class Csv(Callback):
    """Writes a table with a row per step and per evaluation: metrics.csv in the run's folder."""

    file: Annotated[str, "the table; a relative path is inside the run's folder"] = "metrics.csv"

    def on_start(self, run: RunInfo) -> None:
        """Begin the table. A resumed run keeps the rows up to the step that it goes on from."""
        path = inside(run, self.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _until(path, run.from_step) if run.from_step else []
        self._file = path.open("w", newline="", buffering=1)
        self._table = csv.DictWriter(self._file, COLUMNS)
        self._table.writeheader()
        self._table.writerows(kept)

    def on_step(self, event: Event) -> None:
        """Write the row of a step."""
        self._row(
            event,
            epoch=event["epoch"],
            samples=event["n"],
            compute_s=event["compute_s"],
            sync_s=event["sync_s"],
            sent_bytes=event["sent"],
            received_bytes=event["received"],
        )

    def on_evaluation(self, event: Event) -> None:
        """Write the row of an evaluation."""
        metric = event.get("metric") or {}
        self._row(
            event,
            on=event.get("on", "test"),
            accuracy=event.get("accuracy"),
            metric=metric.get("name"),
            value=metric.get("value"),
        )

    def on_end(self, run: RunInfo) -> None:
        """Close the table."""
        self._file.close()

    def _row(self, event: Event, **cells: Any) -> None:
        shared = {name: event.get(name) for name in ("kind", "step", "t", "train_s", "loss")}
        self._table.writerow({**shared, **cells})


def _until(path: Path, step: int) -> list[dict[str, str]]:
    """Return the rows of an earlier session that the resumed run has not undone."""
    if not path.is_file():
        return []
    rows = csv.DictReader(io.StringIO(path.read_text()))
    known = [{name: row.get(name) or "" for name in COLUMNS} for row in rows]
    return [row for row in known if row["step"].isdecimal() and int(row["step"]) <= step]
