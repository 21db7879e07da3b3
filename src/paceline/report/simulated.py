"""What a report says about runs whose times are virtual (transports simulated and emulated)."""

from __future__ import annotations

from paceline.report.lines import Study

GIVEN = "compute times that were given"
COMPUTING = {"emulated": "the processor time of their computing"}


def about_simulated(study: Study) -> str:
    """Say that times were computed and not measured; empty where all were measured."""
    simulated = sum(bool(run.record.get("simulated")) for run in study.runs)
    if not simulated:
        return ""
    names = sorted(
        {str(r.record["config"].get("transport")) for r in study.runs if r.record.get("simulated")}
    )
    times = [COMPUTING.get(name, GIVEN) for name in names]
    which = "All runs were" if simulated == len(study.runs) else "Some of the runs were"
    return (
        f"{which} simulated (transport {' and '.join(names)}): their times were computed for a"
        f" network that was described, from {' or '.join(times)}."
    )
