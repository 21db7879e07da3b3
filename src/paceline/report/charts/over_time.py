"""Charts over the training time: the score and the loss, as means with the range of the runs."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from paceline.report.charts.base import Chart, ChartData
from paceline.report.charts.marks import (
    CHOSEN_WORKERS,
    LABEL,
    Row,
    Spec,
    end_labels,
    level,
    quantity,
    tips,
)

SECONDS = "seconds of training"
SAMPLES = "samples seen by all workers"
Y = ("accuracy", "metric", "loss")
X = ("train_s", "samples")


def curve_charts(data: ChartData) -> list[Chart]:
    """Return the curves that the runs have evaluations for."""
    bands = data.tables["bands"] = band_rows(data.tables["curves"])
    held = {row.get("on", "test") for row in data.tables["curves"]} == {"validation"}
    accuracy, loss = ("Validation accuracy", "Validation") if held else ("Accuracy", "Test")
    wanted = [
        ("accuracy", "train_s", f"{accuracy} over training time", SECONDS, ".1%"),
        ("accuracy", "samples", f"{accuracy} over samples", SAMPLES, ".1%"),
        ("loss", "train_s", f"{loss} loss over training time", SECONDS, ".3f"),
    ]
    if data.score != "accuracy":
        wanted.insert(0, ("metric", "train_s", f"{data.score} over training time", SECONDS, ".4g"))
    return [
        _curve(data, name, over, title, x_title, number)
        for name, over, title, x_title, number in wanted
        if any(r[name] is not None and r[over] is not None for r in bands)
    ]


def band_rows(curves: list[Row]) -> list[Row]:
    """Return one row per setting and evaluation: the mean over its runs, the lowest and highest.

    The n-th evaluations of the runs are put together, as far as every run has one.
    """
    settings: dict[tuple[str, int], dict[str, list[Row]]] = {}
    for row in curves:
        runs = settings.setdefault((row["series"], row["workers"]), {})
        runs.setdefault(row["run"], []).append(row)
    found = []
    for (series, workers), runs in settings.items():
        for together in zip(*runs.values()):  # noqa: B905 - the shortest run ends the curve
            point: Row = {"series": series, "workers": workers, "runs": len(together)}
            for name in X:
                point[name] = _mean([r[name] for r in together])
            for name in Y:
                values = [r[name] for r in together]
                known = _mean(values) is not None
                point[name] = _mean(values)
                point[f"{name}_low"] = min(values) if known else None
                point[f"{name}_high"] = max(values) if known else None
            found.append(point)
    return found


def _mean(values: list[Any]) -> float | None:
    return None if None in values else float(f"{fmean(values):.5g}")


def _curve(data: ChartData, name: str, over: str, title: str, x_title: str, number: str) -> Chart:
    x = quantity(over, x_title, ".3s" if over == "samples" else "", zero=False)
    y = quantity(name, data.score if name == "metric" else name, number, zero=False)
    colour = data.colour()
    tooltip = tips(
        ("series", "setting", ""),
        ("workers", "workers", ""),
        ("runs", "runs", ""),
        (over, x_title, ",.4~g"),
        (name, name, number),
        (f"{name}_low", "lowest run", number),
        (f"{name}_high", "highest run", number),
    )
    here: Spec = {"transform": [{"filter": f"{CHOSEN_WORKERS} && isValid(datum['{name}'])"}]}
    line = {"type": "line", "strokeWidth": 2}
    point = {"type": "point", "filled": True, "size": 24}
    values = [r[f"{name}_{end}"] for r in data.tables["bands"] for end in ("low", "high")]
    known = [v for v in values if v is not None]
    target = data.study.target if name == "accuracy" else None
    if target is not None:
        known.append(target)
    span = max(known) - min(known) or 0.1 * abs(max(known)) or 1.0
    y["scale"] = {"domain": [min(known) - 0.03 * span, max(known) + 0.05 * span], "nice": False}
    down = name != "loss"
    of = {"field": "workers"}
    band: Spec = {
        "detail": of,
        "x": x,
        "y": {**y, "field": f"{name}_low"},
        "y2": {"field": f"{name}_high"},
        "color": colour,
    }
    layers: list[Spec] = [
        {**here, "mark": {"type": "area", "opacity": 0.18}, "encoding": band},
        {**here, "mark": line, "encoding": {"x": x, "y": y, "color": colour, "detail": of}},
        {
            **here,
            "mark": point,
            "encoding": {
                "x": x,
                "y": y,
                "color": colour,
                "shape": data.shape(),
                "tooltip": tooltip,
            },
        },
        end_labels(here["transform"][0]["filter"], over, y, 1.08 * span, colour, down),
    ]
    if target is not None:
        layers.insert(0, level(target, y["scale"]))
    note = (
        "The mean of the runs, and the range from the lowest to the highest as a band; for the"
        " number of workers chosen above, and serial."
    )
    padding = {"left": 5, "top": 5, "bottom": 5, "right": LABEL}
    spec = {**data.spec(layers, workers=True), "padding": padding}
    chart = f"{name}_over_{over}"
    return Chart(chart, "Over time", title, note, "bands", spec, own_legend=True)
