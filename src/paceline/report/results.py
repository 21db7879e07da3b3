"""`results.csv`: one row per run."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.record.writer import write_text
from paceline.report.judge import own_speedup, serial_speedup, speed
from paceline.report.lines import Line, RunRecord, Study

RESULT = (
    "test_accuracy",
    "test_loss",
    "train_loss",
    "steps",
    "samples",
    "train_s",
    "wall_s",
    "samples_per_s",
    "time_to_accuracy_s",
    "steps_to_accuracy",
)
WORKER = (
    "compute_s",
    "encode_s",
    "decode_s",
    "sync_s",
    "idle_s",
    "payload_sent_bytes",
    "net_sent_bytes",
    "memory_sent_bytes",
    "cpu_percent",
    "rss_peak_bytes",
)


def write_results(study: Study, path: Path) -> None:
    """Write the results of every run, completed or not."""
    names, rows = run_table(study)
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(names)
    writer.writerows(rows)
    write_text(path, file.getvalue())


def run_table(study: Study) -> tuple[list[str], list[list[Any]]]:
    """Return the headings and the rows of `results.csv`: one row per run, completed or not."""
    varied = dict.fromkeys(k for line in study.lines for k in line.varied)
    options = [k for k in varied if k not in ("strategy", "threads")]
    lines = [*study.lines, *study.profiled]
    rows = [_row(study, line, run, options) for line in lines for run in line.runs]
    return [name for name, _ in rows[0]], [[value for _, value in row] for row in rows]


def _row(study: Study, line: Line, run: RunRecord, options: list[str]) -> list[tuple[str, Any]]:
    """Return (name, value) pairs: an axis such as `steps` may have the name of a result."""
    alone = Line(line.label, line.workers, line.varied, [run])
    own, serial = own_speedup(study, alone), serial_speedup(study, alone)
    config, result = run.record["config"], run.record["result"]
    metric, privacy = result.get("metric") or {}, run.record.get("privacy") or {}
    means = [(key, alone.over_workers(_field(key))) for key in WORKER]
    return [
        ("run", run.name),
        ("label", line.label),
        ("strategy", config.get("strategy")),
        ("workers", line.workers),
        ("threads", config.get("threads")),
        *((option, line.varied.get(option, "")) for option in options),
        ("seed", run.seed),
        ("status", run.record["status"]),
        ("oversubscribed", bool(config.get("oversubscribed"))),
        *((key, result[key]) for key in RESULT),
        ("metric", metric.get("name")),
        ("metric_value", metric.get("value")),
        ("epsilon", privacy.get("epsilon")),
        ("speedup", own.mean if own else ""),
        ("speedup_serial", serial.mean if serial else ""),
        ("setting_against_serial", _against_serial(study, line)),
        *_estimate(study, line),
        *((f"{key}_mean", mean.mean if mean else "") for key, mean in means),
        ("error", run.record["error"] or ""),
    ]


def _against_serial(study: Study, line: Line) -> str:
    """Return the verdict on a setting's speed in a few words."""
    found = speed(study, line, study.serial(line)) if line.strategy != "serial" else None
    if found is None:
        return ""
    verdict = "faster" if found.lower else "slower" if found.higher else "not told apart"
    return verdict + found.seen


def _estimate(study: Study, line: Line) -> list[tuple[str, Any]]:
    """Return the setting's estimated speed against serial, with its interval."""
    found = serial_speedup(study, line) if line is not study.serial(line) else None
    ends = (found.low, found.high) if found is not None and found.n > 1 else ("", "")
    return [
        ("setting_speedup", "" if found is None else found.mean),
        ("setting_speedup_low", ends[0]),
        ("setting_speedup_high", ends[1]),
        ("confirmed", line.id in study.confirmed),
    ]


def _field(key: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda worker: worker.get(key)
