"""Run a study: every setting with every seed, in random order, and go on where an earlier attempt
was stopped.

Fair means: the same model, data, global batch, initial weights, memory format and evaluation for
all; one thread per worker for every number of workers, plus one line of serial with all cores;
start-up, loading and evaluation left out of the training time; seeds as rounds, each in an order of
its own, so that a slow moment of the machine hits anybody.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.base import Stream
from paceline.errors import BadRequest, DataUnavailable, Interrupted, PacelineError, RunFailed
from paceline.launch.run import Listen, run
from paceline.launch.seat import find as find_seat
from paceline.launch.seat import refuse_inside_a_launcher
from paceline.privacy.accounting import epsilon_of
from paceline.privacy.ledger import LedgerEntry, read_account
from paceline.privacy.settings import Settings
from paceline.record.formats import BEGUN, STUDY
from paceline.record.lock import LOCK, alone_in
from paceline.record.machine import cores, environment
from paceline.record.reader import STUDY_SCHEMA, read_record, read_run, summarise
from paceline.record.shapes import fault
from paceline.record.writer import write_json
from paceline.request.config import Config
from paceline.request.job import Job
from paceline.request.prepare import prepare
from paceline.studies.grid import Setting, StudySpec, alone


@dataclass(frozen=True)
class PlannedRun:
    """One run of a spec."""

    setting: Setting
    seed: int

    @property
    def name(self) -> str:
        return f"{self.setting.slug}-s{self.seed}"


class Listener:
    """What a study tells while it goes on; silent by default."""

    def planned(
        self, spec: StudySpec, rounds: list[list[PlannedRun]], done: dict[str, dict[str, Any]]
    ) -> None: ...
    def begun(self, planned: PlannedRun, job: Job) -> Listen:
        return lambda kind, content: None

    def ended(self, planned: PlannedRun, record: dict[str, Any]) -> None: ...
    def notice(self, text: str) -> None: ...


def rounds_of(spec: StudySpec) -> list[list[PlannedRun]]:
    """One round per seed, each in a random order of its own (the same whenever the study is started
    again).
    """
    rounds = []
    for seed in spec.seeds:
        planned = [PlannedRun(setting, seed) for setting in spec.settings()]
        random.Random(f"order {seed}").shuffle(planned)
        rounds.append(planned)
    return rounds


def run_study(
    spec: StudySpec,
    out: Path,
    listener: Listener | None = None,
    *,
    retry_failed: bool = False,
    clean: bool = False,
) -> dict[str, dict[str, Any]]:
    """The record of every run, by its name. What is in `out` already is not run again.

    `clean` promises that this process has run no multi-threaded torch operation (the CLI's has
    not).
    """
    refuse_inside_a_launcher(find_seat())
    listener, rounds = listener or Listener(), rounds_of(spec)
    _claim(out)
    try:
        with alone_in(
            out, "this study is being run by another process"
        ):  # which would take its unfinished run for a leftover
            session = StudyFolder.open(spec, out)
            return _run_rounds(spec, session, rounds, listener, retry_failed, clean)
    except DataUnavailable as error:
        if not (out / "runs").exists():  # nothing was measured: leave nothing behind
            shutil.rmtree(out)
        hint = (
            "or `paceline study --fetch` to have it fetched, or `--set data=fashion-mini` for what"
            " is built in"
        )
        raise DataUnavailable(f"{str(error).rstrip('.')}; {hint}") from None


def _claim(out: Path) -> None:
    """A folder that holds this study, or nothing."""
    try:
        if (
            out.exists()
            and not (out / "study.json").exists()
            and (not out.is_dir() or set(os.listdir(out)) - {LOCK})
        ):
            raise BadRequest(f"out={out} is not empty and holds no study: choose another folder")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(f"out={out} cannot be written: {error.strerror}") from None


def _run_rounds(
    spec: StudySpec,
    session: StudyFolder,
    rounds: list[list[PlannedRun]],
    listener: Listener,
    retry_failed: bool,
    clean: bool,
) -> dict[str, dict[str, Any]]:
    records = {
        p.name: r
        for p in itertools.chain(*rounds)
        if (r := session.finished(p, retry_failed)) is not None
    }
    listener.planned(spec, rounds, records)
    if (
        text := _privacy_notice([p for p in itertools.chain(*rounds) if p.name not in records], spec)
    ) is not None:
        listener.notice(text)
    for number, planned_runs in enumerate(rounds):
        left = [p for p in planned_runs if p.name not in records]
        if left and number and not _fits(spec, records, len(left)):
            seeds = f"{number} of {len(rounds)} seeds"
            session.note(cut_seeds=seeds)
            listener.notice(
                f"another round would take longer than the {spec.budget_s:.0f} s that this study"
                f" has: {seeds} were run"
            )
            break
        for planned in left:
            records[planned.name] = session.perform(planned, listener, clean)
            listener.ended(planned, records[planned.name])
    session.note(ended=time.time())
    return records


def _fits(spec: StudySpec, records: dict[str, dict[str, Any]], runs: int) -> bool:
    """Whether so many further runs fit into the study's time, as long as those so far took."""
    if spec.budget_s is None:
        return True
    spent = float(sum(r["result"]["wall_s"] for r in records.values()))
    return spent + runs * spent / max(1, len(records)) <= spec.budget_s


