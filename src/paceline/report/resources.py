"""What each setting used: CPU, memory, network, disk, shared memory; of workers and of servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.report.lines import Line, Study
from paceline.report.score import score_of
from paceline.report.tables import Row
from paceline.report.words import listed

USED = (
    "cpu_percent",
    "rss_peak_bytes",
    "pss_peak_bytes",
    "net_received_bytes",
    "net_sent_bytes",
    "disk_read_bytes",
    "disk_write_bytes",
    "memory_received_bytes",
    "memory_sent_bytes",
)
HARDLY = 1e-3  # of the payload: less on the network is not the exchange, but ranks that meet


def resource_table(study: Study) -> list[Row]:
    """Return one row per setting for its workers, and one for its servers where it has some.

    The values are means: over the ranks of the role in a run, then over the runs. Bytes are those
    of one rank in the training phase. A value is None where it was not measured, and
    `time_to_accuracy_s` where not every run reached the target; `reached` counts the runs.
    """
    rows = []
    for line in study.lines:
        if line.completed:
            rows.append(_row(study, line, "worker", line.workers))
            if line.servers:
                rows.append(_row(study, line, "server", line.servers))
    return rows


def _row(study: Study, line: Line, role: str, ranks: int) -> Row:
    reached, runs = line.reached
    time_to, accuracy = line.time_to_accuracy, line.accuracy
    score = score_of(study)
    metric = None if score.is_accuracy else score.spread(line)
    return {
        "setting": line.label,
        "workers": line.workers,
        "role": role,
        "ranks": ranks,
        "runs": runs,
        **{key: _mean(line, key, role) for key in USED},
        "train_s": line.train_s.mean if line.train_s else None,
        "reached": reached,
        "time_to_accuracy_s": time_to.mean if time_to else None,
        "accuracy": accuracy.mean if accuracy else None,
        "metric": metric.mean if metric else None,
    }


def _mean(line: Line, key: str, role: str) -> float | None:
    found = line.over_workers(_field(key), role)
    return found.mean if found else None


def _field(key: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda rank: rank.get(key)


def why_no_network(study: Study) -> str:
    """Return why the network's columns and chart are empty, in one sentence; "" if they are not."""
    several = [x for x in study.lines if x.sent_per_step()]
    quiet = {x.id: net for x in several if (net := _network_share(x)) is not None and net <= HARDLY}
    if not quiet:
        return ""
    who = "The workers" if len(quiet) == len(several) else f"The workers of {listed([*quiet])}"
    passed = "hardly anything" if any(quiet.values()) else "nothing"
    return (
        f"{who} exchanged through shared memory, so {passed} passed the network: see `through"
        " memory`."
    )


def _network_share(line: Line) -> float | None:
    """Return the bytes that were sent over the network, as a share of the payload."""
    sent, net = line.sent_per_step(), line.bytes_per_step("net_sent_bytes")
    return net.mean / sent if sent and net else None


def without_messages(study: Study) -> list[str]:
    """Return the settings with several workers that sent no message during their steps."""
    return [x.id for x in study.lines if x.workers > 1 and x.sent_per_step() == 0]
