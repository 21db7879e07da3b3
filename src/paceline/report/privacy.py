"""What privacy promises and costs: epsilon, the noise, who is trusted, and the accuracy."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from paceline.report.command import command_of
from paceline.report.commentary.comment import Comment, told
from paceline.report.judge import Verdict
from paceline.report.lines import Line, Study
from paceline.report.page.markup import table
from paceline.report.score import lost, score_of, scored
from paceline.request.config import SERIAL_DOES_NOT_KNOW


def private_lines(study: Study) -> list[Line]:
    return [x for x in study.lines if x.completed and x.completed[0].record.get("privacy")]


def guarantee(line: Line) -> dict[str, Any]:
    """Return the privacy record of the run with the largest epsilon."""
    found: list[dict[str, Any]] = [r.record["privacy"] for r in line.completed]
    return max(found, key=lambda record: record["epsilon"])


def privacy_table(study: Study) -> str:
    """Return the page's section on privacy; empty where no run was private."""
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
        record = guarantee(line)
        cells = (
            html.escape(line.id) + ("" if record["private"] else " <b>not private</b>"),
            f"{record['epsilon']:.3g}",
            f"{record['delta']:g}",
            f"{record['epsilon_rdp']:.3g}",
            f"{record['noise']:.3g}",
            f"{record['noise_per_worker']:.3g}",
            f"{record['clip']:g}",
            html.escape(record["sampling"]),
            html.escape(record["trust"]),
            f"{record['steps']:,}",
            score_of(study).text(own.mean if (own := score_of(study).spread(line)) else None),
        )
        rows.append(cells)
    meanings = "".join(
        f"<p><b>{html.escape(name)}.</b> {html.escape(text)}</p>"
        for name, text in _meanings(lines).items()
    )
    note = (
        "<p class=soft>Noise is in units of the clip norm. Epsilon holds for one run: the epsilons"
        " of several runs on the same people add up.</p>"
    )
    return (
        f"<section id=privacy><h2>What privacy promises</h2>{table(head, rows)}{meanings}{note}"
        "</section>"
    )


def _meanings(lines: list[Line]) -> dict[str, str]:
    """Return the guarantee for every kind of trust, from the setting with the most workers."""
    found: dict[str, str] = {}
    for line in sorted(lines, key=lambda x: -x.workers):
        record = guarantee(line)
        found.setdefault(
            f"trust={record['trust']}" if line.workers > 1 else "one worker",
            " ".join(record["guarantee"]),
        )
    return found


def epsilon_of(line: Line) -> str:
    """`, with epsilon 3 at delta 1e-5`; empty for a setting without privacy."""
    if not line.completed or not line.completed[0].record.get("privacy"):
        return ""
    record = guarantee(line)
    delta = f"{record['delta']:g}".replace("e-0", "e-")
    return f", with epsilon {record['epsilon']:.3g} at delta {delta}" + (
        "" if record["private"] else " (not private: secure=false)"
    )


def without_privacy(study: Study, line: Line) -> Line | None:
    """Return the same setting without privacy; else serial without privacy on the same work."""
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
    """Compare the best private setting with the same one without privacy, or with serial."""
    for line in private_lines(study):
        if not guarantee(line)["private"]:
            yield Comment(
                "failed",
                f"`{line.id}` is not private: its noise follows from the seed (secure=false), and"
                " the seed is in the record.",
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
            record, reference = guarantee(best), score.spread(without)
            yield Comment(
                "privacy",
                f"At epsilon {record['epsilon']:.3g} (delta {record['delta']:g}) the best private"
                f" setting, `{best.id}`, reached {score.text(scores[best.id])}; without privacy"
                f" `{without.id}` reached {score.text(reference.mean if reference else None)}:"
                f" {_cost(study, best, without, verdict)}.",
                {"trust": str(record["trust"]), "noise": f"{record['noise']:.3g}"},
            )
    yield from _more_workers(study)


def _cost(study: Study, line: Line, without: Line, verdict: Verdict) -> str:
    score = score_of(study)
    worse, gap = score.worse(verdict), score.gap(line, without)
    if not verdict.differs:
        if not worse:
            return "privacy cost nothing here"
        why = (
            "one run each does not show"
            if verdict.runs < 2
            else "these runs do not show beyond noise"
        )
        return f"{why} what privacy cost ({gap} {'lost' if worse > 0 else 'gained'})"
    each_time = f" {verdict.counted}" if verdict.counted else ""
    return (
        f"privacy cost {gap}{each_time}"
        if worse > 0
        else f"here privacy cost nothing ({gap} better{each_time})"
    ) + verdict.seen


def _by_a_curator(study: Study, line: Line) -> tuple[str, ...]:
    """Return the command of a setting with one noise for all workers."""
    asked = line.completed[0].record["config"].get("privacy")
    if not asked:
        return ()
    kept = [part for part in str(asked).split(",") if not part.startswith("trust=")]
    return told(command_of(study, line, privacy=",".join([*kept, "trust=curator"])))


def _more_workers(study: Study) -> Iterator[Comment]:
    """Report scores that fell with more workers, where every worker adds the whole noise."""
    score = score_of(study)
    for label in study.series:
        own = sorted(
            (x for x in private_lines(study) if x.label == label and score.spread(x)),
            key=lambda x: x.workers,
        )
        if len(own) < 2 or guarantee(own[-1])["trust"] != "peers":
            continue
        few, many = own[0], own[-1]
        if lost(study, many, few, score.large):
            verdict = scored(study, many, few)
            yield Comment(
                "privacy",
                f"`{label}` lost {score.gap(many, few)} from {few.workers} to {many.workers}"
                f" workers{verdict.seen if verdict else ''}: every worker adds the whole noise, so"
                " the average of more workers has more noise. Larger batches help, or"
                " trust=curator, which protects the released model only.",
                commands=_by_a_curator(study, many),
            )
