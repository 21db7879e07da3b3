"""Write a run as a timeline in the Chrome trace format, for Perfetto or chrome://tracing.

Each worker is a process of the trace. A step is divided into forward and backward pass, waiting for
the last worker, exchange, and update. Evaluations and checkpoints have spans of their own. CPU and
memory are counters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.record.reader import Event, arrivals_by_step
from paceline.record.writer import write_text

MICRO = 1e6
MOST_STEPS = 10_000  # of a worker; viewers cannot show many more
STEPS, RESOURCES = 1, 2  # rows of a worker, which the format calls threads
Part = tuple[str, str, float, float, dict[str, Any]]  # name, category, start, seconds, more


def write_trace(workers: list[list[Event]], path: Path) -> None:
    """Write the events of all workers as trace.json."""
    write_text(
        path,
        json.dumps({"traceEvents": spans(workers), "displayTimeUnit": "ms"}, separators=(",", ":")),
    )


def spans(workers: list[list[Event]]) -> list[dict[str, Any]]:
    """Return the trace's events: metadata ("M"), complete spans ("X") and counters ("C")."""
    # Only the last session: the timers of earlier ones may differ.
    session = max((e["session"] for events in workers for e in events), default=0)
    workers = [[e for e in events if e["session"] == session] for events in workers]
    present = [
        events for events in workers if any(e["kind"] == "start" and "clock" in e for e in events)
    ]
    last = arrivals_by_step([w for w in present if not _serves(w)])
    origins = [_origin(events) for events in present]
    zero = min(
        (e["t"] for events in present for e in events if e["kind"] in ("start", "sample")),
        default=0.0,
    )
    found: list[dict[str, Any]] = []
    for events, (clock, wall) in zip(present, origins, strict=True):
        rank = events[0]["rank"]
        name = f"{'server' if _serves(events) else 'worker'} {rank}"
        found.append(
            {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}}
        )
        found.append(
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": STEPS, "args": {"name": "steps"}}
        )
        shift = wall - clock - zero  # from this worker's timer to seconds since the first event
        shown = [e for e in events if e["kind"] == "aside"] + [
            e for e in events if e["kind"] == "step"
        ][:MOST_STEPS]
        found += [_span(rank, shift, part) for e in shown for part in _parts(e, last)]
        found += _counters(rank, zero, events)
    return found


def _serves(events: list[Event]) -> bool:
    return any(e.get("role") == "server" for e in events)


def _origin(events: list[Event]) -> tuple[float, float]:
    """Return one moment on the worker's own timer and in the time that all workers share."""
    start = next(e for e in events if e["kind"] == "start" and "clock" in e)
    return start["clock"], start["t"]


def _parts(event: Event, last: dict[int, float]) -> list[Part]:
    """Return the spans of one event."""
    if event["kind"] == "aside":
        return [(event["what"], "aside", event["began"], event["seconds"], {})]
    if event["kind"] != "step" or "began" not in event:
        return []
    began, end = event["began"], event["began"] + event["compute_s"] + event["sync_s"]
    arrived = min(max(event["arrived"], began), end)
    sync = event["sync_s"]
    waited = min(max(0.0, last.get(event["step"], 0.0) - arrived), sync) if event["waits"] else 0.0
    talked = sync - waited
    before = max(0.0, sync - (end - arrived))  # exchanged before the gradient was complete
    more = {"step": event["step"], "loss": event["loss"]}
    parts = [("step", "step", began, end - began, more)]
    at = began
    for name, category, seconds in (
        ("exchange", "sync", min(before, talked)),
        ("forward, backward", "compute", max(0.0, arrived - began - before)),
        ("wait", "idle", waited),
        ("exchange", "sync", talked - min(before, talked)),
    ):
        if seconds > 0:
            parts.append((name, category, at, seconds, {}))
            at += seconds
    if end > at:
        parts.append(("update", "compute", at, end - at, {}))
    return parts


def _span(rank: int, shift: float, part: Part) -> dict[str, Any]:
    name, category, began, seconds, more = part
    span = {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": STEPS}
    span |= {"ts": round((began + shift) * MICRO, 1), "dur": round(seconds * MICRO, 1)}
    return span | ({"args": more} if more else {})


def _counters(rank: int, zero: float, events: list[Event]) -> list[dict[str, Any]]:
    found, before = [], None
    for e in (e for e in events if e["kind"] == "sample"):
        if before is not None and e["t"] > before["t"]:
            used = (
                e["cpu_user_s"] + e["cpu_system_s"] - before["cpu_user_s"] - before["cpu_system_s"]
            )
            values = {
                "CPU (%)": 100 * used / (e["t"] - before["t"]),
                "memory (MB)": e["rss_bytes"] / 1e6,
            }
            for name, value in values.items():
                at = round((e["t"] - zero) * MICRO, 1)
                found.append(
                    {
                        "ph": "C",
                        "name": name,
                        "pid": rank,
                        "tid": RESOURCES,
                        "ts": at,
                        "args": {name: round(value, 1)},
                    }
                )
        before = e
    return found
