"""What a study measured: one `Line` per setting and number of workers, with all its runs.

How settings compare is in `judge.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.record.blocks import Block, blocks_of
from paceline.record.reader import Event, read_worker_events
from paceline.request.config import SERIAL_DOES_NOT_KNOW

INSECURE = "--insecure: the ranks could meet without a secret, so others could have joined them."


@dataclass(frozen=True)
class Spread:
    """The mean and the range of a number over runs."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: list[float]) -> Spread | None:
        return cls(fmean(values), min(values), max(values), len(values)) if values else None


@dataclass
class RunRecord:
    """One run: its `run.json`, and its events, which are read when they are first needed."""

    name: str
    seed: int
    record: dict[str, Any]
    folder: Path
    damaged: list[str] = field(default_factory=list)  # events that could not be read

    @cached_property
    def events(self) -> list[list[Event]]:
        return read_worker_events(self.folder, self.damaged)


@dataclass
class Line:
    """One setting with one number of workers, and all its runs."""

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
        """The status and error of each run that was not completed."""
        return [
            f"{r.record['status']}: {r.record['error'] or 'no reason was recorded'}"
            for r in self.runs
            if r not in self.completed
        ]

    @property
    def threads(self) -> int:
        """Threads per worker; a run that was refused may have recorded none."""
        given = next((r.record["config"].get("threads") for r in self.runs), 1)
        return given if isinstance(given, int) else 1

    @property
    def own_loop(self) -> bool:
        """Whether a script with a loop of its own made the runs (`join`), not `train`."""
        return any(r.record["config"].get("own_loop") for r in self.runs)

    @property
    def oversubscribed(self) -> bool:
        return any(r.record["config"].get("oversubscribed") for r in self.runs)

    @property
    def insecure(self) -> bool:
        """Whether the ranks were allowed to meet without a secret."""
        return any(r.record["config"].get("insecure") for r in self.runs)

    @property
    def context(self) -> tuple[tuple[str, str], ...]:
        """The varied options that the serial run on the same work shares."""
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
        """The number of runs that reached the target accuracy, and the number of runs."""
        times = [r.record["result"]["time_to_accuracy_s"] for r in self.completed]
        return sum(t is not None for t in times), len(times)

    @property
    def time_to_accuracy(self) -> Spread | None:
        """Time to the target accuracy; None unless every run reached it."""
        reached, of = self.reached
        return self.result("time_to_accuracy_s") if of and reached == of else None

    @property
    def steps_to_accuracy(self) -> Spread | None:
        reached, of = self.reached
        return self.result("steps_to_accuracy") if of and reached == of else None

    def over_workers(
        self, of: Callable[[dict[str, Any]], float | None], role: str = "worker"
    ) -> Spread | None:
        """Return the mean over the workers of a run, spread over the runs."""
        means = []
        for run in self.completed:
            found = [
                v for w in run.record["workers"] if w["role"] == role and (v := of(w)) is not None
            ]
            if found:
                means.append(fmean(found))
        return Spread.of(means)

    def per_step(self, key: str, scale: float = 1.0) -> Spread | None:
        """Return a worker's seconds or bytes per step."""
        return self.over_workers(
            lambda w: scale * w[key] / w["steps"] if w.get(key) is not None and w["steps"] else None
        )

    @property
    def servers(self) -> int:
        return max(
            (sum(w["role"] == "server" for w in r.record["workers"]) for r in self.completed),
            default=0,
        )

    def over_ranks(self, of: Callable[[dict[str, Any]], float | None]) -> Spread | None:
        """Return the sum over all ranks of a run, servers included, spread over the runs.

        Runs in which a rank has no value are left out.
        """
        sums = []
        for run in self.completed:
            found = [of(rank) for rank in run.record["workers"]]
            if found and None not in found:
                sums.append(float(sum(v for v in found if v is not None)))
        return Spread.of(sums)

    def bytes_per_step(self, key: str) -> Spread | None:
        """Return the bytes of all ranks, servers included, per step of a worker."""
        means = []
        for run in self.completed:
            ranks = run.record["workers"]
            moved = [rank.get(key) for rank in ranks]
            steps = sum(rank["steps"] for rank in ranks if rank["role"] == "worker")
            if steps and None not in moved:
                means.append(sum(moved) / steps)
        return Spread.of(means)

    def sent_per_step(self) -> float | None:
        """Return the payload of all ranks, servers included, per step of a worker."""
        found = self.bytes_per_step("payload_sent_bytes")
        return found.mean if found else None

    def share(self, key: str) -> float | None:
        """Return `compute_s`, `sync_s` or `idle_s` as a share of their sum."""
        parts = {k: self.per_step(k) for k in ("compute_s", "sync_s", "idle_s")}
        if any(p is None for p in parts.values()):
            return None
        total = sum(p.mean for p in parts.values() if p)
        own = parts[key]
        return own.mean / total if total and own else None


@dataclass(eq=False)
class Study:
    """What a study, or a folder of runs, measured."""

    title: str
    folder: Path
    lines: list[Line]
    about: dict[str, Any]  # the content of study.json; empty for runs without a study
    unreadable: list[str] = field(default_factory=list)  # records that are damaged
    profiled: list[Line] = field(default_factory=list)  # slowed by the profiler: never compared

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
        """The labels in the order of the request; serial is first."""
        labels = list(dict.fromkeys(line.label for line in self.lines))
        return sorted(labels, key=lambda label: not label.startswith("serial"))

    def line(self, label: str, workers: int) -> Line | None:
        return next(
            (line for line in self.lines if line.label == label and line.workers == workers), None
        )

    def serial(self, line: Line) -> Line | None:
        """Return serial with one thread on the same work."""
        return self._serials.get(line.context)

    @cached_property
    def _serials(self) -> dict[tuple[tuple[str, str], ...], Line]:
        found: dict[tuple[tuple[str, str], ...], Line] = {}
        for line in self.lines:
            if line.strategy == "serial" and line.threads == 1 and line.completed:
                found.setdefault(line.context, line)
        return found

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks in which the best settings were confirmed beside serial."""
        return blocks_of(self.about.get("confirm") or {})

    @cached_property
    def confirmed(self) -> list[str]:
        """The ids of serial and the confirmed settings; empty where nothing was confirmed."""
        return list(self.blocks[0].samples_per_s) if len(self.blocks) >= 2 else []

    def __repr__(self) -> str:
        return (
            f"<Study {self.title}: {len(self.lines)} settings, {len(self.runs)} runs, in"
            f" {self.folder}>"
        )

    def frame(self) -> Any:
        """Return one row per run as a pandas DataFrame, with the columns of `results.csv`."""
        from paceline.report.notebook import study_frame

        return study_frame(self)

    def _repr_html_(self) -> str:
        """Show the answer and a table of the settings in a notebook."""
        from paceline.report.notebook import study_html

        return study_html(self)
