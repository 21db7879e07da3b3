"""A study and a run as a notebook shows them: a small table, and a study's answer above it.

A notebook has its own style sheet and theme. So the HTML here has no style sheet, takes the
notebook's colours, and sets only what its tables need.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from paceline.common.extras import need
from paceline.report.answer import answer, best_lines
from paceline.report.judge import serial_speedup
from paceline.report.lines import Study
from paceline.report.page.markup import prose
from paceline.report.results import run_table
from paceline.report.score import score_of
from paceline.report.words import seconds, size, times, with_range

CELL = "padding:2px 14px 2px 0;border:0;background:none"
NUMBERS = f"{CELL};text-align:right;font-variant-numeric:tabular-nums"
WORDS = f"{CELL};text-align:left"
RULE = "border-bottom:1px solid currentColor"


def study_frame(study: Study) -> Any:
    """Return one row per run as a pandas DataFrame, with the columns of `results.csv`."""
    pandas = need("pandas", "pandas", "notebook", "Study.frame()")
    names, rows = run_table(study)
    return pandas.DataFrame(
        [[None if value == "" else value for value in row] for row in rows], columns=names
    )


def study_html(study: Study) -> str:
    """Return the answer, and each setting at its best number of workers."""
    score = score_of(study)
    form, scale, unit = (".2f", 100, "%") if score.is_accuracy else (".4g", 1, "")
    head = ["setting", "workers", "training", "against serial", f"test {score.name}", "sent a step"]
    rows = []
    for line in best_lines(study):
        gain, sent = serial_speedup(study, line), line.sent_per_step()
        rows.append(
            [
                line.label,
                str(line.workers),
                seconds(line.train_s.mean if line.train_s else None),
                times(gain.mean if gain else None),
                with_range(score.spread(line), form, scale, unit),
                size(sent) if line.workers > 1 else "–",
            ]
        )
    failed = sum(len(line.errors) for line in study.lines)
    said = [f"<p style='margin:4px 0'>{prose(s)}</p>" for s in answer(study)]
    if failed:
        said.append(f"<p style='margin:4px 0'>{failed} of {len(study.runs)} runs failed.</p>")
    return framed(study.title, [*said, html_table(head, rows)], f"{study.folder}")


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first column is text and whose other columns are numbers."""
    styles = [WORDS] + [NUMBERS] * (len(rows[0]) - 1 if rows else 0)
    titles = "".join(
        f"<th style='{style};{RULE};font-weight:600'>{html.escape(title)}</th>"
        for style, title in zip(styles, head, strict=False)
    )
    body = "".join(
        "<tr style='background:none'>"
        + "".join(
            f"<td style='{style}'>{html.escape(cell)}</td>"
            for style, cell in zip(styles, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    top = f"<thead><tr>{titles}</tr></thead>" if head else ""
    return (
        "<table style='border-collapse:collapse;border:0;margin:6px 0;font-size:inherit'>"
        f"{top}<tbody>{body}</tbody></table>"
    )


def framed(title: str, parts: Sequence[str], where: str) -> str:
    """Return a titled block of HTML that ends with the folder it was read from."""
    return (
        "<div style='font-size:13px;line-height:1.45;max-width:760px'>"
        f"<p style='margin:4px 0;font-weight:600'>{html.escape(title)}</p>{''.join(parts)}"
        f"<p style='margin:4px 0;opacity:.7'><code style='background:none'>{html.escape(where)}"
        "</code></p></div>"
    )
