"""What all charts of a study share: the tables, the colours, and what is shown at first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.report.answer import compared, leader
from paceline.report.charts import palette
from paceline.report.charts.marks import Row, Spec, colours_of, with_legend
from paceline.report.columns import Column, column
from paceline.report.lines import Study
from paceline.report.score import score_of

HEIGHT, SMALL, ROW = 300, 180, 24  # pixels: of a chart, of a small one, of one row of names
BEST = 4  # series that charts show at first beside serial; the others are grey
PANEL = 190  # pixels: the width of a small panel in a picture


@dataclass(frozen=True)
class Chart:
    """A chart as the page and the figures draw it."""

    name: str  # of its file
    section: str
    title: str
    note: str  # one sentence on how to read it
    table: str
    spec: Spec = field(repr=False)
    own_legend: bool = False  # otherwise the page's list of series is its legend
    wide: bool = False  # as wide as the page


class ChartData:
    """The tables of a study, the colours of its series, and the setting that is shown at first."""

    def __init__(self, study: Study, tables: dict[str, list[Row]]) -> None:
        self.study, self.tables, self.lines = study, tables, tables["lines"]
        self.series, self.score = study.series, score_of(study).name
        self.colours = palette.assign(self.series)
        self.workers = sorted({row["workers"] for row in self.lines})
        several = [row["workers"] for row in self.lines if row["strategy"] != "serial"]
        self.several_counts = len(set(several)) > 1
        self.default_workers = _most_useful(several or self.workers, study.cores)
        self.default_line = self._fastest()
        self.shown = self._best()

    def _best(self) -> list[str]:
        """Return serial and the best few series: that of the answer, those that were confirmed, and
        the fastest ones with several workers.
        """
        if len(self.series) <= BEST + 2:
            return self.series
        lines = compared(self.study)
        first = leader(self.study, lines).id if lines else ""
        speeds: dict[str, tuple[bool, bool, float]] = {}
        several = [row for row in self.lines if row["workers"] > 1]
        for row in several or self.lines:
            speed = row["speedup_serial"] or (1 / row["train_s"] if row["train_s"] else 0.0)
            confirmed = row["id"] in self.study.confirmed
            own = (row["id"] == first, confirmed, speed * (0.5 if row["oversubscribed"] else 1.0))
            speeds[row["series"]] = max(own, speeds.get(row["series"], own))
        others = [s for s in self.series if s in speeds and not s.startswith("serial")]
        best = sorted(others, key=lambda s: speeds[s], reverse=True)[:BEST]
        return [s for s in self.series if s in best or s == "serial"]

    def _fastest(self) -> str:
        """Return the fastest setting with the default number of workers."""
        many = [
            r
            for r in self.lines
            if r["workers"] == self.default_workers and r["strategy"] != "serial"
        ] or self.lines
        timed = [r for r in many if r["train_s"] is not None]
        return str(min(timed, key=lambda r: r["train_s"])["id"]) if timed else ""

    def column(self, key: str) -> Column:
        return column(key, self.study)

    def known(self, key: str) -> list[Row]:
        """Return the settings that have a value in a column."""
        return [r for r in self.lines if r.get(key) is not None]

    def colour(self) -> Spec:
        colours = {series: colour for series, (colour, _) in self.colours.items()}
        return {**colours_of("series", colours), "legend": None}

    def shape(self) -> Spec:
        shapes = {series: shape for series, (_, shape) in self.colours.items()}
        return {**colours_of("series", shapes), "legend": None}

    def params(self) -> list[dict[str, Any]]:
        return [{"name": "shown", "value": self.shown}]

    def spec(
        self, layers: list[Spec], *, workers: bool = False, line: bool = False, height: int = HEIGHT
    ) -> Spec:
        """Return a chart's description, with the variables that the page sets."""
        params = self.params()
        if workers:
            params.append({"name": "workers", "value": self.default_workers})
        if line:
            params.append({"name": "line", "value": self.default_line})
        return {"width": "container", "height": height, "params": params, "layer": layers}

    def shown_at_first(self, chart: Chart) -> list[Row]:
        """Return the rows that a picture shows: a reader of it cannot choose another setting."""
        first = self.default_line
        return [r for r in self.tables[chart.table] if r.get("line", first) == first]


def _most_useful(workers: Sequence[int], cores: int) -> int:
    """Return the largest number of workers that fits the cores; else the smallest above one."""
    fitting = [w for w in workers if w <= cores]
    if fitting and max(fitting) > 1:
        return max(fitting)
    return min((w for w in workers if w > 1), default=max(workers, default=1))


def static_spec(chart: Chart, data: ChartData, rows: list[Row]) -> Spec:
    """Return the description of a picture: with a title, its own data and a legend."""
    spec: Spec = {
        **chart.spec,
        "title": chart.title,
        "data": {"values": rows},
        "background": "white",
    }
    if "facet" in spec:
        return {**spec, "columns": 3, "spec": {**spec["spec"], "width": PANEL}}
    spec["width"] = 640
    spec.pop("padding", None)  # a picture grows with the names beside its lines
    if not chart.own_legend:
        shown = [s for s in data.shown if any(r.get("series") == s for r in rows)]
        legend = {
            "title": None,
            "orient": "bottom",
            "columns": 3,
            "labelLimit": 220,
            "values": shown,
        }
        spec["layer"] = [with_legend(layer, legend) for layer in chart.spec["layer"]]
    return spec
