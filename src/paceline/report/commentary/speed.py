"""Comments on speed: slower than serial, close to the fastest, more workers than cores."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paceline.report.answer import compared, leader, like_the_leader
from paceline.report.command import study_command
from paceline.report.commentary.comment import Comment, told
from paceline.report.commentary.scaling import SLOWER, reasons, slower
from paceline.report.judge import SPEED, Verdict, judge, serial_speedup, speed
from paceline.report.lines import Line, Study
from paceline.report.words import as_fast, count, listed, times, workers

Ratio = tuple[str, Line, float]


def slower_than_serial(study: Study) -> Iterator[Comment]:
    """For each strategy slower than serial, say where it was slowest, and why."""
    for label in study.series:
        found: list[tuple[Line, float, Verdict]] = []
        for line in (x for x in study.lines if x.label == label and x.workers > 1):
            serial, gain = study.serial(line), serial_speedup(study, line)
            verdict = speed(study, line, serial)
            if gain is not None and verdict is not None and slower(study, line):
                found.append((line, gain.mean, verdict))
        if not found:
            continue
        line, _, verdict = min(found, key=lambda each: each[1])
        because, figures = reasons(study, line)
        shared = f"{_crowd(line)} shared {study.cores} cores." if line.oversubscribed else ""
        first = f"`{label}` with {workers(line.workers)} was slower: {as_fast(verdict)}."
        against = {f"against serial, {workers(x.workers)}": times(g) for x, g, _ in found}
        text = " ".join(part for part in (first, shared, because) if part)
        yield Comment("slower", text, {**against, **figures})


def _crowd(line: Line) -> str:
    """`4 workers with 2 threads each and 1 server`"""
    threads = f" with {line.threads} threads each" if line.threads > 1 else ""
    servers = f" and {count(line.servers, 'server')}" if line.servers else ""
    return f"{workers(line.workers)}{threads}{servers}"


def beyond_the_cores(study: Study) -> Iterator[Comment]:
    """Name the strategies that more workers than cores made slower, or faster."""
    ratios = [r for label in study.series if (r := _oversubscribed(study, label))]
    worse, better = [r for r in ratios if r[2] > 1], [r for r in ratios if r[2] <= 1]
    if worse:
        label, line, ratio = max(worse, key=lambda found: found[2])
        most = f". `{label}` lost most" if len(worse) > 1 else ""
        yield Comment(
            "oversubscribed",
            f"More workers than the {study.cores} cores made {listed([w[0] for w in worse])}"
            f" slower{most}: with {workers(line.workers)} it took {times(ratio)} as long for a"
            " sample as at its best without oversubscription.",
            {f"{name} x {x.workers}": times(r) for name, x, r in worse},
        )
    if better:
        yield Comment(
            "oversubscribed",
            f"{listed([b[0] for b in better])} gained from more workers than cores.",
            {f"{name} x {x.workers}": times(r) for name, x, r in better},
        )


def _oversubscribed(study: Study, label: str) -> Ratio | None:
    """Return a strategy's time per sample with the most workers over its best on free cores."""
    own = [x for x in study.lines if x.label == label and x.train_s]
    fitting = [x for x in own if not x.oversubscribed]
    more = [x for x in own if x.oversubscribed]
    if not fitting or not more:
        return None
    best = min(fitting, key=lambda x: x.sample_s or math.inf)
    last = max(more, key=lambda x: x.workers)
    verdict = speed(study, last, best)
    if not best.sample_s or not last.sample_s or verdict is None:
        return None
    large = verdict.differs and abs(verdict.apart) > SLOWER
    return (label, last, last.sample_s / best.sample_s) if large else None


def within_noise(study: Study) -> Iterator[Comment]:
    """Name the settings that do not differ beyond noise from the one that the answer names."""
    lines = compared(study) or [
        x for x in study.lines if x.train_s and x.strategy != "serial" and x.workers > 1
    ]
    if len(lines) < 2:
        return
    if not judge(SPEED, study).repeated:
        yield Comment(
            "noise",
            "No setting was run twice: differences in time below 10% are not reported. Use more"
            " `--seeds`.",
            commands=told(study_command(study, seeds=3)),
        )
        return
    best, same = leader(study, lines), like_the_leader(study, lines)
    if same:
        gain, least = (
            serial_speedup(study, best),
            min(x.sample_s or math.inf for x in (best, *same)),
        )
        is_fastest = best.sample_s == least and (gain is None or gain.mean > 1)
        fastest = "the fastest, " if is_fastest else ""
        yield Comment(
            "noise",
            f"{listed([x.id for x in same])} did not differ beyond noise from"
            f" {fastest}`{best.id}`.",
            {
                x.id: f"{x.train_s.low:.2f} to {x.train_s.high:.2f} s"
                for x in (best, *same)
                if x.train_s
            },
        )
