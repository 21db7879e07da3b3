"""Profiles of runs with `--profile`: the table of serial beside that of each worker."""

from __future__ import annotations

import html
from typing import Any

from paceline.report.lines import RunRecord, Study
from paceline.report.page.markup import code, table

MOST_ROWS, MOST_RUNS = 25, 4

Profile = dict[str, Any]


def profiles_of(run: RunRecord) -> dict[str, Profile]:
    """Return the profile of each worker of a run."""
    found = {}
    for own in run.events:
        for e in own:
            if e["kind"] == "profile":
                found[f"worker {e['rank']}"] = e
    return found


def profile_tables(study: Study) -> str:
    """Return the page's section on profiles; empty where no run was profiled."""
    profiled = [
        (line, run, tables)
        for line in (*study.profiled, *study.lines)
        for run in line.completed[:1]
        if (tables := profiles_of(run))
    ]
    if not profiled:
        return ""
    serial = next(
        (next(iter(t.values())) for line, _, t in profiled if line.strategy == "serial"), None
    )
    several = [p for p in profiled if p[0].strategy != "serial"] or profiled
    parts = [
        "<section><h2>Profiles</h2><p class=note>Times are milliseconds per step: a function's own"
        " time (with its calls per step in brackets) and its total time. The profiler slows a run:"
        " settings with <code>profile=True</code> are not compared with others.</p>"
    ]
    for line, _, tables in several[:MOST_RUNS]:
        columns = {
            **({"serial": serial} if serial is not None and line.strategy != "serial" else {}),
            **tables,
        }
        for kind, steps, title in (
            ("functions", "function_steps", "Python functions"),
            ("operators", "operator_steps", "operators"),
        ):
            name = html.escape(line.id)
            parts.append(
                f"<details open><summary>{name}:"
                f" {title}</summary>{_table(columns, kind, steps)}</details>"
            )
    return "".join([*parts, "</section>"])


def _table(columns: dict[str, Profile], kind: str, steps: str) -> str:
    rows: dict[str, dict[str, tuple[float, float, float]]] = {}
    for column, profile in columns.items():
        count = max(1, profile[steps])
        for row in profile[kind]:
            rows.setdefault(row["name"], {})[column] = (
                row["own_s"] / count,
                row["calls"] / count,
                row["total_s"] / count,
            )
    order = sorted(rows, key=lambda name: -max(v[0] for v in rows[name].values()))[:MOST_ROWS]
    head = ["", *(h for c in columns for h in (f"{html.escape(c)}<br>own (calls)", "total"))]
    body = []
    for name in order:
        cells = [code(name[:90])]
        for column in columns:
            value = rows[name].get(column)
            own = "–" if value is None else f"{1e3 * value[0]:.3f} ({value[1]:.3g})"
            cells += [own, "–" if value is None else f"{1e3 * value[2]:.3f}"]
        body.append(cells)
    if not body:
        return "<p class=note>The run was too short for this table.</p>"
    return table(head, body)
