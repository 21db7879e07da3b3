"""What a person sees while a run goes on, and at its end."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.job import Job

LINE_EVERY_S = 10.0  # when piped: a plain line this often


class Watch:
    """A live bar on a terminal, plain lines otherwise, nothing when quiet."""

    def __init__(self, job: Job, quiet: bool = False, live: bool | None = None, label: str = "") -> None:
        self.job, self.quiet, self.label = job, quiet, label
        self.console = Console(stderr=True)
        self.live = (sys.stderr.isatty() if live is None else live) and not quiet
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = time.monotonic()
        self._accuracy = ""

    def __enter__(self) -> Watch:
        if not self.quiet and not self.label:
            self._say(headline(self.job.config.described(), self.job.threads))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            if error is None and self._task is not None:
                task = self._progress.tasks[0]
                self._progress.update(self._task, completed=task.total or task.completed)
            self._progress.stop()

    def listen(self, kind: str, content: dict[str, Any]) -> None:
        if self.quiet:
            return
        if kind == "progress":
            self._on_progress(content)
        elif kind == "evaluation" and not content["final"]:
            accuracy = content["accuracy"]
            self._accuracy = "" if accuracy is None else f"accuracy {100 * accuracy:.2f}%"
            self._say(f"epoch {content['epoch']}: test loss {content['loss']:.4f}  {self._accuracy}")
        elif kind == "notice":
            self._say(f"note: {content['text']}")
        elif kind == "chosen" and content["memory_format"] != "contiguous":
            self._say(f"note: memory_format={content['memory_format']} was measured to be faster here, and is used")

    def _on_progress(self, content: dict[str, Any]) -> None:
        rate = f"{content['samples_per_s']:,.0f} samples/s"
        if self.live:
            if self._progress is None:  # not before the workers are forked: it runs a thread
                self._progress = _bar(self.console)
                self._progress.start()
                self._task = self._progress.add_task(self.label or "training", total=content["total"], loss="", rate="")
            assert self._task is not None
            self._progress.update(
                self._task,
                completed=content["step"],
                total=content["total"],
                loss=f"loss {content['loss']:.4f}",
                rate=rate,
            )
        elif time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            of = f"/{content['total']}" if content["total"] else ""
            label = f"{self.label}: " if self.label else ""
            self._say(f"{label}step {content['step']}{of}  loss {content['loss']:.4f}  {rate}")

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total}"),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        refresh_per_second=5,
    )


def headline(config: dict[str, Any], threads: int) -> str:
    workers = config["workers"]
    return (
        f"{config['model']} on {config['data']}: {config['strategy']}, {workers} worker{'s' if workers != 1 else ''} x "
        f"{threads} thread{'s' if threads != 1 else ''}, {config['transport']}"
    )


def show_run(record: dict[str, Any], out: Path, to_stderr: bool) -> None:
    """The honest table at the end."""
    console = Console(stderr=to_stderr)
    result, config = record["result"], record["config"]
    console.print(headline(config, config["threads"]), style="bold", highlight=False)
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = [
        ("test accuracy", percent(result["test_accuracy"])),
        ("test loss", number(result["test_loss"], ".4f")),
        ("train loss, last epoch", number(result["train_loss"], ".4f")),
        ("steps", f"{result['steps']:,}"),
        ("samples", f"{result['samples']:,}"),
        ("training", f"{result['train_s']:.2f} s"),
        ("samples per second", number(result["samples_per_s"], ",.0f")),
        ("all in all", f"{result['wall_s']:.2f} s"),
    ]
    metric = result["metric"]
    if metric and metric["name"] != "accuracy":
        rows.insert(0, (f"test {metric['name']}", number(metric["value"], ".4f")))
    if config["until_accuracy"] is not None:
        reached = result["time_to_accuracy_s"]
        goal = f"{100 * config['until_accuracy']:g}% accuracy after"
        rows.append((goal, "not reached" if reached is None else f"{reached:.2f} s, {result['steps_to_accuracy']:,} steps"))
    for row in rows:
        if row[1] != "-":
            table.add_row(*row)
    console.print(table)
    if config["workers"] > 1:
        console.print(_workers(record["workers"]))
    if config["oversubscribed"]:
        console.print(
            f"oversubscribed: more threads than the {record['environment']['cores']} cores of this machine",
            style="yellow",
        )
    console.print(f"record: {out / 'run.json'}", highlight=False, soft_wrap=True)


def _workers(workers: list[dict[str, Any]]) -> Table:
    table = Table()
    for heading in ("worker", "samples", "compute", "sync", "idle", "sent", "CPU", "peak memory"):
        table.add_column(heading, justify="right")
    for w in workers:
        table.add_row(
            str(w["rank"]),
            f"{w['samples']:,.0f}",
            seconds(w["compute_s"]),
            seconds(w["sync_s"]),
            seconds(w["idle_s"]),
            megabytes(w["payload_sent_bytes"]),
            number(w["cpu_percent"], ".0f") + "%",
            megabytes(w["rss_peak_bytes"]),
        )
    return table


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.1f} MB"
