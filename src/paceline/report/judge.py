"""Compare settings: an estimate with a 95% interval, and whether the settings differ.

`Judge` makes every verdict of the report: those of the answer, the comments, the tables, the pair
table and `results.csv`.

Runs with the same seed were made in the same round, so they are a pair. The estimate is the mean
over the pairs of log(one / other), or of the difference where ratios mean nothing, with a t
interval. Few pairs show their variance badly, so it is drawn towards that of the other settings
(`estimates.Prior`). The speed of settings that were confirmed is estimated from the confirming
blocks alone, by a plain paired t interval. Runs of two studies have no pairs: Welch's test then.

Two settings differ (`Verdict.differs`)

- against serial: if they do at 5%, corrected by Holm's rule for the number of settings;
- otherwise: if they do at 1%;
- where no setting was run twice: if the difference is large (`Quantity.once`). The sentence then
  says "seen in one run".

Whether such a difference is large is a separate question: see `score.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import fmean

from paceline.common.estimates import Estimate, Prior, holm, paired, unpaired, variance
from paceline.record.blocks import Block
from paceline.report.lines import Line, Spread, Study

ONCE = 0.10  # with one run each, a relative difference above this counts
HAIR = 1e-12  # a smaller difference is rounding
AGAINST_SERIAL = 0.05  # with Holm's correction
OTHERWISE = 0.01
TRUSTED = 0.25  # of the degrees of freedom of all runs


@dataclass(frozen=True)
class Quantity:
    """A number of each run by which settings are compared.

    `values` returns one number per completed run; nothing where one of them has no number.
    """

    name: str
    values: Callable[[Line], Sequence[float]]
    relative: bool = True  # compare ratios, not differences
    once: float = ONCE  # with one run each, a difference above this counts


@dataclass(frozen=True)
class Verdict:
    """The comparison of two settings, `one` and `other`."""

    apart: float  # log(one / other), or one - other
    differs: bool
    runs: int  # of the setting with fewer
    estimate: Estimate | None = None  # None with one run each
    wins: int = 0  # pairs on the side of the mean
    pairs: int = 0
    confirmed: bool = False  # from confirming blocks
    p: float = 1.0  # corrected for the number of settings

    @property
    def low(self) -> float:
        """The lower end of the 95% interval."""
        return self.estimate.low if self.estimate else self.apart

    @property
    def high(self) -> float:
        return self.estimate.high if self.estimate else self.apart

    @property
    def lower(self) -> bool:
        return self.differs and self.apart < 0

    @property
    def higher(self) -> bool:
        return self.differs and self.apart > 0

    @property
    def seen(self) -> str:
        """Qualifies a claim from single runs."""
        return "" if self.runs >= 2 else " (seen in one run)"

    @property
    def counted(self) -> str:
        """`in 9 of 9 blocks`: how many pairs are on the side of the mean."""
        if self.pairs < 2:
            return ""
        return f"in {self.wins} of {self.pairs} {'blocks' if self.confirmed else 'rounds'}"

    def turned(self) -> Verdict:
        """Return the same comparison seen from the other setting."""
        found = self.estimate
        back = found and Estimate(-found.mean, found.error, found.freedom, found.n)
        return Verdict(
            -self.apart, self.differs, self.runs, back, self.wins, self.pairs, self.confirmed,
            self.p,
        )  # fmt: skip


@dataclass(frozen=True)
class Noise:
    """The standard deviation of the ratio to serial from round to round."""

    deviation: float
    freedom: int

    @classmethod
    def pooled(cls, groups: list[list[float]]) -> Noise | None:
        several = [g for g in groups if len(g) > 1]
        freedom = sum(len(g) - 1 for g in several)
        if not freedom:
            return None
        total = sum((len(g) - 1) * variance(g) for g in several)
        return cls(math.sqrt(total / freedom), freedom)


class Judge:
    """Compares settings by one quantity, within one study or between two."""

    def __init__(self, quantity: Quantity, *studies: Study) -> None:
        self.quantity, self.studies = quantity, studies
        # by id; the line is kept too, so that no other object can get its id
        self._known: dict[int, tuple[Line, dict[int, float]]] = {}

    def __call__(self, one: Line, other: Line) -> Verdict | None:
        """Compare two settings; None where one of them lacks a number."""
        if (found := self._against_serial.get((id(one), id(other)))) is not None:
            return found
        if (found := self._against_serial.get((id(other), id(one)))) is not None:
            return found.turned()
        return self._compare(one, other)

    @cached_property
    def prior(self) -> Prior | None:
        """What the comparisons of neighbouring settings say about the variance of any.

        They share settings, so they know less than their number says: the degrees of freedom are
        at most a quarter of those of all runs. With that, equal settings whose noise differs
        fivefold are told apart in 1 to 2% of pairs instead of 1%.
        """
        lines = [x for study in self.studies for x in study.lines if len(self._scaled(x)) > 1]
        near = [
            self._paired(x, lines[(i + gap) % len(lines)])
            for i, x in enumerate(lines)
            for gap in (1, 2)
            if len(lines) > gap
        ]
        found = Prior.of(near)
        if found is None:
            return None
        most = TRUSTED * sum(len(self._scaled(x)) - 1 for x in lines[1:])
        return Prior(found.variance, min(found.freedom, most))

    @cached_property
    def noise(self) -> dict[bool, Noise | None]:
        """The noise of settings that fit the cores, and of oversubscribed ones."""
        groups: dict[bool, list[list[float]]] = {False: [], True: []}
        for study in self.studies:
            for line, base in self._pairs(study):
                groups[line.oversubscribed].append(self._paired(line, base))
        return {crowded: Noise.pooled(group) for crowded, group in groups.items()}

    @property
    def repeated(self) -> bool:
        """Whether some setting was run twice."""
        return any(len(g) > 1 for g in self._differences)

    @cached_property
    def _differences(self) -> list[list[float]]:
        return [
            found
            for study in self.studies
            for line, base in self._pairs(study)
            if (found := self._paired(line, base))
        ]

    def _pairs(self, study: Study) -> list[tuple[Line, Line]]:
        """Return each setting with its serial; without serial, with the first setting."""
        found = []
        for line in study.lines:
            base = study.serial(line) or study.lines[0]
            if base is not line:
                found.append((line, base))
        return found

    @cached_property
    def _against_serial(self) -> dict[tuple[int, int], Verdict]:
        """The verdicts on all settings against serial, with Holm's correction."""
        if len(self.studies) > 1:
            return {}
        found = {
            (id(line), id(base)): self._compare(line, base)
            for study in self.studies
            for line, base in self._pairs(study)
            if base is study.serial(line) and (line.workers > 1 or line.threads > 1)
        }
        known = {k: v for k, v in found.items() if v is not None}
        return dict(zip(known, corrected(list(known.values())), strict=True))

    def _compare(self, one: Line, other: Line) -> Verdict | None:
        a, b = self._scaled(one), self._scaled(other)
        if not a or not b:
            return None
        runs = min(len(a), len(b))
        differences = self._paired(one, other) if len(self.studies) == 1 else []
        if len(differences) >= 2:
            return _verdict(self._estimate(differences), differences, runs)
        welch = unpaired(list(a.values()), list(b.values()))
        if welch is not None:
            return _verdict(welch, [], runs)
        apart = differences[0] if differences else fmean(a.values()) - fmean(b.values())
        return Verdict(apart, abs(apart) > self.quantity.once + HAIR, 1)

    def _estimate(self, differences: list[float]) -> Estimate:
        n = len(differences)
        own, freedom = variance(differences), float(n - 1)
        if self.prior is not None and own > 0:
            own, freedom = self.prior.drawn(own, n - 1)
        return Estimate(fmean(differences), math.sqrt(own / n), freedom, n)

    def _paired(self, one: Line, other: Line) -> list[float]:
        a, b = self._scaled(one), self._scaled(other)
        return [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]

    def _scaled(self, line: Line) -> dict[int, float]:
        """Return a number per seed; its logarithm where the quantity is relative."""
        if id(line) not in self._known:
            values = self.quantity.values(line)
            if self.quantity.relative:
                values = [math.log(v) for v in values]
            seeds = [r.seed for r in line.completed]
            by_seed = dict(zip(seeds, values, strict=True)) if values else {}
            self._known[id(line)] = (line, by_seed)
        return self._known[id(line)][1]


