"""Read the events of a run, and compute run.json from them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest
from paceline.record.evaluations import best, last_validation
from paceline.record.formats import COUNTERS, EVENT, EVENTS, GO_TOGETHER, RUN
from paceline.record.plain_step import is_plain_step
from paceline.record.shapes import fault
from paceline.record.steady import steady_samples_per_s
from paceline.record.worker_rows import of_a_split_model, ran_apart

SCHEMA, STUDY_SCHEMA = 1, 1
Event = dict[str, Any]

NETWORKS_OF_OLD = ("gloo", "nccl")  # in records that do not say it: payload over the network only


def read_events(path: Path, damaged: list[str] | None = None) -> list[Event]:
    """Read a file of events, without its damaged lines; `damaged` gets a note of their number."""
    events, left_out = [], 0
    try:
        content = path.read_text(errors="replace")
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}") from None
    for line in content.splitlines():
        if not line.strip():
            continue
        event = parse_event(line)
        if event is None:
            left_out += 1
        else:
            events.append(event)
    if left_out and damaged is not None:
        damaged.append(f"{path}: {left_out} damaged line{'s' * (left_out > 1)}")
    return events


def parse_event(line: str | bytes) -> Event | None:
    """Return the event of a line, or None where its fields are not those of its kind.

    A plugin's own kinds may have any fields.
    """
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if is_plain_step(event):
        plain: Event = event
        return plain
    if fault(event, EVENT) is not None:
        return None
    together = GO_TOGETHER.get(event["kind"], {})
    shape = {
        **EVENTS.get(event["kind"], {}),
        **(together if together.keys() & event.keys() else {}),
    }
    found: Event | None = event if fault(event, shape) is None else None
    return found


def read_run(folder: str | Path) -> dict[str, Any]:
    """Read and check a run's run.json."""
    return read_record(Path(folder) / "run.json", "run", SCHEMA, RUN)


def read_record(path: Path, what: str, schema: int, shape: dict[str, Any]) -> dict[str, Any]:
    """Read a record, and refuse one that is damaged or has a newer schema than this version."""
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadRequest(f"{path.parent} is not a {what}: it has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadRequest(f"{path} cannot be read: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("schema"), int):
        raise BadRequest(f"{path} is not a {what}'s record")
    if record["schema"] > schema:
        raise BadRequest(
            f"{path} has schema {record['schema']}; this Paceline knows {schema}: use a newer"
            " Paceline"
        )
    if (wrong := fault(record, shape)) is not None:
        raise BadRequest(f"{path} is not a {what}'s record: {wrong}")
    return record


def read_worker_events(folder: Path, damaged: list[str] | None = None) -> list[list[Event]]:
    """Return the events of each worker, by rank, without those that a resume has undone."""
    files = {
        int(found[1]): path
        for path in (folder / "events").glob("worker-*.jsonl")
        if (found := _of_worker(path))
    }
    events = [read_events(files[rank], damaged) for rank in sorted(files)]
    starts = {
        e["session"]: e["from_step"]
        for own in events
        for e in own
        if e["kind"] == "start" and "from_step" in e
    }
    return [lived(own, starts) for own in events]


def _of_worker(path: Path) -> re.Match[str] | None:
    """Match the name of a worker's file of events; None for other files and for folders."""
    return re.fullmatch(r"worker-([0-9]{1,9})\.jsonl", path.name) if path.is_file() else None


def lived(events: Iterable[Event], starts: dict[int, int]) -> list[Event]:
    """Drop the events that were undone.

    A session that starts from a checkpoint at step s undoes what earlier sessions did after s.
    """
    last = max(starts, default=0)

    def counts(event: Event) -> bool:
        if event["kind"] not in ("step", "evaluation", "served"):
            return bool(event["session"] == last)
        return all(
            event["step"] <= step for session, step in starts.items() if session > event["session"]
        )

    return [e for e in events if counts(e)]


