"""What to try next, each from something that was seen, with the run's own numbers."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.report.comment import Comment
from paceline.report.lines import Line, Study
from paceline.report.noise import SPEED, judge
from paceline.report.words import milliseconds, percent

SLOW = 1.3  # times the median: a slow worker
NOISY = 0.1  # a standard deviation of times that hides what one looks for


def next_steps(study: Study) -> Iterator[Comment]:
    """What to try next, each from something that was seen."""
    lines = [x for x in study.lines if x.workers > 1 and not x.oversubscribed and x.train_s]
    talking = [x for x in lines if (x.share("sync_s") or 0) >= 0.25]
    if talking:
        worst = max(talking, key=lambda x: x.share("sync_s") or 0)
        each = worst.per_step("sync_s")
        yield Comment(
            "next",
            f"The exchange took {percent(worst.share('sync_s'), 0)} of `{worst.id}`: try to talk"
            " less often (`local-sgd:every=16`), larger batches (`--global-batch-size`), or"
            " another transport.",
            {"exchange per step": milliseconds(each.mean) if each else "–"},
        )
    waiting = [x for x in lines if (x.share("idle_s") or 0) >= 0.25]
    if waiting:
        worst = max(waiting, key=lambda x: x.share("idle_s") or 0)
        sizes = ",".join(map(str, _balanced(worst)))
        smaller = f", or smaller batches for the slow one (`--batch-size {sizes}`)" if sizes else ""
        yield Comment(
            "next",
            f"The workers of `{worst.id}` waited {percent(worst.share('idle_s'), 0)} of the time"
            " for the slowest: try a strategy that lets them run apart (`ps:consistency=async`,"
            f" `local-sgd`){smaller}.",
        )
    for crowded, noise in judge(SPEED, study).noise.items():
        if (
            noise is None
            or noise.deviation <= NOISY
            or not any(x.oversubscribed == crowded for x in study.lines)
        ):
            continue
        which = "oversubscribed runs" if crowded else "runs that fit the cores"
        text = (
            f"Times of equal {which} differed by {percent(noise.deviation, 0)} (standard"
            " deviation): "
        )
        yield Comment(
            "next",
            text + "give more `--seeds`, or a quieter machine.",
            {"known from": f"{noise.freedom} degrees of freedom"},
        )


def _balanced(line: Line) -> list[int]:
    """The run's own global batch, cut by the speeds that were measured; nothing where the workers
    were about as fast.
    """
    config, each = line.completed[0].record["config"], line.completed[0].record["workers"]
    speeds = [
        w["samples"] / w["compute_s"]
        for w in each
        if w["role"] == "worker" and w["samples"] and w["compute_s"]
    ]
    sizes = config.get("batch_sizes") or []
    if (
        len(speeds) != line.workers
        or len(sizes) != line.workers
        or max(speeds) < SLOW * min(speeds)
    ):
        return []
    shares = [max(1, round(sum(sizes) * v / sum(speeds))) for v in speeds]
    shares[speeds.index(max(speeds))] += sum(sizes) - sum(shares)
    return shares
