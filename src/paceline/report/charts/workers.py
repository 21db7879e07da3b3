"""Charts of the workers: the parts of a step's time, and each worker's time and resources."""

from __future__ import annotations

from paceline.look import WORKERS
from paceline.report.charts import palette
from paceline.report.charts.base import ROW, SMALL, Chart, ChartData
from paceline.report.charts.marks import (
    CHOSEN_WORKERS,
    LEGEND,
    Row,
    Spec,
    colours_of,
    names,
    quantity,
    tips,
)
from paceline.report.resources import why_no_network

PLACES = {part: place for place, part in enumerate(palette.PARTS)}
RESOURCES = (
    ("cpu_percent", "CPU", "% of a core"),
    ("memory_mb", "Memory", "MB resident, shared pages included"),
    ("net_mb_per_s", "Network", "MB/s over TCP, both ways"),
    ("disk_mb_per_s", "Disk", "MB/s, read and written"),
)


def worker_charts(data: ChartData) -> list[Chart]:
    """Return the charts of a step's time, of each worker's time, and of its resources."""
    data.tables["parts"] = [
        {
            "series": r["series"],
            "workers": r["workers"],
            "part": part,
            "place": PLACES[part],
            "ms": ms,
        }
        for r in data.lines
        for part, ms in _parts(r).items()
    ]
    found = [_step_parts(data)] if data.tables["parts"] else []
    found += [_time_of_each(data)] if data.tables["workers"] else []
    resources = data.tables["resources"]
    return found + [
        _resource(data, name, title, unit)
        for name, title, unit in RESOURCES
        if any(r[name] is not None for r in resources)
    ]


def _parts(row: Row) -> dict[str, float]:
    """Return the parts of a step's time. DDP exchanges during the backward pass: it has one."""
    if row["sync_ms"] is None and row["compute_ms"] is not None:
        return {palette.TOGETHER: row["compute_ms"]}
    return {
        part: row[f"{part}_ms"]
        for part in ("compute", "codec", "sync", "idle")
        if row.get(f"{part}_ms")
    }


def _step_parts(data: ChartData) -> Chart:
    y, x = names("series", data.series), quantity("ms", "ms of one step, mean over workers")
    tooltip = tips(
        ("series", "setting", ""),
        ("workers", "workers", ""),
        ("part", "part", ""),
        ("ms", "milliseconds", ".2f"),
    )
    layers = [_stacked(data.tables["parts"], x, y, CHOSEN_WORKERS, tooltip)]
    return Chart(
        "time_per_step",
        "Where the time goes",
        "Where the time of a step goes",
        "A worker computes, encodes and decodes messages (codec), exchanges (sync), and waits for"
        " others (idle); for the number of workers chosen above.",
        "parts",
        data.spec(layers, workers=True, height=ROW * len(data.series)),
        own_legend=True,
    )


def _time_of_each(data: ChartData) -> Chart:
    y, x = names("worker", []), quantity("seconds", "seconds of the training")
    tooltip = tips(("worker", "worker", ""), ("part", "part", ""), ("seconds", "seconds", ".3f"))
    layers = [_stacked(data.tables["workers"], x, y, "datum.line == line", tooltip)]
    spec, title = data.spec(layers, line=True, height=SMALL), "Where each worker's time went"
    return Chart("time_per_worker", "Each worker", title, "", "workers", spec, own_legend=True)


def _stacked(rows: list[Row], x: Spec, y: Spec, which: str, tooltip: list[Spec]) -> Spec:
    """Return bars of the parts of a time, one after the other; the legend has those of the rows."""
    there = {row["part"] for row in rows}
    parts = {part: colour for part, colour in palette.PARTS.items() if part in there}
    colour, order = colours_of("part", parts), {"field": "place", "sort": "ascending"}
    encoding = {"x": x, "y": y, "color": colour, "order": order, "tooltip": tooltip}
    return {
        "transform": [{"filter": which}],
        "mark": {"type": "bar", "height": {"band": 0.7}},
        "encoding": encoding,
    }


def _resource(data: ChartData, name: str, title: str, unit: str) -> Chart:
    # the ranks of a setting are 0, 1, ...: sorted by rank, each gets its own colour
    names = dict.fromkeys(r["worker"] for r in data.tables["resources"])
    colour = {
        "field": "worker",
        "type": "nominal",
        "sort": sorted(names, key=lambda name: int(name.rpartition(" ")[2])),
        "scale": {"range": list(WORKERS)},
        "legend": {"title": None, **LEGEND},
    }
    tooltip = tips(("worker", "worker", ""), ("t", "second", ".1f"), (name, unit, ",.4~g"))
    layer: Spec = {
        "transform": [{"filter": f"datum.line == line && isValid(datum['{name}'])"}],
        "mark": {"type": "line", "point": {"size": 20}},
        "encoding": {
            "x": quantity("t", "seconds since the worker started", zero=True),
            "y": quantity(name, unit, zero=True),
            "color": colour,
            "tooltip": tooltip,
        },
    }
    spec = data.spec([layer], line=True, height=SMALL)
    note = why_no_network(data.study) if name == "net_mb_per_s" else ""
    return Chart(
        name, "Each worker", title, note.replace("`", '"'), "resources", spec, own_legend=True
    )
