"""The columns that settings are compared by, named once for the tables, the charts and the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from paceline.report.judge import efficiency, own_speedup, serial_speedup
from paceline.report.lines import Line, Spread, Study
from paceline.report.score import score_of

Measure = Callable[[Study, Line], Spread | None]


@dataclass(frozen=True)
class Column:
    """A quantity that every setting has one value of, with a range over its runs."""

    key: str
    title: str
    unit: str  # s, ms, x, percent, bytes, or nothing: how the page writes the number
    better: str  # low, high, or nothing where neither is better
    format: str  # d3's format for tooltips
    measure: Measure
    compared: bool = True  # in the table of two settings side by side

    @property
    def heading(self) -> str:
        """The title of a chart: `Training time`."""
        return self.title[0].upper() + self.title[1:]

    @property
    def heading_with_unit(self) -> str:
        """The title of a chart whose axis has no other title: `Training time (s)`."""
        return f"{self.heading} ({self.unit})" if self.unit == "s" else self.heading


def _result(key: str) -> Measure:
    return lambda study, line: line.result(key)


def _per_step(key: str, scale: float = 1.0) -> Measure:
    return lambda study, line: line.per_step(key, scale)


def _bytes_per_step(key: str) -> Measure:
    """The bytes of all ranks per step of a worker: what servers send counts."""
    return lambda study, line: line.bytes_per_step(key)


def _of_worker(key: str) -> Measure:
    return lambda study, line: line.over_workers(lambda worker: worker.get(key))


def _of_server(key: str) -> Measure:
    return lambda study, line: line.over_workers(lambda server: server.get(key), "server")


def _cpu_s(rank: dict[str, Any]) -> float | None:
    user, system = rank.get("cpu_user_s"), rank.get("cpu_system_s")
    return None if user is None or system is None else float(user + system)


def _metric(study: Study, line: Line) -> Spread | None:
    """The metric that was asked for, unless it is the accuracy, which has its own column."""
    score = score_of(study)
    return None if score.is_accuracy else score.spread(line)


def _epsilon(study: Study, line: Line) -> Spread | None:
    records = [r.record for r in line.completed]
    return Spread.of([r["privacy"]["epsilon"] for r in records if r.get("privacy")])


def _codec_ms(worker: dict[str, Any]) -> float | None:
    """Encoding and decoding in one step; None where nothing was compressed."""
    spent = (worker.get("encode_s") or 0.0) + (worker.get("decode_s") or 0.0)
    return 1e3 * spent / worker["steps"] if spent and worker["steps"] else None


METRIC = Column("metric", "test metric", "", "high", ".4g", _metric)
COLUMNS = (
    METRIC,
    Column("train_s", "training time", "s", "low", ".2f", lambda s, line: line.train_s),
    Column("wall_s", "whole time of the run", "s", "low", ".2f", _result("wall_s"), compared=False),
    Column("samples_per_s", "samples per second", "", "high", ",.0f", _result("samples_per_s")),
    Column(
        "speedup", "speedup over one worker of the same strategy", "x", "high", ".2f",
        own_speedup, compared=False,
    ),
    Column(
        "speedup_serial", "speedup against serial", "x", "high", ".2f",
        serial_speedup,
    ),
    Column(
        "efficiency", "efficiency", "percent", "high", ".0%",
        efficiency,
    ),
    Column("accuracy", "test accuracy", "percent", "high", ".2%", lambda s, line: line.accuracy),
    Column("test_loss", "test loss", "", "low", ".3f", _result("test_loss")),
    Column("epsilon", "epsilon", "", "low", ".3g", _epsilon),
    Column(
        "time_to_accuracy_s", "time to the target accuracy", "s", "low", ".2f",
        lambda study, line: line.time_to_accuracy,
    ),
    Column(
        "steps_to_accuracy", "steps to the target accuracy", "", "low", ".0f",
        lambda study, line: line.steps_to_accuracy,
    ),
    Column("compute_ms", "computing per step", "ms", "", ".3f", _per_step("compute_s", 1e3)),
    Column(
        "codec_ms", "encoding and decoding per step", "ms", "low", ".3f",
        lambda study, line: line.over_workers(_codec_ms),
    ),
    Column("sync_ms", "exchange per step", "ms", "low", ".3f", _per_step("sync_s", 1e3)),
    Column("idle_ms", "waiting per step", "ms", "low", ".3f", _per_step("idle_s", 1e3)),
    Column(
        "sent_bytes", "bytes per worker and step", "bytes", "low", ".3s",
        _bytes_per_step("payload_sent_bytes"),
    ),
    Column(
        "net_sent_bytes", "... over the network", "bytes", "", ".3s",
        _bytes_per_step("net_sent_bytes"),
    ),
    Column(
        "memory_sent_bytes", "... through shared memory", "bytes", "", ".3s",
        _bytes_per_step("memory_sent_bytes"),
    ),
    Column(
        "cpu_s", "CPU time of all workers and servers", "s", "low", ".2f",
        lambda study, line: line.over_ranks(_cpu_s),
    ),
    Column(
        "cpu_system_s", "system time of all workers and servers", "s", "low", ".2f",
        lambda study, line: line.over_ranks(lambda rank: rank.get("cpu_system_s")),
    ),
    Column("cpu_percent", "CPU of a worker (%)", "", "", ".0f", _of_worker("cpu_percent")),
    Column(
        "server_cpu_percent", "CPU of a server (%)", "", "", ".0f", _of_server("cpu_percent")
    ),
    Column(
        "rss_peak_bytes", "peak memory of a worker", "bytes", "", ".3s",
        _of_worker("rss_peak_bytes"),
    ),
    Column(
        "pss_peak_bytes", "... shared pages divided among their users", "bytes", "", ".3s",
        _of_worker("pss_peak_bytes"),
    ),
    Column(
        "server_rss_peak_bytes", "peak memory of a server", "bytes", "", ".3s",
        _of_server("rss_peak_bytes"),
    ),
    Column("staleness", "staleness", "", "low", ".2f", _of_worker("staleness_mean")),
    Column(
        "distance", "distance between replicas", "", "low", ".2e",
        _of_worker("replica_distance_max"),
    ),
)  # fmt: skip
BY_KEY = {column.key: column for column in COLUMNS}


def column(key: str, study: Study) -> Column:
    """Return a column as this study names it: by its metric, and with servers where it has some."""
    if key == "sent_bytes" and any(line.servers for line in study.lines):
        return replace(BY_KEY[key], title=f"{BY_KEY[key].title}, servers included")
    if key != METRIC.key:
        return BY_KEY[key]
    score = score_of(study)
    better = "high" if score.higher_is_better else "low"
    return replace(METRIC, title=f"test {score.name}", better=better)


def bytes_heading(study: Study) -> str:
    """Return the heading of `sent_bytes` in a table of the page, in HTML."""
    servers = any(line.servers for line in study.lines)
    return "bytes per worker<br>and step" + (",<br>servers included" if servers else "")


def compared_columns(study: Study) -> list[tuple[str, str, str, str]]:
    """Return (key, title, unit, better) of the columns that the page compares two settings by."""
    shown = [column(c.key, study) for c in COLUMNS if c.compared]
    if score_of(study).is_accuracy:
        shown = [c for c in shown if c.key != METRIC.key]
    return [(c.key, c.title, c.unit, c.better) for c in shown]


def measured(study: Study, line: Line) -> dict[str, Spread | None]:
    """Return the value of every column for one setting."""
    return {c.key: c.measure(study, line) for c in COLUMNS}
