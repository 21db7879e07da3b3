"""The charts of a report as SVG: in files for Markdown, in the fonts of the page for print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from paceline.common.files import write_whole
from paceline.report.charts.base import HEIGHT, static_spec
from paceline.report.charts.marks import Spec
from paceline.report.document.content import Document, Figure
from paceline.report.document.output import cannot

FONT = "Libertinus Serif"  # Typst has it built in
LOW = 180  # pixels: three charts fit on a page
NARROW = 420  # beside names
WIDER = 1.5
PRINT: dict[str, Any] = {
    "font": FONT,
    "axis": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"},
    "legend": {"labelFontSize": 12, "titleFontSize": 12, "offset": 6, "rowPadding": 0},
    "header": {"labelFontSize": 12, "titleFontSize": 12},
    "text": {"fontSize": 12},
    "view": {"stroke": None},
}


def draw_missing(document: Document, folder: Path) -> None:
    """Write the SVG of each chart that is not in the folder, or is older than the records."""
    newest = _newest(document)
    try:
        folder.mkdir(exist_ok=True)
        for figure in document.figures:
            path = folder / f"{figure.chart.name}.svg"
            if not path.is_file() or path.stat().st_mtime <= newest:
                write_whole(path, _svg(document, figure))
    except OSError as error:
        raise cannot(folder, error) from None


def _newest(document: Document) -> float:
    """Return when the last record was written."""
    study = document.data.study
    files = [study.folder / "study.json", *(run.folder / "run.json" for run in study.runs)]
    return max((f.stat().st_mtime for f in files if f.is_file()), default=0.0)


def _svg(document: Document, figure: Figure) -> str:
    rows = document.data.shown_at_first(figure.chart)
    spec = static_spec(figure.chart, document.data, rows)
    return _drawn(spec)


def printed(document: Document, figure: Figure) -> str:
    """Return a chart as SVG for print: without a title, which its caption has, in a print font."""
    rows = document.data.shown_at_first(figure.chart)
    spec = {k: v for k, v in static_spec(figure.chart, document.data, rows).items() if k != "title"}
    if spec.get("height") == HEIGHT:
        spec["height"] = LOW
    if any(_is_named(layer) for layer in spec.get("layer", ())):
        spec["width"] = NARROW
    config = {**spec.get("config", {}), **PRINT}
    return _drawn(_with_room({**spec, "config": config}))


def pixels(svg: str) -> float:
    """Return the width of an SVG."""
    found = re.search(r'<svg[^>]* width="([\d.]+)"', svg)
    return float(found[1]) if found else 640.0


def _is_named(layer: Spec) -> bool:
    """Whether names of settings stand beside the axis."""
    return bool(layer.get("encoding", {}).get("y", {}).get("type") == "nominal")


def _with_room(spec: Any) -> Any:
    """Return a description whose names are cut later.

    vl-convert does not know the font, and takes its letters for wider than they are.
    """
    if isinstance(spec, list):
        return [_with_room(item) for item in spec]
    if not isinstance(spec, dict):
        return spec
    return {k: WIDER * v if k == "labelLimit" else _with_room(v) for k, v in spec.items()}


def _drawn(spec: Spec) -> str:
    import vl_convert  # it starts threads

    return str(vl_convert.vegalite_to_svg(spec))
