"""The answer in three sentences: the fastest, the fastest that keeps serial's accuracy, what adding workers buys.

Every setting is compared with serial on the same work: the same model, data, batch, learning rate.
"""

from __future__ import annotations

import math

from paceline.report.lines import Line, Study
from paceline.report.networks import soonest
from paceline.report.noise import accuracy_noise, differ, lost_points, mean_of, seen, time_noise
from paceline.report.words import listed, pace_against, percent, seconds, times, workers


def answer(study: Study) -> list[str]:
    lines = [x for x in study.lines if x.train_s is not None and x.strategy != "serial" and x.workers > 1 and study.serial(x)]
    if not lines:
        return _answer_without_comparison(study)
    found = [soonest(study), _fastest(study, lines), _keeps_accuracy(study, lines), _adding_workers(study, lines)]
    return [f for f in found if f]


def best_lines(study: Study) -> list[Line]:
    """Each setting once, with its own best number of workers: serial first, then the fastest first."""
    found = []
    for label in study.series:
        own = [x for x in study.lines if x.label == label and x.sample_s]
        if own:
            found.append(min(own, key=lambda x: x.sample_s or math.inf))
    return sorted(found, key=lambda x: (x.strategy != "serial", x.threads, -mean_of(study.serial_speedup(x))))


def _answer_without_comparison(study: Study) -> list[str]:
    timed = [x for x in study.lines if x.train_s is not None]
    if not timed:
        return ["No run was completed: see the reasons below."]
    if len(timed) == 1:
        line = timed[0]
        accuracy = f", to {percent(line.accuracy.mean)} accuracy" if line.accuracy else ""
        took = seconds(line.train_s.mean if line.train_s else None)
        return [f"`{line.label}` with {workers(line.workers)} trained for {took}{accuracy}."]
    scored = [x for x in timed if x.accuracy is not None]
    found = []
    if scored:
        best = max(scored, key=lambda x: x.accuracy.mean if x.accuracy else 0.0)
        found.append(f"`{best.id}` ended with the highest accuracy, {percent(best.accuracy.mean if best.accuracy else None)}.")
    quick = min(timed, key=lambda x: x.train_s.mean if x.train_s else math.inf)
    found.append(f"`{quick.id}` took the least time, {seconds(quick.train_s.mean if quick.train_s else None)}.")
    return found


def _fastest(study: Study, lines: list[Line]) -> str:
    best = max(lines, key=lambda x: mean_of(study.serial_speedup(x)))
    serial, gain, noise = study.serial(best), study.serial_speedup(best), time_noise(study)
    if gain is None or serial is None:
        return ""
    speed = pace_against(best, serial)
    if gain.mean <= 1 or not differ(noise, best, serial):
        return f"No setting was faster than serial beyond noise; the nearest was `{best.id}`: {speed}."
    ends = ""
    if best.accuracy and serial.accuracy:
        ends = f", ending at {percent(best.accuracy.mean)} (serial: {percent(serial.accuracy.mean)})"
    same = [x for x in lines if x is not best and x.context == best.context and not differ(noise, x, best)]
    others = f"; {len(same)} other setting{'s' * (len(same) > 1)} cannot be told from it" if same and noise else ""
    return (
        f"Fastest was `{best.label}` with {workers(best.workers)}: {times(gain.mean)} as fast as serial, {speed}"
        f"{ends}{seen(best, serial)}{others}."
    )


def _keeps_accuracy(study: Study, lines: list[Line]) -> str:
    noise, points = time_noise(study), accuracy_noise(study)
    faster = []
    for x in lines:
        serial = study.serial(x)
        if serial and serial.accuracy and x.accuracy and mean_of(study.serial_speedup(x)) > 1 and differ(noise, x, serial):
            faster.append((x, serial))
    if not faster:
        return ""
    keeping = [(x, serial) for x, serial in faster if lost_points(points, x, serial) is None]
    if not keeping:
        return "Every setting that was faster than serial lost accuracy."
    best, serial = max(keeping, key=lambda pair: mean_of(study.serial_speedup(pair[0])))
    assert best.accuracy is not None
    assert serial.accuracy is not None
    lost = 100 * (serial.accuracy.mean - best.accuracy.mean)
    below = (
        f"{lost:.1f} points below serial, which these runs cannot tell from noise"
        if lost > 0.05
        else "no less accurate than serial"
    )
    if best is max(lines, key=lambda x: mean_of(study.serial_speedup(x))):
        return f"It ended {below}."
    return (
        f"The fastest that is not known to have lost accuracy was `{best.label}` with {workers(best.workers)}: "
        f"{times(mean_of(study.serial_speedup(best)))} as fast as serial, ending {below}."
    )


def _adding_workers(study: Study, lines: list[Line]) -> str:
    best: dict[str, int] = {}
    for label in dict.fromkeys(x.label for x in lines):
        own = [x for x in study.lines if x.label == label and x.sample_s]
        if len({x.workers for x in own}) >= 2:
            best[label] = min(own, key=lambda x: x.sample_s or math.inf).workers
    if not best:
        return ""
    counts = sorted(set(best.values()))
    tried = max(x.workers for x in lines)
    cores = f"this machine has {study.cores} cores"
    if len(counts) == 1:
        if counts[0] == 1:
            return f"Adding workers did not pay: every strategy was fastest with one ({cores})."
        more = ", the most that were tried" if counts[0] == tried else f"; up to {tried} were tried"
        return f"Every strategy was fastest with {workers(counts[0])}{more} ({cores})."
    common = max(counts, key=lambda c: sum(v == c for v in best.values()))
    others = [f"{label} ({count})" for label, count in best.items() if count != common]
    share = f"{sum(v == common for v in best.values())} of {len(best)} strategies were fastest with {workers(common)}"
    return f"{share} ({cores}); the others were {listed(others, 4)}."
