"""Parts of a worker's row in run.json that only some runs have."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

Event = dict[str, Any]


def ran_apart(events: list[Event], steps: list[Event]) -> dict[str, float | None]:
    """Return how far workers ran apart: staleness, overlapping updates, distance from the mean."""

    def over(key: str, combine: Callable[[list[float]], float]) -> float | None:
        values = [float(e[key]) for e in steps if e.get(key) is not None]
        return combine(values) if values else None

    distances = [
        e["value"] for e in events if e["kind"] == "distance" and e.get("value") is not None
    ]
    return {
        "staleness_mean": over("staleness", fmean),
        "staleness_max": over("staleness", max),
        "missed_mean": over("missed", fmean),
        "overlap_rate": over("overlapped", fmean),
        "replica_distance_max": max(distances, default=None),
    }


def of_a_split_model(start: Event, summary: Event, steps: list[Event]) -> dict[str, Any]:
    """Return what a worker held of a model that was split, and what it sent inside it."""
    split = start.get("split")
    if split is None:
        return {}
    return {
        "parameters": start.get("parameters"),
        "activation_sent_bytes": sum(e.get("inside", 0) for e in steps),
        "bubble": summary.get("bubble"),
        "split": split,
    }