class SpeedJudge(Judge):
    """Compares speeds: by confirming blocks where both settings have them."""

    def _compare(self, one: Line, other: Line) -> Verdict | None:
        if len(self.studies) == 1:
            study = self.studies[0]
            if {one.id, other.id} <= set(study.confirmed):
                found = of_blocks(study.blocks, one.id, other.id)
                if found is not None:
                    return found
        return super()._compare(one, other)

    @cached_property
    def _against_serial(self) -> dict[tuple[int, int], Verdict]:
        """Confirmed settings are a family of their own: the others were not run as often."""
        found = super()._against_serial
        own = {k: v for k, v in found.items() if v.confirmed}
        return found | dict(zip(own, corrected(list(own.values())), strict=True))


def of_blocks(blocks: Sequence[Block], one: str, other: str) -> Verdict | None:
    """Compare the seconds per sample of two settings by confirming blocks; None for one block."""
    differences = [-block.log_ratio(one, other) for block in blocks]
    found = paired(differences)
    if found is None:
        return None
    return _verdict(found, differences, len(differences), confirmed=True)


def corrected(family: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts at 5%, with Holm's correction for their number.

    A verdict from single runs has no interval and stays as it is.
    """
    raw = [v.estimate.p if v.apart else 1.0 for v in family if v.estimate is not None]
    adjusted = iter(holm(raw))
    return [_at(v, next(adjusted)) if v.estimate is not None else v for v in family]


def _at(verdict: Verdict, p: float) -> Verdict:
    return replace(verdict, differs=p <= AGAINST_SERIAL, p=p)


def _verdict(
    found: Estimate, differences: list[float], runs: int, confirmed: bool = False
) -> Verdict:
    apart = 0.0 if abs(found.mean) <= HAIR else found.mean
    wins = sum(d * apart > 0 for d in differences)
    p = 1.0 if apart == 0 else found.p
    differs = p <= (AGAINST_SERIAL if confirmed else OTHERWISE)
    return Verdict(apart, differs, runs, found, wins, len(differences), confirmed, p)


def _per_sample(line: Line) -> list[float]:
    """Return the seconds per sample after the first steps; of all steps in older records."""
    found = []
    for run in line.completed:
        result = run.record["result"]
        steady = result.get("steady_samples_per_s")
        if steady:
            found.append(1 / steady)
        elif result["train_s"] and result["samples"]:
            found.append(result["train_s"] / result["samples"])
    return found if len(found) == len(line.completed) and all(v > 0 for v in found) else []


def _to_accuracy(line: Line) -> list[float]:
    found = [r.record["result"]["time_to_accuracy_s"] for r in line.completed]
    return found if all(found) else []


SPEED = Quantity("seconds of training per sample", _per_sample)
TO_ACCURACY = Quantity("seconds to the accuracy", _to_accuracy)


@cache
def judge(quantity: Quantity, *studies: Study) -> Judge:
    return SpeedJudge(quantity, *studies) if quantity is SPEED else Judge(quantity, *studies)


def speed(study: Study, one: Line, other: Line | None) -> Verdict | None:
    """Compare the seconds per sample of two settings: lower is faster."""
    return judge(SPEED, study)(one, other) if other is not None and other is not one else None


def times_as_fast(study: Study, line: Line, base: Line | None) -> Spread | None:
    """Return how many times as fast as another a setting was, with its 95% interval."""
    if base is line and line.completed:
        return Spread(1.0, 1.0, 1.0, len(line.completed))
    found = speed(study, line, base)
    if found is None:
        return None
    return Spread(
        math.exp(-found.apart), math.exp(-found.high), math.exp(-found.low), found.pairs or 1
    )


def serial_speedup(study: Study, line: Line) -> Spread | None:
    """Return how many times as fast as serial with one thread a setting was."""
    return times_as_fast(study, line, study.serial(line))


def own_speedup(study: Study, line: Line) -> Spread | None:
    """Return how many times as fast as one worker of the same setting a setting was."""
    return times_as_fast(study, line, study.line(line.label, 1))


def efficiency(study: Study, line: Line) -> Spread | None:
    """Return speedup / P, over one worker of the same setting (or serial without one)."""
    found = own_speedup(study, line) or serial_speedup(study, line)
    if found is None:
        return None
    p = line.workers
    return Spread(found.mean / p, found.low / p, found.high / p, found.n)


def mean_of(spread: Spread | None) -> float:
    return spread.mean if spread is not None else 0.0
