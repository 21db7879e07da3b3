"""What the reader chooses: the series and workers of the charts, and two settings to compare."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Protocol

from paceline.report.charts.base import Chart, ChartData
from paceline.report.page.markup import options, slug

# the outline of each shape of a series, in a box of 16 by 16
GLYPHS = {
    "circle": "M8 3a5 5 0 1 0 .01 0z",
    "square": "M3.5 3.5h9v9h-9z",
    "triangle-up": "M8 3l5.5 10h-11z",
    "diamond": "M8 2l5 6-5 6-5-6z",
    "cross": "M6 3h4v3h3v4h-3v3H6v-3H3V6h3z",
    "triangle-down": "M8 13L2.5 3h11z",
}


class Listed(Protocol):
    """What the list of series needs: the page of a plan has one, too."""

    series: list[str]
    shown: list[str]
    colours: dict[str, tuple[str, str]]  # colour and shape, by series
    workers: list[int]
    default_workers: int


def controls(data: Listed) -> str:
    """Return the list of series, which is also the legend, and the choice of workers."""
    chips = "".join(_chip(data, series) for series in data.series)
    both = (
        "<button type=button data-choose=best>best four</button>"
        if len(data.shown) < len(data.series)
        else ""
    ) + (
        "<button type=button data-choose=all>all</button>"
        "<button type=button data-choose=none>none</button>"
    )
    choose = ""
    if len(data.workers) > 1:
        counts = options([str(w) for w in data.workers], str(data.default_workers))
        choose = f"<label class='chip pick'>workers <select id=workers>{counts}</select></label>"
    return (
        '<div class=controls role="group" aria-label="what the charts show">'
        f"{chips}{both}{choose}</div>"
    )


def _chip(data: Listed, series: str) -> str:
    colour, shape = data.colours[series]
    name, checked = html.escape(series), " checked" if series in data.shown else ""
    return (
        f'<label class=chip><input type=checkbox{checked} data-series="{name}">'
        '<svg width=14 height=14 viewBox="0 0 16 16" aria-hidden=true>'
        f'<path fill="{colour}" d="{GLYPHS[shape]}"/></svg>{name}</label>'
    )


def chart_sections(data: ChartData, drawn: Sequence[Chart]) -> list[str]:
    """Return the charts by section."""
    found: dict[str, list[Chart]] = {}
    for chart in drawn:
        found.setdefault(chart.section, []).append(chart)
    return [_section(data, section, members) for section, members in found.items()]


def _section(data: ChartData, section: str, members: Sequence[Chart]) -> str:
    choose = ""
    if section == "Each worker":
        ids = options([r["id"] for r in data.lines], data.default_line)
        choose = f"<div class=row><label>setting <select id=line>{ids}</select></label></div>"
    figures = "".join(figure(chart) for chart in members)
    return (
        f'<section id="{slug(section)}"><h2>{html.escape(section)}</h2>{choose}'
        f"<div class=grid>{figures}</div></section>"
    )


def figure(chart: Chart) -> str:
    """Return a chart with its title, its note and buttons to download it."""
    save = "".join(
        f"<button type=button data-save={kind} title='download as {kind.upper()}'>{kind.upper()}"
        "</button>"
        for kind in ("svg", "png")
    )
    wide = " class=wide" if chart.wide else ""
    return (
        f"<figure{wide}><div class=title><h3>{html.escape(chart.title)}</h3><span class=save>{save}"
        f"</span></div><div class=chart data-chart={chart.name}></div>"
        f"<figcaption>{html.escape(chart.note)}</figcaption></figure>"
    )


def pair_table(data: ChartData) -> str:
    """Return two settings side by side; page.js fills the table."""
    if len(data.lines) < 2:
        return ""
    ids = [r["id"] for r in data.lines]
    first = next((r["id"] for r in data.lines if r["strategy"] == "serial"), ids[0])
    second = data.default_line if data.default_line != first else ids[1]
    return (
        '<section id="pairs"><h2>Two settings side by side</h2><div class=row>'
        f"<label>one <select id=one>{options(ids, first)}</select></label>"
        f"<label>other <select id=other>{options(ids, second)}</select></label></div>"
        "<div class=scroll><table><thead><tr><th></th><th>one</th><th>other</th>"
        "<th>other / one</th><th class=text>verdict</th></tr></thead>"
        "<tbody id=pair></tbody></table></div></section>"
    )
