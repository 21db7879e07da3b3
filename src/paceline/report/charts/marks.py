"""Marks, axes and legends that charts are put together from, as Vega-Lite descriptions."""

from __future__ import annotations

from typing import Any

Spec = dict[str, Any]
Row = dict[str, Any]
NEUTRAL = "#888888"
LABEL = 160  # pixels to the right of a chart, for the names of its lines
PLAIN_X: Spec = {"field": "p", "type": "quantitative", "scale": {"zero": False, "nice": False}}
BETWEEN = 14  # pixels: the least distance between two names
LEGEND: Spec = {"orient": "bottom", "columns": 4, "labelLimit": 240}
# by the format of a tooltip; ticks need as many digits as tell them apart
AXIS_FORMATS = {".2%": ".4~%", ".1%": ".4~%", ".0%": ".4~%", ".3s": "~s", ".2e": "~g"}


def quantity(field: str, title: str, number: str = "", **scale: Any) -> Spec:
    """Return a number on an axis; `number` is the format in a tooltip."""
    axis = {"format": AXIS_FORMATS.get(number, ",.6~g"), "tickCount": 6}
    return {"field": field, "type": "quantitative", "title": title, "axis": axis, "scale": scale}


def colours_of(field: str, mapping: dict[str, str], title: str | None = None) -> Spec:
    """Return a colour or shape per name, with a legend."""
    scale = {"domain": list(mapping), "range": list(mapping.values())}
    return {"field": field, "type": "nominal", "scale": scale, "legend": {"title": title, **LEGEND}}


def tips(*fields: tuple[str, str, str]) -> list[Spec]:
    """Return tooltips of (field, title, format)."""
    return [
        {"field": f, "title": title, **({"format": form} if form else {})}
        for f, title, form in fields
    ]


def only(name: str, series: str = "series") -> Spec:
    """Keep the rows that have a value and whose series is chosen."""
    return {
        "transform": [
            {"filter": f"isValid(datum['{name}']) && indexof(shown, datum.{series}) >= 0"}
        ]
    }


CHOSEN_WORKERS = (
    "(datum.workers == workers || (datum.workers == 1 && indexof(datum.series, 'serial') == 0)) && "
    "indexof(shown, datum.series) >= 0"
)


def ranged(
    here: Spec,
    x: Spec,
    y: Spec,
    colour: Spec,
    shape: Spec,
    tooltip: list[Spec],
) -> list[Spec]:
    """Return means as points (hollow where oversubscribed), joined by a line, with the range of
    the runs.
    """
    name = y["field"]
    span = {
        "x": x,
        "y": {**y, "field": f"{name}_low"},
        "y2": {"field": f"{name}_high"},
        "color": colour,
    }
    hollow = {"condition": {"test": "datum.oversubscribed", "value": 0}, "value": 1}
    marked = {
        "x": x,
        "y": y,
        "color": colour,
        "fill": colour,
        "shape": shape,
        "fillOpacity": hollow,
        "tooltip": tooltip,
    }
    joined = {
        **here,
        "mark": {"type": "line", "strokeWidth": 1.5, "strokeOpacity": 0.8},
        "encoding": {"x": x, "y": y, "color": colour},
    }
    return [
        joined,
        {**here, "mark": {"type": "rule", "strokeWidth": 1.5, "clip": True}, "encoding": span},
        {**here, "mark": {"type": "point", "size": 55, "strokeWidth": 1.5}, "encoding": marked},
    ]


def faint(name: str, x: Spec, y: Spec) -> Spec:
    """Return the series that are not chosen, as thin grey lines without labels."""
    there = f"isValid(datum['{name}']) && indexof(shown, datum.series) < 0"
    return {
        "transform": [{"filter": there}],
        "mark": {"type": "line", "strokeWidth": 1, "opacity": 0.35, "color": NEUTRAL},
        "encoding": {"x": x, "y": y, "detail": {"field": "series"}},
    }


