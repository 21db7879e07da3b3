"""The progress of a run: a live bar on a terminal, plain lines otherwise, nothing when quiet."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from paceline.errors import voiced
from paceline.report.run_rows import headline
from paceline.request.job import Job
from paceline.terminal.notebook import NotebookBar

LINE_EVERY_S = 10.0


class Watch:
    """Shows a run while it trains.

    `live` shows a bar (None: if this is a terminal). Without a bar, `lines` prints a line every ten
    seconds.
    """

    def __init__(
        self,
        job: Job,
        *,
        quiet: bool = False,
        live: bool | None = None,
        lines: bool = True,
        label: str = "",
        headed: bool = True,
    ) -> None:
        self.job, self.quiet, self.label, self.headed = job, quiet, label, headed
        self.console = Console(stderr=True)
        self.live = (
            self.console.is_terminal or self.console.is_jupyter if live is None else live
        ) and not quiet
        self.lines = lines and not quiet and not self.live
        self._progress: Progress | None = None
        self._notebook: NotebookBar | None = None
        self._seen: dict[str, Any] = {}  # the last progress that was told
        self._task: TaskID | None = None
        self._last_line = time.monotonic()

    def __enter__(self) -> Watch:
        if (self.live or self.lines) and not self.label and self.headed:
            self._say(headline(self.job.config.described(), self.job.threads))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._notebook is not None:
            self._show_in_notebook(force=True)
        if self._progress is not None:
            if error is None and self._task is not None:
                task = self._progress.tasks[0]
                self._progress.update(self._task, completed=task.total or task.completed)
            self._progress.stop()

    def listen(self, kind: str, content: dict[str, Any]) -> None:
        if self.quiet:
            return
        if kind == "notice":
            self._say(f"note: {voiced(content['text'])}")
        elif kind == "progress":
            self._on_progress(content)
        elif not (self.live or self.lines):
            return
        elif kind == "line":
            self._say(content["text"])
        elif kind == "evaluation" and not content["final"]:
            accuracy = (
                ""
                if content["accuracy"] is None
                else f"  accuracy {100 * content['accuracy']:.2f}%"
            )
            when = f"epoch {content['epoch']}" if content["epoch"] is not None else "at the end"
            self._say(
                f"{when}, step {content['step']:,}: {content['on']} loss"
                f" {content['loss']:.4f}{accuracy}"
            )
        elif kind == "chosen" and content["memory_format"] != "contiguous" and not self.label:
            self._say(
                f"note: memory_format={content['memory_format']} is used: it was measured to be"
                " faster here"
            )

    def _on_progress(self, content: dict[str, Any]) -> None:
        rate = f"{content['samples_per_s']:,.0f} samples/s"
        if self.live and self.console.is_jupyter:
            self._seen = content
            self._show_in_notebook()
        elif self.live:
            if self._progress is None:  # it runs a thread: the workers must be forked before
                self._progress = _bar(self.console)
                self._progress.start()
                self._task = self._progress.add_task(
                    self.label or "training", total=content["total"], loss="", rate="", done=""
                )
            assert self._task is not None
            self._progress.update(
                self._task,
                completed=content["step"],
                total=content["total"],
                loss=_shown(content),
                rate=rate,
                done=(
                    f"{content['step']}/{content['total']}"
                    if content["total"]
                    else f"step {content['step']}"
                ),
            )
        elif self.lines and time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            of = f"/{content['total']}" if content["total"] else ""
            label = f"{self.label}: " if self.label else ""
            self._say(f"{label}step {content['step']}{of}  {_shown(content)}  {rate}")

    def _show_in_notebook(self, force: bool = False) -> None:
        if self._notebook is None:
            self._notebook = NotebookBar(self.label or "training")
        words = f"{_shown(self._seen)}  {self._seen['samples_per_s']:,.0f} samples/s".strip()
        self._notebook.update(self._seen["step"], self._seen["total"], words, force)

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


def _shown(content: dict[str, Any]) -> str:
    """Return the loss, and the epsilon that a private run has spent; a private loss is hidden."""
    said = [f"epsilon {content['epsilon']:.2f}"] if content.get("epsilon") is not None else []
    if content["loss"] is not None:
        said.append(f"loss {content['loss']:.4f}")
    return "  ".join(said)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[done]}"),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        refresh_per_second=5,
    )