def summarise(
    workers: list[list[Event]],
    config: dict[str, Any],
    environment: dict[str, Any],
    status: str,
    error: str | None,
    wall_s: float,
) -> dict[str, Any]:
    """Compute run.json from the workers' events."""
    all_steps = [[e for e in events if e["kind"] == "step"] for events in workers]
    ranks = max(1, int(config.get("workers") or 1)) + int(config.get("servers") or 0)
    there = [events for events in workers if events][:ranks]
    servers = [events for events in there if any(e.get("role") == "server" for e in events)]
    workers = [events for events in there if events not in servers]
    idle: list[float | None] = (
        [*idle_seconds(workers)] if not several_hosts(workers) else [None] * len(workers)
    )
    steps = [[e for e in events if e["kind"] == "step"] for events in workers]
    last = max((s[-1]["step"] for s in steps if s), default=0)
    samples = sum(e["n"] for s in all_steps for e in s)
    train_s = max((s[-1]["train_s"] for s in steps if s), default=0.0)
    evaluations = [e for events in workers[:1] for e in events if e["kind"] == "evaluation"]
    tests = [e for e in evaluations if e.get("on", "test") == "test"]
    final = tests[-1] if tests else {}
    reached = next((e for e in evaluations if e.get("reached")), None)
    return {
        "schema": SCHEMA,
        "status": status,
        "error": error,
        "config": config,
        "environment": environment,
        "chosen": chosen(workers[0] if workers else []),
        "result": {
            "test_accuracy": final.get("accuracy"),
            "test_loss": final.get("loss"),
            "train_loss": _train_loss(steps),
            "metric": final.get("metric"),
            "metrics": final.get("metrics"),
            "validation": last_validation(evaluations),
            "best": best(evaluations),
            "ema": final.get("ema"),
            "steps": last,
            "samples": samples,
            "train_s": train_s,
            "wall_s": wall_s,
            "samples_per_s": samples / train_s if train_s else None,
            "steady_samples_per_s": steady_samples_per_s(steps),
            "time_to_accuracy_s": reached["train_s"] if reached else None,
            "steps_to_accuracy": reached["step"] if reached else None,
        },
        "workers": [
            *(
                _worker(events, own, idle[i], config)
                for i, (events, own) in enumerate(zip(workers, steps, strict=True))
            ),
            *(_server(events, config) for events in servers),
        ],
        "balance": _balance(workers[0] if workers else []),
        "codec": _codec(workers[0] if workers else []),
        "machine": _machine(workers[0] if workers else []),
    }


def chosen(events: list[Event]) -> dict[str, Any]:
    """Return what `auto` options chose by measuring."""
    found: dict[str, Any] = {}
    for event in events:
        if event["kind"] == "start":
            found["memory_format"] = event.get("memory_format")
        elif event["kind"] == "choice":
            found.update({k: v for k, v in event.items() if k == "collective"})
    return found


def _codec(events: list[Event]) -> dict[str, int] | None:
    """Return the mean bytes of a message, encoded and plain; None without a codec."""
    start = next((e for e in events if e["kind"] == "start" and "message_bytes" in e), None)
    if start is None:
        return None
    seen = next(
        (
            e["message_bytes"]
            for e in reversed(events)
            if e["kind"] == "summary" and "message_bytes" in e
        ),
        None,
    )
    return {
        "message_bytes": round(seen if seen is not None else start["message_bytes"]),
        "plain_bytes": start["plain_bytes"],
    }


def _balance(events: list[Event]) -> list[dict[str, Any]] | None:
    """Return the changes of the batch sizes: the step, the new sizes, the measured speeds."""
    found = [
        {k: e[k] for k in ("step", "batch_sizes", "samples_per_s")}
        for e in events
        if e["kind"] == "balance"
    ]
    return found or None


def _machine(events: list[Event]) -> dict[str, Any] | None:
    """Return what the whole container used during the run, as worker 0 measured it."""
    return next(
        (e["machine"] for e in reversed(events) if e["kind"] == "summary" and "machine" in e), None
    )


def arrivals_by_step(workers: list[list[Event]]) -> dict[int, float]:
    """Return for each step when the last worker arrived at its exchange.

    Only steps that all workers recorded count. Empty for one worker, and for several hosts, whose
    timers do not agree.
    """
    arrivals = [_arrivals(events) for events in workers]
    if len(workers) < 2 or several_hosts(workers):
        return {}
    return {
        step: max(a[step] for a in arrivals)
        for step in set.intersection(*(set(a) for a in arrivals))
    }


def several_hosts(workers: list[list[Event]]) -> bool:
    """Whether workers ran on several hosts, whose timers cannot be compared."""
    return (
        len(
            {
                e.get("boot") or e.get("host")
                for events in workers
                for e in events
                if e["kind"] == "start"
            }
        )
        > 1
    )


