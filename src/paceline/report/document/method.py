"""How a study was measured, in words: what a reader needs to judge its figures."""

from __future__ import annotations

from paceline.report.document.inline import Text, prose
from paceline.report.judge import AGAINST_SERIAL, ONCE, OTHERWISE
from paceline.report.lines import Study
from paceline.report.score import UNKNOWN_POINTS
from paceline.report.simulated import about_simulated
from paceline.report.words import count, listed, percent, seconds


def method(study: Study) -> list[tuple[str, Text]]:
    """Return (what, how it was done), as far as it applies to this study."""
    found = [("Work", _work(study)), ("Times", _times(study))]
    if study.definition:
        found.append(("Screening", _screening(study)))
    if study.confirmed:
        found += [("Confirming", _confirming(study)), ("Disturbance", _disturbance(study))]
    if len(study.lines) > 1:
        found += [("Statistic", _statistic(study)), ("Claims", _claims(study))]
    found += [("Privacy", guarantee) for guarantee in _guarantees(study)]
    return [(what, prose(how)) for what, how in found]


def _guarantees(study: Study) -> list[str]:
    """Return what private runs promise, each promise once."""
    private = [p for r in study.runs if (p := r.record.get("privacy"))]
    told = [f"With delta {p['delta']:g}: {' '.join(p['guarantee'])}" for p in private]
    return list(dict.fromkeys(told))


def _work(study: Study) -> str:
    if not study.definition:
        many = len(study.runs) > 1
        return (
            "No study planned these runs; they are compared by the options in which they differ."
            if many
            else "This is one run: its times and its score have no interval."
        )
    base, axes = study.definition.get("base", {}), study.definition.get("axes", {})
    shared = "All runs share the model, the data, the initial weights (by seed) and the evaluation."
    if study.definition.get("scaling") == "weak":
        return (
            f"{shared} Each worker has the same batch and the same number of steps (weak scaling)."
        )
    own = "batch_size" in base or "batch_size" in axes
    batch = "the same batch for every worker" if own else "the same global batch"
    return f"{shared} Every number of workers has {batch} and the same samples (strong scaling)."


def _times(study: Study) -> str:
    how = (
        "The training time leaves out start-up, loading and evaluation. Speed is samples per second"
        " of the steps after the first ones, where the records have it, else of all steps."
    )
    return f"{how} {about_simulated(study)}".rstrip()


def _screening(study: Study) -> str:
    rounds = count(study.seeds, "round")
    each = "The round" if study.seeds == 1 else f"Each of {rounds}"
    return (
        f"{each} ran every setting once, serial included, in random order: a whole training with"
        " the seed of that round. Accuracy and time to accuracy come from these runs."
    )


def _confirming(study: Study) -> str:
    about = study.about["confirm"]
    names = listed([str(about["serial"]), *map(str, about["settings"])])
    width, blocks = percent(about["width"], 0), count(len(study.blocks), "block")
    fixed = "fixed" if len(study.blocks) >= about["pilot"] else "was to fix"
    wanted = (
        f" The time budget ended after {blocks} of {about['wanted']}."
        if about.get("ended") == "budget"
        else ""
    )
    return (
        "The setting that looks fastest of many is in part the luckiest, so the fastest ones of"
        f" screening ran again. A confirming block runs {names} one after the other in random"
        f" order, about {seconds(about['block_s'])} in all; there were {blocks}. Their number does"
        f" not depend on the result: the variance of the first {about['pilot']} blocks {fixed} it,"
        f" for an interval of +-{width} (Stein's two-stage rule).{wanted} The speeds of these"
        " settings come from the blocks alone."
    )


def _disturbance(study: Study) -> str:
    about = study.about["confirm"]
    marked, again = sum(b.disturbed for b in study.blocks), sum(b.repeats for b in study.blocks)
    known = any(b.foreign is not None for b in study.blocks)
    if not known:
        return "This machine does not tell what other processes used, so no block was repeated."
    return (
        "A block counts as disturbed if other processes and the host took more than"
        f" {percent(about['threshold'], 0)} of the machine's CPU time. It is then repeated, at most"
        f" twice, and after that kept and marked. Here {count(again, 'repeat')}"
        f" {'was' if again == 1 else 'were'} made, and {count(marked, 'disturbed block')}"
        f" {'was' if marked == 1 else 'were'} kept."
    )


def _statistic(study: Study) -> str:
    pairs = "the same block" if study.confirmed else "the same seed"
    if study.confirmed:
        pairs += " (or of the same seed, for settings that were only screened)"
    few = (
        " Few rounds show their variance badly, so that of a setting is drawn towards that of the"
        " other settings."
        if study.seeds > 1
        else ""
    )
    if study.seeds < 2 and not study.confirmed:
        return "Every setting was run once: the figures have no interval."
    return (
        f"A speed against serial is the mean of log(speed / serial's speed) over pairs of {pairs},"
        f" with a paired t interval of 95%.{few}"
    )


def _claims(study: Study) -> str:
    if study.seeds < 2 and not study.confirmed:
        return (
            f"A difference is claimed where it is above {percent(ONCE, 0)} (accuracy:"
            f" {100 * UNKNOWN_POINTS:.0f} points), and is called seen in one run."
        )
    return (
        "A setting is called faster or slower than serial if a t-test says so at"
        f" {percent(AGAINST_SERIAL, 0)} after Holm's correction for the number of settings."
        f" Two other settings are told apart at {percent(OTHERWISE, 0)}."
    )
