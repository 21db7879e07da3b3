"""Charts against the number of workers."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.report.charts.base import Chart, ChartData
from paceline.report.charts.marks import (
    LABEL,
    NEUTRAL,
    PLAIN_X,
    Row,
    Spec,
    cores_line,
    dashed,
    end_labels,
    faint,
    level,
    only,
    quantity,
    ranged,
    tips,
    to_the_right,
)

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


INTERVALS = ("speedup_serial", "speedup", "efficiency")  # their bars are 95% intervals
# most lines end near the top of these charts: their names make room downwards
TOP = (*INTERVALS, "accuracy", "metric")
PANELS = "speedup_serial"  # small multiples: one panel per series
PANEL_HEIGHT = 150
BEYOND = 0.3  # bars may reach beyond all means by this share of their span
PLANS = (
    _Plan(
        "speedup_serial",
        "Speed",
        "times as fast as serial, one thread",
        "One panel per strategy; grey lines are the other strategies. The dashed line is ideal: P"
        " workers are P times as fast. Bars are 95% intervals. Hollow points are oversubscribed.",
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
    return [
        _panels(data, plan) if plan.key == PANELS else _chart(data, plan)
        for plan in PLANS
        if _varies(data, plan.key)
    ]


def _varies(data: ChartData, key: str) -> bool:
    return len({r["workers"] for r in data.known(key)}) > 1


def _workers_axis(data: ChartData, field: str) -> Spec:
    low, high = min(data.workers), max(data.workers)
    x = quantity(field, "workers", domain=[low - 0.4, high + 0.4], nice=False)
    x["axis"] = {"values": data.workers, "format": "d", "grid": False}
    return x


def _domain(data: ChartData, plan: _Plan) -> list[float]:
    """Return a range that holds every mean, and the bars as far as there is room."""
    rows, name = data.known(plan.key), plan.key
    means = [r[name] for r in rows]
    if plan.law == IDEAL:  # the dashed line may leave the picture; no mean may
        means += [0.0, 1.0, min(max(data.workers), data.study.cores)]
    means += [0.0] if plan.zero else []
    low, high = min(means), max(means)
    room = BEYOND * (high - low) or 0.05 * abs(high) or 1.0
    lows, highs = ([r[f"{name}_{end}"] for r in rows] for end in ("low", "high"))
    bottom = low if low == 0 else max(min(lows) - 0.05 * room, low - room)
    return [bottom, min(max(highs) + 0.15 * room, high + room)]


def _tooltip(name: str, title: str, form: str) -> list[Spec]:
    bars = ("95% from", "95% to") if name in INTERVALS else ("lowest", "highest")
    return tips(
        ("series", "setting", ""),
        ("workers", "workers", ""),
        (name, title, form),
        (f"{name}_low", bars[0], form),
        (f"{name}_high", bars[1], form),
        ("runs", "runs", ""),
        ("oversubscribed", "oversubscribed", ""),
    )


def _chart(data: ChartData, plan: _Plan) -> Chart:
    name, column = plan.key, data.column(plan.key)
    axis = plan.axis or f"{data.score} after training"
    x, y = _workers_axis(data, "x"), quantity(name, axis, column.format)
    bottom, top = _domain(data, plan)
    y["scale"] = {"domain": [bottom, top], "nice": False, "zero": False}
    title = column.heading
    if name in ("time_to_accuracy_s", "steps_to_accuracy") and data.study.target is not None:
        title += f" of {100 * data.study.target:g}%"
    colour = data.colour()
    here = only(name)
    layers = [
        *cores_line(data.study.cores, max(data.workers)),
        *_law(data, plan.law),
        faint(name, x, y),
        *ranged(here, x, y, colour, data.shape(), _tooltip(name, title, column.format)),
        to_the_right(here, x, y, colour),
        end_labels(
            here["transform"][0]["filter"],
            "workers",
            y,
            top - bottom,
            colour,
            name in TOP,
        ),
    ]
    spec = {**data.spec(layers), "padding": {"left": 5, "top": 5, "bottom": 5, "right": LABEL}}
    return Chart(name, plan.section, title, plan.note, "lines", spec, own_legend=True)


def _panels(data: ChartData, plan: _Plan) -> Chart:
    """Return one small panel per series, each with serial's and the ideal line."""
    name, column = plan.key, data.column(plan.key)
    high, domain = max(data.workers), _domain(data, plan)
    x, y = _workers_axis(data, "workers"), quantity(name, plan.axis, column.format)
    y["scale"] = {"domain": domain, "nice": False}
    y["axis"] = {**y["axis"], "tickCount": 4, "title": "times as fast"}
    others: list[Row] = [
        {"series": r["series"], "p": r["workers"], "v": r[name]} for r in data.known(name)
    ]
    value: Spec = {"field": "v", "type": "quantitative"}
    end = min(float(high), domain[1])
    texts = [
        {"p": end, "v": end, "text": "ideal"},
        *([{"p": high, "v": 1.0, "text": "serial"}] if high > 1 else []),
    ]
    layers = [
        *cores_line(data.study.cores, high),
        *_law(data, plan.law),
        level(1.0),
        {
            "data": {"values": others},
            "mark": {"type": "line", "strokeWidth": 1, "opacity": 0.25, "color": NEUTRAL},
            "encoding": {"x": {**PLAIN_X}, "y": value, "detail": {"field": "series"}},
        },
        *ranged(
            {}, x, y, data.colour(), data.shape(), _tooltip(name, column.heading, column.format)
        ),
        {
            "data": {"values": texts},
            "mark": {"type": "text", "align": "right", "dy": -6, "fontSize": 10, "color": NEUTRAL},
            "encoding": {"x": {**PLAIN_X}, "y": value, "text": {"field": "text"}},
        },
    ]
    order = [s for s in data.series if not s.startswith("serial")]
    shown = f"{only(name)['transform'][0]['filter']} && indexof(datum.series, 'serial') != 0"
    header = {"title": None, "labelFontWeight": "bold", "labelLimit": 210, "labelFontSize": 12}
    spec: Spec = {
        "params": data.params(),
        "transform": [{"filter": shown}],
        "facet": {"field": "series", "type": "nominal", "sort": order, "header": header},
        "columns": 4,
        "spec": {"width": 200, "height": PANEL_HEIGHT, "layer": layers},
    }
    title = column.heading
    return Chart(name, plan.section, title, plan.note, "lines", spec, own_legend=True, wide=True)


def _law(data: ChartData, law: str) -> list[Spec]:
    low, high = min(data.workers), max(data.workers)
    if law == IDEAL:
        return [dashed([{"p": p, "v": p} for p in (low, high)])]
    serial = next((r["steps_to_accuracy"] for r in data.lines if r["series"] == "serial"), None)
    if law != ONE_OVER_P or serial is None:
        return []
    grid = [low + (high - low) * i / 40 for i in range(41)]
    return [dashed([{"p": p, "v": serial / p} for p in grid])]
