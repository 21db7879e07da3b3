"""What a report says about runs whose times are virtual (transport simulated)."""

from __future__ import annotations

from paceline.report.lines import Study


def about_simulated(study: Study) -> str:
    """Say that times were computed and not measured; empty where all were measured."""
    simulated = sum(bool(run.record.get("simulated")) for run in study.runs)
    if not simulated:
        return ""
    which = "All runs were" if simulated == len(study.runs) else "Some of the runs were"
    return (
        f"{which} simulated (transport simulated): their times were computed for a network and for"
        " compute times that were given, and not measured."
    )
