"""The answer in a few sentences: the fastest, the fastest that keeps serial's score, and what more
workers bring.

Every setting is compared with serial on the same work: the same model, data, batch, learning rate.
"""

from __future__ import annotations

import math

from paceline.report.judge import Verdict, mean_of, serial_speedup, speed
from paceline.report.lines import Line, Study
from paceline.report.networks import soonest
from paceline.report.privacy import epsilon_of
from paceline.report.score import lost, only_the_largest_class, score_of, standing
from paceline.report.words import (
    as_fast,
    count,
    interval,
    listed,
    percent,
    seconds,
    times,
    workers,
)


def answer(study: Study) -> list[str]:
    """Return the sentences that the page and the terminal begin with."""
    lines = compared(study)
    if not lines:
        return [*_answer_without_comparison(study), *_largest_class(study)]
    found = [
        soonest(study),
        _fastest(study, lines),
        *_largest_class(study),
        _keeps_score(study, lines),
    ]
    return [f for f in (*found, _adding_workers(study, lines)) if f]


def compared(study: Study) -> list[Line]:
    """Return the settings with several workers whose serial baseline was run."""
    return [
        x
        for x in study.lines
        if x.strategy != "serial" and x.workers > 1 and serial_speedup(study, x) is not None
    ]


def leader(study: Study, lines: list[Line]) -> Line:
    """Return the setting that the first sentence is about.

    It is the fastest of those that were confirmed, if any were, and of those that are tied the one
    with the best score; else the fastest of those that are faster than serial beyond noise, if
    there are any.
    """
    confirmed = [x for x in study.lines if x.id in study.confirmed and x is not study.serial(x)]
    if confirmed:
        fastest = max(confirmed, key=lambda x: mean_of(serial_speedup(study, x)))
        return max([fastest, *tied_with(study, fastest)], key=lambda x: _merit(study, x))
    faster = [x for x in lines if _is_faster(study, x)]
    return max(
        faster or lines,
        key=lambda x: (mean_of(serial_speedup(study, x)), -(x.sample_s or math.inf)),
    )


def _merit(study: Study, line: Line) -> tuple[float, float]:
    """The score, the higher the better, then the speed."""
    score = score_of(study)
    own = score.spread(line)
    value = -math.inf if own is None else own.mean if score.higher_is_better else -own.mean
    return value, mean_of(serial_speedup(study, line))


def like_the_leader(study: Study, lines: list[Line]) -> list[Line]:
    """Return the settings that do not differ from the leader beyond noise; none of single runs."""
    best = leader(study, lines)
    verdicts = [
        (x, speed(study, x, best)) for x in lines if x is not best and x.context == best.context
    ]
    return [x for x, v in verdicts if v is not None and v.runs >= 2 and not v.differs]


def best_lines(study: Study) -> list[Line]:
    """Return each setting with its own best number of workers, by speed; serial is first.

    The settings that the first sentence rests on are among them, whatever their best number is.
    """
    found = [x for x in study.lines if x.id in study.confirmed and x.sample_s]
    for label in study.series:
        own = [x for x in study.lines if x.label == label and x.sample_s]
        if own:
            best = min(own, key=lambda x: (not _is_faster(study, x), x.sample_s or math.inf))
            found += [best] if best.id not in study.confirmed else []
    return sorted(
        found, key=lambda x: (x.strategy != "serial", x.threads, -mean_of(serial_speedup(study, x)))
    )


def _is_faster(study: Study, line: Line) -> bool:
    found = speed(study, line, study.serial(line))
    return found is not None and found.lower


def _answer_without_comparison(study: Study) -> list[str]:
    timed = [x for x in study.lines if x.train_s is not None]
    if not timed:
        return ["No run was completed: see the reasons below."]
    score = score_of(study)
    if len(timed) == 1:
        line = timed[0]
        ended = f", to {phrase}" if (phrase := score.phrase(line)) else ""
        took = seconds(line.train_s.mean if line.train_s else None)
        return [
            f"`{line.label}` with {workers(line.workers)} trained for"
            f" {took}{ended}{epsilon_of(line)}."
        ]
    found = []
    scores = {x.id: spread.mean for x in timed if (spread := score.spread(x)) is not None}
    if scores:
        pick, word = (max, "highest") if score.higher_is_better else (min, "lowest")
        best = pick((x for x in timed if x.id in scores), key=lambda x: scores[x.id])
        found.append(
            f"`{best.id}` ended with the {word} {score.name},"
            f" {score.text(scores[best.id])}{epsilon_of(best)}."
        )
    quick = min(timed, key=lambda x: x.train_s.mean if x.train_s else math.inf)
    found.append(
        f"`{quick.id}` took the least time,"
        f" {seconds(quick.train_s.mean if quick.train_s else None)}."
    )
    return found


