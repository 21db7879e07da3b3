"""The progress of a study: a live table on a terminal, one line per run otherwise.

The table runs no thread, since workers are forked from this process while it is shown.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from statistics import fmean
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.errors import voiced
from paceline.launch.run import Listen
from paceline.record.blocks import Block
from paceline.report.words import count, workers
from paceline.request.job import Job
from paceline.studies.confirm import Confirmation
from paceline.studies.grid import StudySpec
from paceline.studies.plan import PlannedRun
from paceline.studies.runner import Listener
from paceline.terminal.fitting import WRAP, Column, drop, fit_table, shorten, wrap_name

MOST_ROWS = 20
REFRESH_S = 0.25


class StudyTable(Listener):
    """Shows a study while it runs."""

    def __init__(self, *, quiet: bool = False, live: bool | None = None) -> None:
        self.console = Console(stderr=True)
        self.quiet = quiet
        # In a notebook a line per run: the table would need ipywidgets.
        shown = (self.console.is_terminal if live is None else live) and not quiet
        self.live = shown and not self.console.is_jupyter
        self._display: Live | None = None
        self._records: dict[str, dict[str, Any]] = {}
        self._planned: list[PlannedRun] = []
        self._current: PlannedRun | None = None
        self._progress: dict[str, Any] = {}
        self._began = time.monotonic()
        self._done_before = 0
        self._last = 0.0
        self._confirmation: Confirmation | None = None

    def __enter__(self) -> StudyTable:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._display is not None:
            self._current = None
            self._display.update(self._table(), refresh=True)
            self._display.stop()
            self._display = None

    def planned(
        self, spec: StudySpec, rounds: list[list[PlannedRun]], done: dict[str, dict[str, Any]]
    ) -> None:
        order = {setting.slug: number for number, setting in enumerate(spec.settings())}
        self._planned = sorted(
            (p for planned in rounds for p in planned), key=lambda p: order[p.setting.slug]
        )
        self._records = dict(done)
        self._done_before, self._began = len(done), time.monotonic()
        settings, seeds = count(len(rounds[0]), "setting"), count(len(rounds), "seed")
        self._say(f"{spec.title or spec.name}: {settings} x {seeds}")
        if done:
            self._say(f"{len(done)} of {len(self._planned)} runs are in the folder already")
        if self.live and len(done) < len(self._planned):
            self._display = Live(
                self._table(), console=self.console, auto_refresh=False, transient=True
            )
            self._display.start()

    def begun(self, planned: PlannedRun, job: Job) -> Listen:
        self._current, self._progress = planned, {}
        self._refresh(force=True)
        return self._hear

    def ended(self, planned: PlannedRun, record: dict[str, Any]) -> None:
        self._records[planned.name], self._current = record, None
        if self.live:
            if record["status"] != "completed":
                self._say(self._line(planned, record))
            self._refresh(force=True)
        else:
            self._say(f"[{len(self._records)}/{len(self._planned)}] {self._line(planned, record)}")

    def confirming(self, confirmation: Confirmation) -> None:
        self._confirmation, self._current = confirmation, None
        names = [candidate.name for candidate in confirmation.others]
        self._say(f"confirming {' and '.join(names)} beside serial, in blocks")
        if done := len(confirmation.blocks):
            self._say(f"{count(done, 'block')} are in the folder already")
        self._refresh(force=True)

    def confirmed(self, confirmation: Confirmation, block: Block) -> None:
        if self.live:
            self._refresh(force=True)
            return
        told = ", ".join(
            f"{other.name} {math.exp(block.log_ratio(other.name, confirmation.serial.name)):.2f}x"
            for other in confirmation.others
        )
        marked = " (disturbed)" if block.disturbed else ""
        self._say(f"[block {block.number + 1}/{confirmation.wanted}] {told}{marked}")

    def notice(self, text: str) -> None:
        self._say(f"note: {voiced(text)}")

    def _hear(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "progress":
            self._progress = content
            self._refresh()

    def _say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _refresh(self, force: bool = False) -> None:
        if self._display is not None and (force or time.monotonic() - self._last >= REFRESH_S):
            self._last = time.monotonic()
            self._display.update(self._table(), refresh=True)

    @staticmethod
    def _line(planned: PlannedRun, record: dict[str, Any]) -> str:
        what, result = (
            f"{planned.setting.label} x {planned.setting.workers}, seed {planned.seed}",
            record["result"],
        )
        if record["status"] != "completed":
            return f"{what}: {record['status']}: {record['error']}"
        accuracy = (
            ""
            if result["test_accuracy"] is None
            else f", accuracy {100 * result['test_accuracy']:.2f}%"
        )
        many = ", oversubscribed" if record["config"].get("oversubscribed") else ""
        return f"{what}: {result['train_s']:.2f} s{accuracy}{many}"

    def _table(self) -> Group:
        """Return the mean training times so far, by setting and number of workers."""
        cells: dict[tuple[str, int], list[PlannedRun]] = defaultdict(list)
        for planned in self._planned:
            cells[planned.setting.label, planned.setting.workers].append(planned)
        labels, counts = list(dict.fromkeys(k[0] for k in cells)), sorted({k[1] for k in cells})
        shown = self._shown(labels)
        columns = [
            Column(
                workers(number),
                [self._cell(cells.get((label, number), []), "{:.2f} s") for label in shown],
                [self._cell(cells.get((label, number), []), "{:.3g}") for label in shown],
                str(number),
            )
            for number in counts
        ]
        active = self._current.setting.workers if self._current else counts[0]
        by_distance = sorted(zip(counts, columns, strict=True), key=lambda c: -abs(c[0] - active))
        steps = [*map(shorten, columns), WRAP, *(drop(column) for _, column in by_distance)]
        table = fit_table(self.console, "training time (s)", shown, columns, steps, _frame)
        if len(labels) > len(shown):
            table.add_row(Text(f"... {len(labels) - len(shown)} more", style="dim"))
        return Group(table, *self._status())

    def _shown(self, labels: list[str]) -> list[str]:
        """Return the rows that fit, around the current setting."""
        active = self._current.setting.label if self._current else None
        middle = labels.index(active) - MOST_ROWS // 2 if active in labels else 0
        start = max(0, min(len(labels) - MOST_ROWS, middle))
        return labels[start : start + MOST_ROWS]

    def _cell(self, planned: list[PlannedRun], form: str) -> Text:
        if not planned:
            return Text("")
        records = [self._records[p.name] for p in planned if p.name in self._records]
        times = [r["result"]["train_s"] for r in records if r["status"] == "completed"]
        running = self._current in planned
        if any(r["status"] != "completed" for r in records):
            return Text("failed", style="red")
        text = form.format(fmean(times)) if times else "·"
        return Text(
            f"> {text}" if running else text,
            style="bold cyan" if running else "" if times else "dim",
        )

    def _status(self) -> list[RenderableType]:
        """Return a bar with the time left, and the current setting."""
        if self._confirmation is not None:
            return [self._blocks(self._confirmation)]
        done, total = len(self._records), len(self._planned)
        here = (
            self._progress.get("step", 0) / self._progress["total"]
            if self._progress.get("total")
            else 0.0
        )
        elapsed, new = time.monotonic() - self._began, done - self._done_before + here
        left = (
            f", about {_minutes(max(0.0, total - done - here) * elapsed / new)} left"
            if new >= 1
            else ""
        )
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=total, completed=done + here, width=24),
            f"{done}/{total} runs, {_minutes(elapsed)}{left}",
        )
        if self._current is None:
            return [bar]
        name = f"running {self._current.setting.label} x {self._current.setting.workers}"
        return [bar, Text(wrap_name(name, self.console.width))]

    def _blocks(self, found: Confirmation) -> RenderableType:
        """Return a bar over the confirming blocks, with the ratios to serial so far."""
        done, bar = found.blocks, Table.grid(padding=(0, 1))
        means = [
            f"{other.name} {math.exp(fmean(found.log_ratios(other))):.2f}x"
            for other in found.others
            if done
        ]
        bar.add_row(
            ProgressBar(total=found.wanted, completed=len(done), width=24),
            f"confirming: block {len(done) + 1} of {found.wanted}  {', '.join(means)}",
        )
        return bar


def _frame() -> Table:
    return Table(box=None, padding=(0, 0, 0, 1), pad_edge=False, header_style="dim")


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
