"""The top of the page: the answer with its table, and the comments."""

from __future__ import annotations

import html
from collections.abc import Sequence

from paceline.report.answer import answer, best_lines
from paceline.report.columns import bytes_heading, measured
from paceline.report.commentary.comment import Comment
from paceline.report.lines import Line, Study
from paceline.report.page.markup import code, definitions, prose, table
from paceline.report.score import score_of
from paceline.report.words import percent, size, times, with_range

SHOWN = 10  # comments; the rest is folded
WARNINGS = ("failed", "slower", "slow worker")


def answer_section(study: Study) -> str:
    """Return the answer, and a table of each setting at its best number of workers."""
    sentences = "".join(f"<p>{prose(s)}</p>" for s in answer(study))
    rows = [_row(study, line) for line in best_lines(study)]
    notes = "".join(f"<p class=note>{prose(note)}</p>" for note in _notes(study))
    return (
        f'<section class=answer id="answer">{sentences}{table(_head(study), rows)}{notes}</section>'
    )


def _head(study: Study) -> list[str]:
    score = score_of(study)
    head = ["setting", "best<br>workers", "training", "against<br>serial"]
    head.append(f"test<br>{html.escape(score.name)}")
    if has_accuracy_beside(study):
        head.append("test<br>accuracy")
    if study.target is not None:
        head.append(f"time to<br>{100 * study.target:g}%")
    return [*head, bytes_heading(study), "exchange,<br>waiting"]


def _row(study: Study, line: Line) -> list[str]:
    found = measured(study, line)
    sync, idle = line.share("sync_s"), line.share("idle_s")
    sent, several = found["sent_bytes"], line.workers > 1
    row = [
        code(line.label),
        workers_cell(line),
        with_range(found["train_s"], ".2f", 1, " s"),
        times(found["speedup_serial"].mean if found["speedup_serial"] else None),
        score_cell(study, line),
    ]
    if has_accuracy_beside(study):
        row.append(with_range(found["accuracy"], ".2f", 100, "%"))
    if study.target is not None:
        reached = found["time_to_accuracy_s"]
        row.append(with_range(reached, ".2f", 1, " s") if reached else "not reached")
    row.append(size(sent.mean) if sent and several else "–")
    known = sync is not None and idle is not None and several
    return [*row, f"{percent(sync, 0)}, {percent(idle, 0)}" if known else "–"]


def _notes(study: Study) -> list[str]:
    means = (
        "The numbers are means over the runs, with the lowest and the highest run in brackets. Each"
        " setting is shown at its own best number of workers."
    )
    if any(x.servers for x in study.lines):
        means += " Bytes are what all workers and servers send, divided by the workers' steps."
    notes = [means]
    if cut := str(study.definition.get("cut", "")):
        notes.append(f"This study was cut to be quick: {cut}.")
    if study.about.get("cut_seeds"):
        notes.append(f"Because of the time budget, {study.about['cut_seeds']} were run.")
    if any(x.oversubscribed for x in best_lines(study)):
        notes.append(
            f"† oversubscribed: more workers and servers than the {study.cores} cores; those times"
            " hold for this machine only."
        )
    return notes


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
    return f"<li><span{kind}>{prose(comment.text)}</span>{figures}</li>"
