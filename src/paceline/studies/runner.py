"""Run a study: every setting with every seed, in random order. Started again, it continues.

A study is fair in this sense:

- All runs share the model, the data, the global batch, the initial weights (by seed), the memory
  format and the evaluation.
- Every worker has one thread, for every number of workers. One serial setting uses all cores.
- The training time leaves out start-up, loading and evaluation.
- Seeds are rounds, each in its own random order, so that a slow moment of the machine can hit any
  setting. These runs screen the settings.
- The best settings are confirmed beside serial in further blocks (see confirm.py), which alone
  make the headline.
"""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.common.cores import cores
from paceline.errors import DataUnavailable, Interrupted, PacelineError
from paceline.launch.run import Listen, run
from paceline.launch.seat import find as find_seat
from paceline.launch.seat import refuse_inside_a_launcher
from paceline.record.blocks import Block, blocks_of
from paceline.record.lock import alone_in
from paceline.request.config import Config
from paceline.request.job import Job
from paceline.studies.available import refuse_missing_transport, refuse_on_a_cluster
from paceline.studies.candidates import candidates
from paceline.studies.confirm import Confirmation
from paceline.studies.folder import StudyFolder, claim, prepare_again
from paceline.studies.grid import StudySpec
from paceline.studies.plan import PlannedRun, rounds_of, scaled
from paceline.studies.preparing import prepare_data

# Runs options that name a cluster (launcher=spark): returns the record. See api.py.
Elsewhere = Callable[[dict[str, Any], Listen], dict[str, Any]]
SCREENING_SHARE = 0.6  # of the budget, at most: the rest is for confirming


class Listener:
    """Receives the progress of a study; this class ignores it, and displays override it."""

    def planned(
        self, spec: StudySpec, rounds: list[list[PlannedRun]], done: dict[str, dict[str, Any]]
    ) -> None: ...
    def begun(self, planned: PlannedRun, job: Job) -> Listen:
        return lambda kind, content: None

    def ended(self, planned: PlannedRun, record: dict[str, Any]) -> None: ...
    def confirming(self, confirmation: Confirmation) -> None: ...
    def confirmed(self, confirmation: Confirmation, block: Block) -> None: ...
    def heard(self, kind: str, content: dict[str, Any]) -> None: ...
    def notice(self, text: str) -> None: ...