@dataclass
class StudyFolder:
    """The study's folder: its definition, what was chosen for all runs, and the runs."""

    spec: StudySpec
    out: Path
    about: dict[str, Any]

    @classmethod
    def open(cls, spec: StudySpec, out: Path) -> StudyFolder:
        path = out / "study.json"
        if path.exists():
            about = read_record(path, "study", STUDY_SCHEMA, STUDY)
            if (wrong := fault(about, BEGUN)) is not None:
                raise BadRequest(
                    f"{path} is not a study that can go on ({wrong}): choose another --out"
                )
            planned = _runs_of(spec)
            before = {run["name"]: run["options"] for run in about["runs"]}
            changed = sorted(
                {
                    k
                    for run in planned
                    if run["name"] in before
                    for k in _differing(run["options"], before[run["name"]])
                }
            )
            if about["environment"]["cores"] != cores():
                was = about["environment"]["cores"]
                raise BadRequest(
                    f"{out} was begun on {was} cores, and here are {cores()}: choose another --out"
                )
            if changed or not {run["name"] for run in planned} & set(before):
                what = f"it differs in {', '.join(changed)}" if changed else "no run is in both"
                raise BadRequest(f"{out} holds another study ({what}): choose another --out")
            session = cls(
                spec, out, about
            )  # the same, or one with more seeds, more values, more settings
            session.note(definition=spec.described(), runs=planned)
            return session
        session = cls(
            spec,
            out,
            {
                "schema": STUDY_SCHEMA,
                "name": spec.name,
                "definition": spec.described(),
                "started": time.time(),
            },
        )
        session.note(
            environment=environment(),
            memory_format={},
            runs=_runs_of(spec),
        )
        return session

    def note(self, **fields: Any) -> None:
        self.about.update(fields)
        write_json(self.out / "study.json", self.about)

    def folder(self, planned: PlannedRun) -> Path:
        return self.out / "runs" / planned.name

    def finished(self, planned: PlannedRun, retry_failed: bool) -> dict[str, Any] | None:
        """The record of a run that need not be repeated."""
        try:
            record = read_run(self.folder(planned))
        except BadRequest:
            return None
        return (
            record
            if record["status"] == "completed"
            or (record["status"] == "failed" and not retry_failed)
            else None
        )

    def perform(self, planned: PlannedRun, listener: Listener, clean: bool) -> dict[str, Any]:
        """A run that fails is a record that says so; the rest goes on."""
        folder = self.folder(planned)
        options = {**planned.setting.options, "seed": planned.seed, "out": str(folder)}
        kind = f"{options.get('model')} on {options.get('data')}"
        if "memory_format" not in options and kind in self.about["memory_format"]:
            options["memory_format"] = self.about["memory_format"][kind]
        started, job = time.perf_counter(), None
        _clear(folder)  # of what a study that was stopped has left of it
        try:
            config = Config.make(_scaled(options, self.spec))
            spent = tuple(line for line in read_account(folder) if line.steps)
            if not spent:
                shutil.rmtree(folder / "privacy", ignore_errors=True)
            job = _prepared(
                config, folder, spent, lambda text: listener.notice(f"{planned.name}: {text}")
            )
            record = run(job, listener.begun(planned, job), clean=clean)
            if kind not in self.about["memory_format"]:  # chosen once, for all
                self.note(
                    memory_format={
                        **self.about["memory_format"],
                        kind: record["config"]["memory_format"],
                    }
                )
            return record
        except Interrupted:
            raise
        except PacelineError as error:
            if (
                isinstance(error, DataUnavailable)
                and len({str(s.options.get("data")) for s in self.spec.settings()}) == 1
            ):
                raise  # no other run would fare better
            if (folder / "run.json").is_file():
                return read_run(folder)
            asked = job.config.described() if job else Config.make(options).described()
            wall_s = time.perf_counter() - started
            record = summarise(
                [], {"oversubscribed": False, **asked}, environment(), "failed", str(error), wall_s
            )
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_json(folder / "run.json", record)
            except OSError as full:
                raise RunFailed(f"{folder} cannot be written: {full.strerror}") from None
            return record


