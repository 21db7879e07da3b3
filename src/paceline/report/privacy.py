"""What privacy promises and what it costs: epsilon, the noise behind it, who is trusted, and the accuracy that is left."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from paceline.report.comment import Comment
from paceline.report.lines import Line, Study
from paceline.report.words import percent


def private_lines(study: Study) -> list[Line]:
    return [x for x in study.lines if x.completed and x.completed[0].record.get("privacy")]


def promise(line: Line) -> dict[str, Any]:
    """The largest epsilon of its runs, with the rest of what was promised."""
    found: list[dict[str, Any]] = [r.record["privacy"] for r in line.completed]
    return max(found, key=lambda told: told["epsilon"])


def privacy_table(study: Study) -> str:
    """HTML; empty where nothing was private."""
    lines = private_lines(study)
    if not lines:
        return ""
    head = (
        "setting",
        "epsilon",
        "delta",
        "(Rényi)",
        "noise",
        "each worker's",
        "clip",
        "sampling",
        "trust",
        "steps",
        "accuracy",
    )
    rows = []
    for line in lines:
        told = promise(line)
        cells = (
            html.escape(line.id) + ("" if told["private"] else " <b>not private</b>"),
            f"{told['epsilon']:.3g}",
            f"{told['delta']:g}",
            f"{told['epsilon_rdp']:.3g}",
            f"{told['noise']:.3g}",
            f"{told['noise_per_worker']:.3g}",
            f"{told['clip']:g}",
            html.escape(told["sampling"]),
            html.escape(told["trust"]),
            f"{told['steps']:,}",
            percent(line.accuracy.mean if line.accuracy else None),
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    titles = "".join(f"<th>{h}</th>" for h in head)
    body = f"<div class=scroll><table><thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    meanings = "".join(f"<p><b>{html.escape(name)}.</b> {html.escape(text)}</p>" for name, text in _meanings(lines).items())
    note = (
        "<p class=soft>Noise is in units of the clip norm. Epsilon is of one run: whoever sees several runs on the same people "
        "has seen several epsilons, which add up.</p>"
    )
    return f"<section id=privacy><h2>What privacy promises</h2>{body}{meanings}{note}</section>"


def _meanings(lines: list[Line]) -> dict[str, str]:
    """Two sentences for every kind of trust, of the setting with the most workers."""
    found: dict[str, str] = {}
    for line in sorted(lines, key=lambda x: -x.workers):
        told = promise(line)
        found.setdefault(f"trust={told['trust']}" if line.workers > 1 else "one worker", " ".join(told["guarantee"]))
    return found


def what_privacy_costs(study: Study) -> Iterator[Comment]:
    """Against the same strategy without it, or serial without it."""
    plain = [x for x in study.lines if x.completed and not x.completed[0].record.get("privacy") and x.accuracy]
    for line in private_lines(study):
        if not promise(line)["private"]:
            yield Comment(
                "failed", f"`{line.id}` is not private: its noise follows from the seed (secure=false), which is in the record."
            )
    best = max(
        (x for x in private_lines(study) if x.accuracy), key=lambda x: x.accuracy.mean if x.accuracy else 0.0, default=None
    )
    without = max(plain, key=lambda x: x.accuracy.mean if x.accuracy else 0.0, default=None)
    if best is not None and best.accuracy and without is not None and without.accuracy:
        told, lost = promise(best), without.accuracy.mean - best.accuracy.mean
        cost = f"privacy cost {100 * lost:.2f} points" if lost >= 0.001 else "here privacy cost no accuracy"
        yield Comment(
            "privacy",
            f"At epsilon {told['epsilon']:.3g} (delta {told['delta']:g}) the best private setting, `{best.id}`, came to "
            f"{percent(best.accuracy.mean)}; without privacy `{without.id}` came to {percent(without.accuracy.mean)}: "
            f"{cost}.",
            {"trust": str(told["trust"]), "noise": f"{told['noise']:.3g}"},
        )
    yield from _more_workers(study)


def _accuracy(line: Line) -> float:
    return line.accuracy.mean if line.accuracy else 0.0


def _more_workers(study: Study) -> Iterator[Comment]:
    """Where every message is protected, more workers add more noise: what that does to accuracy."""
    for label in study.series:
        own = sorted((x for x in private_lines(study) if x.label == label and x.accuracy), key=lambda x: x.workers)
        if len(own) < 2 or promise(own[-1])["trust"] != "peers":
            continue
        few, many = own[0], own[-1]
        lost = _accuracy(few) - _accuracy(many)
        if lost > 0.005:
            yield Comment(
                "privacy",
                f"`{label}` lost {100 * lost:.2f} points from {few.workers} to {many.workers} workers: every one of them adds "
                "the whole noise, so their average has more of it; trust=curator, or larger batches, take it away.",
            )
