"""The answer in three sentences: the fastest, the fastest that keeps serial's accuracy, what adding workers buys."""

from __future__ import annotations

import math

from paceline.report.lines import Line, Study
from paceline.report.noise import accuracy_noise, differ, lost_points, mean_of, seen, time_noise
from paceline.report.words import listed, percent, seconds, times, workers


def answer(study: Study) -> list[str]:
    """Three sentences: the fastest, the fastest that keeps serial's accuracy, what adding workers buys."""
    lines = [x for x in study.lines if x.train_s is not None and x.strategy != "serial" and x.workers > 1]
    serial = next((x for x in study.lines if x.strategy == "serial" and x.threads == 1 and x.train_s), None)
    if not lines or serial is None or serial.train_s is None:
        return _answer_without_comparison(study)
    found = [_fastest(study, lines, serial), _keeps_accuracy(study, lines, serial), _adding_workers(study, lines)]
    return [f for f in found if f]


def _answer_without_comparison(study: Study) -> list[str]:
    timed = [x for x in study.lines if x.train_s is not None]
    if not timed:
        return ["No run was completed: see the reasons below."]
    if len(timed) == 1:
        line = timed[0]
        accuracy = f", to {percent(line.accuracy.mean)} accuracy" if line.accuracy else ""
        assert line.train_s is not None
        return [f"`{line.label}` with {workers(line.workers)} trained for {seconds(line.train_s.mean)}{accuracy}."]
    scored = [x for x in timed if x.accuracy is not None]
    found = []
    if scored:
        best = max(scored, key=lambda x: x.accuracy.mean if x.accuracy else 0.0)
        found.append(
            f"`{best.label}` ended with the highest accuracy, {percent(best.accuracy.mean if best.accuracy else None)}."
        )
    quick = min(timed, key=lambda x: x.train_s.mean if x.train_s else math.inf)
    found.append(f"`{quick.label}` took the least time, {seconds(quick.train_s.mean if quick.train_s else None)}.")
    return found


def _fastest(study: Study, lines: list[Line], serial: Line) -> str:
    best = max(lines, key=lambda x: mean_of(study.serial_speedup(x)))
    serial, gain, noise = study.serial(best) or serial, study.serial_speedup(best), time_noise(study)
    if gain is None or best.train_s is None or serial.train_s is None:
        return ""
    if gain.mean <= 1 or not differ(noise, best, serial):
        return (
            f"No setting was faster than serial training ({seconds(serial.train_s.mean)}) beyond noise; the nearest was "
            f"`{best.label}` with {workers(best.workers)} ({seconds(best.train_s.mean)})."
        )
    ends = ""
    if best.accuracy and serial.accuracy:
        ends = f", ending at {percent(best.accuracy.mean)} (serial: {percent(serial.accuracy.mean)})"
    same = [x for x in lines if x is not best and x.context == best.context and not differ(noise, x, best)]
    others = f"; {len(same)} other setting{'s' * (len(same) > 1)} cannot be told from it" if same and noise else ""
    return (
        f"Fastest was `{best.label}` with {workers(best.workers)}: {seconds(best.train_s.mean)} of training, "
        f"{times(gain.mean)} as fast as serial ({seconds(serial.train_s.mean)}){ends}{seen(best, serial)}{others}."
    )


def _keeps_accuracy(study: Study, lines: list[Line], serial: Line) -> str:
    if serial.accuracy is None or serial.train_s is None:
        return ""
    scored, accuracy, times_apart = [x for x in lines if x.accuracy is not None], accuracy_noise(study), time_noise(study)
    keeping = [
        x
        for x in scored
        if lost_points(accuracy, x, study.serial(x) or serial) is None and mean_of(study.serial_speedup(x)) > 1
    ]
    keeping = [x for x in keeping if differ(times_apart, x, serial)]
    if not keeping:
        return "No setting was both faster than serial and as accurate." if scored else ""
    best = max(keeping, key=lambda x: mean_of(study.serial_speedup(x)))
    fastest = max(lines, key=lambda x: mean_of(study.serial_speedup(x)))
    assert best.accuracy is not None
    if best is fastest:
        return "It paid no accuracy for it: what it lost against serial, if anything, cannot be told from noise."
    return (
        f"The fastest that kept serial's accuracy was `{best.label}` with {workers(best.workers)}: "
        f"{times(mean_of(study.serial_speedup(best)))} as fast "
        f"as serial, at {percent(best.accuracy.mean)} (serial: {percent(serial.accuracy.mean)})."
    )


def _adding_workers(study: Study, lines: list[Line]) -> str:
    best: dict[str, int] = {}
    for label in dict.fromkeys(x.label for x in lines):
        own = [x for x in study.lines if x.label == label and x.train_s is not None]
        if len({x.workers for x in own}) >= 2:
            best[label] = max(own, key=lambda x: x.samples / x.train_s.mean if x.train_s else 0.0).workers
    if not best:
        return ""
    counts = sorted(set(best.values()))
    most = max(x.workers for x in lines)
    cores = f"this machine has {study.cores} cores"
    if len(counts) == 1:
        if counts[0] == 1:
            return f"Adding workers did not pay: every strategy was fastest with one ({cores})."
        if counts[0] == most:
            return f"Every strategy was fastest with {workers(most)}, the most that were tried ({cores})."
        return f"Adding workers paid up to {counts[0]}: every strategy was fastest there, and slower with more ({cores})."
    common = max(counts, key=lambda c: sum(v == c for v in best.values()))
    others = [f"{label} ({count})" for label, count in best.items() if count != common]
    share = f"{sum(v == common for v in best.values())} of {len(best)} strategies were fastest with {workers(common)}"
    return f"{share} ({cores}); the others were {listed(others, 4)}."


def best_lines(study: Study) -> list[Line]:
    """Each setting once, with its own best number of workers: serial first, then the fastest first."""
    found = []
    for label in study.series:
        own = [x for x in study.lines if x.label == label and x.train_s is not None]
        if own:
            found.append(max(own, key=lambda x: x.samples / x.train_s.mean if x.train_s and x.train_s.mean else 0.0))
    return sorted(found, key=lambda x: (x.strategy != "serial", x.threads, -mean_of(study.serial_speedup(x))))
