"""Every chart that a study's tables can fill, as Vega-Lite descriptions.

The page draws them, and so do the pictures in `figures/`. A chart names its table and computes
nothing that is not in the table. The page sets three variables: `shown` (the chosen series),
`workers` and `line` (the setting of the detailed charts).
"""

from __future__ import annotations

from paceline.report.charts.base import Chart, ChartData
from paceline.report.charts.network_map import network_map
from paceline.report.charts.over_time import curve_charts
from paceline.report.charts.scaling import scaling_charts
from paceline.report.charts.settings import axis_charts, setting_charts
from paceline.report.charts.workers import worker_charts


def all_charts(data: ChartData) -> list[Chart]:
    """Return the charts in the order of the page; some of them add their table to the data's."""
    return [
        *network_map(data),
        *scaling_charts(data),
        *axis_charts(data),
        *setting_charts(data),
        *curve_charts(data),
        *worker_charts(data),
    ]