def run_study(
    spec: StudySpec,
    out: Path,
    listener: Listener | None = None,
    *,
    retry_failed: bool = False,
    clean: bool = False,
    elsewhere: Elsewhere | None = None,
) -> dict[str, dict[str, Any]]:
    """Run what `out` does not hold yet, and return the record of every run by its name.

    `clean` promises that this process has run no multi-threaded torch operation (the CLI's has
    not). `elsewhere` runs what names a cluster.
    """
    refuse_on_a_cluster(spec)
    refuse_inside_a_launcher(find_seat())
    refuse_missing_transport(spec)
    claim(out)
    try:
        # A second process would take the unfinished run of the first for a leftover.
        with alone_in(out, "this study is being run by another process"):
            study = _StudyRun(StudyFolder.open(spec, out), listener or Listener(), clean)
            study.elsewhere = elsewhere
            return study.all(rounds_of(spec), retry_failed)
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
        self.elsewhere: Elsewhere | None = None
        self._began = time.monotonic()
        self._spent_before_s = float(folder.about.get("spent_s") or 0.0)

    def all(self, rounds: list[list[PlannedRun]], retry_failed: bool) -> dict[str, dict[str, Any]]:
        """Screen all settings, then confirm the best, as far as the time budget goes."""
        runs = list(itertools.chain(*rounds))
        found = {p.name: self.folder.finished(p, retry_failed) for p in runs}
        records = {name: record for name, record in found.items() if record is not None}
        self.listener.planned(self.spec, rounds, records)
        text = _privacy_notice([p for p in runs if p.name not in records], self.spec)
        if text is not None:
            self.notice(text)
        if self.spec.prepare and len(records) < len(runs):
            prepare_data(self.spec.prepare, self.spec.base.get("data_dir"), self.notice)
        self.screen(rounds, records)
        if self.spec.confirms:
            self.confirm(records)
        self.folder.note(ended=time.time(), spent_s=self.spent_s)
        return records

    def screen(self, rounds: list[list[PlannedRun]], records: dict[str, dict[str, Any]]) -> None:
        """Run one randomised complete block of all settings per seed, while they fit."""
        for number, planned_runs in enumerate(rounds):
            left = [p for p in planned_runs if p.name not in records]
            if left and number and not self._fits(records, len(left)):
                seeds = f"{number} of {len(rounds)} seeds"
                self.folder.note(cut_seeds=seeds)
                self.notice(
                    f"{seeds} were run: another round would exceed this study's time budget of"
                    f" {self.spec.budget}"
                )
                break
            for planned in left:
                records[planned.name] = self.one(planned)
                self.listener.ended(planned, records[planned.name])

    def confirm(self, records: dict[str, dict[str, Any]]) -> None:
        """Run serial and the best settings in adjacent blocks, as many as the width asks for."""
        private = [s for s in self.spec.settings() if s.options.get("privacy") is not None]
        if private:
            self.notice("nothing is confirmed by further runs: each private run spends privacy")
            return
        kept = self.folder.about.get("confirm") or {}
        begun = [kept["serial"], *kept["settings"]] if kept.get("blocks") else None
        chosen = candidates(self.spec, records, begun)
        if len(chosen) < 2:
            self.notice("nothing can be confirmed: no setting was completed beside serial")
            return
        found = Confirmation(
            self.spec,
            [replace(c, options=self._as_others(c.options)) for c in chosen],
            self.folder.out / "confirm",
            blocks_of(kept),
            self.clean,
        )
        self.listener.confirming(found)
        ended = "enough"
        while len(found.blocks) < found.wanted:
            if found.block_s > self.left_s and found.blocks:
                ended = "budget"
                break
            try:
                block = found.next(self.left_s, self.notice, self.listener.heard)
            except Interrupted:
                raise
            except PacelineError as error:
                self.notice(f"confirming has ended: {error}")
                ended = str(error)
                break
            self.folder.note(confirm=found.described("interrupted"), spent_s=self.spent_s)
            self.listener.confirmed(found, block)
        self.folder.note(confirm=found.described(ended))

    def one(self, planned: PlannedRun) -> dict[str, Any]:
        """Run one setting with one seed. A failure becomes a record, and the study continues."""
        started, job = time.perf_counter(), None
        path = self.folder.cleared(planned)
        options = self._as_others(
            {**planned.setting.options, "seed": planned.seed, "out": str(path)}
        )
        try:
            if options.get("launcher") == "spark" and self.elsewhere is not None:
                return self.on_a_cluster(planned, options)
            config = Config.make(scaled(options, self.spec))
            job = prepare_again(config, path, lambda text: self.notice(f"{planned.name}: {text}"))
            record = run(job, self.listener.begun(planned, job), clean=self.clean)
            formats, kind = self.folder.about["memory_format"], _kind(options)
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

    def on_a_cluster(self, planned: PlannedRun, options: dict[str, Any]) -> dict[str, Any]:
        """Run one setting on a cluster, whose ranks print lines and notices here."""
        assert self.elsewhere is not None

        def listen(kind: str, content: dict[str, Any]) -> None:
            if kind == "notice":
                self.notice(f"{planned.name}: {content['text']}")

        return self.elsewhere(scaled(options, self.spec), listen)

    def notice(self, text: str) -> None:
        """Tell the user, and keep the notice for the live page."""
        self.listener.notice(text)
        self.folder.keep_notice(text)

    def _as_others(self, options: dict[str, Any]) -> dict[str, Any]:
        """Add the memory format that the first run on the same model and data has chosen."""
        known = self.folder.about["memory_format"].get(_kind(options))
        return {"memory_format": known, **options} if known is not None else options

    @property
    def spent_s(self) -> float:
        """The time that this study has taken, in this session and those before."""
        return self._spent_before_s + time.monotonic() - self._began

    @property
    def left_s(self) -> float:
        return math.inf if self.spec.budget_s is None else self.spec.budget_s - self.spent_s

    def _fits(self, records: dict[str, dict[str, Any]], runs: int) -> bool:
        """Whether so many further screening runs leave enough of the budget for confirming."""
        if self.spec.budget_s is None:
            return True
        spent = float(sum(r["result"]["wall_s"] for r in records.values()))
        share = SCREENING_SHARE if self.spec.confirms else 1.0
        return spent + runs * spent / max(1, len(records)) <= share * self.spec.budget_s

    def _share_their_data(self) -> bool:
        return len({str(s.options.get("data")) for s in self.spec.settings()}) == 1


def _kind(options: dict[str, Any]) -> str:
    return f"{options.get('model')} on {options.get('data')}"


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
