"""The charts, as descriptions in Vega-Lite: the page draws them, and so do the pictures in
`figures/`.

A chart names the table that it is made from; nothing in it is computed that is not in the table.
Three variables are set by the page: `shown` (the series that are chosen), `workers` and `line`
(what the detailed charts show).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.report import palette
from paceline.report.lines import Study
from paceline.report.marks import (
    CHOSEN_WORKERS,
    LEGEND,
    Row,
    Spec,
    colours_of,
    cores_line,
    dashed,
    level,
    only,
    quantity,
    ranged,
    tips,
    with_legend,
)
from paceline.report.networks import MAP_ROW, map_layers, network_rows
from paceline.report.score import score_of
from paceline.report.tables import axis_rows, numeric_axes

HEIGHT, SMALL, ROW = 300, 180, 24
SECONDS = "seconds of training"
SEEDS = "Bars are the range over the seeds."
PLACES = {part: place for place, part in enumerate(palette.PARTS)}


@dataclass(frozen=True)
class Chart:
    name: str  # of its file
    section: str
    title: str
    note: str  # one sentence on how to read it
    table: str
    spec: Spec = field(repr=False)
    own_legend: bool = False  # otherwise the page's list of series is its legend


class Charts:
    """All the charts that a study's data can fill."""

    def __init__(self, study: Study, tables: dict[str, list[Row]]) -> None:
        self.study, self.tables, self.lines = study, tables, tables["lines"]
        self.series, self.score = study.series, score_of(study).name
        self.colours = palette.assign(self.series)
        self.workers = sorted({row["workers"] for row in self.lines})
        several = [row["workers"] for row in self.lines if row["strategy"] != "serial"]
        self.several = len(set(several)) > 1  # numbers of workers, to draw lines over
        self.default_workers = _most_useful(several or self.workers, study.cores)
        self.default_line = self._fastest()

    def all(self) -> list[Chart]:
        found = [
            *self._networks(),
            *self._scaling(),
            *self._axes(),
            *self._by_setting(),
            *self._curves(),
            *self._time(),
            *self._resources(),
        ]
        return [chart for chart in found if chart is not None]

    def shown_at_first(self, chart: Chart) -> list[Row]:
        """The rows that a picture of the chart shows: a picture has no choice of setting."""
        return [
            r
            for r in self.tables[chart.table]
            if r.get("line", self.default_line) == self.default_line
        ]

    def _fastest(self) -> str:
        """Of those with several workers: what the detailed charts show first."""
        many = [
            r
            for r in self.lines
            if r["workers"] == self.default_workers and r["strategy"] != "serial"
        ] or self.lines
        timed = [r for r in many if r["train_s"] is not None]
        return str(min(timed, key=lambda r: r["train_s"])["id"]) if timed else ""

    def _networks(self) -> list[Chart | None]:
        rows = network_rows(self.study)
        if not rows:
            return []
        self.tables["networks"] = rows
        ways = len({r["way"] for r in rows})
        note = (
            "Time to the target accuracy relative to plain all-reduce on the same links: below 1"
            " (blue) is sooner."
        )
        title = "Time to accuracy, against plain all-reduce"
        spec = self._spec(map_layers(rows), height=MAP_ROW * ways)
        return [
            Chart(
                "network_map",
                "At which bandwidth does what win",
                title,
                note,
                "networks",
                spec,
                own_legend=True,
            )
        ]

    # --- against the number of workers

    def _scaling(self) -> list[Chart | None]:
        if not self.several:
            return []
        target = "" if self.study.target is None else f" of {100 * self.study.target:g}%"
        ideal = [dashed([{"p": p, "v": p} for p in (min(self.workers), max(self.workers))])]
        return [
            self._against_workers(
                "speedup_serial", "Speed", "Speedup against serial", "times as fast as serial, one thread", ".2f",
                "Dashed: ideal, P workers are P times as fast. Hollow points are oversubscribed.", ideal,
            ),
            self._against_workers(
                "speedup", "Speed", "Speedup over one worker of the same strategy", "times as fast as one worker", ".2f",
                "S(P) = training time with one worker / with P workers, of the same strategy. Dashed: ideal.", ideal,
            ),
            self._against_workers(
                "efficiency", "Speed", "Efficiency", "speedup / P", ".0%",
                "100% is ideal. Beyond the number of cores workers share them, and efficiency must fall.",
            ),
            self._against_workers(
                "train_s", "Speed", "Training time", "seconds", ".2f",
                "Start-up, loading and evaluation are not in it.", zero=True,
            ),
            self._against_workers("metric", "Accuracy", f"Test {self.score}", f"{self.score} after training", ".4g", SEEDS),
            self._against_workers(
                "accuracy", "Accuracy", "Test accuracy", "accuracy after training", ".2%", SEEDS,
            ),
            self._against_workers(
                "time_to_accuracy_s", "Accuracy", f"Time to the target accuracy{target}", "seconds of training", ".2f",
                "Only settings that reached it in every run.", zero=True,
            ),
            self._against_workers(
                "steps_to_accuracy", "Accuracy", f"Steps to the target accuracy{target}", "steps", ".0f",
                "Dashed: the law 1/P from serial, which holds when P gradients taken at once are worth P steps.",
                self._one_over_p(), zero=True,
            ),
            self._against_workers(
                "sent_bytes", "Cost", "Bytes per worker and step", "bytes sent by one worker in one step", ".3s",
                "Payload of the training phase; what a server sends is not in it.", zero=True,
            ),
            self._against_workers(
                "sync_ms", "Cost", "Exchange per step", "milliseconds in one step", ".3f",
                "What a worker spends on the exchange; waiting for others is not in it.", zero=True,
            ),
            self._against_workers(
                "staleness", "Drift", "Staleness", "updates by others that a gradient missed, mean", ".2f",
                "Only strategies that let workers run ahead have it.", zero=True,
            ),
            self._against_workers(
                "distance", "Drift", "Distance between replicas", "farthest from the mean, relative to its length", ".2e",
                "Seen at evaluations: 0 where one falls right after an average. Only where replicas may differ.", zero=True,
            ),
        ]  # fmt: skip

    def _against_workers(
        self,
        name: str,
        section: str,
        title: str,
        y_title: str,
        number: str,
        note: str,
        laws: Sequence[Spec] = (),
        zero: bool = False,
    ) -> Chart | None:
        rows = [r for r in self.lines if r.get(name) is not None]
        if len({r["workers"] for r in rows}) < 2:
            return None
        low, high = min(self.workers), max(self.workers)
        x = quantity("x", "workers", domain=[low - 0.4, high + 0.4], nice=False)
        x["axis"] = {"values": self.workers, "format": "d", "grid": False}
        y = quantity(name, y_title, number, zero=zero)
        if laws and name.startswith(
            "speedup"
        ):  # the ideal may leave the picture; what was measured may not
            y["scale"] = {
                "domain": [
                    0,
                    1.15 * max(*(r[f"{name}_high"] for r in rows), min(high, self.study.cores)),
                ]
            }
        tooltip = tips(
            ("series", "setting", ""), ("workers", "workers", ""), (name, title, number), (f"{name}_low", "lowest", number),
            (f"{name}_high", "highest", number), ("runs", "runs", ""), ("oversubscribed", "oversubscribed", ""),
        )  # fmt: skip
        layers = [
            *cores_line(self.study.cores, high),
            *laws,
            *ranged(only(name), x, y, self._colour(), self._shape(), tooltip),
        ]
        return Chart(name, section, title, note, "lines", self._spec(layers))

    def _one_over_p(self) -> list[Spec]:
        serial = next((r["steps_to_accuracy"] for r in self.lines if r["series"] == "serial"), None)
        if serial is None:
            return []
        low, high = min(self.workers), max(self.workers)
        grid = [low + (high - low) * i / 40 for i in range(41)]
        return [dashed([{"p": p, "v": serial / p} for p in grid])]

    # --- along other axes, and by setting where the number of workers does not vary

    def _axes(self) -> list[Chart | None]:
        found: list[Chart | None] = []
        for axis in numeric_axes(self.study):
            self.tables[f"axis_{axis}"] = axis_rows(self.study, axis)
            found += [
                self._along(axis, "metric", f"Test {self.score}", ".4g"),
                self._along(axis, "accuracy", "Test accuracy", ".2%"),
                self._along(axis, "train_s", "Training time (s)", ".2f"),
                self._along(axis, "time_to_accuracy_s", "Time to the target accuracy (s)", ".2f"),
            ]
        return found

    def _along(self, axis: str, name: str, title: str, number: str) -> Chart | None:
        rows = [r for r in self.tables[f"axis_{axis}"] if r.get(name) is not None]
        values = sorted({r["value"] for r in rows})
        if len(values) < 2:
            return None
        wide = values[0] > 0 and values[-1] / values[0] >= 8
        both = wide and name not in ("accuracy", "metric")
        colours = palette.assign(list(dict.fromkeys(r["series"] for r in rows)))
        x = quantity("value", axis, **({"type": "log"} if wide else {"zero": False}))
        if len(values) <= 8:
            x["axis"] = {"values": values, "format": "~g"}
        y = quantity(name, title, number, **({"type": "log"} if both else {"zero": False}))
        colour = colours_of("series", {s: c for s, (c, _) in colours.items()})
        shape = colours_of("series", {s: mark for s, (_, mark) in colours.items()})
        tooltip = tips(
            ("series", "setting", ""), ("value", axis, ""), (name, title, number), (f"{name}_low", "lowest", number),
            (f"{name}_high", "highest", number),
        )  # fmt: skip
        layers = ranged(only(name, "full"), x, y, colour, shape, tooltip)
        note = "Both axes are logarithmic." if both else ""
        where = (
            f"{name}_by_{axis}",
            f"Along {axis}",
            f"{title} against {axis}",
            note,
            f"axis_{axis}",
        )
        return Chart(*where, self._spec(layers), own_legend=True)

    def _by_setting(self) -> list[Chart | None]:
        if self.several:
            return []
        return [
            self._dots("speedup_serial", "Speed", "Speedup against serial", ".2f"),
            self._dots("metric", "Accuracy", f"Test {self.score}", ".4g", zero=False),
            self._dots("accuracy", "Accuracy", "Test accuracy", ".2%", zero=False),
            self._dots("time_to_accuracy_s", "Accuracy", "Time to the target accuracy (s)", ".2f"),
            self._dots("train_s", "Speed", "Training time (s)", ".2f"),
            self._dots("sent_bytes", "Cost", "Bytes per worker and step", ".3s"),
        ]

    def _dots(
        self, name: str, section: str, title: str, number: str, zero: bool = True
    ) -> Chart | None:
        rows = [r for r in self.lines if r.get(name) is not None]
        if len(rows) < 2:
            return None
        x, y = quantity(name, title, number, zero=zero), _names("id", [r["id"] for r in self.lines])
        tooltip = tips(("id", "setting", ""), (name, title, number), ("runs", "runs", ""))
        dot = {"x": x, "y": y, "color": self._colour(), "tooltip": tooltip}
        span = {
            "x": {**x, "field": f"{name}_low"},
            "x2": {"field": f"{name}_high"},
            "y": y,
            "color": self._colour(),
        }
        layers: list[Spec] = [
            {**only(name), "mark": {"type": "point", "filled": True, "size": 80}, "encoding": dot},
            {**only(name), "mark": "rule", "encoding": span},
        ]
        return Chart(
            f"{name}_by_setting",
            section,
            title,
            "",
            "lines",
            self._spec(layers, height=ROW * len(rows)),
        )

    # --- over time

    def _curves(self) -> list[Chart | None]:
        chosen = (
            None
            if self.score == "accuracy"
            else self._curve(
                "metric", "train_s", f"{self.score} over training time", SECONDS, ".4g"
            )
        )
        return [
            chosen,
            self._curve("accuracy", "train_s", "Accuracy over training time", SECONDS, ".1%"),
            self._curve(
                "accuracy", "samples", "Accuracy over samples", "samples seen by all workers", ".1%"
            ),
            self._curve("loss", "train_s", "Test loss over training time", SECONDS, ".3f"),
        ]

    def _curve(self, name: str, over: str, title: str, x_title: str, number: str) -> Chart | None:
        if not any(r[name] is not None and r[over] is not None for r in self.tables["curves"]):
            return None
        x = quantity(over, x_title, ".3s" if over == "samples" else "", zero=False)
        encoding: Spec = {
            "x": x,
            "y": quantity(name, self.score if name == "metric" else name, number, zero=False),
            "color": self._colour(),
            "detail": {"field": "run"},
        }
        tooltip = tips(
            ("series", "setting", ""),
            ("workers", "workers", ""),
            (over, x_title, ",.4~g"),
            (name, name, number),
        )
        here: Spec = {"transform": [{"filter": CHOSEN_WORKERS}]}
        layers: list[Spec] = [
            {
                **here,
                "mark": {"type": "line", "strokeWidth": 1.5, "strokeOpacity": 0.85},
                "encoding": encoding,
            },
            {
                **here,
                "mark": {"type": "point", "filled": True, "size": 24},
                "encoding": {**encoding, "shape": self._shape(), "tooltip": tooltip},
            },
        ]
        if name == "accuracy" and self.study.target is not None:
            layers.insert(0, level(self.study.target))
        note = "One line per run, for the number of workers chosen above; serial for comparison."
        return Chart(
            f"{name}_over_{over}",
            "Over time",
            title,
            note,
            "curves",
            self._spec(layers, workers=True),
        )

    # --- where the time goes

    def _time(self) -> list[Chart | None]:
        self.tables["parts"] = [
            {
                "series": r["series"],
                "workers": r["workers"],
                "part": part,
                "place": PLACES[part],
                "ms": ms,
            }
            for r in self.lines
            for part, ms in _parts(r).items()
        ]
        found: list[Chart | None] = []
        if self.tables["parts"]:
            y, x = (
                _names("series", self.series),
                quantity("ms", "ms of one step, mean over workers"),
            )
            tooltip = tips(
                ("series", "setting", ""),
                ("workers", "workers", ""),
                ("part", "part", ""),
                ("ms", "milliseconds", ".2f"),
            )
            spec = self._spec(
                [_stacked(x, y, CHOSEN_WORKERS, tooltip)],
                workers=True,
                height=ROW * len(self.series),
            )
            note = (
                "Computing, making and reading messages (codec), exchanging, waiting; for the"
                " number of workers chosen above."
            )
            title = "Where the time of a step goes"
            found.append(
                Chart(
                    "time_per_step",
                    "Where the time goes",
                    title,
                    note,
                    "parts",
                    spec,
                    own_legend=True,
                )
            )
        if self.tables["workers"]:
            y, x = _names("worker", []), quantity("seconds", "seconds of the training")
            tooltip = tips(
                ("worker", "worker", ""), ("part", "part", ""), ("seconds", "seconds", ".3f")
            )
            spec = self._spec(
                [_stacked(x, y, "datum.line == line", tooltip)], line=True, height=SMALL
            )
            title = "Where each worker's time went"
            found.append(
                Chart("time_per_worker", "Each worker", title, "", "workers", spec, own_legend=True)
            )
        return found

    def _resources(self) -> list[Chart | None]:
        return [
            self._resource("cpu_percent", "CPU", "% of a core"),
            self._resource("memory_mb", "Memory", "MB resident, shared pages included"),
            self._resource("net_mb_per_s", "Network", "MB/s over TCP, both ways"),
            self._resource("disk_mb_per_s", "Disk", "MB/s, read and written"),
        ]

    def _resource(self, name: str, title: str, unit: str) -> Chart | None:
        if not any(r[name] is not None for r in self.tables["resources"]):
            return None
        colour = {
            "field": "worker",
            "type": "nominal",
            "scale": {"range": list(palette.COLOURS)},
            "legend": {"title": None, **LEGEND},
        }
        encoding: Spec = {
            "x": quantity("t", "seconds since the worker started", zero=True),
            "y": quantity(name, unit, zero=True),
            "color": colour,
            "tooltip": tips(
                ("worker", "worker", ""), ("t", "second", ".1f"), (name, unit, ",.4~g")
            ),
        }
        layer: Spec = {
            "transform": [{"filter": f"datum.line == line && isValid(datum['{name}'])"}],
            "mark": {"type": "line", "point": {"size": 20}},
            "encoding": encoding,
        }
        spec = self._spec([layer], line=True, height=SMALL)
        return Chart(name, "Each worker", title, "", "resources", spec, own_legend=True)

    # --- what all charts share

    def _colour(self) -> Spec:
        return {
            **colours_of("series", {s: c for s, (c, _) in self.colours.items()}),
            "legend": None,
        }

    def _shape(self) -> Spec:
        return {
            **colours_of("series", {s: shape for s, (_, shape) in self.colours.items()}),
            "legend": None,
        }

    def _spec(
        self, layers: list[Spec], *, workers: bool = False, line: bool = False, height: int = HEIGHT
    ) -> Spec:
        params: list[dict[str, Any]] = [{"name": "shown", "value": self.series}]
        if workers:
            params.append({"name": "workers", "value": self.default_workers})
        if line:
            params.append({"name": "line", "value": self.default_line})
        return {"width": "container", "height": height, "params": params, "layer": layers}


