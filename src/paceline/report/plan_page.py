"""The page of a plan, in the report's look: curves over workers, a map over bandwidths, a table.

It is made of the plan as JSON (`paceline plan --json`): everything on it is predicted, except the
points of runs that were measured.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report.charts import palette
from paceline.report.charts.base import HEIGHT, Chart
from paceline.report.charts.marks import NEUTRAL, Row, Spec, colours_of, only, quantity, tips
from paceline.report.page.chosen import controls, figure
from paceline.report.page.markup import (
    breakable,
    command_box,
    document,
    header,
    links_in,
    prose,
    table,
)
from paceline.report.page.page import columnar

SHOWN, MAP_ROW = 4, 30
WORSE, BEST = "#F2F2F2", "#2166AC"
RATES = {1e9: "Gbit/s", 1e6: "Mbit/s"}


@dataclass
class Curves:
    """The series of a plan, their colours, and which of them are shown at first."""

    series: list[str]
    shown: list[str]
    colours: dict[str, tuple[str, str]]
    workers: list[int]
    default_workers: int = 0

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Curves:
        best: dict[str, float] = {}
        for row in rows:
            best[row["series"]] = max(best.get(row["series"], 0.0), row["samples_per_s"])
        series = list(best)
        shown = sorted(series, key=lambda name: -best[name])[:SHOWN]
        return cls(series, [s for s in series if s in shown], palette.assign(series), [])

    def colour(self) -> Spec:
        named = {series: colour for series, (colour, _) in self.colours.items()}
        return {**colours_of("series", named), "legend": None}


def plan_page(
    plan: dict[str, Any],
    title: str,
    subtitle: str,
    sentences: Sequence[str],
    command: str,
    library: str,
) -> str:
    """Return the whole document. `plan` may have a `map` and `measured` points."""
    rows = [_row(row) for row in plan["rows"]]
    curves = Curves.of(rows)
    tables: dict[str, list[Row]] = {"rows": rows, "map": _map_rows(plan.get("map", ()))}
    charts = _charts(curves, rows, tables["map"], plan.get("measured", ()))
    content = {
        "series": curves.series,
        "shown": curves.shown,
        "default_workers": 0,
        "default_line": "",
        "charts": {c.name: {"table": c.table, "spec": c.spec} for c in charts},
        "tables": {name: columnar(found) for name, found in tables.items()},
    }
    lead, rest = sentences[:1], sentences[1:]
    said = "".join(f"<p class=lead>{prose(s)}</p>" for s in lead)
    said += "".join(f"<p>{prose(s)}</p>" for s in rest)
    main = (
        f"<section class=answer id=answer>{said}{command_box(command)}</section>"
        f"{controls(curves)}"
        f'<section id="curves"><h2>Over the number of workers</h2>'
        f"<div class=grid>{''.join(figure(c) for c in charts if c.section == 'curves')}</div>"
        "</section>"
        + "".join(
            f'<section id="map"><h2>What is fastest at which bandwidth</h2>'
            f"<div class=grid>{figure(c)}</div></section>"
            for c in charts
            if c.section == "map"
        )
        + _table_section(rows)
    )
    body = (
        f"{header(title, subtitle, links_in(main))}<main>{main}</main>"
        "<footer>Every figure of a plan is predicted. Made by Paceline.</footer>"
    )
    return document(title, body, content, library)


def _row(row: dict[str, Any]) -> Row:
    codec = "" if row["codec"] == "none" else f" + {row['codec']}"
    return {
        "series": row["strategy"] + codec,
        "workers": row["workers"],
        "samples_per_s": row["samples_per_s"],
        "low": row["samples_per_s_low"],
        "high": row["samples_per_s_high"],
        "speedup": row["speedup"],
        "efficiency": row["efficiency"],
        "bytes": row["sent_bytes_per_step"],
        "price": row["price_per_million_samples"],
        "steps": row.get("steps_to_accuracy"),
        "seconds": row.get("time_to_accuracy_s"),
        "seconds_low": row.get("time_to_accuracy_low_s"),
        "seconds_high": row.get("time_to_accuracy_high_s"),
    }


def _charts(
    curves: Curves, rows: list[Row], map_rows: list[Row], measured: Sequence[Row]
) -> list[Chart]:
    several = len({row["workers"] for row in rows}) > 1
    found = []
    if several:
        points = [
            {**row, "series": _row_series(row)} for row in measured if row.get("samples_per_s")
        ]
        found.append(_curve(
            curves, "speed", "samples_per_s", "Speed", "samples per second", ",.0f",
            "Lines are predicted, with a 95% band"
            + ("; points were measured." if points else "."), points,
        ))  # fmt: skip
        found.append(_curve(
            curves, "efficiency", "efficiency", "Efficiency", "speedup / workers", ".0%",
            "The speed of P workers divided by P times that of one.", [],
        ))  # fmt: skip
    if several and any(row["seconds"] is not None for row in rows):
        found.append(_curve(
            curves, "seconds", "seconds", "Time to the accuracy", "seconds", ",.0f",
            "Steps to the accuracy times the seconds of a step.", [],
        ))  # fmt: skip
    if several and any(row["steps"] is not None for row in rows):
        chart = _curve(
            curves,
            "steps",
            "steps",
            "Steps to the accuracy",
            "steps",
            ",.0f",
            "Counted, or from the formula of docs/planning.md. Dashed: one worker's steps divided"
            " by the number of workers.",
            [],
        )
        chart.spec["layer"].append(_in_proportion(rows))
        found.append(chart)
    if several and any(row["price"] is not None for row in rows):
        found.append(_curve(
            curves, "price", "price", "Price", "per million samples", ".3~g",
            "Hosts times hours times the price of a host.", [],
        ))  # fmt: skip
    if map_rows:
        found.append(_map(map_rows))
    return found


def _in_proportion(rows: list[Row]) -> Spec:
    """A dashed line: what the steps would be if they fell as 1/P."""
    alone = next((r["steps"] for r in rows if r["workers"] == 1 and r["steps"]), None)
    numbers = sorted({row["workers"] for row in rows})
    points = [{"workers": n, "steps": alone / n} for n in numbers] if alone else []
    return {
        "data": {"values": points},
        "mark": {"type": "line", "strokeDash": [5, 4], "color": NEUTRAL},
        "encoding": {
            "x": {"field": "workers", "type": "quantitative"},
            "y": {"field": "steps", "type": "quantitative"},
        },
    }


def _row_series(row: Row) -> str:
    return str(row["strategy"]) + ("" if row["codec"] == "none" else f" + {row['codec']}")


def _curve(
    curves: Curves, name: str, field: str, title: str, unit: str, form: str, note: str,
    points: list[Row],
) -> Chart:  # fmt: skip
    x: Spec = {
        **quantity("workers", "workers", ",d"),
        "scale": {"type": "log", "base": 2, "nice": False},
    }
    y = quantity(field, unit, form, zero=True)
    here, colour = only(field), curves.colour()
    tooltip = tips(("series", "setting", ""), ("workers", "workers", ""), (field, unit, form))
    layers: list[Spec] = []
    low, high = {"samples_per_s": ("low", "high"), "seconds": ("seconds_low", "seconds_high")}.get(
        field, ("", "")
    )
    if low:
        span = {"x": x, "y": {**y, "field": low}, "y2": {"field": high}, "color": colour}
        layers.append({**here, "mark": {"type": "area", "opacity": 0.13}, "encoding": span})
    line = {"x": x, "y": y, "color": colour, "tooltip": tooltip}
    layers.append({**here, "mark": {"type": "line", "point": {"size": 30}}, "encoding": line})
    if points:
        layers.append(
            {
                "data": {"values": points},
                "transform": [{"filter": "indexof(shown, datum.series) >= 0"}],
                "mark": {"type": "point", "shape": "cross", "size": 90, "filled": True},
                "encoding": {**line, "tooltip": [*tooltip, {"field": "from", "title": "measured"}]},
            }
        )
    spec = {
        "width": "container",
        "height": HEIGHT,
        "params": [{"name": "shown", "value": curves.shown}],
        "layer": layers,
    }
    return Chart(name, "curves", title, note, "rows", spec)


def _map_rows(cells: Sequence[dict[str, Any]]) -> list[Row]:
    best: dict[float, float] = {}
    for cell in cells:
        rate = cell["bit_per_s"]
        best[rate] = max(best.get(rate, 0.0), cell["samples_per_s"])
    return [
        {
            "setting": cell["setting"],
            "rate": rate_words(cell["bit_per_s"]),
            "place": cell["bit_per_s"],
            "samples_per_s": cell["samples_per_s"],
            "share": cell["samples_per_s"] / best[cell["bit_per_s"]],
            "text": f"{cell['samples_per_s'] / best[cell['bit_per_s']]:.2f}",
        }
        for cell in cells
    ]


def rate_words(rate: float) -> str:
    """`1e8` -> `100 Mbit/s`"""
    unit = next((unit for unit in RATES if rate >= unit), 1e6)
    return f"{rate / unit:g} {RATES[unit]}"


def _map(rows: list[Row]) -> Chart:
    order = [row["rate"] for row in sorted(rows, key=lambda row: row["place"])]
    names = list(dict.fromkeys(row["setting"] for row in rows))
    axis: Spec = {"labelAngle": 0, "grid": False, "labelLimit": 260}
    x: Spec = {
        "field": "rate",
        "type": "ordinal",
        "title": "links between hosts",
        "sort": list(dict.fromkeys(order)),
        "axis": axis,
    }
    y: Spec = {"field": "setting", "type": "nominal", "title": None, "sort": names, "axis": axis}
    scale: Spec = {"domain": [0, 1], "range": [WORSE, BEST]}
    colour: Spec = {"field": "share", "type": "quantitative", "scale": scale, "legend": None}
    tooltip = tips(
        ("setting", "setting", ""),
        ("rate", "links", ""),
        ("samples_per_s", "samples per second", ",.0f"),
        ("share", "of the fastest at this bandwidth", ".2f"),
    )
    dark = {"condition": {"test": "datum.share < 0.6", "value": "#222222"}, "value": "#ffffff"}
    layers: list[Spec] = [
        {
            "mark": {"type": "rect", "stroke": "white"},
            "encoding": {"x": x, "y": y, "color": colour, "tooltip": tooltip},
        },
        {
            "mark": {"type": "text", "fontSize": 12},
            "encoding": {"x": x, "y": y, "text": {"field": "text"}, "color": dark},
        },
    ]
    spec = {"width": "container", "height": MAP_ROW * len(names), "params": [], "layer": layers}
    note = "The speed of a setting divided by that of the fastest at the same bandwidth, predicted."
    return Chart("map", "map", "Speed against the fastest", note, "map", spec, True, True)


def _table_section(rows: list[Row]) -> str:
    priced = any(row["price"] is not None for row in rows)
    timed = any(row["seconds"] is not None for row in rows)
    head = ["setting", "workers", "samples/s <small>95% interval</small>", "speedup", "efficiency",
            "bytes per step", *(["seconds to the accuracy"] if timed else []),
            *(["price per million samples"] if priced else [])]  # fmt: skip
    cells = [
        [
            breakable(row["series"]),
            str(row["workers"]),
            f"{row['samples_per_s']:,.0f} <small>({row['low']:,.0f} to {row['high']:,.0f})</small>",
            f"{row['speedup']:.2f}x",
            f"{100 * row['efficiency']:.0f}%",
            f"{row['bytes']:,.0f}",
            *([f"{row['seconds']:,.0f}" if row["seconds"] else "–"] if timed else []),
            *([f"{row['price']:.4g}" if row["price"] is not None else "–"] if priced else []),
        ]
        for row in sorted(rows, key=lambda row: -row["samples_per_s"])
    ]
    return (
        f'<section id="all"><h2>All settings, predicted</h2>{table(head, cells)}'
        f"<p class=note>{html.escape(f'{len(rows)} settings.')}</p></section>"
    )
