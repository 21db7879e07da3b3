"""What a person sees while a study goes on: a live table on a terminal, a line per run otherwise.

Nothing here runs a thread: workers are forked from this process while the table is shown.
"""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import fmean
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.launch.run import Listen
from paceline.request.job import Job
from paceline.studies.grid import StudySpec
from paceline.studies.plan import PlannedRun
from paceline.studies.runner import Listener

MOST_ROWS = 20
REFRESH_S = 0.25


class StudyTable(Listener):
    """Listens to a study."""

    def __init__(self, *, quiet: bool = False, live: bool | None = None) -> None:
        self.console = Console(stderr=True)
        self.quiet = quiet
        self.live = (self.console.is_terminal if live is None else live) and not quiet
        self._display: Live | None = None
        self._records: dict[str, dict[str, Any]] = {}
        self._planned: list[PlannedRun] = []
        self._current: PlannedRun | None = None
        self._progress: dict[str, Any] = {}
        self._began = time.monotonic()
        self._done_before = 0
        self._last = 0.0

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
        settings, seeds = len(rounds[0]), len(rounds)
        self._say(
            f"{spec.title or spec.name}: {settings} settings x {seeds} seed{'s' * (seeds > 1)}"
        )
        if done:
            self._say(f"{len(done)} of {len(self._planned)} runs are here already")
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

    def notice(self, text: str) -> None:
        self._say(f"note: {text}")

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

    # --- the table: what was measured so far, by setting and number of workers

    def _table(self) -> Group:
        cells: dict[tuple[str, int], list[PlannedRun]] = defaultdict(list)
        for planned in self._planned:
            cells[planned.setting.label, planned.setting.workers].append(planned)
        labels, counts = list(dict.fromkeys(k[0] for k in cells)), sorted({k[1] for k in cells})
        table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
        table.add_column("training time, mean")
        for count in counts:
            table.add_column(f"{count} worker{'s' * (count > 1)}", justify="right", no_wrap=True)
        active = self._current.setting.label if self._current else None
        start = (
            max(0, min(len(labels) - MOST_ROWS, labels.index(active) - MOST_ROWS // 2))
            if active in labels
            else 0
        )
        for label in labels[start : start + MOST_ROWS]:
            table.add_row(
                Text(label), *(self._cell(cells.get((label, count), [])) for count in counts)
            )
        if len(labels) > MOST_ROWS:
            table.add_row(Text(f"... {len(labels) - MOST_ROWS} more", style="dim"))
        return Group(table, self._status())

    def _cell(self, planned: list[PlannedRun]) -> Text:
        if not planned:
            return Text("")
        records = [self._records[p.name] for p in planned if p.name in self._records]
        times = [r["result"]["train_s"] for r in records if r["status"] == "completed"]
        running = self._current in planned
        if any(r["status"] != "completed" for r in records):
            return Text("failed", style="red")
        text = f"{fmean(times):.2f} s" if times else "·"
        return Text(
            f"> {text}" if running else text,
            style="bold cyan" if running else "" if times else "dim",
        )

    def _status(self) -> Table:
        done, total = len(self._records), len(self._planned)
        here = (
            self._progress.get("step", 0) / self._progress["total"]
            if self._progress.get("total")
            else 0.0
        )
        elapsed, new = time.monotonic() - self._began, done - self._done_before + here
        left = (
            f", about {_clock(max(0.0, total - done - here) * elapsed / new)} left"
            if new >= 1
            else ""
        )
        row = Table.grid(padding=(0, 1))
        running = (
            f"{self._current.setting.label} x {self._current.setting.workers}"
            if self._current
            else ""
        )
        row.add_row(
            ProgressBar(total=total, completed=done + here, width=24),
            f"{done}/{total} runs, {_clock(elapsed)}{left}",
            running,
        )
        return row


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
