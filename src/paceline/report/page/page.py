"""The report: one page that works offline, on a phone, in print, light and dark."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from typing import Any

from paceline.report.charts.base import Chart, ChartData
from paceline.report.columns import compared_columns
from paceline.report.commentary.all import comments
from paceline.report.lines import Study
from paceline.report.messages import messages_table
from paceline.report.origin import origin_table
from paceline.report.page.chosen import chart_sections, controls, pair_table
from paceline.report.page.data_scale import data_scale_section
from paceline.report.page.details import all_results, configuration
from paceline.report.page.markup import document, header, links_in
from paceline.report.page.resources import resources_section
from paceline.report.page.summary import answer_section, comments_section
from paceline.report.predicted import predicted_section
from paceline.report.privacy import privacy_table
from paceline.report.profiles import profile_tables
from paceline.report.tables import Row, verdicts
from paceline.report.words import count


def page(study: Study, data: ChartData, drawn: Sequence[Chart], library: str) -> str:
    """Return the whole document; `library` is the JavaScript that draws charts."""
    content = {
        "series": data.series,
        "shown": data.shown,
        "default_workers": data.default_workers,
        "default_line": data.default_line,
        "charts": {c.name: {"table": c.table, "spec": c.spec} for c in drawn},
        "tables": {
            name: columnar(rows)
            for name, rows in data.tables.items()
            if name == "lines" or any(c.table == name for c in drawn)
        },
        "compared": compared_columns(study),
        "verdicts": verdicts(study),
    }
    parts = (
        answer_section(study),
        comments_section(comments(study)),
        controls(data),
        *chart_sections(data, drawn),
        predicted_section(study),
        data_scale_section(study),
        resources_section(study),
        messages_table(study),
        origin_table(study),
        privacy_table(study),
        pair_table(data),
        profile_tables(study),
        all_results(study),
        configuration(study),
    )
    main = "\n".join(parts)
    head = header(study.title, _facts(study), links_in(main))
    body = f"{head}<main>{main}</main>{_footer(study)}"
    return document(study.title, body, content, library)


def columnar(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return rows as one list of values per column, in a third of the bytes; page.js undoes it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _facts(study: Study) -> str:
    """Return the question, the work, the number of runs, the date and the machine."""
    question = html.escape(str(study.definition.get("question", "")))
    started = study.about.get("started")
    when = time.strftime("%d %B %Y", time.localtime(started)) if started else ""
    env = study.environment
    machine = (
        f"{env.get('cpu', '')}, {env.get('cores', '?')} cores, torch {env.get('torch', '')}, Python"
        f" {env.get('python', '')}"
    )
    done = sum(len(x.completed) for x in study.lines)
    work = f"{_all(study, 'model')} on {_all(study, 'data')}"
    facts = ", ".join(x for x in (count(done, "run"), count(study.seeds, "seed"), when) if x)
    asked = f"{question}; " if question else ""
    return f"{asked}{html.escape(work)}: {facts}.<br>{html.escape(machine)}"


def _all(study: Study, option: str) -> str:
    """Return the value of an option, or how many values the runs have."""
    found = list(dict.fromkeys(str(r.record["config"].get(option)) for r in study.runs))
    return found[0] if len(found) == 1 else f"{len(found)} kinds of {option}"


def _footer(study: Study) -> str:
    version = html.escape(str(study.environment.get("paceline", "")))
    return (
        f"<footer>Made by Paceline {version} from the records in this folder; <code>paceline report"
        f" {html.escape(str(study.folder))}</code> makes it again.</footer>"
    )
