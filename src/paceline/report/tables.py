"""The tables behind every chart and every comparison: plain rows, computed once from the lines of a
study.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.record.reader import Event
from paceline.record.writer import write_text
from paceline.report.lines import Line, RunRecord, Spread, Study
from paceline.report.noise import Judge, Known, Quantity, Verdict, speed
from paceline.report.score import UNKNOWN_POINTS, score_of
from paceline.request.config import label_of

Row = dict[str, Any]
MOST_POINTS = 60  # of one worker's resources over time
DODGE = (
    0.035  # between series at the same number of workers, so that error bars do not hide each other
)

RESULT_COLUMNS = (
    "test_accuracy", "test_loss", "train_loss", "steps", "samples", "train_s", "wall_s", "samples_per_s",
    "time_to_accuracy_s", "steps_to_accuracy",
)  # fmt: skip


def line_rows(study: Study) -> list[Row]:
    """One row per setting: everything that is compared, as means with their ranges."""
    rows = []
    series = study.series
    for line in study.lines:
        if not line.completed:
            continue
        place = series.index(line.label) - (len(series) - 1) / 2
        row: Row = {
            "id": line.id,
            "series": line.label,
            "strategy": line.strategy,
            "workers": line.workers,
            "x": round(line.workers + DODGE * place * min(1.0, 12 / len(series)), 4),
            "runs": len(line.completed),
            "oversubscribed": line.oversubscribed,
            "reached": "{} of {}".format(*line.reached),
        }
        for name, spread in measured(study, line).items():
            row |= _spread(name, spread)
        rows.append(row)
    return rows


def measured(study: Study, line: Line) -> dict[str, Spread | None]:
    """What there is to compare about a setting."""
    return {
        "train_s": line.train_s,
        "samples_per_s": line.result("samples_per_s"),
        "metric": None if score_of(study).is_accuracy else score_of(study).spread(line),
        "accuracy": line.accuracy,
        "test_loss": line.result("test_loss"),
        "epsilon": Spread.of(
            [r.record["privacy"]["epsilon"] for r in line.completed if r.record.get("privacy")]
        ),
        "speedup": study.own_speedup(line),
        "speedup_serial": study.serial_speedup(line),
        "efficiency": study.efficiency(line),
        "time_to_accuracy_s": line.time_to_accuracy,
        "steps_to_accuracy": line.steps_to_accuracy,
        "compute_ms": line.per_step("compute_s", 1e3),
        "codec_ms": line.over_workers(_codec_ms),
        "sync_ms": line.per_step("sync_s", 1e3),
        "idle_ms": line.per_step("idle_s", 1e3),
        "sent_bytes": line.per_step("payload_sent_bytes"),
        "net_sent_bytes": line.per_step("net_sent_bytes"),
        "memory_sent_bytes": line.per_step("memory_sent_bytes"),
        "cpu_percent": line.over_workers(lambda w: w.get("cpu_percent")),
        "rss_peak_bytes": line.over_workers(lambda w: w.get("rss_peak_bytes")),
        "pss_peak_bytes": line.over_workers(lambda w: w.get("pss_peak_bytes")),
        "disk_write_bytes": line.over_workers(lambda w: w.get("disk_write_bytes")),
        "staleness": line.over_workers(lambda w: w.get("staleness_mean")),
        "distance": line.over_workers(lambda w: w.get("replica_distance_max")),
    }


def _codec_ms(worker: Row) -> float | None:
    """Encoding and decoding in one step; none where nothing was compressed."""
    spent = (worker.get("encode_s") or 0.0) + (worker.get("decode_s") or 0.0)
    return 1e3 * spent / worker["steps"] if spent and worker["steps"] else None


TIMES = ("train_s", "samples_per_s", "speedup_serial")  # one worker of any strategy repeats serial


def verdicts(study: Study) -> dict[str, list[str]]:
    """Every pair of settings in every column: for each row of `line_rows` a letter per row before
    it (see `letter`).
    """
    lines = [line for line in study.lines if line.completed]
    values: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        for run in line.completed:
            alone = Line(line.label, line.workers, line.varied, [run])
            for name, spread in measured(study, alone).items():
                if spread is not None:
                    values.setdefault(name, {}).setdefault(line.id, []).append(spread.mean)
    found = {}
    for name, own in values.items():
        judge = Judge(_column(study, name, own), study)
        known = [judge.known(x) for x in lines]
        found[name] = [
            "".join(_letter_of(judge, a, b) for b in known[:i]) for i, a in enumerate(known)
        ]
    return found


def _column(study: Study, name: str, values: dict[str, list[float]]) -> Quantity:
    score = score_of(study)
    if name == "metric" or (name == "accuracy" and score.is_accuracy):
        return score.quantity

    def whole(line: Line) -> list[float]:
        found = values.get(line.id, [])
        return found if len(found) == len(line.completed) else []

    if name != "accuracy" and all(v > 0 for own in values.values() for v in own):
        return Quantity(name, whole, alone_is_serial=name in TIMES)
    return Quantity(
        name, whole, relative=False, once=UNKNOWN_POINTS if name == "accuracy" else math.inf
    )


def _letter_of(judge: Judge, a: Known | None, b: Known | None) -> str:
    return letter(judge.compare(a, b)) if a and b else "-"


def letter(verdict: Verdict) -> str:
    """`r` told, in all rounds; `t` told by a t-test; `o` told, seen once; `n` within noise; `1` one
    run: cannot be told.
    """
    if verdict.told:
        return "o" if verdict.runs < 2 else "r" if verdict.split else "t"
    return "1" if verdict.runs < 2 else "n"


def _spread(name: str, spread: Spread | None) -> Row:
    if spread is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {
        name: _round(spread.mean),
        f"{name}_low": _round(spread.low),
        f"{name}_high": _round(spread.high),
    }


def curve_rows(study: Study) -> list[Row]:
    """Accuracy and loss over training time and over samples, of every run."""
    rows = []
    for line in study.lines:
        for run in line.completed:
            if not run.events:
                continue
            seen = _samples_by_step(run.events)
            for e in run.events[0]:
                if e["kind"] == "evaluation":
                    rows.append(
                        {
                            "series": line.label,
                            "workers": line.workers,
                            "run": run.name,
                            "train_s": _round(e.get("train_s")),
                            "samples": seen.get(e["step"]),
                            "accuracy": _round(e.get("accuracy")),
                            "metric": _round((e.get("metric") or {}).get("value")),
                            "loss": _round(e.get("loss")),
                        }
                    )
    return rows


def _samples_by_step(events: list[list[Event]]) -> dict[int, int]:
    """How many samples all workers together had seen after so many steps."""
    new: dict[int, float] = {}
    for own in events:
        for e in own:
            if e["kind"] == "step":
                new[e["step"]] = new.get(e["step"], 0) + e["n"]
    total, seen = 0.0, {0: 0}
    for step in sorted(new):
        total += new[step]
        seen[step] = round(total)
    return seen


def worker_rows(study: Study) -> list[Row]:
    """Where each worker's time went: mean over the runs of a setting."""
    rows = []
    for line in study.lines:
        ranks: dict[tuple[int, str], list[Row]] = {}
        for run in line.completed:
            for w in run.record["workers"]:
                ranks.setdefault((w["rank"], w["role"]), []).append(w)
        for (rank, role), found in sorted(ranks.items()):
            for place, part in enumerate(("compute", "sync", "idle")):
                values = [w[f"{part}_s"] for w in found if w.get(f"{part}_s") is not None]
                if values and role == "worker":
                    mean = _round(sum(values) / len(values))
                    rows.append(
                        {
                            "line": line.id,
                            "worker": f"{role} {rank}",
                            "part": part,
                            "place": place,
                            "seconds": mean,
                        }
                    )
    return rows


