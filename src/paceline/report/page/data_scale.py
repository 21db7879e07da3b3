"""The section "Time against the size of the data", for studies that vary `data_share`."""

from __future__ import annotations

from paceline.report.commentary.costs import slope
from paceline.report.lines import Study
from paceline.report.page.markup import code, prose, table
from paceline.report.tables import Row, axis_rows, numeric_axes
from paceline.report.words import seconds

TIMES = {
    "wall_s": "wall",
    "train_s": "training",
    "cpu_s": "CPU of<br>all ranks",
    "cpu_system_s": "of which<br>system",
}
NOTE = (
    "The row `power` is the p of a time that grew as samples^p: 1 is in proportion; below 1, a part"
    " of the time does not depend on the data. Wall time includes start-up, loading and evaluation."
)


def data_scale_section(study: Study) -> str:
    """Return wall, training, CPU and system time by samples; empty without that axis."""
    if "data_share" not in numeric_axes(study):
        return ""
    series: dict[str, list[Row]] = {}
    for row in axis_rows(study, "data_share"):
        series.setdefault(row["series"], []).append(row)
    rows = []
    for name, points in series.items():
        points.sort(key=lambda row: row["samples"])
        for row in points:
            times = [seconds(row[key]) for key in TIMES]
            rows.append([code(name), f"{row['value']:g}", f"{row['samples']:,.0f}", *times])
        powers = [_power(points, key) for key in TIMES]
        if any(powers):
            rows.append(["", "", "power", *(power or "–" for power in powers)])
    head = ["setting", "share of<br>the data", "samples", *TIMES.values()]
    return (
        '<section id="data"><h2>Time against the size of the data</h2>'
        f"{table(head, rows)}<p class=note>{prose(NOTE)}</p></section>"
    )


def _power(points: list[Row], key: str) -> str:
    known = [(row["samples"], row[key]) for row in points if row[key]]
    found = slope(known)
    return "" if found is None else f"{found:.2f}"
