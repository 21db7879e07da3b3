"""Charts along the other numeric axes of a study, and by setting where workers do not vary."""

from __future__ import annotations

from paceline.report.charts import palette
from paceline.report.charts.base import ROW, Chart, ChartData
from paceline.report.charts.marks import Spec, colours_of, names, only, quantity, ranged, tips
from paceline.report.tables import along, axis_rows, numeric_axes

SCORES = ("metric", "accuracy")
BY_SETTING = (
    ("speedup_serial", "Speed"),
    ("metric", "Accuracy"),
    ("accuracy", "Accuracy"),
    ("time_to_accuracy_s", "Accuracy"),
    ("train_s", "Speed"),
    ("sent_bytes", "Cost"),
)


def axis_charts(data: ChartData) -> list[Chart]:
    """Return the charts along each numeric axis of the grid other than the workers."""
    found: list[Chart | None] = []
    for axis in numeric_axes(data.study):
        data.tables[f"axis_{axis}"] = axis_rows(data.study, axis)
        found += [_along(data, axis, key) for key in along(axis)]
    return [chart for chart in found if chart is not None]


def _along(data: ChartData, axis: str, name: str) -> Chart | None:
    rows = [r for r in data.tables[f"axis_{axis}"] if r.get(name) is not None]
    values = sorted({r["value"] for r in rows})
    if len(values) < 2:
        return None
    column = data.column(name)
    title, form = column.heading_with_unit, column.format
    wide = values[0] > 0 and values[-1] / values[0] >= 8
    both = wide and name not in SCORES
    colours = palette.assign(list(dict.fromkeys(r["series"] for r in rows)))
    x = quantity("value", axis, **({"type": "log"} if wide else {"zero": False}))
    if len(values) <= 8:
        x["axis"] = {"values": values, "format": "~g"}
    y = quantity(name, title, form, **({"type": "log"} if both else {"zero": False}))
    colour = colours_of("series", {s: c for s, (c, _) in colours.items()})
    shape = colours_of("series", {s: mark for s, (_, mark) in colours.items()})
    tooltip = tips(
        ("series", "setting", ""),
        ("value", axis, ""),
        (name, title, form),
        (f"{name}_low", "lowest", form),
        (f"{name}_high", "highest", form),
    )
    return Chart(
        f"{name}_by_{axis}",
        f"Along {axis}",
        f"{title} against {axis}",
        "Both axes are logarithmic." if both else "",
        f"axis_{axis}",
        data.spec(ranged(only(name, "full"), x, y, colour, shape, tooltip)),
        own_legend=True,
    )


def setting_charts(data: ChartData) -> list[Chart]:
    """Return one chart per column with a point per setting, where the workers do not vary."""
    if data.several_counts:
        return []
    found = [_dots(data, key, section) for key, section in BY_SETTING]
    return [chart for chart in found if chart is not None]


def _dots(data: ChartData, name: str, section: str) -> Chart | None:
    rows, column = data.known(name), data.column(name)
    if len(rows) < 2:
        return None
    title = column.heading_with_unit
    x = quantity(name, title, column.format, zero=name not in SCORES)
    y, colour = names("id", [r["id"] for r in data.lines]), data.colour()
    tooltip = tips(("id", "setting", ""), (name, title, column.format), ("runs", "runs", ""))
    dot = {"x": x, "y": y, "color": colour, "tooltip": tooltip}
    span = {
        "x": {**x, "field": f"{name}_low"},
        "x2": {"field": f"{name}_high"},
        "y": y,
        "color": colour,
    }
    layers: list[Spec] = [
        {**only(name), "mark": {"type": "point", "filled": True, "size": 80}, "encoding": dot},
        {**only(name), "mark": "rule", "encoding": span},
    ]
    spec = data.spec(layers, height=ROW * len(rows))
    return Chart(f"{name}_by_setting", section, title, "", "lines", spec)
