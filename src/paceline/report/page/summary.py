"""The top of the page: the answer, the main table, and the comments."""

from __future__ import annotations

import html
from collections.abc import Sequence

from paceline.report.answer import answer, winner
from paceline.report.command import command_of
from paceline.report.commentary.comment import Comment
from paceline.report.lines import Line, Study
from paceline.report.page.main_table import main_table
from paceline.report.page.markup import command_box, definitions, fill, prose
from paceline.report.score import score_of
from paceline.report.words import with_range

LEAD = 2  # sentences in large type
SHOWN = 10  # comments; the rest is folded
WARNINGS = ("failed", "slower", "slow worker")


def answer_section(study: Study) -> str:
    """Return the first screen: the answer, the winner's command, and the main table."""
    sentences, best = answer(study), winner(study)
    command = command_of(study, best) if best is not None else ""
    return str(
        fill(
            "first_screen.html",
            lead=sentences[:LEAD],
            rest=sentences[LEAD:],
            command=command,
            own_loop=best is not None and best.own_loop,
            table=main_table(study),
        )
    )


def has_accuracy_beside(study: Study) -> bool:
    """Whether the runs have an accuracy beside another metric that was asked for."""
    return not score_of(study).is_accuracy and any(x.accuracy for x in study.lines)


def workers_cell(line: Line) -> str:
    return html.escape(str(line.workers)) + (" †" if line.oversubscribed else "")


def score_cell(study: Study, line: Line) -> str:
    """Return the metric that was asked for, with its range."""
    score = score_of(study)
    form, scale, unit = (".2f", 100, "%") if score.is_accuracy else (".4g", 1, "")
    return with_range(score.spread(line), form, scale, unit)


def comments_section(found: Sequence[Comment]) -> str:
    """Return the comments, each with its figures folded."""
    if not found:
        return ""
    items = [_item(comment) for comment in found]
    rest = items[SHOWN:]
    more = f"<details><summary>{len(rest)} more</summary>{_list(rest)}</details>" if rest else ""
    shown = _list(items[:SHOWN])
    return f'<section id="comments"><h2>What the runs show</h2>{shown}{more}</section>'


def _list(items: Sequence[str]) -> str:
    return f"<ul class=comments>{''.join(items)}</ul>"


def _item(comment: Comment) -> str:
    kind = ' class="warn"' if comment.kind in WARNINGS else ""
    figures = ""
    if comment.figures:
        listed = definitions(comment.figures)
        figures = f" <details class=figures><summary>figures</summary>{listed}</details>"
    commands = "".join(command_box(command) for command in comment.commands)
    return f"<li><span{kind}>{prose(comment.text)}</span>{figures}{commands}</li>"
