"""Advice on what to try next, from what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paceline.report.command import command_of, study_command
from paceline.report.commentary.comment import Comment, told
from paceline.report.commentary.trouble import SLOW
from paceline.report.judge import SPEED, judge, speed
from paceline.report.lines import Line, Study
from paceline.report.words import count, milliseconds, percent

LESS_OFTEN, RARELY = "local-sgd:every=16", ("local-sgd", "psgd", "diloco")
RUN_AHEAD, AHEAD = "ps:consistency=async", ("ps:consistency=async", "hogwild", "local-sgd", "psgd")
MUCH = 0.25  # of the workers' time
NOISY = 0.1  # a standard deviation of the log of times that hides most differences


def next_steps(study: Study) -> Iterator[Comment]:
    """Advise on long exchanges, on waiting, and on noise."""
    lines = [x for x in study.lines if x.workers > 1 and not x.oversubscribed and x.train_s]
    talking = [x for x in lines if (x.share("sync_s") or 0) >= MUCH]
    if talking:
        yield _exchange(study, max(talking, key=lambda x: x.share("sync_s") or 0))
    waiting = [x for x in lines if (x.share("idle_s") or 0) >= MUCH]
    if waiting:
        yield _waiting(study, max(waiting, key=lambda x: x.share("idle_s") or 0))
    seeds = 2 * max((len(x.runs) for x in study.lines), default=1)
    for crowded, noise in judge(SPEED, study).noise.items():
        some = any(x.oversubscribed == crowded for x in study.lines)
        if noise is None or noise.deviation <= NOISY or not some:
            continue
        which = "oversubscribed runs" if crowded else "runs that fit the cores"
        yield Comment(
            "next",
            f"Times of equal {which} differed by {percent(noise.deviation, 0)} (standard"
            " deviation): use more `--seeds`, or a quieter machine.",
            {"known from": f"{count(noise.freedom, 'degree')} of freedom"},
            told(study_command(study, seeds=seeds)),
        )


def _exchange(study: Study, line: Line) -> Comment:
    """Advise on a long exchange: exchange less often where that may help, else larger batches."""
    each = line.per_step("sync_s")
    rarely, faster = _measured(study, line, RARELY)
    batch = sum(line.completed[0].record["config"].get("batch_sizes") or [])
    if faster is not None:
        advice = f"`{faster.id}` exchanged less often and was faster here"
        commands = told(command_of(study, faster))
    elif not rarely and not _private(line):
        advice = f"try to exchange less often (`{LESS_OFTEN}`)"
        commands = told(command_of(study, line, strategy=LESS_OFTEN, servers=None))
    else:
        advice = "try larger batches, which make fewer exchanges"
        larger = {"batch_size": None, "global_batch_size": 2 * batch}
        commands = told(command_of(study, line, **larger)) if batch else ()
    return Comment(
        "next",
        f"The exchange took {percent(line.share('sync_s'), 0)} of the time of `{line.id}`:"
        f" {advice}.",
        {"exchange per step": milliseconds(each.mean) if each else "–"},
        commands,
    )


def _waiting(study: Study, line: Line) -> Comment:
    """Advise on waiting: strategies that let workers run ahead, smaller batches for a slow one."""
    ahead, faster = _measured(study, line, AHEAD)
    sizes = _balanced(line)
    advice, commands = [], list[str]()
    if faster is not None:
        advice.append(f"`{faster.id}` lets them run ahead and was faster here")
        commands.append(command_of(study, faster))
    elif not ahead and not _private(line):
        advice.append(f"try a strategy that lets them run ahead (`{RUN_AHEAD}`)")
        commands.append(command_of(study, line, strategy=RUN_AHEAD))
    if sizes:
        shown = ",".join(map(str, sizes))
        advice.append(f"try smaller batches for the slow one (`--batch-size {shown}`)")
        commands.append(command_of(study, line, global_batch_size=None, batch_size=sizes))
    return Comment(
        "next",
        f"The workers of `{line.id}` waited {percent(line.share('idle_s'), 0)} of the time for the"
        f" slowest{': ' if advice else ''}{', or '.join(advice)}.",
        commands=told(*commands),
    )


def _measured(study: Study, line: Line, strategies: tuple[str, ...]) -> tuple[bool, Line | None]:
    """Say whether one of the strategies ran beside a setting, and return the fastest if faster."""
    own = [
        x
        for x in study.lines
        if x.completed and x.workers == line.workers and x.label.startswith(strategies)
    ]
    faster = [x for x in own if (v := speed(study, x, line)) is not None and v.lower]
    return bool(own), min(faster, key=lambda x: x.sample_s or math.inf, default=None)


def _private(line: Line) -> bool:
    return line.completed[0].record["config"].get("privacy") is not None


def _balanced(line: Line) -> list[int]:
    """Return batch sizes in proportion to the workers' measured speeds, with the same sum.

    Empty where the workers were about equally fast.
    """
    config, each = line.completed[0].record["config"], line.completed[0].record["workers"]
    speeds = [
        w["samples"] / w["compute_s"]
        for w in each
        if w["role"] == "worker" and w["samples"] and w["compute_s"]
    ]
    sizes = config.get("batch_sizes") or []
    complete = len(speeds) == len(sizes) == line.workers
    if not complete or max(speeds) < SLOW * min(speeds):
        return []
    shares = [max(1, round(sum(sizes) * v / sum(speeds))) for v in speeds]
    shares[speeds.index(max(speeds))] += sum(sizes) - sum(shares)
    return shares
