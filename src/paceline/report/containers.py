"""What the container of each rank used while it trained: one row per setting and rank."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any

from paceline.record.formats import CONTAINER
from paceline.report.lines import Line, Study
from paceline.report.tables import Row

MEANING = (
    "What the whole container of each rank used from the first step of training to the last, with"
    " all that runs in it (Spark's executor, too): the counters of its cgroup and of its network"
    " interfaces, which are those of `docker stats`. Ranks in one container read the same counters."
    " Memory is that at the end of training, without the inactive part of the page cache."
)

OF_CONTAINERS = (  # the columns of a table after the CPU, in bytes
    "memory_bytes",
    "memory_peak_bytes",
    "net_received_bytes",
    "net_sent_bytes",
    "block_read_bytes",
    "block_write_bytes",
)


def container_table(study: Study) -> list[Row]:
    """Return one row per setting and rank, with means over the runs; empty outside containers."""
    return [row for line in study.lines if line.completed for row in _rows(line)]


def _rows(line: Line) -> Iterable[Row]:
    runs = [run.record["workers"] for run in line.completed]
    ranks: dict[int, list[dict[str, Any]]] = {}
    for workers in runs:
        for worker in workers:
            if worker.get("container"):
                ranks.setdefault(int(worker["rank"]), []).append(worker)
    for rank, found in sorted(ranks.items()):
        hosts = sorted({str(worker["host"]) for worker in found})
        yield {
            "setting": line.label,
            "workers": line.workers,
            "role": found[0]["role"],
            "rank": rank,
            "host": ", ".join(hosts),
            "runs": len(found),
            **{key: _mean(worker["container"].get(key) for worker in found) for key in CONTAINER},
        }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