def idle_seconds(workers: list[list[Event]]) -> list[float]:
    """Return how long each worker waited at exchanges for the last worker to arrive.

    In each step that is at most the time it spent in the exchange. With overlap, the backward pass
    hides the rest of the wait.
    """
    last = arrivals_by_step(workers)
    return [
        sum(
            min(last[e["step"]] - e["arrived"], e["sync_s"])
            for e in events
            if e["kind"] == "step" and e["step"] in last and "arrived" in e
        )
        for events in workers
    ]


def _arrivals(events: list[Event]) -> dict[int, float]:
    return {
        e["step"]: e["arrived"]
        for e in events
        if e["kind"] == "step" and e.get("waits", e.get("arrived") is not None)
    }


def _train_loss(steps: list[list[Event]]) -> float | None:
    """Return the mean loss over the samples of the last epoch."""
    epoch = max((s[-1]["epoch"] for s in steps if s), default=None)
    pairs = [
        (e["loss"], e["n"])
        for s in steps
        for e in s
        if e["epoch"] == epoch and e["n"] and e["loss"] is not None
    ]
    weight = sum(n for _, n in pairs)
    return sum(loss * n for loss, n in pairs) / weight if weight else None


def _worker(
    events: list[Event], steps: list[Event], idle_s: float | None, config: dict[str, Any]
) -> dict[str, Any]:
    start: Event = next((e for e in events if e["kind"] == "start"), {})
    summary: Event = next((e for e in reversed(events) if e["kind"] == "summary"), {})
    known = summary.get("times_known", True)
    sync_s = sum(e["sync_s"] for e in steps)
    idle_s = None if idle_s is None else min(idle_s, sync_s)
    counted = {
        "rank": events[0]["rank"],
        "role": start.get("role", "worker"),
        "host": start.get("host"),
        "samples": sum(e["n"] for e in steps),
        "steps": len(steps),
        "compute_s": sum(e["compute_s"] for e in steps),
        "sync_s": sync_s - (idle_s or 0.0) if known else None,
        "idle_s": idle_s if known else None,
        "encode_s": sum(e.get("encode_s", 0.0) for e in steps),
        "decode_s": sum(e.get("decode_s", 0.0) for e in steps),
        "payload_sent_bytes": sum(e["sent"] for e in steps),
        "payload_received_bytes": sum(e["received"] for e in steps),
        "messages_sent": sum(e["messages"] for e in steps),
        **{key: summary.get(key) for key in COUNTERS},
        **ran_apart(events, steps),
        **of_a_split_model(start, summary, steps),
        "traffic": summary.get("traffic"),
        **({"container": summary["container"]} if summary.get("container") else {}),
    }
    # After a resume these count the last session only, but the payload counts the whole run.
    if summary.get("session"):
        counted |= {"net_sent_bytes": None, "net_received_bytes": None}
    return {**counted, **through_memory(counted, over_network(start, config))}


def over_network(start: Event, config: dict[str, Any]) -> bool:
    """Whether no payload of a rank went through shared memory, as its first event says."""
    said: bool = start.get("over_network", config.get("transport") in NETWORKS_OF_OLD)
    return said


def through_memory(worker: dict[str, Any], over_network: bool) -> dict[str, int | None]:
    """Return the payload that went through shared memory: payload minus network bytes."""
    moved: dict[str, int | None] = {}
    for way in ("sent", "received"):
        payload, net = worker[f"payload_{way}_bytes"], worker[f"net_{way}_bytes"]
        known = payload is not None and net is not None
        through = 0 if over_network else max(0, payload - net) if known else None
        moved[f"memory_{way}_bytes"] = through
    return moved


def _server(events: list[Event], config: dict[str, Any]) -> dict[str, Any]:
    """Return a server's row: it makes no steps, and its payload is what it served.

    A session's counts start from zero. Each session counts up to its summary, or, where another
    session went on from a checkpoint, up to that checkpoint.
    """
    last = {e["session"]: e for e in events if e["kind"] in ("served", "summary")}

    def total(key: str) -> int | None:
        counts = [e.get(key) for e in last.values()]
        return (
            sum(c for c in counts if c is not None) if any(c is not None for c in counts) else None
        )

    served = {
        **_worker(events, [], 0.0, config),
        "payload_sent_bytes": total("served_sent_bytes"),
        "payload_received_bytes": total("served_received_bytes"),
        "messages_sent": total("served_messages"),
    }
    start: Event = next((e for e in events if e["kind"] == "start"), {})
    return {**served, **through_memory(served, over_network(start, config))}
