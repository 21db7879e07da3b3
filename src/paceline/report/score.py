"""The score of a trained model: the metric that was asked for, else the accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.registry import metrics
from paceline.report.judge import Quantity, Verdict, judge
from paceline.report.lines import Line, Spread, Study
from paceline.report.words import percent

POINTS = 0.005  # a difference in accuracy below this is called small
TINY_POINTS = 0.0005  # ... below this is not reported
SHARE = 0.01  # the same for another metric, relative to its value
TINY_SHARE = 0.001
UNKNOWN_POINTS = 0.05  # with one run per setting, a difference in accuracy below this is noise


@dataclass(frozen=True)
class Score:
    """A number by which the models of a study are compared."""

    name: str
    higher_is_better: bool
    quantity: Quantity

    @property
    def is_accuracy(self) -> bool:
        return self.name == "accuracy"

    @property
    def large(self) -> float:
        return POINTS if self.is_accuracy else SHARE

    @property
    def tiny(self) -> float:
        return TINY_POINTS if self.is_accuracy else TINY_SHARE

    def spread(self, line: Line) -> Spread | None:
        return Spread.of(list(self.quantity.values(line)))

    def text(self, value: float | None) -> str:
        if value is None:
            return "–"
        return percent(value) if self.is_accuracy else f"{value:.4g}"

    def phrase(self, line: Line) -> str:
        """`95.00% accuracy`, `auc 0.8663`; with the accuracy beside it."""
        own = self.spread(line)
        if own is None:
            return ""
        if self.is_accuracy:
            return f"{self.text(own.mean)} accuracy"
        beside = f" ({percent(line.accuracy.mean)} accuracy)" if line.accuracy else ""
        return f"{self.name} {self.text(own.mean)}{beside}"

    def gap(self, line: Line, serial: Line) -> str:
        own, other = self.spread(line), self.spread(serial)
        if own is None or other is None:
            return "–"
        apart = abs(own.mean - other.mean)
        return f"{100 * apart:.1f} points" if self.is_accuracy else f"{apart:.3g}"

    def worse(self, verdict: Verdict) -> float:
        """Return by how much a score is worse: a difference in accuracy, or a log ratio.

        It is negative where the score is better.
        """
        return -verdict.apart if self.higher_is_better else verdict.apart


@cache
def score_of(*studies: Study) -> Score:
    """Return the score of studies: their metric if all runs have the same one, else accuracy."""
    runs = [r.record for study in studies for line in study.lines for r in line.completed]
    found = [r["result"].get("metric") for r in runs]
    names = {m["name"] for m in found if m}
    name = names.pop() if len(names) == 1 and all(found) else "accuracy"
    if name == "accuracy":
        accuracy = Quantity(
            "accuracy",
            _values(lambda r: r["result"]["test_accuracy"]),
            relative=False,
            once=UNKNOWN_POINTS,
        )
        return Score("accuracy", True, accuracy)
    of = _values(lambda r: (r["result"]["metric"] or {}).get("value"))
    relative = all(v > 0 for study in studies for line in study.lines for v in of(line))
    quantity = (
        Quantity(name, of, relative=relative)
        if relative
        else Quantity(name, of, relative=False, once=math.inf)
    )
    return Score(name, _higher_is_better(found[0] or {}), quantity)


def _values(of: Callable[[dict[str, Any]], float | None]) -> Callable[[Line], list[float]]:
    def each(line: Line) -> list[float]:
        found = line.values(of)
        whole = len(found) == len(line.completed) and all(math.isfinite(v) for v in found)
        return found if whole else []

    return each


def _higher_is_better(metric: dict[str, Any]) -> bool:
    """Read it from the record; older records do not have it, and the registry is asked."""
    said = metric.get("higher_is_better")
    name = str(metric.get("name"))
    if said is None and name in metrics:
        said = getattr(metrics.entry(name).make, "higher_is_better", True)
    return said is not False


def scored(study: Study, line: Line, serial: Line | None) -> Verdict | None:
    """Compare a setting's score with serial's."""
    return judge(score_of(study).quantity, study)(line, serial) if serial is not None else None


def lost(study: Study, line: Line, serial: Line | None, least: float = 0.0) -> bool:
    """Whether the runs show that a score is worse than serial's by at least so much."""
    found, score = scored(study, line, serial), score_of(study)
    return found is not None and found.differs and score.worse(found) >= max(least, score.tiny)


def standing(study: Study, line: Line, serial: Line) -> str:
    """Say how a setting's score compares with serial's, and whether that is beyond noise."""
    score, found = score_of(study), scored(study, line, serial)
    if found is None:
        return ""
    worse, gap = score.worse(found), score.gap(line, serial)
    tiny = abs(worse) <= score.tiny
    if (tiny and worse <= 0) or (worse < 0 and not found.differs):
        return (
            "no less accurate than serial"
            if score.is_accuracy
            else f"with no worse {score.name} than serial"
        )
    if tiny:
        return (
            "as accurate as serial, within 0.05 points"
            if score.is_accuracy
            else f"with serial's {score.name}, within 0.1%"
        )
    if score.is_accuracy:
        where = f"{gap} {'below' if worse > 0 else 'above'} serial"
    else:
        where = f"with {score.name} {gap} {'worse' if worse > 0 else 'better'} than serial's"
    return f"{where}{_how(found)}"


def _how(found: Verdict) -> str:
    if found.runs < 2:
        return " (seen in one run)" if found.differs else " in one run, which may be chance"
    if not found.differs:
        return ", which is within noise"
    return f", {found.counted}" if found.counted else ", which is more than noise"


def largest_class(record: dict[str, Any]) -> tuple[str, float] | None:
    """Return the largest class of the test set and its share, if the record counts classes."""
    classes = ((record.get("data") or {}).get("report") or {}).get("classes") or {}
    total = sum(c["test"] for c in classes.values())
    if not total:
        return None
    name = max(classes, key=lambda c: classes[c]["test"])
    return str(name), classes[name]["test"] / total


def only_the_largest_class(record: dict[str, Any]) -> str:
    """Return the largest class if the accuracy is its share, within half a sample; else ""."""
    found, accuracy = largest_class(record), record["result"]["test_accuracy"]
    if found is None or accuracy is None:
        return ""
    total = sum(c["test"] for c in record["data"]["report"]["classes"].values())
    return found[0] if abs(accuracy - found[1]) * total <= 0.5 else ""
