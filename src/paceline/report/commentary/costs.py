"""Comments on costs: bytes sent, drift between replicas, more data, and measuring itself."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paceline.report.commentary.comment import Comment
from paceline.report.lines import Line, Spread, Study
from paceline.report.tables import axis_rows
from paceline.report.words import listed, percent, size, workers

MOST_FIGURES = 12


def bytes_moved(study: Study) -> Iterator[Comment]:
    """Say which settings sent the least and the most in a step, servers included."""
    counts = sorted({x.workers for x in study.lines if x.workers > 1 and x.strategy != "serial"})
    if not counts:
        return
    at = max((c for c in counts if c <= study.cores), default=counts[0])
    lines = [x for x in study.lines if x.workers == at]
    moved = {x.label: sent for x in lines if (sent := x.sent_per_step()) is not None}
    if len(moved) < 2:
        return
    low, high = min(moved.values()), max(moved.values())
    if high <= 1.05 * low:
        return
    least, most = (
        [k for k, v in moved.items() if abs(v - edge) <= 0.01 * edge] for edge in (low, high)
    )
    servers = any(x.servers for x in lines if x.label in moved)
    unit = " per worker and step" + (", servers included" if servers else "")
    yield Comment(
        "bytes",
        f"With {workers(at)}, {_sent(least, 'least', low, unit)} and {_sent(most, 'most', high)}.",
        {label: size(value) for label, value in sorted(moved.items(), key=lambda item: item[1])},
    )


def _sent(labels: list[str], what: str, value: float, unit: str = "") -> str:
    if len(labels) == 1:
        return f"`{labels[0]}` sent the {what} ({size(value)}{unit})"
    return f"{len(labels)} settings sent the {what} ({size(value)}{unit}: {listed(labels)})"


def drift(study: Study) -> Iterator[Comment]:
    """Name the settings whose replicas drifted farthest apart and whose gradients were stalest."""
    far = _largest_first(study, "replica_distance_max")
    if far:
        line, distance = far[0]
        yield Comment(
            "drift",
            f"Replicas drifted farthest apart in `{line.id}`: {percent(distance.mean, 1)} of the"
            " length of their mean.",
            {x.id: percent(d.mean, 2) for x, d in far[:MOST_FIGURES]},
        )
    stale = _largest_first(study, "staleness_mean")
    if stale:
        line, mean = stale[0]
        yield Comment(
            "drift",
            f"Gradients were stalest in `{line.id}`: {mean.mean:.1f} updates by others behind, on"
            " average.",
            {x.id: f"{s.mean:.2f}" for x, s in stale[:MOST_FIGURES]},
        )


def _largest_first(study: Study, key: str) -> list[tuple[Line, Spread]]:
    known = [(x, x.over_workers(lambda w: w.get(key))) for x in study.lines]
    found = [(x, spread) for x, spread in known if spread is not None and spread.mean > 0]
    return sorted(found, key=lambda pair: -pair[1].mean)


def along_the_data(study: Study) -> Iterator[Comment]:
    """Say whether the training time grew in proportion to the number of samples."""
    by_series: dict[str, list[tuple[float, float]]] = {}
    for row in axis_rows(study, "data_share"):
        if row["train_s"] is not None:
            by_series.setdefault(row["series"], []).append((row["samples"], row["train_s"]))
    slopes = {
        name: s for name, points in by_series.items() if (s := slope(sorted(points))) is not None
    }
    if slopes:
        low, high = min(slopes.values()), max(slopes.values())
        powers = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
        proportional = all(abs(s - 1) <= 0.1 for s in slopes.values())
        yield Comment(
            "data",
            f"Training time grew as the number of samples to the power {powers}:"
            f" {'' if proportional else 'not '}in proportion.",
            {name: f"slope {s:.2f}" for name, s in slopes.items()},
        )


def slope(points: list[tuple[float, float]]) -> float | None:
    """Return the slope of log y against log x, by least squares; None below three points."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len(logs) < 3:
        return None
    mx, my = sum(x for x, _ in logs) / len(logs), sum(y for _, y in logs) / len(logs)
    spread = sum((x - mx) ** 2 for x, _ in logs)
    return sum((x - mx) * (y - my) for x, y in logs) / spread if spread else None


def measuring_cost(study: Study) -> Iterator[Comment]:
    """Say how much of the workers' time the measuring took."""
    shares = []
    for run in study.runs:
        timed = [(w.get("measuring_s"), w.get("measured_s")) for w in run.record["workers"]]
        known = [(spent, total) for spent, total in timed if None not in (spent, total)]
        total = sum(total for _, total in known)
        if total:
            shares.append(sum(spent for spent, _ in known) / total)
    if shares:
        yield Comment(
            "measuring",
            f"Measuring (events and samples of resources) took"
            f" {percent(sum(shares) / len(shares), 2)} of the workers' time.",
            {"highest in one run": percent(max(shares), 2)},
        )
