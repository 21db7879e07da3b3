"""What a report says, as plain data: the PDF and the Markdown are two ways to write it down.

Every sentence and figure comes from the functions that the page uses.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest
from paceline.report.answer import answer
from paceline.report.charts.all import all_charts
from paceline.report.charts.base import Chart, ChartData
from paceline.report.commentary.all import comments
from paceline.report.document.inline import Text, code, joined, plain, prose, spaced
from paceline.report.document.method import method
from paceline.report.document.tables import (
    Table,
    all_settings,
    containers,
    main_table,
    splits,
    used,
)
from paceline.report.lines import Study
from paceline.report.reading import read_study
from paceline.report.render import tables_of
from paceline.report.words import count, entries, size
from paceline.request.config import Config

# what a reader of the page chooses; a caption names it
ON_THE_PAGE = re.compile("[,;] for the number of workers chosen above(; serial for comparison)?")
MOST_COMMANDS = 12  # of runs that no study planned


@dataclass(frozen=True)
class Figure:
    """A chart with its caption."""

    chart: Chart
    caption: Text


@dataclass(frozen=True)
class Remark:
    """A comment on the data, with the figures behind it."""

    text: Text
    figures: list[tuple[Text, Text]] = field(default_factory=list)
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Document:
    """A report: title, question, answer, tables, charts, comments, method, how to repeat it."""

    title: str
    question: str
    facts: list[tuple[str, str]]  # the work, the runs, the date, the machine
    answer: list[Text]
    commands: list[str]  # that made the records
    main: Table
    figures: list[Figure]
    remarks: list[Remark]
    method: list[tuple[str, Text]]  # (what, how)
    more: list[Table]  # all settings, resources
    environment: list[tuple[str, str]]
    options: list[tuple[str, str]]
    made_by: str
    data: ChartData = field(repr=False)


def read_document(folder: str | Path) -> Document:
    """Read the records of a study, a run or a folder of runs and return its report."""
    return document(read_study(folder))


def document(study: Study) -> Document:
    """Return the report of a study; a study of which no run was completed has none."""
    if not any(line.completed for line in study.lines):
        reasons = [reason for line in study.lines for reason in line.errors]
        why = f" ({reasons[0].splitlines()[0]})" if reasons else ""
        raise BadRequest(f"no run in {study.folder} was completed, so there is no result{why}")
    data = ChartData(study, tables_of(study))
    return Document(
        title=study.title,
        question=str(study.definition.get("question") or ""),
        facts=list(_facts(study)),
        answer=[prose(sentence) for sentence in answer(study)],
        commands=_commands(study),
        main=main_table(study),
        figures=[
            Figure(chart, _caption(chart, data))
            for chart in all_charts(data)
            if data.shown_at_first(chart)
        ],
        remarks=[
            Remark(prose(c.text), [(prose(k), plain(v)) for k, v in c.figures.items()], c.commands)
            for c in comments(study)
        ],
        method=method(study),
        more=[
            table
            for table in (all_settings(study), used(study), splits(study), containers(study))
            if table is not None
        ],
        environment=_environment(study),
        options=list(_options(study)),
        made_by=f"Paceline {study.environment.get('paceline', '')}".strip(),
        data=data,
    )


def _facts(study: Study) -> Iterator[tuple[str, str]]:
    done = sum(len(x.completed) for x in study.lines)
    failed = len(study.runs) - done
    yield "Work", f"{_all(study, 'model')} on {_all(study, 'data')}"
    runs = [count(done, "run"), *([count(study.seeds, "seed")] if study.seeds > 1 else [])]
    if study.confirmed:
        runs.append(count(len(study.blocks), "confirming block"))
    if failed:
        runs.append(f"{failed} not completed")
    yield "Runs", ", ".join(runs)
    if started := study.about.get("started"):
        yield "Date", time.strftime("%d %B %Y", time.localtime(started)).lstrip("0")
    env = study.environment
    parts = [env.get("cpu"), env.get("cores") and count(int(env["cores"]), "core")]
    versions = [f"{name} {env[key]}" for name, key in _VERSIONS if env.get(key)]
    yield "Machine", ", ".join(str(x) for x in (*parts, *versions) if x)


_VERSIONS = (("torch", "torch"), ("Python", "python"))


def _all(study: Study, option: str) -> str:
    """Return the value of an option, or all values that the runs have."""
    found = dict.fromkeys(str(r.record["config"].get(option)) for r in study.runs)
    return ", ".join(found)


def _caption(chart: Chart, data: ChartData) -> Text:
    """Return the title of a chart, the setting that it shows, and how to read it."""
    parts = [prose(f"{chart.title}.")]
    params = {p["name"] for p in chart.spec.get("params", ())}
    if "line" in params and data.default_line:
        parts.append(joined(spaced(plain("Shown is"), code(data.default_line)), plain(".")))
    elif "workers" in params:
        beside = ", beside serial" if any(r["strategy"] == "serial" for r in data.lines) else ""
        parts.append(plain(f"With {count(data.default_workers, 'worker')}{beside}."))
    if note := ON_THE_PAGE.sub("", chart.note):
        parts.append(prose(note))
    return spaced(*parts)


def _commands(study: Study) -> list[str]:
    """Return the commands that made the records; a study has one."""
    own = (study.about.get("environment") or {}).get("command")
    found = [own] if own else [r.record["environment"].get("command") for r in study.runs]
    return list(dict.fromkeys(str(c) for c in found if c))[:MOST_COMMANDS]


def _environment(study: Study) -> list[tuple[str, str]]:
    first: dict[str, Any] = study.environment
    left_out = ("command", "memory_bytes")
    known = ((k, v) for k, v in first.items() if k not in left_out and v not in (None, ""))
    found = [(k, entries(v)) for k, v in known]
    if memory := first.get("memory_bytes"):
        found.append(("memory", size(memory)))
    for what, chosen in (study.about.get("memory_format") or {}).items():
        found.append((f"memory format of {what}", str(chosen)))
    return found


def _options(study: Study) -> Iterator[tuple[str, str]]:
    """Return what all runs share, and the axes of a study."""
    if study.definition:
        for name, value in study.definition.get("base", {}).items():
            yield name, str(value)
        for name, values in study.definition.get("axes", {}).items():
            yield f"{name} (varied)", "; ".join(map(str, values))
        return
    configs = [r.record["config"] for r in study.runs]
    for name in Config.options():
        values = dict.fromkeys(str(c[name]) for c in configs if c.get(name) not in (None, [], ""))
        if values and name != "out":
            yield (name if len(values) == 1 else f"{name} (varied)"), "; ".join(values)
