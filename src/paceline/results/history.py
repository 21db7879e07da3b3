"""The course of a run, from its events: one row per step and one per evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.record.reader import Event, read_worker_events

Row = dict[str, Any]


def history(folder: Path) -> list[Row]:
    """Return the steps and evaluations of the whole run, in the order of their steps.

    Steps that a resume has undone are left out. An evaluation comes after the step that it
    follows.
    """
    workers = read_worker_events(folder)
    made: dict[int, list[Event]] = {}
    for own in workers:
        for event in own:
            if event["kind"] == "step":
                made.setdefault(event["step"], []).append(event)
    rows: list[Row] = []
    samples = 0.0
    for number in sorted(made):
        samples += sum(e["n"] for e in made[number])
        rows.append(_step(number, made[number], samples))
    rows += [_evaluation(e) for own in workers[:1] for e in own if e["kind"] == "evaluation"]
    return sorted(rows, key=lambda row: (row["step"], row["kind"] == "evaluation"))


def _step(number: int, events: Sequence[Event], samples: float) -> Row:
    """Combine one step of all workers: their mean loss, the slowest one's time, all their bytes."""
    lossy = [e for e in events if e["loss"] is not None and e["n"]]
    weight = sum(e["n"] for e in lossy)
    return {
        "kind": "step",
        "step": number,
        "epoch": max(e["epoch"] for e in events),
        "train_s": max(e["train_s"] for e in events),
        "loss": sum(e["loss"] * e["n"] for e in lossy) / weight if weight else None,
        "samples": whole(sum(e["n"] for e in events)),
        "samples_seen": whole(samples),
        "compute_s": max(e["compute_s"] for e in events),
        "sync_s": max(e["sync_s"] for e in events),
        "sent_bytes": sum(e["sent"] for e in events),
    }


def _evaluation(event: Event) -> Row:
    """Return the scores of an evaluation, with the set that they are of: `test_loss`,
    `validation_auc`, and `test_ema_loss` for the moving average of the weights.
    """
    on = event.get("on", "test")
    row: Row = {"kind": "evaluation", "step": event["step"], "train_s": event["train_s"]}
    for which, scores in ((on, event), (f"{on}_ema", event.get("ema"))):
        if scores is None:
            continue
        row[f"{which}_loss"] = scores.get("loss")
        row[f"{which}_accuracy"] = scores.get("accuracy")
        metric = scores.get("metric") or {}
        named = scores.get("metrics") or ({metric["name"]: metric.get("value")} if metric else {})
        row |= {f"{which}_{name}": value for name, value in named.items()}
    return row


def whole(value: float) -> float | int:
    """Return a count as an int: events of servers and private runs may hold fractions."""
    return int(value) if float(value).is_integer() else value


def notices(folder: Path) -> list[str]:
    """Return what the run told its user, each sentence once, in order."""
    from paceline.record.notices import NAME
    from paceline.record.reader import read_events

    path = folder / "events" / NAME
    if not path.is_file():
        return []
    said = [e["text"] for e in read_events(path) if e["kind"] == "notice"]
    return list(dict.fromkeys(said))
