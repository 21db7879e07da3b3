"""Comments on the confirming blocks: how many there were, how wide the intervals are."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paceline.report.command import study_command
from paceline.report.commentary.comment import Comment, told
from paceline.report.judge import speed
from paceline.report.lines import Study
from paceline.report.words import count, listed, percent


def confirmation(study: Study) -> Iterator[Comment]:
    """Say what the first sentence rests on."""
    if not study.confirmed:
        return
    about, blocks = study.about["confirm"], study.blocks
    serial, others = str(about["serial"]), [str(name) for name in about["settings"]]
    marked, again = sum(b.disturbed for b in blocks), sum(b.repeats for b in blocks)
    disturbed = (
        f" Other processes disturbed {marked} of them, which were kept after"
        f" {'a repeat' if again == 1 else f'{again} repeats'}."
        if marked
        else f" {count(again, 'block')} that other processes disturbed"
        f" {'was' if again == 1 else 'were'} run again."
        if again
        else ""
    )
    yield Comment(
        "confirmed",
        f"The first sentence rests on {count(len(blocks), 'block')} alone, in which"
        f" {listed([serial, *others])} ran one after the other in random order, after all settings"
        f" had been screened.{disturbed}",
        {
            f"block {b.number + 1}{' (disturbed)' * b.disturbed}": ", ".join(
                f"{name} {math.exp(b.log_ratio(name, serial)):.2f}x" for name in others
            )
            for b in blocks
        },
    )
    yield from _width(study, others)


def _width(study: Study, others: list[str]) -> Iterator[Comment]:
    """Say how wide the intervals became, and which budget makes them as narrow as wanted."""
    about = study.about["confirm"]
    lines = [x for x in study.lines if x.id in others]
    verdicts = [v for x in lines if (v := speed(study, x, study.serial(x))) is not None]
    halves = [v.estimate.half for v in verdicts if v.estimate is not None]
    if about.get("ended") != "budget" or not halves:
        return
    reached, missing = math.expm1(max(halves)), about["wanted"] - len(study.blocks)
    if reached <= about["width"]:  # the pilot's variance was larger than that of all blocks
        return
    needed = (study.about.get("spent_s") or 0) + max(1, missing) * about["block_s"]
    budget = f"`--budget {math.ceil(needed / 60)}min`"
    pilot = int(about.get("pilot") or 0)
    gives = (
        f"{budget} would give +-{percent(about['width'], 0)}"
        if len(study.blocks) >= pilot
        else f"{budget} is enough for the first {pilot}, which show how many are needed for"
        f" +-{percent(about['width'], 0)}"
    )
    yield Comment(
        "confirmed",
        f"The budget ended after {len(study.blocks)} of {about['wanted']} blocks, with intervals of"
        f" +-{percent(reached, 0)}; {gives}.",
        commands=told(study_command(study, budget=f"{math.ceil(needed / 60)}min")),
    )
