"""Charts against the number of workers."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.report.charts.base import Chart, ChartData
from paceline.report.charts.marks import Spec, cores_line, dashed, only, quantity, ranged, tips

IDEAL, ONE_OVER_P = "ideal", "1/P"


@dataclass(frozen=True)
class _Plan:
    """A chart of one column."""

    key: str
    section: str
    axis: str
    note: str
    zero: bool = False  # the axis begins at 0
    law: str = ""  # a dashed line to compare with


PLANS = (
    _Plan(
        "speedup_serial",
        "Speed",
        "times as fast as serial, one thread",
        "The dashed line is ideal: P workers are P times as fast. Hollow points are"
        " oversubscribed.",
        law=IDEAL,
    ),
    _Plan(
        "speedup",
        "Speed",
        "times as fast as one worker",
        "The training time with one worker divided by the time with P workers of the same strategy."
        " The dashed line is ideal.",
        law=IDEAL,
    ),
    _Plan(
        "efficiency",
        "Speed",
        "speedup / P",
        "100% is ideal. More workers than cores share the cores, and efficiency must fall.",
    ),
    _Plan(
        "train_s",
        "Speed",
        "seconds",
        "The time leaves out start-up, loading and evaluation.",
        zero=True,
    ),
    _Plan("metric", "Accuracy", "", "The bars show the range over the seeds."),
    _Plan(
        "accuracy",
        "Accuracy",
        "accuracy after training",
        "The bars show the range over the seeds.",
    ),
    _Plan(
        "time_to_accuracy_s",
        "Accuracy",
        "seconds of training",
        "The chart shows the settings that reached the target in every run.",
        zero=True,
    ),
    _Plan(
        "steps_to_accuracy",
        "Accuracy",
        "steps",
        "The dashed line is serial's number of steps divided by P. It holds where P gradients"
        " computed at once are worth P steps.",
        zero=True,
        law=ONE_OVER_P,
    ),
    _Plan(
        "sent_bytes",
        "Cost",
        "bytes per worker and step",
        "This is the payload that all workers and servers send during training, divided by the"
        " workers' steps.",
        zero=True,
    ),
    _Plan(
        "sync_ms",
        "Cost",
        "milliseconds in one step",
        "This is the time that a worker spends on the exchange, without waiting for others.",
        zero=True,
    ),
    _Plan(
        "staleness",
        "Drift",
        "updates by others that a gradient missed, mean",
        "Only strategies that let workers run ahead have staleness.",
        zero=True,
    ),
    _Plan(
        "distance",
        "Drift",
        "farthest from the mean, relative to its length",
        "The distance is measured at evaluations: it is 0 where one follows an averaging. Only"
        " strategies whose replicas may differ have it.",
        zero=True,
    ),
)


def scaling_charts(data: ChartData) -> list[Chart]:
    """Return one chart per column that is known for several numbers of workers."""
    if not data.several_counts:
        return []
    return [_chart(data, plan) for plan in PLANS if _varies(data, plan.key)]


def _varies(data: ChartData, key: str) -> bool:
    return len({r["workers"] for r in data.known(key)}) > 1


def _chart(data: ChartData, plan: _Plan) -> Chart:
    name, column = plan.key, data.column(plan.key)
    low, high = min(data.workers), max(data.workers)
    x = quantity("x", "workers", domain=[low - 0.4, high + 0.4], nice=False)
    x["axis"] = {"values": data.workers, "format": "d", "grid": False}
    axis = plan.axis or f"{data.score} after training"
    y = quantity(name, axis, column.format, zero=plan.zero)
    if plan.law == IDEAL:  # the dashed line may leave the picture; no measured point may
        most = max(r[f"{name}_high"] for r in data.known(name))
        y["scale"] = {"domain": [0, 1.15 * max(most, min(high, data.study.cores))]}
    title = column.heading
    if name in ("time_to_accuracy_s", "steps_to_accuracy") and data.study.target is not None:
        title += f" of {100 * data.study.target:g}%"
    tooltip = tips(
        ("series", "setting", ""),
        ("workers", "workers", ""),
        (name, title, column.format),
        (f"{name}_low", "lowest", column.format),
        (f"{name}_high", "highest", column.format),
        ("runs", "runs", ""),
        ("oversubscribed", "oversubscribed", ""),
    )
    layers = [
        *cores_line(data.study.cores, high),
        *_law(data, plan.law),
        *ranged(only(name), x, y, data.colour(), data.shape(), tooltip),
    ]
    return Chart(name, plan.section, title, plan.note, "lines", data.spec(layers))


def _law(data: ChartData, law: str) -> list[Spec]:
    low, high = min(data.workers), max(data.workers)
    if law == IDEAL:
        return [dashed([{"p": p, "v": p} for p in (low, high)])]
    serial = next((r["steps_to_accuracy"] for r in data.lines if r["series"] == "serial"), None)
    if law != ONE_OVER_P or serial is None:
        return []
    grid = [low + (high - low) * i / 40 for i in range(41)]
    return [dashed([{"p": p, "v": serial / p} for p in grid])]
