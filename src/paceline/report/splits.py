"""What each worker of a model that is split held and sent: one row per setting and worker."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any

from paceline.report.lines import Line, Study
from paceline.report.tables import Row

MEANING = (
    "A worker of a split model holds a part of its parameters. It sends activations, and their"
    " gradients, to the workers of its copy of the model; gradients of parameters go to the other"
    " copies, and with `domain` also to the workers of its own copy. The bubble is the share of the"
    " passes' time in which a worker of a pipeline waited; beside it stands the timetable's own,"
    " with equal stages and free messages. Bytes are those of one step."
)


def split_table(study: Study) -> list[Row]:
    """Return the rows, with means over the runs; empty where no model was split."""
    return [row for line in study.lines if line.completed for row in _rows(line)]


def _rows(line: Line) -> Iterable[Row]:
    ranks: dict[int, list[dict[str, Any]]] = {}
    for run in line.completed:
        for worker in run.record["workers"]:
            if worker.get("split") is not None and worker["steps"]:
                ranks.setdefault(int(worker["rank"]), []).append(worker)
    for rank, found in sorted(ranks.items()):
        steps = [w["steps"] for w in found]
        inside = [w["activation_sent_bytes"] or 0 for w in found]
        sent = [w["payload_sent_bytes"] or 0 for w in found]
        bubbles = [w["bubble"] for w in found if w.get("bubble") is not None]
        yield {
            "setting": line.label,
            "workers": line.workers,
            "rank": rank,
            "parameters": found[0]["parameters"],
            "activation_bytes": fmean(a / n for a, n in zip(inside, steps, strict=True)),
            "gradient_bytes": fmean(
                max(0, s - a) / n for s, a, n in zip(sent, inside, steps, strict=True)
            ),
            "rss_peak_bytes": fmean(w["rss_peak_bytes"] or 0 for w in found),
            "bubble": fmean(bubbles) if bubbles else None,
            "bubble_in_theory": found[0]["split"].get("bubble_in_theory"),
        }


def told(row: Row) -> tuple[str, str]:
    """Return the measured bubble and the timetable's, as text."""
    shares = (row["bubble"], row["bubble_in_theory"])
    measured, theory = ("–" if share is None else f"{share:.0%}" for share in shares)
    return measured, theory
