"""A study, or a folder of runs, as it shows while it is under way: settings and results so far."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.record.formats import STUDY
from paceline.record.reader import STUDY_SCHEMA, read_record, read_run
from paceline.record.shapes import number
from paceline.request.naming import kept_together
from paceline.watch.files import JsonFile, inside
from paceline.watch.run import RunView, rounded

MOST_OPEN = 4  # runs whose events are kept in memory


@dataclass
class Planned:
    """One run of the study: planned, under way or finished."""

    name: str
    label: str
    workers: int
    seed: int
    folder: Path
    record: JsonFile
    begun: bool = False
    changed_at: float = 0.0

    @property
    def status(self) -> str:
        """planned, running, completed, failed or interrupted."""
        if self.record.content is not None:
            return str(self.record.content["status"])
        return "running" if self.begun else "planned"

    @property
    def done(self) -> bool:
        """Whether the study does not run it again; it repeats interrupted runs."""
        return self.status in ("completed", "failed")


@dataclass
class Row:
    """One setting with one number of workers."""

    label: str
    workers: int
    runs: list[Planned] = field(default_factory=list)


class StudyView:
    """Reads `study.json` and the records of its runs; the events of the run that is shown."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.about = JsonFile(
            root / "study.json",
            root,
            lambda path: read_record(path, "study", STUDY_SCHEMA, STUDY),
        )
        self.runs: dict[str, Planned] = {}
        self._open: OrderedDict[Path, RunView] = OrderedDict()

    # --- reading

    def refresh(self) -> None:
        """Look at the plan and at every run's record; read again only what has changed."""
        self.about.refresh()
        for run in (self.about.content or {}).get("runs", ()):
            self._know(run["name"], run["label"], run["workers"], run["seed"])
        for folder in _run_folders(self.root if self.about.content is None else self.root / "runs"):
            if inside(self.root, folder):
                self._know(folder.name, "", 0, 0)
        for run in self.runs.values():
            if run.record.refresh() and run.record.content and not run.label:
                config = run.record.content["config"]
                run.label = kept_together(config)
                run.workers, run.seed = config["workers"], config.get("seed") or 0
            events = run.folder / "events"
            run.begun = inside(self.root, events) and events.is_dir()
            run.changed_at = _newest(events) if run.status == "running" else 0.0

    def _know(self, name: str, label: str, workers: int, seed: int) -> None:
        folder = self.root / ("runs" if self.about.content is not None else "") / name
        # A name with a slash, or a link, may lead out of the folder that is watched.
        plain = Path(name).name == name and name != ".."
        if name not in self.runs and plain and inside(self.root, folder):
            record = JsonFile(folder / "run.json", self.root, lambda path: read_run(path.parent))
            self.runs[name] = Planned(name, label, workers, seed, folder, record)

    def current(self) -> str | None:
        """The run that is under way, or else the one that ended last."""
        if running := [r for r in self.runs.values() if r.status == "running"]:
            return max(running, key=lambda r: r.changed_at).name
        over = [r for r in self.runs.values() if r.record.content is not None]
        return max(over, key=lambda r: r.record.changed_at).name if over else None

    def shown(self, name: str | None) -> RunView | None:
        """The view of a run that the study has; of the current one for any other name."""
        asked = self.runs.get(name or "")
        if asked is not None and asked.status != "planned":
            return self._view(asked.folder)
        folder = self._confirming()
        if folder is None and (name := self.current()) is not None:
            folder = self.runs[name].folder
        return None if folder is None else self._view(folder)

    def _view(self, folder: Path) -> RunView:
        if folder not in self._open:
            self._open[folder] = RunView(folder, self.root)
        self._open.move_to_end(folder)
        while len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)
        return self._open[folder]

    def _confirming(self) -> Path | None:
        """The run under way in the last of the blocks that confirm the best settings."""
        for block in sorted((self.root / "confirm").glob("block-*"))[-1:]:
            for folder in _run_folders(block):
                if inside(self.root, folder) and not (folder / "run.json").exists():
                    return folder
        return None

    # --- telling

    def picture(self) -> dict[str, Any]:
        """Return what the page shows of the study, without the run that is shown."""
        about = self.about.content or {}
        definition = about.get("definition") or {}
        runs = list(self.runs.values())
        done = [r for r in runs if r.done]
        confirming, confirm = self._confirming(), _confirm(about)
        running = confirming is not None or any(r.status == "running" for r in runs)
        left = 0 if confirm else len(runs) - len(done)
        ended = about.get("ended") if about else runs and not left
        over = bool(ended) and not running
        told: dict[str, Any] = rounded(
            {
                "title": definition.get("title") or about.get("name") or self.root.name,
                "question": definition.get("question"),
                "planned": len(runs),
                "done": len(done),
                "failed": sum(r.status == "failed" for r in runs),
                "over": over,
                "confirm": confirm,
                "cut": about.get("cut_seeds"),
                "current": (confirming.name if confirming else self.current()) if running else None,
                "spent_s": sum(
                    r.record.content["result"]["wall_s"] for r in done if r.record.content
                ),
                "left_s": None if over else confirm["left_s"] if confirm else _left_s(runs),
                "rows": [_row(row) for row in self._rows()],
                "notices": [{**n, "t": int(n["t"])} for n in about.get("notices") or []],
                "faults": [self.about.fault] if self.about.fault else [],
            }
        )
        return told

    def _rows(self) -> list[Row]:
        found: dict[tuple[str, int], Row] = {}
        for run in self.runs.values():
            key = (run.label or "under way", run.workers)
            found.setdefault(key, Row(*key)).runs.append(run)
        return list(found.values())


