"""Run a grid of settings in interleaved rounds, and keep what was measured.

Fair means: the same model, data, global batch, initial weights, memory format and evaluation for all; one thread
per worker for every number of workers, plus one line of serial with all cores; start-up, loading and evaluation left out
of the training time; rounds interleaved, so that a slow moment of the machine hits everybody.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.errors import BadRequest, Interrupted, PacelineError
from paceline.job import Job, prepare
from paceline.launch.run import Listen, run
from paceline.record.machine import cores


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    strategy: str
    workers: int
    threads: int

    @property
    def label(self) -> str:
        return f"{self.strategy} {self.workers} x {self.threads}"


@dataclass
class Line:
    """What was measured for one setting, over all rounds."""

    setting: Setting
    records: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def values(self, name: str) -> list[float]:
        return [r["result"][name] for r in self.records if r["result"][name] is not None]

    def median(self, name: str) -> float | None:
        found = self.values(name)
        return statistics.median(found) if found else None

    def sent_bytes_per_step(self) -> float | None:
        """Summed over the workers."""
        if not self.records:
            return None
        last = self.records[-1]
        sent = [w["payload_sent_bytes"] for w in last["workers"]]
        return None if None in sent or not last["result"]["steps"] else sum(sent) / last["result"]["steps"]

    @property
    def oversubscribed(self) -> bool:
        return any(r["config"]["oversubscribed"] for r in self.records)


def builtin() -> list[Setting]:
    """Serial against two workers, and PyTorch's own as the yardstick."""
    lines = [Setting("serial", 1, 1), Setting("allreduce", 2, 1), Setting("ddp", 2, 1)]
    return [*lines, Setting("serial", 1, cores())] if cores() > 1 else lines


def run_study(
    settings: list[Setting],
    base: dict[str, Any],
    rounds: int,
    out: Path,
    watch: Callable[[Setting, int, Job], Listen],
) -> list[Line]:
    """Every setting once per round. A run that fails is a line that says so; the rest goes on."""
    lines = [Line(s) for s in settings]
    memory_format = base.get("memory_format", "auto")
    for number in range(rounds):
        for line in lines:
            if line.error:
                continue
            name = f"{line.setting.strategy}-{line.setting.workers}x{line.setting.threads}-round{number + 1}"
            options = {
                **base,
                "strategy": line.setting.strategy,
                "workers": line.setting.workers,
                "threads": line.setting.threads,
                "memory_format": memory_format,
                "out": str(out / "runs" / name),
            }
            try:
                job = prepare(Config.make(options), lambda config: out)
                record = run(job, watch(line.setting, number + 1, job), clean=True)
                memory_format = record["config"]["memory_format"]  # chosen once, for all
                line.records.append(record)
            except (BadRequest, Interrupted):  # nothing that another run would do better
                raise
            except PacelineError as error:
                line.error = str(error)
    write_results(lines, out / "results.csv")
    return lines


COLUMNS = ("test_accuracy", "test_loss", "train_loss", "steps", "samples", "train_s", "wall_s", "samples_per_s")


def write_results(lines: list[Line], path: Path) -> None:
    """One row per run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["strategy", "workers", "threads", "round", "status", *COLUMNS])
        for line in lines:
            key = [line.setting.strategy, line.setting.workers, line.setting.threads]
            for number, record in enumerate(line.records):
                writer.writerow([*key, number + 1, record["status"], *(record["result"][c] for c in COLUMNS)])
            if line.error:
                writer.writerow([*key, len(line.records) + 1, f"failed: {line.error}", *("" for _ in COLUMNS)])
