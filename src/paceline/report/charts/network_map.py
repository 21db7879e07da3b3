"""The map of networks: the time to the target accuracy of every way of training on every network,
relative to plain all-reduce on the same network.
"""

from __future__ import annotations

import math

from paceline.report.charts.base import Chart, ChartData
from paceline.report.charts.marks import Row, Spec, tips
from paceline.report.lines import Study
from paceline.report.networks import compares_networks, networks, plain_at, way_of

ROW = 30  # pixels
MOST = 8.0  # the colours end at this many times as soon or as late
SOON, LATE, EQUAL, UNKNOWN = "#2166AC", "#B2182B", "#F2F2F2", "#999999"


def network_map(data: ChartData) -> list[Chart]:
    """Return the map as a list of one chart; of none where networks were not compared."""
    rows = network_rows(data.study)
    if not rows:
        return []
    data.tables["networks"] = rows
    return [
        Chart(
            "network_map",
            "What is fastest at which bandwidth",
            "Time to accuracy, against plain all-reduce",
            "Each number is the time to the target accuracy divided by that of plain all-reduce on"
            " the same links: below 1 (blue) is sooner.",
            "networks",
            data.spec(_layers(rows), height=ROW * len({r["way"] for r in rows})),
            own_legend=True,
        )
    ]


def network_rows(study: Study) -> list[Row]:
    """Return one row per way of training and network; none where networks were not compared."""
    order = networks(study)
    if not compares_networks(study):
        return []
    rows = []
    for line in study.lines:
        network, plain = line.varied.get("network"), plain_at(study, line)
        if network is None or plain is None or not line.completed:
            continue
        own, theirs = line.time_to_accuracy, plain.time_to_accuracy
        relative = own.mean / theirs.mean if own and theirs and theirs.mean else None
        rows.append(
            {
                "way": way_of(line),
                "network": network,
                "place": order.index(network),
                "seconds": float(f"{own.mean:.4g}") if own else None,
                "relative": float(f"{relative:.4g}") if relative else None,
                "shade": max(-1.0, min(1.0, math.log(relative, MOST))) if relative else None,
                "text": f"{relative:.2f}" if relative else "never" if own is None else "–",
                "reached": "{} of {}".format(*line.reached),
            }
        )
    return rows


def _layers(rows: list[Row]) -> list[Spec]:
    order = [r["network"] for r in sorted(rows, key=lambda r: r["place"])]
    axis: Spec = {"labelAngle": 0, "grid": False, "labelLimit": 260}
    x: Spec = {
        "field": "network",
        "type": "ordinal",
        "title": "each host's link",
        "sort": list(dict.fromkeys(order)),
        "axis": axis,
    }
    ways = list(dict.fromkeys(r["way"] for r in rows))
    y: Spec = {"field": "way", "type": "nominal", "title": None, "sort": ways, "axis": axis}
    scale: Spec = {"domain": [-1, 0, 1], "range": [SOON, EQUAL, LATE]}
    known: Spec = {
        "test": "isValid(datum.shade)",
        "field": "shade",
        "type": "quantitative",
        "scale": scale,
        "legend": None,
    }
    colour: Spec = {"condition": known, "value": UNKNOWN}
    tooltip = tips(
        ("way", "setting", ""),
        ("network", "link", ""),
        ("seconds", "seconds to the accuracy", ".2f"),
        ("relative", "of plain all-reduce's", ".2f"),
        ("reached", "runs that reached it", ""),
    )
    dark = {
        "condition": {
            "test": "isValid(datum.shade) && abs(datum.shade) < 0.55",
            "value": "#222222",
        },
        "value": "#ffffff",
    }
    return [
        {
            "mark": {"type": "rect", "stroke": "white"},
            "encoding": {"x": x, "y": y, "color": colour, "tooltip": tooltip},
        },
        {
            "mark": {"type": "text", "fontSize": 12},
            "encoding": {"x": x, "y": y, "text": {"field": "text"}, "color": dark},
        },
    ]