def _fastest(study: Study, lines: list[Line]) -> str:
    """Name the fastest setting, or those that are tied, with intervals."""
    best = leader(study, lines)
    serial = study.serial(best)
    verdict = speed(study, best, serial)
    if serial is None or verdict is None:
        return ""
    if not verdict.lower:
        return _none_faster(study, lines, best, serial, verdict)
    ends = _ends(study, [best], serial)
    tied = tied_with(study, best) if verdict.confirmed else []
    if tied:
        return f"{_tie(study, [best, *tied])}{_ends(study, [best, *tied], serial)}."
    if verdict.confirmed:
        others = len(study.confirmed) - 2
        told = f"; it was faster than `{_other(study, best)}` too" if others == 1 else ""
        return f"{named(best)} was the fastest: {as_fast(verdict)}{ends}{told}."
    others = len(like_the_leader(study, lines))
    rest = (
        f"; {count(others, 'other setting')} did not differ from it beyond noise" if others else ""
    )
    unsure = any(
        mean_of(serial_speedup(study, x)) > mean_of(serial_speedup(study, best)) for x in lines
    )
    return (
        f"The fastest{' beyond noise' * unsure} was {named(best)}: {as_fast(verdict)}{ends}{rest}."
    )


def named(line: Line) -> str:
    """`` `allreduce` with 2 workers``"""
    return f"`{line.label}` with {workers(line.workers)}"


def winner(study: Study) -> Line | None:
    """Return the setting to train with: the leader if it is faster than serial, else serial.

    Without serial to compare with it is the setting with the best score, else the fastest.
    """
    lines = compared(study)
    if lines:
        best = leader(study, lines)
        serial = study.serial(best)
        verdict = speed(study, best, serial)
        return best if verdict is not None and verdict.lower else serial
    done, score = [x for x in study.lines if x.completed], score_of(study)
    known = {x.id: found.mean for x in done if (found := score.spread(x)) is not None}
    if known:
        sign = 1 if score.higher_is_better else -1
        return max((x for x in done if x.id in known), key=lambda x: sign * known[x.id])
    return max(done, key=lambda x: mean_of(serial_speedup(study, x)), default=None)


def tied_with(study: Study, best: Line) -> list[Line]:
    """Return the confirmed settings that the blocks do not tell from the best one."""
    own = [x for x in study.lines if x.id in study.confirmed and x is not best]
    serial = study.serial(best)
    return [
        x
        for x in own
        if x is not serial and (v := speed(study, x, best)) is not None and not v.differs
    ]


def _other(study: Study, best: Line) -> str:
    serial = study.serial(best)
    return next(i for i in study.confirmed if i != best.id and (not serial or i != serial.id))


def _tie(study: Study, tied: list[Line]) -> str:
    """`` `a` and `b` with 2 workers were tied for the fastest: 1.5x and 1.4x as fast ...``"""
    verdicts = [v for x in tied if (v := speed(study, x, study.serial(x))) is not None]
    if len({x.workers for x in tied}) == 1:
        who = f"{listed([x.label for x in tied])} with {workers(tied[0].workers)}"
    else:
        who = listed([x.id for x in tied])
    gains = " and ".join(times(math.exp(-v.apart)) for v in verdicts)
    told = "; ".join(interval(v) for v in verdicts)
    return f"{who} were tied for the fastest: {gains} as fast as serial ({told})"


def _none_faster(
    study: Study, lines: list[Line], best: Line, serial: Line, verdict: Verdict
) -> str:
    """Say that all settings were slower, or that none was shown to be faster."""
    ends = _ends(study, [best], serial)
    if verdict.estimate is not None and verdict.high < 0:
        return (
            f"The fastest seems to be {named(best)}: {as_fast(verdict)}{ends}; as the best of"
            f" {len(lines)} settings that is not certain (`--budget` confirms the best)."
        )
    if all((v := speed(study, x, study.serial(x))) is not None and v.higher for x in lines):
        if len(lines) == 1:
            return f"{named(best)} was slower than serial: {as_fast(verdict)}{ends}."
        return (
            f"All {len(lines)} settings with several workers were slower than serial; the nearest"
            f" was {named(best)}: {as_fast(verdict)}{ends}."
        )
    beyond = "faster than serial" if verdict.runs >= 2 else "more than 10% faster than serial"
    none = "No setting with several workers" if best.workers > 1 else "No setting"
    return (
        f"{none} was shown to be {beyond}; the nearest was {named(best)}: {as_fast(verdict)}{ends}."
    )


