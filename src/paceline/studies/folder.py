"""A study's folder: `study.json` with its definition, and one folder per run."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.common.cores import cores
from paceline.errors import BadRequest, RunFailed
from paceline.privacy.accounting import epsilon_of
from paceline.privacy.ledger import LedgerEntry, read_account
from paceline.privacy.settings import Settings
from paceline.record.formats import BEGUN, PREDICTED, STUDY
from paceline.record.lock import LOCK
from paceline.record.machine import environment
from paceline.record.reader import STUDY_SCHEMA, read_record, read_run, summarise
from paceline.record.shapes import fault
from paceline.record.writer import write_json
from paceline.request.config import Config
from paceline.request.job import Job
from paceline.request.prepare import prepare
from paceline.studies.grid import StudySpec
from paceline.studies.plan import PlannedRun, runs_of

MOST_NOTICES = 30


def claim(out: Path) -> None:
    """Create the folder. Refuse one that holds something other than a study."""
    try:
        if (
            out.exists()
            and not (out / "study.json").exists()
            and (not out.is_dir() or set(os.listdir(out)) - {LOCK, PREDICTED})
        ):
            raise BadRequest(f"out={out} is not empty and holds no study: choose another folder")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(f"out={out} cannot be written: {error.strerror}") from None


@dataclass
class StudyFolder:
    """Reads and writes what a study keeps on disk; `about` is the content of `study.json`."""

    spec: StudySpec
    out: Path
    about: dict[str, Any]

    @classmethod
    def open(cls, spec: StudySpec, out: Path) -> StudyFolder:
        """Begin a study, or continue one that is there.

        The study that is there may have fewer seeds, values or settings than `spec`. A run that
        both have must have the same options in both.
        """
        path = out / "study.json"
        if not path.exists():
            about = {
                "schema": STUDY_SCHEMA,
                "name": spec.name,
                "definition": spec.described(),
                "started": time.time(),
            }
            folder = cls(spec, out, about)
            folder.note(environment=environment(), memory_format={}, runs=runs_of(spec))
            return folder
        about = read_record(path, "study", STUDY_SCHEMA, STUDY)
        if (wrong := fault(about, BEGUN)) is not None:
            raise BadRequest(f"{path} cannot be continued ({wrong}): choose another --out")
        planned = runs_of(spec)
        _refuse_another_study(out, about, planned)
        folder = cls(spec, out, about)
        folder.note(definition=spec.described(), runs=planned)
        return folder

    def note(self, **fields: Any) -> None:
        """Write further fields into `study.json`."""
        self.about.update(fields)
        write_json(self.out / "study.json", self.about)

    def keep_notice(self, text: str) -> None:
        """Add a notice of the study itself; the last few are kept."""
        kept = [*(self.about.get("notices") or []), {"t": time.time(), "text": text}]
        self.note(notices=kept[-MOST_NOTICES:])

    def run_folder(self, planned: PlannedRun) -> Path:
        return self.out / "runs" / planned.name

    def finished(self, planned: PlannedRun, retry_failed: bool) -> dict[str, Any] | None:
        """Return the record of a run that need not be repeated; None where it must be run."""
        try:
            record = read_run(self.run_folder(planned))
        except BadRequest:
            return None
        failed = record["status"] == "failed" and not retry_failed
        return record if record["status"] == "completed" or failed else None

    def cleared(self, planned: PlannedRun) -> Path:
        """Empty a run's folder of an earlier attempt.

        The account of the privacy that the attempt spent stays: it remains spent.
        """
        folder = self.run_folder(planned)
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name == "privacy":
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        return folder

    def record_failure(
        self, planned: PlannedRun, config: dict[str, Any], error: str, wall_s: float
    ) -> dict[str, Any]:
        """Return the record that a failed run left; write one for a run that left none."""
        folder = self.run_folder(planned)
        if (folder / "run.json").is_file():
            return read_run(folder)
        whole = {"oversubscribed": False, **config}
        record = summarise([], whole, environment(), "failed", error, wall_s)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "run.json", record)
        except OSError as full:
            raise RunFailed(f"{folder} cannot be written: {full.strerror}") from None
        return record


def _refuse_another_study(out: Path, about: dict[str, Any], planned: list[dict[str, Any]]) -> None:
    if about["environment"]["cores"] != cores():
        was = about["environment"]["cores"]
        raise BadRequest(
            f"{out} was begun on {was} cores, and this machine has {cores()}: choose another --out"
        )
    before = {run["name"]: run["options"] for run in about["runs"]}
    both = [run for run in planned if run["name"] in before]
    changed = sorted({k for run in both for k in _differing(run["options"], before[run["name"]])})
    if changed or not both:
        what = f"it differs in {', '.join(changed)}" if changed else "no run is in both"
        raise BadRequest(f"{out} holds another study ({what}): choose another --out")


def _differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [k for k in one.keys() | other.keys() if one.get(k) != other.get(k)]


def prepare_again(config: Config, folder: Path, say: Callable[[str], None]) -> Job:
    """Return the job of a run, with what earlier attempts spent of its privacy budget.

    Refuse the run where both together would exceed the budget.
    """
    spent_lines = tuple(line for line in read_account(folder) if line.steps)
    if not spent_lines:
        shutil.rmtree(folder / "privacy", ignore_errors=True)
    if not spent_lines or config.privacy is None:
        return prepare(config, lambda config: folder)
    asked = Settings.read(config.privacy)
    spent = epsilon_of((line.spent for line in spent_lines), asked.delta, asked.accountant)
    job = _within_budget(config, folder, spent_lines) if asked.noise is not None else None
    if job is None:
        raise BadRequest(
            f"privacy: an earlier attempt at this run spent epsilon {spent:.3g} of its budget"
            f" {asked.epsilon:g}, and the whole run does not fit into the rest. Delete {folder} to"
            " run it all the same; both attempts then count for the people in the data"
        )
    say(
        f"an earlier attempt at this run spent epsilon {spent:.3g}; the epsilon in its record"
        " covers both attempts"
    )
    return job


def _within_budget(config: Config, folder: Path, spent: tuple[LedgerEntry, ...]) -> Job | None:
    """Return the job if the rest of the budget is enough for all of its steps.

    Without `noise` in the request, the noise is chosen so that a run spends the whole budget:
    callers do not ask then.
    """
    job = prepare(config, lambda config: folder, spent)
    fits = job.protection is not None and not job.protection.cut_short
    return job if fits else None
