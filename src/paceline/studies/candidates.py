"""Which settings a study confirms: serial, and the best of those that it has screened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from paceline.common.estimates import t_quantile
from paceline.record.steady import speed_of
from paceline.studies.grid import Setting, StudySpec
from paceline.studies.plan import PlannedRun

Record = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A setting that is run in every block."""

    name: str
    slug: str
    options: dict[str, Any]
    samples_per_s: float  # when it was screened
    outside_s: float  # what a run takes beside its steps

    @classmethod
    def of(cls, setting: Setting, screened: list[Record]) -> Candidate:
        outside = [r["result"]["wall_s"] - r["result"]["train_s"] for r in screened]
        return cls(
            f"{setting.label} x {setting.workers}",
            setting.slug,
            setting.options,
            fmean(map(speed_of, screened)),
            max(0.0, min(outside)),
        )


def candidates(
    spec: StudySpec, records: Mapping[str, Record], begun: Sequence[str] | None = None
) -> list[Candidate]:
    """Return serial and the best settings; empty where there are none.

    The first is the one that was fastest against serial. A few short runs do not tell settings
    apart that differ by a few per cent, so of those that may be as fast the most accurate come
    next, then the others by speed.
    Only settings on the same work as the fastest one are chosen: serial must be theirs, too. A
    single worker with one thread is serial again, so it is not chosen.
    `begun` has the names of those that an earlier session has chosen.
    """
    measured: dict[str, tuple[Setting, dict[int, Record]]] = {}
    for setting in spec.settings():
        names = {seed: PlannedRun(setting, seed).name for seed in spec.seeds}
        own = {seed: records[name] for seed, name in names.items() if name in records}
        if own and all(r["status"] == "completed" and speed_of(r) for r in own.values()):
            measured[f"{setting.label} x {setting.workers}"] = (setting, own)

    def made(setting: Setting) -> Candidate:
        own = measured[f"{setting.label} x {setting.workers}"][1]
        return Candidate.of(setting, list(own.values()))

    if begun is not None:
        return [made(measured[name][0]) for name in begun if name in measured]
    serials = [(s, own) for s, own in measured.values() if _is_plain_serial(s)]
    gains: list[tuple[list[float], Setting, Setting]] = []
    for setting, own in measured.values():
        base = next((b for b in serials if _same_work(b[0], setting)), None)
        if base is None or _is_alone(setting):
            continue
        serial, theirs = base
        logs = [
            math.log(speed_of(own[s]) / speed_of(theirs[s])) for s in own.keys() & theirs.keys()
        ]
        if logs:
            gains.append((logs, setting, serial))
    if not gains:
        return []
    gains.sort(key=lambda gain: -fmean(gain[0]))
    serial = gains[0][2]
    by_speed = [setting for _, setting, theirs in gains if theirs is serial]
    near = nearest([its for its, _, theirs in gains if theirs is serial])
    tied = sorted(
        by_speed[1:near],
        key=lambda setting: _quality(measured[f"{setting.label} x {setting.workers}"][1]),
        reverse=True,
    )
    best = [by_speed[0], *tied, *by_speed[max(1, near) :]]
    return [made(setting) for setting in (serial, *best[: spec.confirms])]


def nearest(logs: Sequence[Sequence[float]]) -> int:
    """How many settings, from the first on, may be as fast as the first (95%, pooled variance).

    `logs` are the log ratios of each setting to serial, the fastest setting first.
    """
    spread = [(value - fmean(its)) ** 2 for its in logs for value in its]
    freedom = len(spread) - len(logs)
    if freedom < 1:
        return 1
    deviation = math.sqrt(sum(spread) / freedom)
    quantile = t_quantile(freedom)

    def may_be_as_fast(its: Sequence[float]) -> bool:
        apart = fmean(logs[0]) - fmean(its)
        return apart <= quantile * deviation * math.sqrt(1 / len(logs[0]) + 1 / len(its))

    return next((i for i, its in enumerate(logs) if not may_be_as_fast(its)), len(logs))


def _quality(records: Mapping[int, Record]) -> float:
    """The mean of the metric that the runs were asked for; the higher, the better."""
    values = []
    for record in records.values():
        metric = record["result"].get("metric")
        if metric is None or metric["value"] is None:
            values.append(-(record["result"].get("test_loss") or math.inf))
        else:
            values.append(metric["value"] if metric["higher_is_better"] else -metric["value"])
    return fmean(values)


def _is_plain_serial(setting: Setting) -> bool:
    return setting.strategy == "serial" and setting.options.get("threads") == 1


def _is_alone(setting: Setting) -> bool:
    """Whether one worker with one thread does what serial does, whatever its strategy."""
    return setting.workers == 1 and setting.options.get("threads") == 1


def _same_work(serial: Setting, setting: Setting) -> bool:
    return all(setting.varied.get(k) == v for k, v in serial.varied.items() if k != "strategy")
