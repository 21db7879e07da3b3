"""The records of a study, put together: one `Line` per setting, with what was measured over its
seeds.

Speedup of P workers is `train_s(1) / train_s(P)` of the same setting, and against serial with one
thread; where the amount of work differs (weak scaling) both are per sample. Efficiency is speedup /
P.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.common.values import is_path, shortened
from paceline.errors import BadRequest
from paceline.record.formats import STUDY
from paceline.record.reader import STUDY_SCHEMA, Event, read_record, read_run, read_worker_events
from paceline.request.config import SERIAL_DOES_NOT_KNOW, label_of

NOT_COMPARED = ("out", "seed", "batch_sizes", "oversubscribed", "resume", "workers", "data_dir")
FOLLOW = (
    "batch_size",
    "servers",
    "overlap",
    "transport",
    "threads",
)  # from strategy and workers, unless a person has said otherwise


@dataclass(frozen=True)
class Spread:
    """A mean and how far the runs lie apart."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: list[float]) -> Spread | None:
        return cls(fmean(values), min(values), max(values), len(values)) if values else None

    @property
    def relative(self) -> float:
        """Half the range, relative to the mean."""
        return (self.high - self.low) / 2 / abs(self.mean) if self.mean else 0.0


@dataclass
class RunRecord:
    name: str
    seed: int
    record: dict[str, Any]
    folder: Path
    damaged: list[str] = field(
        default_factory=list
    )  # its events that could not be read, once they have been

    @cached_property
    def events(self) -> list[list[Event]]:
        return read_worker_events(self.folder, self.damaged)


@dataclass
class Line:
    """One setting."""

    label: str
    workers: int
    varied: dict[str, str]
    runs: list[RunRecord] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"{self.label} x {self.workers}"

    @property
    def strategy(self) -> str:
        return next(
            (str(r.record["config"].get("strategy", "")) for r in self.runs),
            self.varied.get("strategy", ""),
        )

    @property
    def completed(self) -> list[RunRecord]:
        return [r for r in self.runs if r.record["status"] == "completed"]

    @property
    def errors(self) -> list[str]:
        """Why runs did not come to their end."""
        return [
            f"{r.record['status']}: {r.record['error'] or 'no reason was recorded'}"
            for r in self.runs
            if r not in self.completed
        ]

    @property
    def threads(self) -> int:
        given = next((r.record["config"].get("threads") for r in self.runs), 1)
        return (
            given if isinstance(given, int) else 1
        )  # a run that was refused may not have come so far

    @property
    def oversubscribed(self) -> bool:
        return any(r.record["config"].get("oversubscribed") for r in self.runs)

    @property
    def context(self) -> tuple[tuple[str, str], ...]:
        """What serial would share with it."""
        return tuple(
            sorted(
                (k, v)
                for k, v in self.varied.items()
                if k not in (*SERIAL_DOES_NOT_KNOW, "threads")
            )
        )

    # --- measured

    def values(self, of: Callable[[dict[str, Any]], float | None]) -> list[float]:
        found = (of(r.record) for r in self.completed)
        return [v for v in found if v is not None]

    def result(self, key: str) -> Spread | None:
        return Spread.of(self.values(lambda r: r["result"].get(key)))

    @property
    def train_s(self) -> Spread | None:
        return self.result("train_s")

    @property
    def accuracy(self) -> Spread | None:
        return self.result("test_accuracy")

    @property
    def sample_s(self) -> float | None:
        """Seconds of training per sample."""
        return self.train_s.mean / self.samples if self.train_s and self.samples else None

    @property
    def samples(self) -> float:
        spread = self.result("samples")
        return spread.mean if spread else 0.0

    @property
    def reached(self) -> tuple[int, int]:
        """In how many runs the target accuracy was reached, of how many."""
        times = [r.record["result"]["time_to_accuracy_s"] for r in self.completed]
        return sum(t is not None for t in times), len(times)

    @property
    def time_to_accuracy(self) -> Spread | None:
        """Only where every run got there: a mean over the lucky ones would be no mean."""
        reached, of = self.reached
        return self.result("time_to_accuracy_s") if of and reached == of else None

    @property
    def steps_to_accuracy(self) -> Spread | None:
        reached, of = self.reached
        return self.result("steps_to_accuracy") if of and reached == of else None

    def over_workers(
        self, of: Callable[[dict[str, Any]], float | None], role: str = "worker"
    ) -> Spread | None:
        """The mean over the workers of a run, then the spread over the runs."""
        means = []
        for run in self.completed:
            found = [
                v for w in run.record["workers"] if w["role"] == role and (v := of(w)) is not None
            ]
            if found:
                means.append(fmean(found))
        return Spread.of(means)

    def per_step(self, key: str, scale: float = 1.0) -> Spread | None:
        """A worker's seconds or bytes per step."""
        return self.over_workers(
            lambda w: scale * w[key] / w["steps"] if w.get(key) is not None and w["steps"] else None
        )

    @property
    def servers(self) -> int:
        return max(
            (sum(w["role"] == "server" for w in r.record["workers"]) for r in self.completed),
            default=0,
        )

    def sent_per_step(self) -> float | None:
        """Payload of all ranks, servers included, for each step of a worker."""
        found = []
        for run in self.completed:
            sent = [w.get("payload_sent_bytes") for w in run.record["workers"]]
            steps = sum(w["steps"] for w in run.record["workers"] if w["role"] == "worker")
            if steps and None not in sent:
                found.append(sum(sent) / steps)
        return fmean(found) if found else None

    def share(self, key: str) -> float | None:
        """The part of a worker's training time that `compute_s`, `sync_s` or `idle_s` is."""
        parts = {k: self.per_step(k) for k in ("compute_s", "sync_s", "idle_s")}
        if any(p is None for p in parts.values()):
            return None
        total = sum(p.mean for p in parts.values() if p)
        own = parts[key]
        return own.mean / total if total and own else None


