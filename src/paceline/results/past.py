"""Past runs: what a folder of runs holds, and the options with which a run was made.

Nothing here needs PyTorch, so that a list of runs appears at once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.common.values import is_path, shortened
from paceline.errors import BadRequest
from paceline.record.lock import HELD, refuse_held
from paceline.record.reader import parse_event, read_run
from paceline.request.config import Config

# Where a run was, or what the machine decides: not what was asked for.
OF_THE_PLACE = ("out", "resume", "threads", "memory_format", "launcher", "data_dir")
# Paceline decides these from the others unless they are given; the record does not tell which.
DECIDED = (
    "loss",
    "metric",
    "servers",
    "transport",
    "shard",
    "overlap",
    "momentum",
    "batch_size",
    "epochs",
)


@dataclass(frozen=True)
class PastRun:
    """One run of a folder, in the order of the columns of `paceline runs`."""

    folder: str
    started: float  # seconds since 1970
    model: str
    data: str
    strategy: str
    workers: int | None
    score: float | None  # the accuracy, or the metric that was asked for
    metric: str  # the name of the score
    samples_per_s: float | None
    status: str

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def past_runs(folder: str | Path) -> tuple[list[PastRun], list[str]]:
    """Return the runs of a folder, the newest first, and a sentence for each damaged one.

    A folder that is itself a run holds that run; a study's folder holds the study's runs.
    """
    if not is_path(str(folder)):
        raise BadRequest(f"{shortened(str(folder))} is not a path")
    top = Path(folder)
    if not top.is_dir():
        raise BadRequest(f"{top} is not a folder: give the folder of your runs (default: runs)")
    if _is_run(top):
        folders = [top]
    else:
        inside = top / "runs" if (top / "study.json").is_file() else top
        folders = [p for p in inside.iterdir() if _is_run(p)] if inside.is_dir() else []
    found, damaged = [], []
    for each in folders:
        try:
            found.append(_past(each))
        except BadRequest as error:
            damaged.append(str(error))
    return sorted(found, key=lambda run: (-run.started, run.folder)), sorted(damaged)


def studies_in(folder: str | Path) -> list[str]:
    """Return the folders of the studies in a folder, by name."""
    return sorted(str(p.parent) for p in Path(folder).glob("*/study.json"))


def _is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file() or (folder / "config.json").is_file()


def _past(folder: Path) -> PastRun:
    if not (folder / "run.json").is_file():
        return _unfinished(folder)
    record = read_run(folder)
    config, result = record["config"], record["result"]
    metric = result["metric"] or {}
    named = metric.get("name", "accuracy") != "accuracy"
    return PastRun(
        str(folder),
        _started(folder, folder / "run.json"),
        str(config.get("model")),
        str(config.get("data")),
        str(config["strategy"]),
        config["workers"],
        metric.get("value") if named else result["test_accuracy"],
        metric["name"] if named else "accuracy",
        result["samples_per_s"],
        record["status"],
    )


def _unfinished(folder: Path) -> PastRun:
    """Return a run without a record: it is under way, or it was killed."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise BadRequest(f"{path} cannot be read: {error}") from None
    try:
        refuse_held(folder, HELD)
        status = "killed"
    except BadRequest:
        status = "running"
    workers = config.get("workers")
    return PastRun(
        str(folder),
        _started(folder, path),
        str(config.get("model")),
        str(config.get("data")),
        str(config.get("strategy")),
        workers if isinstance(workers, int) else None,
        None,
        "accuracy",
        None,
        status,
    )


def _started(folder: Path, otherwise: Path) -> float:
    """Return when the run began: the time of worker 0's first event, else that of a file."""
    try:
        with open(folder / "events" / "worker-0.jsonl", "rb") as file:
            event = parse_event(file.readline(100_000))
        if event is not None:
            return float(event["t"])
    except OSError:
        pass
    return otherwise.stat().st_mtime


def given_options(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a run that differ from the defaults; model, data, strategy and workers
    are always among them.
    """
    known = Config.options()
    found = {name: config.get(name) for name in ("model", "data", "strategy", "workers")}
    for name, field in known.items():
        value = config.get(name)
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        skip = name in (*found, *OF_THE_PLACE, *DECIDED)
        if not skip and value is not None and value != default:
            found[name] = value
    return found


def decided_options(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options that Paceline decides where they are not given."""
    return {name: config[name] for name in DECIDED if config.get(name) is not None}
