"""The results of a study on a terminal: the answer and one table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.report.answer import answer, best_lines
from paceline.report.judge import serial_speedup
from paceline.report.lines import Line, Spread, Study
from paceline.report.score import score_of
from paceline.report.words import count, seconds, size, times, with_range
from paceline.terminal.fitting import WRAP, Column, drop, fit_table, shorten


def show_study(study: Study, console: Console) -> None:
    """Print the answer, a table of each setting at its best, failed runs, and the machine."""
    for sentence in answer(study):
        console.print(sentence.replace("`", ""), highlight=False, markup=False)
    if lines := best_lines(study):
        console.print(_table(study, lines, console))
        console.print(_notes(study, lines), style="dim", highlight=False)
    failed = [f"{line.id} {line.errors[0]}" for line in study.lines if line.errors]
    for text in (*failed, *(f"A record is left out: {damage}" for damage in study.unreadable)):
        console.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
    console.print(machine_line(study.environment), style="dim", highlight=False)


def _notes(study: Study, lines: list[Line]) -> str:
    """Return what the columns of the table mean."""
    notes = (
        "Speed against serial is that after the first steps, with its 95% interval in brackets;"
        " other brackets hold the lowest and the highest run. Accuracy is in per cent. Each setting"
        " is shown at its own best number of workers"
    )
    if study.confirmed:
        notes += f", or where it was confirmed. + confirmed in {count(len(study.blocks), 'block')}"
        notes += ", the others screened"
    notes += "."
    if any(line.oversubscribed for line in lines):
        notes += f" * oversubscribed: more workers and servers than the {study.cores} cores."
    return notes


def _table(study: Study, lines: list[Line], console: Console) -> Table:
    score, target = score_of(study), study.target
    form, scale = (".2f", 100) if score.is_accuracy else (".4g", 1)
    training = Column("training", [seconds(x.train_s.mean if x.train_s else None) for x in lines])
    scores = _ranged(f"test\n{score.name}", [score.spread(x) for x in lines], form, scale)
    gains = [serial_speedup(study, x) for x in lines]
    against = Column(
        "against\nserial",
        [_gain(x, gain, study) for x, gain in zip(lines, gains, strict=True)],
        [times(gain.mean if gain else None) for gain in gains],
    )
    columns = [
        Column("best\nworkers", [str(x.workers) for x in lines]),
        training,
        against,
        scores,
    ]
    steps, last_steps = [shorten(scores)], []
    if not score.is_accuracy and any(x.accuracy for x in study.lines):
        accuracy = _ranged("test\naccuracy", [x.accuracy for x in lines], ".2f", 100)
        columns.append(accuracy)
        steps.append(shorten(accuracy))
        last_steps.append(drop(accuracy))
    if target is not None:
        reached = [x.time_to_accuracy for x in lines]
        time_to = _ranged(f"time to\n{100 * target:g}%", reached, ".2f", missing="not reached")
        columns.append(time_to)
        steps.append(shorten(time_to))
        last_steps.append(drop(time_to))
    sent = Column("sent\na step", [_sent(x) for x in lines])
    names = [x.label + (" *" if x.oversubscribed else "") for x in lines]
    steps = [drop(sent), *steps, WRAP, shorten(against), *last_steps, drop(training)]
    return fit_table(console, "setting", names, [*columns, sent], steps)


def _ranged(
    heading: str, values: list[Spread | None], form: str, scale: float = 1, missing: str = "–"
) -> Column:
    """Return a column of means with their ranges; its short cells leave out the range."""
    short = [missing if v is None else f"{v.mean * scale:{form}}" for v in values]
    full = [missing if v is None else with_range(v, form, scale) for v in values]
    return Column(heading, full, short)


def _gain(line: Line, gain: Spread | None, study: Study) -> str:
    """`1.52x (1.41-1.64) +`: the estimate, its interval, and a mark where it was confirmed."""
    if gain is None or line is study.serial(line):
        return times(gain.mean if gain else None)
    marked = " +" if line.id in study.confirmed else ""
    interval = f" ({gain.low:.2f}-{gain.high:.2f})" if gain.n > 1 else ""
    return f"{times(gain.mean)}{interval}{marked}"


def _sent(line: Line) -> str:
    sent = line.per_step("payload_sent_bytes")
    return size(sent.mean) if sent and line.workers > 1 else "–"


def machine_line(environment: dict[str, Any]) -> str:
    """Return the processor, the cores, and the versions of torch and Python in one line."""
    known = {name: environment.get(name, "?") for name in ("cpu", "cores", "torch", "python")}
    return "{cpu}, {cores} cores, torch {torch}, Python {python}".format(**known)