def _parts(row: Row) -> dict[str, float]:
    """What a step's time consists of; DDP's exchange hides inside the backward pass."""
    if row["sync_ms"] is None and row["compute_ms"] is not None:
        return {palette.TOGETHER: row["compute_ms"]}
    return {
        part: row[f"{part}_ms"]
        for part in ("compute", "codec", "sync", "idle")
        if row.get(f"{part}_ms")
    }


def _names(field_name: str, order: list[str]) -> Spec:
    """Names down the side."""
    sort = {"sort": order} if order else {}
    return {
        "field": field_name,
        "type": "nominal",
        "title": None,
        "axis": {"labelLimit": 240},
        **sort,
    }


def _stacked(x: Spec, y: Spec, which: str, tooltip: list[Spec]) -> Spec:
    """The parts of a time, one after the other."""
    colour, order = colours_of("part", dict(palette.PARTS)), {"field": "place", "sort": "ascending"}
    encoding = {"x": x, "y": y, "color": colour, "order": order, "tooltip": tooltip}
    return {
        "transform": [{"filter": which}],
        "mark": {"type": "bar", "height": {"band": 0.7}},
        "encoding": encoding,
    }


def _most_useful(workers: Sequence[int], cores: int) -> int:
    """The largest number of workers that have a core each; else the smallest there is."""
    fitting = [w for w in workers if w <= cores]
    return (
        max(fitting)
        if fitting and max(fitting) > 1
        else min((w for w in workers if w > 1), default=max(workers, default=1))
    )


def static_spec(chart: Chart, charts: Charts, rows: list[Row]) -> Spec:
    """As a picture: with its title, its own data and a legend."""
    spec: Spec = {
        **chart.spec,
        "width": 640,
        "title": chart.title,
        "data": {"values": rows},
        "background": "white",
    }
    if not chart.own_legend:
        shown = [s for s in charts.series if any(r.get("series") == s for r in rows)]
        legend = {
            "title": None,
            "orient": "bottom",
            "columns": 3,
            "labelLimit": 220,
            "values": shown,
        }
        spec["layer"] = [with_legend(layer, legend) for layer in chart.spec["layer"]]
    return spec
