"""What a run's evaluations say: the best one, and the last on the validation set."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]


def deciding(events: list[Event]) -> list[Event]:
    """Return the evaluations on the set that decides: the validation set, if there is one."""
    found = [e for e in events if e["kind"] == "evaluation"]
    on = "validation" if any(e.get("on") == "validation" for e in found) else "test"
    return [e for e in found if e.get("on", "test") == on]


def last_validation(evaluations: list[Event]) -> dict[str, Any] | None:
    """Return the numbers of the last evaluation on the validation set."""
    last = next((e for e in reversed(evaluations) if e.get("on") == "validation"), None)
    wanted = ("loss", "accuracy", "metric", "metrics", "ema")
    return None if last is None else {name: last[name] for name in wanted if name in last}


def best(evaluations: list[Event]) -> dict[str, Any] | None:
    """Return the best evaluation, by the number and on the set that decide."""
    last = next((e for e in reversed(evaluations) if e.get("best") and "decided_by" in e), None)
    if last is None:
        return None
    by = last["decided_by"]
    value = last["loss"] if by == "loss" else last.get("metrics", {}).get(by)
    return {"step": last["step"], "value": value, "by": by, "on": last.get("on", "test")}
