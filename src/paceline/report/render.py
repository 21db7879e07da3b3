"""From records to what a person opens: `report.html`, `figures/`, `results.csv`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, RunFailed
from paceline.record.writer import write_text
from paceline.report.charts import Chart, Charts, static_spec
from paceline.report.lines import Study, read_study
from paceline.report.page import page
from paceline.report.tables import (
    Row,
    curve_rows,
    line_rows,
    resource_rows,
    worker_rows,
    write_results,
)

Say = Callable[[str], None]
SCALE = 2  # of the PNGs


def render(folder: str | Path, figures: bool = True, say: Say = lambda _: None) -> Path:
    """Write the report of a study (or of a run, or of a folder of runs) into its own folder; the
    page's path.
    """
    return write(read_study(folder), Path(folder), figures, say)


def write(study: Study, folder: Path, figures: bool, say: Say) -> Path:
    charts = Charts(study, tables_of(study))
    drawn = charts.all()
    path = folder / "report.html"
    try:
        write_results(study, folder / "results.csv")
        write_text(path, page(study, charts, drawn, library()))
        if figures:
            (folder / "figures").mkdir(exist_ok=True)
            for number, chart in enumerate(drawn):
                say(f"figure {number + 1} of {len(drawn)}")
                rows = charts.shown_at_first(chart)
                if rows:
                    draw(chart, charts, rows, folder / "figures")
    except OSError as error:
        raise RunFailed(f"the report cannot be written to {folder}: {error.strerror}") from None
    return path


def tables_of(study: Study) -> dict[str, list[Row]]:
    return {
        "lines": line_rows(study),
        "curves": curve_rows(study),
        "workers": worker_rows(study),
        "resources": resource_rows(study),
    }


def draw(chart: Chart, charts: Charts, rows: list[Row], folder: Path) -> None:
    """The same chart as a picture, twice."""
    convert = _vl_convert()
    svg = convert.vegalite_to_svg(static_spec(chart, charts, rows))
    (folder / f"{chart.name}.svg").write_text(svg)
    (folder / f"{chart.name}.png").write_bytes(convert.svg_to_png(svg, scale=SCALE))


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, so that the page needs no network."""
    return str(_vl_convert().javascript_bundle())


def _vl_convert() -> Any:
    try:
        import vl_convert
    except ImportError as error:
        raise PacelineError(
            f"reports need vl-convert-python: pip install vl-convert-python ({error})"
        ) from None
    return vl_convert
