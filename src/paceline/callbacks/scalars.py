"""The numbers of an event that loggers plot, under the same names in all of them."""

from __future__ import annotations

from typing import Any

from paceline.callbacks.base import Event

OF_A_STEP = {
    "loss": "train/loss",
    "compute_s": "time/compute_s",
    "sync_s": "time/sync_s",
    "train_s": "time/train_s",
    "sent": "network/sent_bytes",
    "received": "network/received_bytes",
}


def of_step(event: Event) -> dict[str, float]:
    """Return the numbers of a step; what the record does not hold (a private loss) is left out."""
    return {label: event[name] for name, label in OF_A_STEP.items() if event.get(name) is not None}


def of_evaluation(event: Event) -> dict[str, float]:
    """Return the numbers of an evaluation: `test/accuracy`, `validation/loss`, and those of the
    moving average of the weights as `test-ema/accuracy`.
    """
    on = event.get("on", "test")
    found = _measured(on, event)
    if event.get("ema"):
        found |= _measured(f"{on}-ema", event["ema"])
    return found


def _measured(on: str, values: dict[str, Any]) -> dict[str, float]:
    metric = values.get("metric") or {}
    named = {"loss": values.get("loss"), "accuracy": values.get("accuracy")}
    if metric.get("name"):
        named[metric["name"]] = metric.get("value")
    named |= values.get("metrics") or {}
    return {f"{on}/{name}": value for name, value in named.items() if value is not None}


def of_record(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a whole run, from run.json: steps, samples per second, seconds."""
    wanted = ("steps", "samples", "samples_per_s", "train_s", "wall_s", "time_to_accuracy_s")
    result = record["result"]
    return {f"run/{name}": result[name] for name in wanted if result.get(name) is not None}
