"""Charts over the training time: the score and the loss of each run."""

from __future__ import annotations

from paceline.report.charts.base import Chart, ChartData
from paceline.report.charts.marks import CHOSEN_WORKERS, Spec, level, quantity, tips

SECONDS = "seconds of training"
SAMPLES = "samples seen by all workers"


def curve_charts(data: ChartData) -> list[Chart]:
    """Return the curves that the runs have evaluations for."""
    wanted = [
        ("accuracy", "train_s", "Accuracy over training time", SECONDS, ".1%"),
        ("accuracy", "samples", "Accuracy over samples", SAMPLES, ".1%"),
        ("loss", "train_s", "Test loss over training time", SECONDS, ".3f"),
    ]
    if data.score != "accuracy":
        wanted.insert(0, ("metric", "train_s", f"{data.score} over training time", SECONDS, ".4g"))
    return [
        _curve(data, name, over, title, x_title, number)
        for name, over, title, x_title, number in wanted
        if any(r[name] is not None and r[over] is not None for r in data.tables["curves"])
    ]


def _curve(data: ChartData, name: str, over: str, title: str, x_title: str, number: str) -> Chart:
    x = quantity(over, x_title, ".3s" if over == "samples" else "", zero=False)
    encoding: Spec = {
        "x": x,
        "y": quantity(name, data.score if name == "metric" else name, number, zero=False),
        "color": data.colour(),
        "detail": {"field": "run"},
    }
    tooltip = tips(
        ("series", "setting", ""),
        ("workers", "workers", ""),
        (over, x_title, ",.4~g"),
        (name, name, number),
    )
    here: Spec = {"transform": [{"filter": CHOSEN_WORKERS}]}
    line = {"type": "line", "strokeWidth": 1.5, "strokeOpacity": 0.85}
    point = {"type": "point", "filled": True, "size": 24}
    marked = {**encoding, "shape": data.shape(), "tooltip": tooltip}
    layers: list[Spec] = [
        {**here, "mark": line, "encoding": encoding},
        {**here, "mark": point, "encoding": marked},
    ]
    if name == "accuracy" and data.study.target is not None:
        layers.insert(0, level(data.study.target))
    note = "One line per run, for the number of workers chosen above; serial for comparison."
    spec = data.spec(layers, workers=True)
    return Chart(f"{name}_over_{over}", "Over time", title, note, "curves", spec)
