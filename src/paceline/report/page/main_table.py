"""The main table, which is also the picture: a row per setting beside serial.

Speed and score are dots with 95% intervals, from the verdicts of `judge.py`; bytes, CPU and memory
are those of all workers and servers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from markupsafe import Markup

from paceline.report.answer import compared, leader, like_the_leader, tied_with
from paceline.report.judge import SPEED, Verdict, judge, speed
from paceline.report.lines import INSECURE, Line, Spread, Study
from paceline.report.page.intervals import Dot, Scale, axis, picture
from paceline.report.score import Score, score_of, scored
from paceline.report.words import count, percent, seconds, size, times

UNFOLDED = 14  # rows that are shown at first; serial is always one of them
WORDS = {"good": ("faster", "better"), "bad": ("slower", "worse")}


@dataclass
class Row:
    """One setting: its texts, its dots, and its marks."""

    line: Line
    speed: Dot | None = None
    speed_text: str = "–"
    speed_range: str = ""
    faster_in: str = ""
    score: Dot | None = None
    score_text: str = "–"
    score_range: str = ""
    accuracy: str = ""
    sent: str = "–"
    cpu: str = "–"
    memory: str = "–"
    marks: list[str] = field(default_factory=list)
    folded: bool = False
    pictures: dict[str, Markup] = field(default_factory=dict)


@dataclass(frozen=True)
class MainTable:
    """The rows by speed, the axes above the pictures, and the legend below."""

    rows: list[Row]
    against_serial: bool  # otherwise the first picture is the training time
    score: Score
    axes: dict[str, Markup]
    legend: list[str]
    accuracy_beside: bool
    servers: bool

    @property
    def folded(self) -> int:
        return sum(row.folded for row in self.rows)


def main_table(study: Study) -> MainTable:
    """Return the main table of a study."""
    score, against = score_of(study), any(study.serial(x) for x in study.lines)
    beside = not score.is_accuracy and any(x.accuracy for x in study.lines)
    rows = [_row(study, line, against, beside) for line in study.lines]
    rows.sort(key=lambda row: _place(row, against))
    _mark(study, rows)
    kept = [row for row in rows if row.speed is None or row.speed.kind != "base"][:UNFOLDED]
    for row in rows:
        base = row.speed is not None and row.speed.kind == "base"
        row.folded = len(rows) > UNFOLDED + 2 and row not in kept and not base
    axes = _draw(rows, score, against)
    legend = _legend(study, rows, score, against)
    servers = any(x.servers for x in study.lines)
    return MainTable(rows, against, score, axes, legend, beside, servers)


def _place(row: Row, against: bool) -> float:
    if row.speed is None:
        return math.inf
    return -row.speed.mean if against else row.speed.mean


def _row(study: Study, line: Line, against: bool, beside: bool) -> Row:
    row = Row(line)
    if not line.completed:
        row.speed_text = "failed"
        return row
    if against:
        _fill_speed(study, row)
    elif line.train_s is not None:
        row.speed = _of_spread(line.train_s)
        row.speed_text = seconds(line.train_s.mean)
        row.speed_range = _range(line.train_s)
    _fill_score(study, row)
    if beside and line.accuracy is not None:
        row.accuracy = percent(line.accuracy.mean)
    if line.workers > 1 or line.servers:
        row.sent = size(line.sent_per_step())
    cpu = line.over_ranks(lambda rank: rank.get("cpu_percent"))
    row.cpu = f"{cpu.mean:.0f}%" if cpu else "–"
    memory = line.over_ranks(lambda rank: rank.get("pss_peak_bytes")) or line.over_ranks(
        lambda rank: rank.get("rss_peak_bytes")
    )
    row.memory = size(memory.mean) if memory else "–"
    return row


def _fill_speed(study: Study, row: Row) -> None:
    serial = study.serial(row.line)
    if serial is row.line:
        row.speed, row.speed_text = Dot(1.0, 1.0, 1.0, "base", 1.0), times(1.0)
        return
    found = speed(study, row.line, serial)
    if found is None:
        return
    kind = "good" if found.lower else "bad" if found.higher else "same"
    ends = math.exp(-found.high), math.exp(-found.low)
    row.speed = Dot(math.exp(-found.apart), *ends, kind, 1.0)
    row.speed_text = times(row.speed.mean)
    row.speed_range = f"{ends[0]:.2f} to {ends[1]:.2f}" if found.estimate else "one run"
    row.faster_in = _faster_in(found)


def _faster_in(found: Verdict) -> str:
    """`faster in 9 of 9 blocks`: the pairs on the side of the mean, as the sentences say it."""
    side = "faster" if found.apart < 0 else "slower"
    return f"{side} {found.counted}" if found.counted else ""


def _fill_score(study: Study, row: Row) -> None:
    score, serial = score_of(study), study.serial(row.line)
    own = score.spread(row.line)
    if own is None:
        return
    row.score_text = score.text(own.mean)
    reference = score.spread(serial) if serial is not None else None
    base = reference.mean if reference is not None else None
    found = scored(study, row.line, serial) if serial is not row.line else None
    if found is None:
        row.score = Dot(
            own.mean, own.mean, own.mean, "base" if serial is row.line else "same", base
        )
        return
    kind = "same" if not found.differs else "bad" if score.worse(found) > 0 else "good"
    half = found.estimate.half if found.estimate else 0.0
    relative = score.quantity.relative
    low, high = (own.mean * math.exp(end) if relative else own.mean + end for end in (-half, half))
    row.score = Dot(own.mean, low, high, kind, base)
    if found.estimate:
        row.score_range = (
            f"+-{100 * half:.1f}" if score.is_accuracy else f"+-{(high - low) / 2:.2g}"
        )


def _of_spread(spread: Spread) -> Dot:
    return Dot(spread.mean, spread.low, spread.high, "same")


def _range(spread: Spread) -> str:
    return f"{spread.low:.2f} to {spread.high:.2f}" if spread.n > 1 else "one run"


def _mark(study: Study, rows: list[Row]) -> None:
    """Mark the confirmed settings, and those that are tied with the fastest."""
    lines = compared(study)
    best = leader(study, lines) if lines else None
    verdict = speed(study, best, study.serial(best)) if best is not None else None
    tied: list[Line] = []
    if best is not None and verdict is not None and verdict.lower:
        tied = tied_with(study, best) if verdict.confirmed else like_the_leader(study, lines)
        if tied:
            tied = [best, *tied]
    for row in rows:
        if row.line.id in study.confirmed and row.line is not study.serial(row.line):
            row.marks.append("confirmed")
        if any(row.line is x for x in tied):
            row.marks.append("tied for the fastest")
        elif row.line is best and verdict is not None and verdict.lower:
            title = "fastest confirmed" if verdict.confirmed else _title(row, rows)
            row.marks.append(title)


def _title(best: Row, rows: list[Row]) -> str:
    """The answer is about several workers; one worker of a strategy may be faster still."""
    means = [row.speed.mean for row in rows if row.speed]
    first = best.speed is not None and best.speed.mean >= max(means)
    return "fastest" if first else "fastest of several workers"


def _draw(rows: list[Row], score: Score, against: bool) -> dict[str, Markup]:
    """Draw the pictures of all rows on common scales; return the axes."""
    form = score.text if not score.is_accuracy else lambda v: f"{100 * v:.4g}%"
    speeds = [row.speed for row in rows if row.speed]
    scores = [row.score for row in rows if row.score]
    scales = {
        "speed": Scale.of(speeds, True, lambda v: f"{v:g}x" if against else f"{v:g} s"),
        "score": Scale.of(scores, False, form),
    }
    for row in rows:
        for name, dot, text, interval in (
            ("speed", row.speed, row.speed_text, row.speed_range),
            ("score", row.score, row.score_text, row.score_range),
        ):
            scale = scales[name]
            if dot is not None and scale is not None:
                said = WORDS.get(dot.kind, ("", ""))[name == "score"]
                row.pictures[name] = picture(
                    scale, dot, " ".join(filter(None, (text, interval, said)))
                )
    return {name: axis(scale) for name, scale in scales.items() if scale is not None}


def _legend(study: Study, rows: list[Row], score: Score, against: bool) -> list[str]:
    """Say what dots, bars and colours mean, and where the numbers come from."""
    found = [_meaning(study, rows, score, against), _sources(study), _used(study, rows)]
    if cut := str(study.definition.get("cut", "")):
        found.append(f"This study was cut to be quick: {cut}.")
    if study.about.get("cut_seeds"):
        found.append(f"Because of the time budget, {study.about['cut_seeds']} were run.")
    return [text for text in found if text]


def _meaning(study: Study, rows: list[Row], score: Score, against: bool) -> str:
    if not against:
        return (
            "Dots are means over the runs; bars reach from the lowest to the highest run. Serial"
            " was not run on the same work, so nothing is compared with it."
        )
    several = [row for row in rows if row.line.workers > 1 or row.line.threads > 1]
    tested = [v for row in several if (v := speed(study, row.line, study.serial(row.line)))]
    number = sum(v.estimate is not None and not v.confirmed for v in tested)
    confirmed = sum(v.confirmed for v in tested)
    if not judge(SPEED, study).repeated and not confirmed:
        return (
            "Dots are single runs, so there are no intervals. Green is more than 10% faster than"
            " serial (dashed line), red more than 10% slower, grey between; in the column of the"
            f" {score.name}, better and worse."
        )
    tied = any("tied for the fastest" in row.marks for row in rows)
    families = [f"{count(number, 'setting')}"] if number else []
    families += [f"{count(confirmed, 'confirmed setting')} by themselves"] if confirmed else []
    corrected = f", with Holm's correction for {' and '.join(families)}" if families else ""
    return (
        "Dots are means, bars are 95% intervals of the comparison with serial (dashed line). Green"
        f" is faster (better), red is slower (worse), grey is not told apart: at 5%{corrected}"
        f"{'; one worker of a strategy at 1%' if len(several) < len(rows) - 1 else ''}."
        + (" Settings that are tied were not told apart from the fastest." if tied else "")
    )


def _sources(study: Study) -> str:
    if not study.confirmed:
        return ""
    return (
        "The speeds of the rows marked `confirmed` come from the"
        f" {count(len(study.blocks), 'confirming block')} alone; the other speeds, and every"
        f" {score_of(study).name}, come from the {count(study.seeds, 'round')} of whole trainings."
    )


def _used(study: Study, rows: list[Row]) -> str:
    ranks = "workers and servers" if any(x.servers for x in study.lines) else "workers"
    text = (
        f"Bytes are what all {ranks} send, divided by the workers' steps. CPU (100% is one core)"
        f" and memory are sums over all {ranks}."
    )
    if any(row.line.oversubscribed for row in rows):
        text += f" † oversubscribed: more {ranks} than the {study.cores} cores."
    if any(row.line.insecure for row in rows):
        text += f" {INSECURE}"
    return text
