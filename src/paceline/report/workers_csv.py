"""`workers.csv`: one row per run and rank, workers and servers alike."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.record.formats import CONTAINER
from paceline.record.writer import write_text
from paceline.report.lines import Line, RunRecord, Study

RANK = (
    "role",
    "rank",
    "host",
    "samples",
    "steps",
    "compute_s",
    "sync_s",
    "idle_s",
    "cpu_percent",
    "cpu_user_s",
    "cpu_system_s",
    "rss_peak_bytes",
    "pss_peak_bytes",
    "payload_sent_bytes",
    "payload_received_bytes",
    "net_sent_bytes",
    "net_received_bytes",
    "memory_sent_bytes",
    "memory_received_bytes",
    "disk_read_bytes",
    "disk_write_bytes",
)
CONTAINER_HEAD = tuple(f"container_{key}" for key in CONTAINER)
RUN = ("train_s", "time_to_accuracy_s", "test_accuracy")
HEAD = ("run", "label", "workers", "seed", "status", *RANK, *CONTAINER_HEAD, *RUN)
HEAD += ("metric", "metric_value")


def write_workers(study: Study, path: Path) -> None:
    """Write what every worker and server of every run used; an unknown value is an empty cell."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(HEAD)
    for line in (*study.lines, *study.profiled):
        for run in line.runs:
            writer.writerows(_rows(line, run))
    write_text(path, file.getvalue())


def _rows(line: Line, run: RunRecord) -> Iterator[list[Any]]:
    result = run.record["result"]
    metric = result.get("metric") or {}
    before = [run.name, line.label, line.workers, run.seed, run.record["status"]]
    after = [*(result.get(key) for key in RUN), metric.get("name"), metric.get("value")]
    for rank in run.record["workers"]:
        own = rank.get("container") or {}
        used = [*(rank.get(key) for key in RANK), *(own.get(key) for key in CONTAINER)]
        yield [*before, *used, *after]
