"""Comments on accuracy: what settings lost or gained against serial, in the metric asked for.

A loss is reported only where the runs show it; a separate question is whether it is large.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from paceline.record.evaluations import deciding
from paceline.report.commentary.comment import Comment
from paceline.report.judge import TO_ACCURACY, Verdict, judge
from paceline.report.lines import Line, Study
from paceline.report.score import Score, score_of, scored
from paceline.report.words import listed, percent, seconds, workers

# strategies in which the gradient of each worker is an update by itself
UPDATES_ALONE = ("hogwild", "ps:consistency=async", "ps:consistency=ssp")
MOST_FIGURES = 12
NEAR = 0.2  # of the step that is looked for

Found = tuple[Line, Line, Verdict]


def accuracy_paid(study: Study) -> Iterator[Comment]:
    """Report large losses; where there are none, small ones; else that there were none."""
    score, found = score_of(study), _against_serial(study)
    beyond_noise = [f for f in found if score.worse(f[2]) > 0 and f[2].differs]
    worse = [f for f in beyond_noise if score.worse(f[2]) > score.tiny]
    large = [f for f in worse if score.worse(f[2]) >= score.large]
    if large:
        yield _comment_on(study, score, large, "lost")
    elif worse:
        yield _comment_on(study, score, worse, "little")
    elif (several := [f for line, _, f in found if line.workers > 1]) and all(
        f.runs >= 2 for f in several
    ):
        yield Comment("accuracy", _no_loss(score, tiny=bool(beyond_noise)))


def _no_loss(score: Score, tiny: bool) -> str:
    if not score.is_accuracy:
        least = "0.1%" if tiny else "noise"
        return f"No strategy's {score.name} was worse than serial's by more than {least}."
    if tiny:
        return "No strategy lost more than 0.05 points of accuracy against serial training."
    return "No strategy lost accuracy against serial training beyond noise."


def accuracy_gained(study: Study) -> Iterator[Comment]:
    """Report large gains."""
    score = score_of(study)
    gained = [
        f for f in _against_serial(study) if f[2].differs and -score.worse(f[2]) >= score.large
    ]
    if gained:
        yield _comment_on(study, score, gained, "gained")


def _against_serial(study: Study) -> list[Found]:
    found = []
    for line in study.lines:
        serial = study.serial(line)
        verdict = scored(study, line, serial) if line.strategy != "serial" else None
        if serial is not None and verdict is not None:
            found.append((line, serial, verdict))
    return found


def _comment_on(study: Study, score: Score, found: list[Found], what: str) -> Comment:
    """Name all settings, the largest difference, and the reason where the record shows it."""
    line, serial, verdict = max(found, key=lambda f: abs(score.worse(f[2])))
    names = listed(list(dict.fromkeys(x.label for x, _, _ in found)))
    gap, own = score.gap(line, serial), score.spread(line)
    gained = what == "gained"
    verb = "gained" if gained else "lost"
    if score.is_accuracy:
        start, side = f"{names} {verb} accuracy against serial", "above" if gained else "below"
    else:
        start = f"{names} {verb} in {score.name} against serial"
        side = "better than" if gained else "worse than"
    little = ", but little:" if what == "little" else ": up to"
    each_time = f", {verdict.counted}" if verdict.counted else ""
    text = (
        f"{start}{little} {gap} {side} serial (`{line.label}` with {workers(line.workers)},"
        f" {score.text(own.mean if own else None)}{each_time}){verdict.seen}."
    )
    if gained:
        text += _sooner(study, line, serial) + _reason(line, serial)
    sign = "+" if gained else "-"
    order = sorted(found, key=lambda f: -abs(score.worse(f[2])))[:MOST_FIGURES]
    return Comment("accuracy", text, {x.id: f"{sign}{score.gap(x, s)}" for x, s, _ in order})


def _sooner(study: Study, line: Line, serial: Line) -> str:
    verdict = judge(TO_ACCURACY, study)(line, serial)
    if (
        verdict is None
        or not verdict.lower
        or study.target is None
        or not line.time_to_accuracy
        or not serial.time_to_accuracy
    ):
        return ""
    own, theirs = line.time_to_accuracy.mean, serial.time_to_accuracy.mean
    return f" It reached {100 * study.target:g}% in {seconds(own)}, serial in {seconds(theirs)}."


def _reason(line: Line, serial: Line) -> str:
    """Explain a gain by more updates, where workers update alone and the global batch is equal."""
    batches = [
        sum(x.completed[0].record["config"].get("batch_sizes") or [0]) for x in (line, serial)
    ]
    if not line.strategy.startswith(UPDATES_ALONE) or batches[0] != batches[1]:
        return ""
    return (
        f" With the same global batch its {line.workers} workers make {line.workers} updates, each"
        " from a part of the batch, where serial makes one."
    ) + _at_equal_updates(line, serial)


def _at_equal_updates(line: Line, serial: Line) -> str:
    """Say what the setting had reached after as many updates as serial makes in all.

    Its P workers have made them after 1/P of serial's steps. Empty unless every run was evaluated
    near that step.
    """
    steps, end = serial.result("steps"), serial.accuracy
    if steps is None or end is None:
        return ""
    at, found = steps.mean / line.workers, []
    for run in line.completed:
        seen = [e for own in run.events[:1] for e in deciding(own)]
        near = min(seen, key=lambda e: abs(e["step"] - at), default=None)
        if near is None or abs(near["step"] - at) > NEAR * at or near.get("accuracy") is None:
            return ""
        found.append(near["accuracy"])
    if not found:
        return ""
    return (
        f" After as many updates as serial makes in all it had {percent(fmean(found), 1)}; serial"
        f" ends at {percent(end.mean, 1)}."
    )