def _run_folders(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if (p / "events").is_dir())
    except OSError:
        return []


def _newest(events: Path) -> float:
    """When a file of events was last written; 0 if there is none."""
    try:
        return max((p.stat().st_mtime for p in events.iterdir()), default=0.0)
    except OSError:
        return 0.0


def _confirm(about: dict[str, Any]) -> dict[str, Any] | None:
    """How far the blocks are that confirm the best settings; None before the first."""
    told = about.get("confirm")
    if not isinstance(told, dict) or not isinstance(told.get("blocks"), list):
        return None
    blocks: int = len(told["blocks"])
    wanted: Any = told.get("wanted")
    block_s: Any = told.get("block_s")
    if not (number(wanted) and number(block_s)):
        return {"blocks": blocks, "wanted": None, "left_s": None}
    return {"blocks": blocks, "wanted": wanted, "left_s": max(0, wanted - blocks) * block_s}


def _left_s(runs: list[Planned]) -> float | None:
    """Guess how long the runs take that are left: as long as others of their setting, or of all."""
    took: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        if run.status == "completed" and run.record.content is not None:
            wall_s = run.record.content["result"]["wall_s"]
            took.setdefault((run.label, run.workers), []).append(wall_s)
    if not took:
        return None
    of_all = fmean(s for seconds in took.values() for s in seconds)
    return sum(fmean(took.get((r.label, r.workers), [of_all])) for r in runs if not r.done)


def _row(row: Row) -> dict[str, Any]:
    records = [
        r.record.content
        for r in row.runs
        if r.status == "completed" and r.record.content is not None
    ]
    metrics = [m for r in records if (m := _metric(r)) is not None]
    workers = [w for r in records for w in r["workers"] if w["role"] == "worker" and w["steps"]]

    def mean(values: list[Any]) -> float | None:
        there = [v for v in values if v is not None]
        return fmean(there) if there else None

    return {
        "label": row.label,
        "workers": row.workers,
        "runs": [{"name": r.name, "seed": r.seed, "status": r.status} for r in row.runs],
        "train_s": mean([r["result"]["train_s"] for r in records]),
        "samples_per_s": mean(
            [
                r["result"].get("steady_samples_per_s") or r["result"]["samples_per_s"]
                for r in records
            ]
        ),
        "metric": {"name": metrics[-1][0], "value": fmean(v for _, v in metrics)}
        if metrics
        else None,
        "step_bytes": mean(
            [
                w["payload_sent_bytes"] / w["steps"]
                for w in workers
                if w["payload_sent_bytes"] is not None
            ]
        ),
        "epsilon": mean([(r.get("privacy") or {}).get("epsilon") for r in records]),
        "error": next(
            (
                str(r.record.content["error"])
                for r in row.runs
                if r.status == "failed" and r.record.content
            ),
            None,
        ),
    }


def _metric(record: dict[str, Any]) -> tuple[str, float] | None:
    """The metric that was asked for, or else the accuracy."""
    result = record["result"]
    metric = result.get("metric")
    if metric and metric.get("value") is not None:
        return metric["name"], metric["value"]
    accuracy = result["test_accuracy"]
    return None if accuracy is None else ("accuracy", accuracy)
