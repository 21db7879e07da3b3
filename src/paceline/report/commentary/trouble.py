"""Comments on what went wrong: failed runs, a busy machine, slow workers, a target not reached."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from paceline.report.commentary.comment import Comment
from paceline.report.lines import Line, Study
from paceline.report.words import count, listed, percent, times

SLOW = 1.3  # times the median of the others: a slow worker
EQUAL = 0.9  # of the others' samples: below it the batch is smaller, which costs more per sample
ELSEWHERE = 30.0  # per cent of a core: more than a launcher takes
MUCH_WAITING = 0.15  # of the workers' time


def failures(study: Study) -> Iterator[Comment]:
    """List the settings with failed runs, and the records that could not be read."""
    for line in study.lines:
        if line.errors:
            reason = line.errors[0].splitlines()[0]
            yield Comment(
                "failed",
                f"In {len(line.errors)} of {len(line.runs)} runs `{line.id}` {reason}",
            )
    for damage in study.unreadable:
        yield Comment("failed", f"A record is left out: {damage}")
    for damage in (damage for run in study.runs for damage in run.damaged):
        yield Comment("failed", f"Events are left out: {damage}")


def disturbed(study: Study) -> Iterator[Comment]:
    """Say when other processes used the machine, or when a profiler slowed runs down."""
    others = []
    for run in study.runs:
        machine = (run.record.get("machine") or {}).get("cpu_percent")
        own = [w["cpu_percent"] for w in run.record["workers"] if w.get("cpu_percent") is not None]
        if machine is not None and own and len(own) == len(run.record["workers"]):
            others.append(machine - sum(own))
    if others and median(others) >= ELSEWHERE:
        yield Comment(
            "disturbed",
            f"Something else used the machine: {median(others):.0f}% of a core beside the workers"
            f" (median of {count(len(others), 'run')}). Times and speedups are those of a busy"
            " machine.",
            {"most in one run": f"{max(others):.0f}%"},
        )
    if any(run.record["config"].get("profile") for run in study.runs):
        yield Comment(
            "disturbed",
            "Some runs were profiled, which slows them down: do not compare their times.",
        )


def unlike_work(study: Study) -> Iterator[Comment]:
    """Say when runs that were not planned together have different global batches."""
    done = [x for x in study.lines if x.completed and not study.definition]
    batches = {x.id: sum(x.completed[0].record["config"].get("batch_sizes") or [0]) for x in done}
    if len({b for b in batches.values() if b}) > 1:
        yield Comment(
            "unlike",
            "The global batches of these runs differ, so they made different steps: their"
            " accuracies after training are not comparable.",
            {name: f"{batch} samples per step" for name, batch in batches.items()},
        )


def slow_workers(study: Study) -> Iterator[Comment]:
    """Name each worker that took much longer per sample than the others in every run."""
    for line in study.lines:
        if line.workers < 2 or not line.completed:
            continue
        ratios = _slow_in_every_run(line)
        idle = line.share("idle_s")
        waited = (
            f" The workers waited {percent(idle, 0)} of the time."
            if idle is not None and idle >= MUCH_WAITING
            else ""
        )
        once = " (seen in one run)" if len(line.completed) < 2 else ""
        for rank, ratio in sorted(ratios.items()):
            yield Comment(
                "slow worker",
                f"Worker {rank} of `{line.id}` was slow: it took {times(ratio)} as long for a"
                f" sample as the others did{once}.{waited}",
                {"times the median of the others": times(ratio)},
            )


def _slow_in_every_run(line: Line) -> dict[int, float]:
    """Return (rank: times the others' median), from the last run, of workers always slow.

    Workers with different stages of a model have different work: none of them is slow.
    """
    slow: list[dict[int, float]] = []
    for run in line.completed:
        each = [w for w in run.record["workers"] if w["role"] == "worker" and w["samples"]]
        if any((w.get("split") or {}).get("stages", 1) > 1 for w in each):
            return {}
        found = {w["rank"]: _times_the_others(w, [o for o in each if o is not w]) for w in each}
        slow.append({rank: ratio for rank, ratio in found.items() if ratio >= SLOW})
    always = set.intersection(*(set(found) for found in slow))
    return {rank: slow[-1][rank] for rank in always}


def _times_the_others(worker: dict[str, Any], others: list[dict[str, Any]]) -> float:
    """Return a worker's time per sample over the others'; 0 for a worker with fewer samples."""
    usual = median(o["compute_s"] / o["samples"] for o in others) if others else 0.0
    if not usual or worker["samples"] < EQUAL * median(o["samples"] for o in others):
        return 0.0
    return float(worker["compute_s"] / worker["samples"] / usual)


def not_reached(study: Study) -> Iterator[Comment]:
    """Name the settings that missed the target accuracy in some run."""
    if study.target is None:
        return
    missing = [x for x in study.lines if x.completed and x.reached[0] < x.reached[1]]
    if missing:
        yield Comment(
            "target",
            f"{listed([x.id for x in missing])} did not reach the target of"
            f" {100 * study.target:g}% in every run.",
            {x.id: "{} of {} runs".format(*x.reached) for x in missing},
        )
