"""Advice on what to try next, from what was measured."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.report.commentary.comment import Comment
from paceline.report.commentary.trouble import SLOW
from paceline.report.judge import SPEED, judge
from paceline.report.lines import Line, Study
from paceline.report.words import milliseconds, percent

MUCH = 0.25  # of the workers' time
NOISY = 0.1  # a standard deviation of the log of times that hides most differences


def next_steps(study: Study) -> Iterator[Comment]:
    """Advise on long exchanges, on waiting, and on noise."""
    lines = [x for x in study.lines if x.workers > 1 and not x.oversubscribed and x.train_s]
    talking = [x for x in lines if (x.share("sync_s") or 0) >= MUCH]
    if talking:
        worst = max(talking, key=lambda x: x.share("sync_s") or 0)
        each = worst.per_step("sync_s")
        yield Comment(
            "next",
            f"The exchange took {percent(worst.share('sync_s'), 0)} of the time of `{worst.id}`:"
            " try to exchange less often (`local-sgd:every=16`), larger batches"
            " (`--global-batch-size`), or another transport.",
            {"exchange per step": milliseconds(each.mean) if each else "–"},
        )
    waiting = [x for x in lines if (x.share("idle_s") or 0) >= MUCH]
    if waiting:
        worst = max(waiting, key=lambda x: x.share("idle_s") or 0)
        sizes = ",".join(map(str, _balanced(worst)))
        smaller = f", or smaller batches for the slow one (`--batch-size {sizes}`)" if sizes else ""
        yield Comment(
            "next",
            f"The workers of `{worst.id}` waited {percent(worst.share('idle_s'), 0)} of the time"
            " for the slowest: try a strategy that lets them run ahead (`ps:consistency=async`,"
            f" `local-sgd`){smaller}.",
        )
    for crowded, noise in judge(SPEED, study).noise.items():
        some = any(x.oversubscribed == crowded for x in study.lines)
        if noise is None or noise.deviation <= NOISY or not some:
            continue
        which = "oversubscribed runs" if crowded else "runs that fit the cores"
        yield Comment(
            "next",
            f"Times of equal {which} differed by {percent(noise.deviation, 0)} (standard"
            " deviation): use more `--seeds`, or a quieter machine.",
            {"known from": f"{noise.freedom} degrees of freedom"},
        )


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
