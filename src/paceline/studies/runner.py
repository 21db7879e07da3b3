"""Run a study: every setting with every seed, in random order. Started again, it continues.

A study is fair in this sense:

- All runs share the model, the data, the global batch, the initial weights (by seed), the memory
  format and the evaluation.
- Every worker has one thread, for every number of workers. One serial setting uses all cores.
- The training time leaves out start-up, loading and evaluation.
- Seeds are rounds, each in its own random order, so that a slow moment of the machine can hit any
  setting.
"""

from __future__ import annotations

import itertools
import shutil
import time
from pathlib import Path
from typing import Any

from paceline.errors import DataUnavailable, Interrupted, PacelineError
from paceline.launch.run import Listen, run
from paceline.launch.seat import find as find_seat
from paceline.launch.seat import refuse_inside_a_launcher
from paceline.record.lock import alone_in
from paceline.record.machine import cores
from paceline.request.config import Config
from paceline.request.job import Job
from paceline.studies.folder import StudyFolder, claim, prepare_again
from paceline.studies.grid import StudySpec
from paceline.studies.plan import PlannedRun, rounds_of, scaled


class Listener:
    """Receives the progress of a study; this class ignores it, and displays override it."""

    def planned(
        self, spec: StudySpec, rounds: list[list[PlannedRun]], done: dict[str, dict[str, Any]]
    ) -> None: ...
    def begun(self, planned: PlannedRun, job: Job) -> Listen:
        return lambda kind, content: None

    def ended(self, planned: PlannedRun, record: dict[str, Any]) -> None: ...
    def notice(self, text: str) -> None: ...


def run_study(
    spec: StudySpec,
    out: Path,
    listener: Listener | None = None,
    *,
    retry_failed: bool = False,
    clean: bool = False,
) -> dict[str, dict[str, Any]]:
    """Run what `out` does not hold yet, and return the record of every run by its name.

    `clean` promises that this process has run no multi-threaded torch operation (the CLI's has
    not).
    """
    refuse_inside_a_launcher(find_seat())
    claim(out)
    try:
        # A second process would take the unfinished run of the first for a leftover.
        with alone_in(out, "this study is being run by another process"):
            return _StudyRun(StudyFolder.open(spec, out), listener or Listener(), clean).all(
                rounds_of(spec), retry_failed
            )
    except DataUnavailable as error:
        if not (out / "runs").exists():  # nothing was measured: leave nothing behind
            shutil.rmtree(out)
        raise DataUnavailable(
            f"{str(error).rstrip('.')}; or `paceline study --fetch` to download it, or"
            " `--set data=fashion-mini` for the built-in data"
        ) from None


class _StudyRun:
    def __init__(self, folder: StudyFolder, listener: Listener, clean: bool) -> None:
        self.folder, self.listener, self.clean = folder, listener, clean
        self.spec = folder.spec

    def all(self, rounds: list[list[PlannedRun]], retry_failed: bool) -> dict[str, dict[str, Any]]:
        """Run every round that fits into the study's time budget."""
        runs = list(itertools.chain(*rounds))
        found = {p.name: self.folder.finished(p, retry_failed) for p in runs}
        records = {name: record for name, record in found.items() if record is not None}
        self.listener.planned(self.spec, rounds, records)
        text = _privacy_notice([p for p in runs if p.name not in records], self.spec)
        if text is not None:
            self.listener.notice(text)
        for number, planned_runs in enumerate(rounds):
            left = [p for p in planned_runs if p.name not in records]
            if left and number and not _fits(self.spec, records, len(left)):
                seeds = f"{number} of {len(rounds)} seeds"
                self.folder.note(cut_seeds=seeds)
                self.listener.notice(
                    f"{seeds} were run: another round would exceed this study's time budget of"
                    f" {self.spec.budget_s:.0f} s"
                )
                break
            for planned in left:
                records[planned.name] = self.one(planned)
                self.listener.ended(planned, records[planned.name])
        self.folder.note(ended=time.time())
        return records

    def one(self, planned: PlannedRun) -> dict[str, Any]:
        """Run one setting with one seed. A failure becomes a record, and the study continues."""
        started, job = time.perf_counter(), None
        path, formats = self.folder.cleared(planned), self.folder.about["memory_format"]
        options = {**planned.setting.options, "seed": planned.seed, "out": str(path)}
        kind = f"{options.get('model')} on {options.get('data')}"
        if "memory_format" not in options and kind in formats:
            options["memory_format"] = formats[kind]
        try:
            config = Config.make(scaled(options, self.spec))
            job = prepare_again(
                config, path, lambda text: self.listener.notice(f"{planned.name}: {text}")
            )
            record = run(job, self.listener.begun(planned, job), clean=self.clean)
            if kind not in formats:  # the first run chooses for all that follow
                chosen = record["config"]["memory_format"]
                self.folder.note(memory_format={**formats, kind: chosen})
            return record
        except Interrupted:
            raise
        except PacelineError as error:
            if isinstance(error, DataUnavailable) and self._share_their_data():
                raise
            asked = job.config.described() if job else Config.make(options).described()
            wall_s = time.perf_counter() - started
            return self.folder.record_failure(planned, asked, str(error), wall_s)

    def _share_their_data(self) -> bool:
        return len({str(s.options.get("data")) for s in self.spec.settings()}) == 1


def _fits(spec: StudySpec, records: dict[str, dict[str, Any]], runs: int) -> bool:
    """Whether so many further runs fit into the time budget, at the mean time of those so far."""
    if spec.budget_s is None:
        return True
    spent = float(sum(r["result"]["wall_s"] for r in records.values()))
    return spent + runs * spent / max(1, len(records)) <= spec.budget_s


def _privacy_notice(planned: list[PlannedRun], spec: StudySpec) -> str | None:
    """Say how many private runs a study makes beyond those that were asked for."""
    private = [
        p
        for p in planned
        if Config.make({"privacy": p.setting.options.get("privacy")}).privacy is not None
    ]
    added = sum(p.setting.baseline for p in private)
    if not added:
        return None
    fewer = "; all_cores = false leaves some of them out" if spec.all_cores and cores() > 1 else ""
    return (
        f"privacy: {len(private)} private runs on the same people, whose epsilons add up; {added}"
        f" of them are serial runs that a study adds to compare with{fewer}"
    )