def resource_rows(study: Study) -> list[Row]:
    """CPU, memory, network and disk of each worker over time, of the first run of each setting."""
    rows = []
    for line in study.lines:
        if line.completed:
            rows += [{"line": line.id, **row} for row in _resources(line.completed[0])]
    return rows


def _resources(run: RunRecord) -> list[Row]:
    rows = []
    for own in run.events:
        samples = [e for e in own if e["kind"] == "sample"]
        role = next((e.get("role") for e in own if e["kind"] == "start"), "worker")
        every = max(1, math.ceil(len(samples) / MOST_POINTS))
        kept = samples[::every]
        for before, now in itertools.pairwise(kept):
            span = now["elapsed_s"] - before["elapsed_s"]
            if span <= 0:
                continue

            def rate(
                *keys: str, before: Event = before, now: Event = now, span: float = span
            ) -> float | None:
                if any(now.get(k) is None or before.get(k) is None for k in keys):
                    return None
                return float(sum(now[k] - before[k] for k in keys)) / span

            cpu, net = (
                rate("cpu_user_s", "cpu_system_s"),
                rate("net_sent_bytes", "net_received_bytes"),
            )
            disk = rate("disk_read_bytes", "disk_write_bytes")
            rows.append(
                {
                    "worker": f"{role} {now['rank']}",
                    "t": _round(now["elapsed_s"]),
                    "cpu_percent": None if cpu is None else round(100 * cpu, 1),
                    "memory_mb": round(now["rss_bytes"] / 1e6, 1),
                    "net_mb_per_s": None if net is None else round(net / 1e6, 3),
                    "disk_mb_per_s": None if disk is None else round(disk / 1e6, 3),
                }
            )
    return rows


