"""On which set the runs' stopping rules and best checkpoints looked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.report.command import command_of
from paceline.report.commentary.comment import Comment, told
from paceline.report.lines import Study


def selection(study: Study) -> Iterator[Comment]:
    """Say whether rules that stop a run or choose weights have looked at the test set."""
    runs = [run.record for line in study.lines for run in line.completed]
    ruled = [record for record in runs if _rules(record["config"])]
    if not ruled:
        return
    held = [r for r in ruled if ((r["result"].get("best") or {}).get("on") == "validation")]
    if len(held) == len(ruled):
        yield Comment(
            "method",
            "Stopping rules and best checkpoints looked at a validation set; the test set was used"
            " once, at the end.",
        )
        return
    first = next(x for x in study.lines if any(r.record in ruled for r in x.completed))
    count = len(ruled) - len(held)
    yield Comment(
        "method",
        f"In {count} of {len(runs)} runs, rules that stop a run or choose its weights"
        f" ({', '.join(sorted({name for r in ruled for name in _rules(r['config'])}))}) looked at"
        " the test set, so their final figures were chosen by looking at it: give validation=0.1"
        " to keep the test set apart.",
        commands=told(command_of(study, first, validation=0.1)),
    )


def _rules(config: dict[str, Any]) -> list[str]:
    """The options of a run that look at its evaluations and change what it returns."""
    found = [name for name in ("patience", "until_accuracy") if config.get(name) is not None]
    if "best" in str(config.get("keep") or ""):
        found.append("keep=best")
    if str(config.get("lr_schedule") or "").startswith("plateau"):
        found.append("plateau")
    return found
