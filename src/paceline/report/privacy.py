"""What privacy promises and what it costs: epsilon, the noise behind it, who is trusted, and the
accuracy that is left.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from paceline.report.comment import Comment
from paceline.report.lines import Line, Study
from paceline.report.noise import Verdict
from paceline.report.score import lost, score_of, scored
from paceline.request.config import SERIAL_DOES_NOT_KNOW


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
        html.escape(score_of(study).name),
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
            score_of(study).text(own.mean if (own := score_of(study).spread(line)) else None),
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    titles = "".join(f"<th>{h}</th>" for h in head)
    body = (
        "<div"
        f" class=scroll><table><thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
    meanings = "".join(
        f"<p><b>{html.escape(name)}.</b> {html.escape(text)}</p>"
        for name, text in _meanings(lines).items()
    )
    note = (
        "<p class=soft>Noise is in units of the clip norm. Epsilon is of one run: whoever sees"
        " several runs on the same people has seen several epsilons, which add up.</p>"
    )
    return f"<section id=privacy><h2>What privacy promises</h2>{body}{meanings}{note}</section>"


def _meanings(lines: list[Line]) -> dict[str, str]:
    """Two sentences for every kind of trust, of the setting with the most workers."""
    found: dict[str, str] = {}
    for line in sorted(lines, key=lambda x: -x.workers):
        told = promise(line)
        found.setdefault(
            f"trust={told['trust']}" if line.workers > 1 else "one worker",
            " ".join(told["guarantee"]),
        )
    return found


def epsilon_of(line: Line) -> str:
    """`, with epsilon 3 at delta 1e-5`; nothing for a setting without privacy."""
    if not line.completed or not line.completed[0].record.get("privacy"):
        return ""
    told = promise(line)
    delta = f"{told['delta']:g}".replace("e-0", "e-")
    return f", with epsilon {told['epsilon']:.3g} at delta {delta}" + (
        "" if told["private"] else " (not private: secure=false)"
    )


def without_privacy(study: Study, line: Line) -> Line | None:
    """The same setting without privacy; else serial without it on the same work."""
    plain = [x for x in study.lines if x.completed and not x.completed[0].record.get("privacy")]

    def rest(varied: dict[str, str], *but: str) -> dict[str, str]:
        return {k: v for k, v in varied.items() if k not in ("privacy", *but)}

    same = (x for x in plain if x.workers == line.workers and rest(x.varied) == rest(line.varied))
    unknown = (*SERIAL_DOES_NOT_KNOW, "threads")
    serial = (
        x
        for x in plain
        if x.strategy == "serial"
        and x.threads == 1
        and rest(x.varied, *unknown) == rest(line.varied, *unknown)
    )
    return next(same, None) or next(serial, None)


def what_privacy_costs(study: Study) -> Iterator[Comment]:
    """Against the same setting without it, or serial without it."""
    for line in private_lines(study):
        if not promise(line)["private"]:
            yield Comment(
                "failed",
                f"`{line.id}` is not private: its noise follows from the seed (secure=false), which"
                " is in the record.",
            )
    score = score_of(study)
    scores = {
        x.id: spread.mean for x in private_lines(study) if (spread := score.spread(x)) is not None
    }
    if scores:
        pick = max if score.higher_is_better else min
        best = pick((x for x in private_lines(study) if x.id in scores), key=lambda x: scores[x.id])
        without = without_privacy(study, best)
        verdict = scored(study, best, without)
        if without is not None and verdict is not None:
            told, reference = promise(best), score.spread(without)
            yield Comment(
                "privacy",
                f"At epsilon {told['epsilon']:.3g} (delta {told['delta']:g}) the best private"
                f" setting, `{best.id}`, came to {score.text(scores[best.id])}; without privacy"
                f" `{without.id}` came to {score.text(reference.mean if reference else None)}:"
                f" {_cost(study, best, without, verdict)}.",
                {"trust": str(told["trust"]), "noise": f"{told['noise']:.3g}"},
            )
    yield from _more_workers(study)


def _cost(study: Study, line: Line, without: Line, verdict: Verdict) -> str:
    score = score_of(study)
    worse, gap = score.worse(verdict), score.gap(line, without)
    if not verdict.told:
        unknown = (
            "one run each cannot tell what"
            if verdict.runs < 2
            else "these runs cannot tell from noise what"
        )
        return (
            f"{unknown} privacy cost ({gap} {'lost' if worse > 0 else 'gained'})"
            if worse
            else "privacy cost nothing here"
        )
    each_time = f" {verdict.each_time}" if verdict.split else ""
    return (
        f"privacy cost {gap}{each_time}"
        if worse > 0
        else f"here privacy cost nothing ({gap} better{each_time})"
    ) + verdict.seen


def _more_workers(study: Study) -> Iterator[Comment]:
    """Where every message is protected, more workers add more noise: what that does to the score,
    where it is told.
    """
    score = score_of(study)
    for label in study.series:
        own = sorted(
            (x for x in private_lines(study) if x.label == label and score.spread(x)),
            key=lambda x: x.workers,
        )
        if len(own) < 2 or promise(own[-1])["trust"] != "peers":
            continue
        few, many = own[0], own[-1]
        if lost(study, many, few, score.large):
            verdict = scored(study, many, few)
            yield Comment(
                "privacy",
                f"`{label}` lost {score.gap(many, few)} from {few.workers} to {many.workers}"
                f" workers{verdict.seen if verdict else ''}: every one of them adds the whole"
                " noise, so their average has more of it; trust=curator, or larger batches, take"
                " it away.",
            )