def axis_rows(study: Study, axis: str) -> list[Row]:
    """Along one numeric axis of the grid: one row per setting, in series of what else differs."""
    rows = []
    for line in study.lines:
        value = number(line.varied.get(axis))
        if value is None or not line.completed:
            continue
        others = label_of({k: v for k, v in line.varied.items() if k != axis})
        name = others + (f" x {line.workers}" if line.workers > 1 else "")
        row: Row = {"series": name, "full": line.label, "value": value, "samples": line.samples}
        for key, spread in (
            ("metric", None if score_of(study).is_accuracy else score_of(study).spread(line)),
            ("accuracy", line.accuracy),
            ("train_s", line.train_s),
            ("time_to_accuracy_s", line.time_to_accuracy),
        ):
            row |= _spread(key, spread)
        rows.append(row)
    return rows


def numeric_axes(study: Study) -> list[str]:
    """Axes of the grid, other than the workers, that have numbers as values."""
    names = list(
        dict.fromkeys(
            k for line in study.lines for k in line.varied if k not in ("strategy", "threads")
        )
    )
    found = []
    for name in names:
        values = {line.varied[name] for line in study.lines if name in line.varied}
        if len(values) > 1 and all(number(v) is not None for v in values):
            found.append(name)
    return found


def number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def write_results(study: Study, path: Path) -> None:
    """`results.csv`: one row per run."""
    varied = list(dict.fromkeys(k for line in study.lines for k in line.varied if k != "strategy"))
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    head = [
        "run",
        "label",
        "strategy",
        "workers",
        "threads",
        *(v for v in varied if v != "threads"),
        "seed",
        "status",
    ]
    worker = [
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
    ]
    writer.writerow(
        [
            *head,
            "oversubscribed",
            *RESULT_COLUMNS,
            "metric",
            "metric_value",
            "epsilon",
            "speedup",
            "speedup_serial",
            "setting_against_serial",
            *(f"{w}_mean" for w in worker),
            "error",
        ]
    )
    for line in study.lines:
        against = against_serial(study, line)
        for run in line.runs:
            alone = Line(line.label, line.workers, line.varied, [run])
            own, serial = study.own_speedup(alone), study.serial_speedup(alone)
            config, result = run.record["config"], run.record["result"]
            means = [alone.over_workers(field_of(key)) for key in worker]
            writer.writerow(
                [
                    run.name, line.label, config.get("strategy"), line.workers, config.get("threads"),
                    *(line.varied.get(v, "") for v in varied if v != "threads"), run.seed, run.record["status"],
                    bool(config.get("oversubscribed")), *(result[c] for c in RESULT_COLUMNS),
                    *((result.get("metric") or {}).get(k) for k in ("name", "value")),
                    (run.record.get("privacy") or {}).get("epsilon"),
                    own.mean if own else "", serial.mean if serial else "", against,
                    *(m.mean if m else "" for m in means), run.record["error"] or "",
                ]
            )  # fmt: skip
    write_text(path, file.getvalue())


def against_serial(study: Study, line: Line) -> str:
    """The verdict on a setting's speed, in a word or three."""
    found = speed(study, line, study.serial(line)) if line.strategy != "serial" else None
    if found is None:
        return ""
    return (
        "faster" if found.lower else "slower" if found.higher else "not told apart"
    ) + found.seen


def field_of(key: str) -> Callable[[Row], float | None]:
    return lambda row: row.get(key)


def _round(value: float | None) -> float | None:
    """Five figures: more is noise, and the page is to be small."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
