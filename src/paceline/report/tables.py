"""The tables behind the charts and comparisons: plain rows, computed once from a study's lines."""

from __future__ import annotations

import itertools
import math
from typing import Any

from paceline.record.evaluations import deciding
from paceline.record.reader import Event
from paceline.report.columns import BY_KEY, compared_columns, measured
from paceline.report.judge import SPEED, Judge, Quantity, Verdict, judge
from paceline.report.lines import Line, RunRecord, Spread, Study
from paceline.report.score import UNKNOWN_POINTS, score_of
from paceline.request.naming import label_of

Row = dict[str, Any]
MOST_POINTS = 60  # of one worker's resources over time
DODGE = 0.035  # between series at the same number of workers, so that their bars do not overlap
SPEEDS = ("train_s", "samples_per_s", "speedup_serial")  # one verdict for all of them


def line_rows(study: Study) -> list[Row]:
    """Return one row per setting: the mean of every column and the range over the runs."""
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
        }
        for name, spread in measured(study, line).items():
            row |= _spread(name, spread)
        rows.append(row)
    return rows


def verdicts(study: Study) -> dict[str, list[str]]:
    """Return the verdicts on every pair of settings, by column.

    A column has one string per row of `line_rows`, with one letter (see `letter`) for each row
    before it. Columns that the page does not compare settings by are left out.
    """
    lines = [line for line in study.lines if line.completed]
    values: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        for run in line.completed:
            alone = Line(line.label, line.workers, line.varied, [run])
            for name, spread in measured(study, alone).items():
                if spread is not None:
                    values.setdefault(name, {}).setdefault(line.id, []).append(spread.mean)
    shown = {name for name, *_ in compared_columns(study)}
    found: dict[str, list[str]] = {}
    for name, own in values.items():
        column = _column(study, name, own)
        same = next((found[n] for n in SPEEDS if n in found), None) if column is SPEED else None
        if same is not None:
            found[name] = same
        elif name in shown:
            judged = judge(SPEED, study) if column is SPEED else Judge(column, study)
            found[name] = [
                "".join(_letter_of(judged(a, b)) for b in lines[:i]) for i, a in enumerate(lines)
            ]
    return found


def _column(study: Study, name: str, values: dict[str, list[float]]) -> Quantity:
    score = score_of(study)
    if name in SPEEDS:
        return SPEED
    if name == "metric" or (name == "accuracy" and score.is_accuracy):
        return score.quantity

    def whole(line: Line) -> list[float]:
        found = values.get(line.id, [])
        return found if len(found) == len(line.completed) else []

    if name != "accuracy" and all(v > 0 for own in values.values() for v in own):
        return Quantity(name, whole)
    return Quantity(
        name, whole, relative=False, once=UNKNOWN_POINTS if name == "accuracy" else math.inf
    )


def _letter_of(verdict: Verdict | None) -> str:
    return letter(verdict) if verdict is not None else "-"


def letter(verdict: Verdict) -> str:
    """Return a verdict as a letter, for the page.

    They differ: `t` by a t-test; `o` in the one run of each.
    No difference was shown: `n` within noise; `1` one run each.
    """
    if verdict.differs:
        return "o" if verdict.runs < 2 else "t"
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
    """Return one row per evaluation of every run."""
    rows = []
    for line in study.lines:
        for run in line.completed:
            if not run.events:
                continue
            seen = _samples_by_step(run.events)
            rows += [
                {
                    "series": line.label,
                    "workers": line.workers,
                    "run": run.name,
                    "train_s": _round(e.get("train_s")),
                    "samples": seen.get(e["step"]),
                    "accuracy": _round(e.get("accuracy")),
                    "metric": _round((e.get("metric") or {}).get("value")),
                    "loss": _round(e.get("loss")),
                    "on": e.get("on", "test"),
                }
                for e in deciding(run.events[0])
            ]
    return rows


def _samples_by_step(events: list[list[Event]]) -> dict[int, int]:
    """Return the number of samples that all workers together had seen after each step."""
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
    """Return the parts of each worker's training time, as means over the runs of a setting."""
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
    """Return CPU, memory, network and disk of each worker over time, in a setting's first run."""
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


def along(axis: str) -> tuple[str, ...]:
    """Return the columns that are shown along an axis of the grid."""
    costs = ("wall_s", "cpu_s", "cpu_system_s") if axis == "data_share" else ()
    return ("metric", "accuracy", "train_s", "time_to_accuracy_s", *costs)


def axis_rows(study: Study, axis: str) -> list[Row]:
    """Return one row per setting that has a value on a numeric axis of the grid.

    A series is made of the settings that agree in everything else.
    """
    rows = []
    for line in study.lines:
        value = number(line.varied.get(axis))
        if value is None or not line.completed:
            continue
        others = label_of({k: v for k, v in line.varied.items() if k != axis})
        name = others + (f" x {line.workers}" if line.workers > 1 else "")
        row: Row = {"series": name, "full": line.label, "value": value, "samples": line.samples}
        for key in along(axis):
            row |= _spread(key, BY_KEY[key].measure(study, line))
        rows.append(row)
    return rows


def numeric_axes(study: Study) -> list[str]:
    """Return the axes of the grid, other than the workers, whose values are numbers."""
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


def _round(value: float | None) -> float | None:
    """Round to five digits: more would be noise, and would make the page larger."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