def _ends(study: Study, lines: list[Line], serial: Line) -> str:
    """`, ending at 95.00% (serial: 96.00%)`, with the epsilon of a private setting."""
    score = score_of(study)
    own, reference = [score.spread(x) for x in lines], score.spread(serial)
    if any(spread is None for spread in own) or reference is None:
        return epsilon_of(lines[0])
    name = "" if score.is_accuracy else f"{score.name} "
    values = " and ".join(score.text(spread.mean) for spread in own if spread is not None)
    return (
        f", ending at {name}{values} (serial: {score.text(reference.mean)}){epsilon_of(lines[0])}"
    )


def _keeps_score(study: Study, lines: list[Line]) -> str:
    score, best = score_of(study), leader(study, lines)
    faster = [x for x in lines if _is_faster(study, x) and score.spread(x)]
    faster = [x for x in faster if (serial := study.serial(x)) and score.spread(serial)]
    if not faster:
        return ""
    keeping = [x for x in faster if not lost(study, x, study.serial(x), score.large)]
    if not keeping:
        return (
            "Every setting that was faster than serial lost"
            f" {'accuracy' if score.is_accuracy else 'in ' + score.name}."
        )
    fastest = max(keeping, key=lambda x: mean_of(serial_speedup(study, x)))
    kept = best if best in keeping else fastest
    serial = study.serial(kept)
    assert serial is not None
    ended = standing(study, kept, serial)
    if kept is best:
        who = f"`{best.label}`" if tied_with(study, best) else "It"
        return f"{who} ended {ended}."
    loss = "with little loss" if lost(study, kept, serial) else "without a known loss"
    what = "of accuracy" if score.is_accuracy else f"in {score.name}"
    return (
        f"The fastest {loss} {what} was {named(kept)}: "
        f"{times(mean_of(serial_speedup(study, kept)))} as fast as serial, ending {ended}."
    )


def _largest_class(study: Study) -> list[str]:
    """Name the settings whose accuracy is that of a model that always answers one class."""
    found = {
        x.id: only_the_largest_class(x.completed[0].record) for x in study.lines if x.completed
    }
    same = {name: largest for name, largest in found.items() if largest}
    if not same:
        return []
    accuracy = next(x.accuracy for x in study.lines if x.id in same)
    return [
        f"The accuracy of {listed(list(same))}, {percent(accuracy.mean if accuracy else None)}, is"
        f" the share of the largest class ({next(iter(same.values()))}): a model that always"
        " answers with that class reaches it, too."
    ]


def _adding_workers(study: Study, lines: list[Line]) -> str:
    """Say with how many workers each strategy was fastest, where the runs show it."""
    best: dict[str, int] = {}
    unclear: list[str] = []
    once = False
    labels = list(dict.fromkeys(x.label for x in lines))
    for label in labels:
        own = [x for x in study.lines if x.label == label and x.sample_s]
        if len({x.workers for x in own}) < 2:
            continue
        first = min(own, key=lambda x: x.sample_s or math.inf)
        verdicts = [speed(study, x, first) for x in own if x is not first]
        once |= any(v is not None and v.runs < 2 for v in verdicts)
        if all(v is not None and v.differs for v in verdicts):
            best[label] = first.workers
        else:
            unclear.append(label)
    cores = f"this machine has {study.cores} cores{'; seen in one run' * once}"
    if not best:
        many = (
            f"for {listed(unclear, 4)}"
            if len(unclear) < 3
            else f"for any of the {len(unclear)} strategies"
        )
        return (
            f"These runs do not show which number of workers is fastest {many} ({cores})."
            if unclear
            else ""
        )
    rest = (
        f" These runs do not show which number is fastest for {listed(unclear, 4)}."
        if unclear
        else ""
    )
    counts = sorted(set(best.values()))
    tried = max(x.workers for x in lines)
    if len(counts) == 1:
        all_of_them = len(best) == len(labels) > 1
        every = "every strategy" if all_of_them else listed(list(best), 4)
        was = "was" if all_of_them or len(best) == 1 else "were"
        if counts[0] == 1:
            return (
                f"Adding workers did not pay: {every} {was} fastest with one worker"
                f" ({cores}).{rest}"
            )
        more = ", the most that were tried" if counts[0] == tried else f"; up to {tried} were tried"
        return (
            f"{every[0].upper() + every[1:]} {was} fastest with {workers(counts[0])}{more}"
            f" ({cores}).{rest}"
        )
    common = max(counts, key=lambda c: sum(v == c for v in best.values()))
    others = [f"{label} ({fastest})" for label, fastest in best.items() if fastest != common]
    alike = sum(v == common for v in best.values())
    share = (
        f"{alike} of {len(best)} strategies {'was' if alike == 1 else 'were'} fastest with"
        f" {workers(common)}"
    )
    were = "was" if len(others) == 1 else "were"
    return f"{share} ({cores}); {listed(others, 4)} {were} fastest with another number.{rest}"