def _clear(folder: Path) -> None:
    """All of an earlier attempt at a run goes, but for what it has spent of people's privacy, which
    stays spent.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name == "privacy":
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _prepared(
    config: Config, folder: Path, lines: tuple[LedgerEntry, ...], say: Callable[[str], None]
) -> Job:
    """The job, with what earlier attempts have spent in its account; refused where both would
    exceed the budget.
    """
    if not lines or config.privacy is None:
        return prepare(config, lambda config: folder)
    asked = Settings.read(config.privacy)
    spent = epsilon_of((line.spent for line in lines), asked.delta, asked.accountant)
    whole = (
        asked.noise is not None
    )  # where the noise follows from the budget, a run spends all of it
    if whole:
        job = prepare(config, lambda config: folder, lines)
        whole = job.protection is not None and not job.protection.cut_short
    if not whole:
        raise BadRequest(
            f"privacy: an earlier attempt at this run has spent epsilon {spent:.3g} of its budget"
            f" {asked.epsilon:g}, and the whole run does not fit into the rest: delete {folder} to"
            " run it all the same; its people then pay for both"
        )
    say(
        f"an earlier attempt at this run has spent epsilon {spent:.3g}; the epsilon of its record"
        " covers both"
    )
    return job


def _privacy_notice(planned: list[PlannedRun], spec: StudySpec) -> str | None:
    """What people should know before several private runs on the same of them begin."""
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
        f" of them are serial runs that a study adds by itself, to compare with{fewer}"
    )


def _runs_of(spec: StudySpec) -> list[dict[str, Any]]:
    """The runs as study.json has them, in the order of the grid."""
    return [
        {
            "name": PlannedRun(setting, seed).name,
            "label": setting.label,
            "workers": setting.workers,
            "seed": seed,
            "varied": setting.varied,
            "options": {k: str(v) for k, v in setting.options.items()},
        }
        for setting in spec.settings()
        for seed in spec.seeds
    ]


def _differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [k for k in one.keys() | other.keys() if one.get(k) != other.get(k)]


def _scaled(options: dict[str, Any], spec: StudySpec) -> dict[str, Any]:
    """Strong scaling needs nothing. Weak: a worker has the batch and the number of steps that
    serial has.
    """
    if spec.scaling == "strong":
        return options
    lone = prepare(Config.make({**alone(options), "threads": 1}), lambda c: Path("."))
    if isinstance(lone.data.train, Stream):
        raise BadRequest(
            "weak scaling needs to know how many samples there are: a stream does not tell"
        )
    per_epoch = -(-len(lone.data.train) // lone.batch_sizes[0])
    steps = min(s for s in (lone.steps, (lone.epochs or 1) * per_epoch) if s is not None)
    kept = {k: v for k, v in options.items() if k not in ("global_batch_size", "epochs", "steps")}
    return {
        **kept,
        "batch_size": options.get("batch_size", lone.batch_sizes[0]),
        "steps": steps,
        "epochs": None,
    }
