"""The speed of a run after its first steps, in which memory is allocated and caches are cold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WARM_UP_STEPS = 5
WARM_UP_SHARE = 0.1  # of the steps, if that is more


def steady_samples_per_s(workers: Sequence[Sequence[dict[str, Any]]]) -> float | None:
    """Return the samples per second of all workers together, without each worker's first steps.

    `workers` has the step events of each worker. A worker that has made too few steps to leave the
    first ones out counts with all of them.
    """
    rates = [_rate(steps) for steps in workers if steps]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known and len(known) == len(rates) else None


def _rate(steps: Sequence[dict[str, Any]]) -> float | None:
    first = max(WARM_UP_STEPS, round(WARM_UP_SHARE * len(steps)))
    if first > len(steps) // 2:
        first = 0
    # A private run records the times of several steps together: begin where one sum ends.
    while first and steps[first - 1]["train_s"] <= (
        steps[first - 2]["train_s"] if first > 1 else 0
    ):
        first -= 1
    began_s = steps[first - 1]["train_s"] if first else 0.0
    seconds = steps[-1]["train_s"] - began_s
    samples = sum(step["n"] for step in steps[first:])
    return samples / seconds if seconds > 0 else None


def speed_of(record: dict[str, Any]) -> float:
    """The samples per second of a run: after its first steps, where it made enough."""
    result = record["result"]
    return float(result.get("steady_samples_per_s") or result["samples_per_s"] or 0.0)