@dataclass(eq=False)
class Study:
    """What a report is made from."""

    title: str
    folder: Path
    lines: list[Line]
    about: dict[str, Any]  # the study's own file; empty for runs that were not made by a study
    unreadable: list[str] = field(default_factory=list)  # records that are damaged

    @property
    def definition(self) -> dict[str, Any]:
        found: dict[str, Any] = self.about.get("definition", {})
        return found

    @property
    def target(self) -> float | None:
        configs = [r.record["config"] for r in self.runs]
        targets = {c.get("target_accuracy") or c.get("until_accuracy") for c in configs}
        return targets.pop() if len(targets) == 1 else None

    @property
    def runs(self) -> list[RunRecord]:
        return [r for line in self.lines for r in line.runs]

    @property
    def environment(self) -> dict[str, Any]:
        return next((r.record["environment"] for r in self.runs), {})

    @property
    def cores(self) -> int:
        return int(self.environment.get("cores") or 1)

    @property
    def seeds(self) -> int:
        return max((len(line.completed) for line in self.lines), default=0)

    @property
    def series(self) -> list[str]:
        """Labels, in the order in which they were asked for; serial first."""
        labels = list(dict.fromkeys(line.label for line in self.lines))
        return sorted(labels, key=lambda label: not label.startswith("serial"))

    def line(self, label: str, workers: int) -> Line | None:
        return next(
            (line for line in self.lines if line.label == label and line.workers == workers), None
        )

    def serial(self, line: Line) -> Line | None:
        """Serial with one thread on the same work."""
        same = [
            x
            for x in self.lines
            if x.strategy == "serial"
            and x.threads == 1
            and x.context == line.context
            and x.completed
        ]
        return same[0] if same else None

    def speedup(self, line: Line, base: Line | None) -> Spread | None:
        """How many times as fast as `base`, per sample."""
        if (
            base is None
            or base.train_s is None
            or line.train_s is None
            or not base.samples
            or not line.samples
        ):
            return None
        reference = base.train_s.mean * line.samples / base.samples
        own = line.train_s
        if not own.low > 0:
            return None
        return Spread(reference / own.mean, reference / own.high, reference / own.low, own.n)

    def own_speedup(self, line: Line) -> Spread | None:
        return self.speedup(line, self.line(line.label, 1))

    def serial_speedup(self, line: Line) -> Spread | None:
        return self.speedup(line, self.serial(line))

    def efficiency(self, line: Line) -> Spread | None:
        """Speedup over its own single worker (or serial, where that was not run) / P."""
        found = self.own_speedup(line) or self.serial_speedup(line)
        return (
            Spread(
                found.mean / line.workers,
                found.low / line.workers,
                found.high / line.workers,
                found.n,
            )
            if found
            else None
        )


# --- reading


def read_study(folder: str | Path) -> Study:
    """A study, one run, or a folder of runs."""
    if not is_path(str(folder)):
        raise BadRequest(f"{shortened(str(folder))} is not a path")
    folder = Path(folder)
    if (folder / "study.json").is_file():
        return _from_study(folder)
    if (folder / "run.json").is_file():
        return _from_runs(folder, [folder])
    found = sorted(p.parent for p in folder.glob("*/run.json")) if folder.is_dir() else []
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
    return Study(
        about.get("definition", {}).get("title") or about.get("name", folder.name),
        folder,
        there,
        about,
        damaged,
    )


def _record(folder: Path, damaged: list[str]) -> dict[str, Any] | None:
    """None where there is none; a damaged one costs that run only."""
    if not (folder / "run.json").is_file():
        return None
    try:
        return read_run(folder)
    except BadRequest as error:
        if "has schema" in str(error):  # newer than this Paceline: all of them are
            raise
        damaged.append(str(error))
        return None


def _from_runs(folder: Path, folders: list[Path]) -> Study:
    """Runs that nobody planned together: they are told apart by what differs in their
    configurations.
    """
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
            varied = {"strategy": str(config["strategy"])} | {
                k: str(config.get(k)) for k in (*differing, *own)
            }
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
