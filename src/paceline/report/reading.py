"""Read the records of a study, of a run, or of a folder of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.common.values import is_path, shortened
from paceline.errors import BadRequest
from paceline.record.formats import STUDY
from paceline.record.reader import STUDY_SCHEMA, read_record, read_run
from paceline.report.lines import Line, RunRecord, Study
from paceline.request.naming import label_of

NOT_COMPARED = ("out", "seed", "batch_sizes", "oversubscribed", "resume", "workers", "data_dir")
# options that follow from the strategy and the workers unless the user gives them
FOLLOW = ("batch_size", "servers", "overlap", "transport", "threads")


def read_study(folder: str | Path) -> Study:
    """Read a study, one run, or a folder of runs."""
    if not is_path(str(folder)):
        raise BadRequest(f"{shortened(str(folder))} is not a path")
    folder = Path(folder)
    if (folder / "study.json").is_file():
        return _from_study(folder)
    if (folder / "run.json").is_file():
        return _from_runs(folder, [folder])
    found = sorted(p.parent for p in folder.glob("*/run.json")) if folder.is_dir() else []
    if not found and (folder / "events").is_dir():
        raise BadRequest(
            f"{folder} holds a run that is not finished: it has events and no run.json, so it is"
            f" still going on or was killed. `paceline watch {folder}` shows what it has written"
        )
    if not found:
        raise BadRequest(
            f"{folder} is not a study and holds no run: it has neither study.json nor run.json"
        )
    return _from_runs(folder, found)


def _from_study(folder: Path) -> Study:
    about = read_record(folder / "study.json", "study", STUDY_SCHEMA, STUDY)
    lines: dict[tuple[str, int], Line] = {}
    damaged: list[str] = []
    for run in about["runs"]:
        line = lines.setdefault(
            (run["label"], run["workers"]), Line(run["label"], run["workers"], run["varied"])
        )
        own = folder / "runs" / run["name"]
        record = _record(own, damaged)
        if record is not None:
            line.runs.append(RunRecord(run["name"], run["seed"], record, own))
    there = [line for line in lines.values() if line.runs]
    if not there:
        raise BadRequest(f"{folder} holds no finished run yet")
    compared, profiled = _apart(there)
    return Study(
        about.get("definition", {}).get("title") or about.get("name", folder.name),
        folder,
        compared,
        about,
        damaged,
        profiled,
    )


def _apart(lines: list[Line]) -> tuple[list[Line], list[Line]]:
    """Return the settings to compare, and those that are there for their profiles.

    The profiler slows a run, so a study that profiles some of its settings compares the others.
    """
    profiled = [x for x in lines if x.varied.get("profile", "").lower() == "true"]
    compared = [x for x in lines if x not in profiled]
    return (compared, profiled) if compared else (profiled, [])


def _record(folder: Path, damaged: list[str]) -> dict[str, Any] | None:
    """Return a run's record; None where there is none or where it is damaged."""
    if not (folder / "run.json").is_file():
        return None
    try:
        return read_run(folder)
    except BadRequest as error:
        if "has schema" in str(error):  # written by a newer Paceline: so are the others
            raise
        damaged.append(str(error))
        return None


def _from_runs(folder: Path, folders: list[Path]) -> Study:
    """Group runs that no study planned by the options in which they differ."""
    damaged: list[str] = []
    records = [(f, r) for f in folders if (r := _record(f, damaged)) is not None]
    if not records:
        raise BadRequest(damaged[0])
    configs = [r["config"] for _, r in records]
    names = [
        k for k in dict.fromkeys(k for c in configs for k in c) if k not in (*NOT_COMPARED, *FOLLOW)
    ]
    differing = [k for k in names if len({str(c.get(k)) for c in configs}) > 1]
    groups: dict[tuple[str, ...], list[tuple[Path, dict[str, Any]]]] = {}
    for path, record in records:
        config = record["config"]
        groups.setdefault(
            (str(config["workers"]), *(str(config.get(k)) for k in ("strategy", *differing))), []
        ).append((path, record))
    lines: dict[tuple[str, int], Line] = {}
    for members in groups.values():
        own = [k for k in FOLLOW if len({str(r["config"].get(k)) for _, r in members}) > 1]
        for path, record in members:
            config = record["config"]
            form = config.get("parallel")
            varied = {"strategy": str(config["strategy"])}
            varied |= {"parallel": str(form)} if form is not None else {}
            varied |= {k: str(config.get(k)) for k in (*differing, *own)}
            label = label_of(varied)
            line = lines.setdefault(
                (label, int(config["workers"])), Line(label, int(config["workers"]), varied)
            )
            line.runs.append(RunRecord(path.name, int(config.get("seed") or 0), record, path))
    title = (
        f"{configs[0].get('model')} on {configs[0].get('data')}"
        if len(records) == 1
        else folder.resolve().name
    )
    return Study(title, folder, list(lines.values()), {}, damaged)
