"""Write the report of a study: `report.html`, `figures/`, `results.csv`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from paceline.common.files import write_whole
from paceline.common.places import cache_folder
from paceline.common.shortage import why_not_written
from paceline.errors import PacelineError, RunFailed
from paceline.record.writer import write_text
from paceline.report.charts.all import all_charts
from paceline.report.charts.base import Chart, ChartData, static_spec
from paceline.report.lines import Study
from paceline.report.page.page import page
from paceline.report.reading import read_study
from paceline.report.results import write_results
from paceline.report.tables import (
    Row,
    curve_rows,
    line_rows,
    resource_rows,
    worker_rows,
)
from paceline.report.workers_csv import write_workers

Say = Callable[[str], None]
SCALE = 2  # of the PNGs


def render(folder: str | Path, figures: bool = True, say: Say = lambda _: None) -> Path:
    """Write the report of a study, a run or a folder of runs into its folder; return the page."""
    return write(read_study(folder), Path(folder), figures, say)


def write(study: Study, folder: Path, figures: bool, say: Say) -> Path:
    """Write the report of a study into a folder; return the page."""
    data = ChartData(study, tables_of(study))
    drawn = all_charts(data)
    path = folder / "report.html"
    try:
        write_results(study, folder / "results.csv")
        write_workers(study, folder / "workers.csv")
        write_text(path, page(study, data, drawn, library()))
        if figures:
            (folder / "figures").mkdir(exist_ok=True)
            for number, chart in enumerate(drawn):
                say(f"figure {number + 1} of {len(drawn)}")
                rows = data.shown_at_first(chart)
                if rows:
                    draw(chart, data, rows, folder / "figures")
    except OSError as error:
        raise RunFailed(
            f"the report cannot be written to {folder}: {why_not_written(error)}"
        ) from None
    return path


def tables_of(study: Study) -> dict[str, list[Row]]:
    return {
        "lines": line_rows(study),
        "curves": curve_rows(study),
        "workers": worker_rows(study),
        "resources": resource_rows(study),
    }


def draw(chart: Chart, data: ChartData, rows: list[Row], folder: Path) -> None:
    """Write a chart as SVG and as PNG."""
    convert = _vl_convert()
    svg = convert.vegalite_to_svg(static_spec(chart, data, rows))
    write_whole(folder / f"{chart.name}.svg", svg)
    write_whole(folder / f"{chart.name}.png", convert.svg_to_png(svg, scale=SCALE))


@cache
def library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script: the page needs no network.

    It takes a second to make, so the user's cache keeps it.
    """
    convert = _vl_convert()
    kept = cache_folder("pages") / f"vega-{convert.__version__}.js"
    with suppress(OSError, UnicodeDecodeError):
        return kept.read_text("utf-8")
    made = str(convert.javascript_bundle())
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, made)
    return made


def _vl_convert() -> Any:
    try:
        import vl_convert
    except ImportError as error:
        raise PacelineError(
            f"reports need vl-convert-python: pip install vl-convert-python ({error})"
        ) from None
    return vl_convert