def end_labels(
    which: str, order: str, y: Spec, span: float, colour: Spec, down: bool = False
) -> Spec:
    """Return the name of each series to the right of the chart, at the height of its last point.

    `which` selects the rows, the last row of a series is that with the largest `order`, and `span`
    is what the y axis spans. The gap between two names is at least `BETWEEN` pixels, for any height
    of the chart. The names are sorted by y, and the i-th stands at i * gap + max over j <= i of
    (y_j - j * gap): at its point, or as far above it as the names below need. With `down` the names
    make room downwards, from the highest one.
    """
    name = y["field"]
    sort = [{"field": name, "order": "descending" if down else "ascending"}]
    op, sign = ("min", -1) if down else ("max", 1)
    gap = f"({sign * span * BETWEEN:.8g} / height)"
    last = {"op": "max", "field": order, "as": "_last"}
    return {
        "transform": [
            {"filter": which},
            {"joinaggregate": [last], "groupby": ["series"]},
            {"filter": f"datum['{order}'] == datum._last"},
            {"window": [{"op": "row_number", "as": "_i"}], "sort": sort},
            {"calculate": f"datum['{name}'] - datum._i * {gap}", "as": "_free"},
            {
                "window": [{"op": op, "field": "_free", "as": "_most"}],
                "frame": [None, 0],
                "sort": sort,
            },
            {"calculate": f"datum._most + datum._i * {gap}", "as": "_at"},
        ],
        "mark": {"type": "text", "align": "left", "dx": 7, "limit": LABEL - 10, "fontSize": 11},
        "encoding": {
            "x": {"value": "width"},
            "y": {**y, "field": "_at"},
            "text": {"field": "series"},
            "color": colour,
        },
    }


def to_the_right(here: Spec, x: Spec, y: Spec, colour: Spec) -> Spec:
    """Return serial's level as a thin line to the right: it has one number of workers."""
    alone = [{"filter": "indexof(datum.series, 'serial') == 0 && datum.workers == 1"}]
    return {
        "transform": [*here["transform"], *alone],
        "mark": {"type": "rule", "strokeWidth": 1, "strokeDash": [2, 3]},
        "encoding": {"x": x, "x2": {"value": "width"}, "y": y, "color": colour},
    }


def dashed(points: list[Row]) -> Spec:
    """Return a dashed curve to compare with."""
    return {
        "data": {"values": points},
        "mark": {"type": "line", "strokeDash": [5, 4], "color": NEUTRAL, "clip": True},
        "encoding": {"x": PLAIN_X, "y": {"field": "v", "type": "quantitative"}},
    }


def level(value: float, scale: Spec | None = None) -> Spec:
    """Return a dashed horizontal line. Without the chart's `scale` its axis begins at 0."""
    mark = {"type": "rule", "color": NEUTRAL, "strokeDash": [4, 4]}
    y = {"datum": value} if scale is None else {"datum": value, "scale": scale}
    return {"data": {"values": [{}]}, "mark": mark, "encoding": {"y": y}}


def cores_line(cores: int, most: int) -> list[Spec]:
    """Return a vertical line at the number of cores: beyond it workers share cores."""
    if cores >= most:
        return []
    data = {"values": [{"p": cores, "text": f"{cores} cores"}]}
    x = PLAIN_X
    text = {"type": "text", "align": "left", "dx": 4, "dy": 6, "baseline": "top", "color": NEUTRAL}
    return [
        {
            "data": data,
            "mark": {"type": "rule", "color": NEUTRAL, "strokeDash": [2, 3]},
            "encoding": {"x": x},
        },
        {
            "data": data,
            "mark": text,
            "encoding": {"x": x, "y": {"value": 0}, "text": {"field": "text"}},
        },
    ]


def names(field: str, order: list[str]) -> Spec:
    """Return an axis of names, in the given order if there is one."""
    sort = {"sort": order} if order else {}
    axis = {"labelLimit": 240}
    return {"field": field, "type": "nominal", "title": None, "axis": axis, **sort}


def with_legend(layer: Spec, legend: Spec) -> Spec:
    """Return the layer with a legend: a picture has no list of series beside it."""
    encoding = dict(layer.get("encoding", {}))
    for channel in ("color", "shape", "fill"):
        if channel in encoding and encoding[channel].get("legend", 0) is None:
            encoding[channel] = {**encoding[channel], "legend": legend}
    return {**layer, "encoding": encoding}
