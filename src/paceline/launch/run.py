"""One run: claim its folder, start its workers, write run.json in every case."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.common import asked
from paceline.common.files import sweep
from paceline.common.shortage import out_of_memory
from paceline.common.warned import show_warning, warnings_once
from paceline.errors import (
    BadRequest,
    Interrupted,
    PeerLost,
    RunFailed,
    WorkerFailed,
    voiced,
)
from paceline.launch.callbacks import Calls, threads_left
from paceline.launch.folder import claim
from paceline.launch.fresh import run_in_fresh_process
from paceline.launch.joined import Meeting
from paceline.launch.local import run_processes
from paceline.launch.mpi import run_under_mpirun
from paceline.launch.picture import shown_on_request
from paceline.launch.seat import find as find_seat
from paceline.launch.seat import refuse_inside_a_launcher
from paceline.launch.signals import LEAVE_S, Ending, ending
from paceline.launch.slurm_job import engine
from paceline.launch.threads import run_threads
from paceline.privacy.plan import account
from paceline.record import checkpoint, reserve
from paceline.record.machine import environment
from paceline.record.notices import Notices
from paceline.record.reader import read_run, read_worker_events, summarise
from paceline.record.trace import write_trace
from paceline.record.writer import clean as clean_json
from paceline.record.writer import write_json
from paceline.registry import transports
from paceline.request.job import Job
from paceline.request.session import Session
from paceline.transport.status.picture import last_picture

# Called with ("progress", {...}), ("evaluation", {...}), ("notice", {...}), ("chosen", {...})
Listen = Callable[[str, dict[str, Any]], None]
Events = list[list[dict[str, Any]]]  # of each rank


def run(
    job: Job, listen: Listen, clean: bool = False, meeting: Meeting | None = None
) -> dict[str, Any]:
    """Run the job and return its record; see `run_in_folder`."""
    return run_in_folder(job, listen, clean, meeting)[0]


def run_in_folder(
    job: Job,
    listen: Listen,
    clean: bool = False,
    meeting: Meeting | None = None,
    leaves: bool = False,
) -> tuple[dict[str, Any], Path]:
    """Run the job. Returns its record and its folder.

    Writes run.json in every case, then raises what went wrong. `clean` promises that this process
    has run no multi-threaded torch operation (the CLI's has not), so that it can fork. With a
    `meeting` this process is one of several ranks that a launcher has started; rank 0 writes the
    record. `leaves`: SIGTERM and SIGUSR1 ask the workers to leave with a checkpoint.
    """
    with ending() as end, ExitStack() as held:  # `held`: the folder, until the record is written
        attempt: Attempt | None = None
        claimed: list[Session] = []

        def take(job: Job) -> Session:
            began = meeting.began if meeting is not None else _never
            with end.delayed():  # a folder that exists gets a record
                claimed.append(claim(job, began, held))
            return claimed[0]

        try:
            if meeting is None:
                refuse_inside_a_launcher(find_seat())
                session = take(job)
            else:
                _refuse_a_network(job, meeting)
                session = meeting.claim(job, take)
            leaves = leaves or job.config.max_time is not None
            attempt = Attempt(replace(session, leaves=leaves), listen, meeting)
            failure = attempt.train(clean, end)
        except KeyboardInterrupt:
            if not claimed:
                raise
            attempt = attempt or Attempt(claimed[0], listen, meeting)
            failure = attempt.interrupted(end)
        held.callback(attempt.calls.close)
        attempt.tidy(failure)
        record = attempt.conclude(failure, lambda: end.heard is not None)
        return record, attempt.session.out


def _never(out: Path) -> bool:
    return False


def _refuse_a_network(job: Job, meeting: Meeting) -> None:
    if job.config.network is not None:
        raise BadRequest(
            f"network={job.config.network} is not available inside {meeting.seat.launcher}:"
            " Paceline itself starts the ranks on a testbed's hosts; run paceline train alone"
        )


class Attempt:
    """One session of a run, as the process that starts it sees it."""

    def __init__(self, session: Session, listen: Listen, meeting: Meeting | None) -> None:
        self.session, self.listen, self.meeting = session, listen, meeting
        self.job, self.out = session.job, session.out
        self.config = session.config  # with what the workers choose (the memory format)
        self.leads = meeting is None or meeting.leads
        # A resumed run counts as started when all workers are ready. Until then its files stay as
        # they are.
        self.started = session.job.resume_from is None
        self.lost: list[int] = []  # workers that died while the others went on
        self.last: list[dict[str, Any]] = []  # what the ranks did when the run failed
        self.left: Interrupted | None = None  # all ranks have left early, with a checkpoint
        self._end: Ending | None = None
        self.notices = Notices(session.out, session.number)
        self._early: list[tuple[str, dict[str, Any]]] = []  # heard before the run has started
        self.calls = Calls(
            session.job.callbacks if self.leads else (),
            session.out,
            self._described,
            self.config.deadline_s,
            lambda text: self.listen("notice", {"text": text}),
        )

    def train(self, clean: bool, end: Ending) -> BaseException | None:
        """Start the workers and wait for their end. Returns what went wrong."""
        self._end = end
        try:
            if self.leads:
                reserve.take(self.out)
                if self.started:
                    self._save_config()
                for notice in self.job.notices:
                    self._hear("notice", {"text": notice})
            start = self.meeting.train if self.meeting else _starter(self.job, clean)
            with warnings_once(), shown_on_request(self.out, alone=self.meeting is None):
                start(self._for_workers(), self._hear)
            self.calls.drain()
            end.settling = True
            return self.left
        except KeyboardInterrupt:
            return self.interrupted(end)
        except Exception as error:
            end.settling = True
            if (told := out_of_memory(error)) is not None:
                cause, error = error, RunFailed(told)
                error.__cause__ = cause
            return self.calls.failure or error  # a callback that raised has ended the run
        finally:
            end.cannot_leave()

    def _for_workers(self) -> Session:
        """Return the session without the callbacks, which stay in this process."""
        return replace(self.session, job=replace(self.job, callbacks=(), asked={}))

    def _hear(self, kind: str, content: dict[str, Any]) -> None:
        """Note what concerns the record, and pass it on."""
        if kind == "warning":
            show_warning(content)
            return
        if self.session.leaves and self._end is not None:
            self._hear_of_leaving(kind, content, self._end)
        if kind in ("begins", "leaving", "left"):
            return
        if self.leads:
            self._early.append((kind, content))
            for heard in self._early if self.started else ():
                self.notices.take(*heard)
            self._early = [] if self.started else self._early
        if kind == "lost":
            self.lost.append(content["rank"])
        if kind == "chosen":
            self.config = self.config.merged({"memory_format": content["memory_format"]})
        self.started = self.started or kind == "ready"
        if self.started and self.leads and kind in ("chosen", "ready"):
            self._save_config()
            if self.meeting is not None:
                self.meeting.mark(self.out)
        if kind == "ready":  # all workers have been started
            self.calls.begin()
        self.calls.check()
        self.listen("notice" if kind == "waiting" else kind, content)

    def _hear_of_leaving(self, kind: str, content: dict[str, Any], end: Ending) -> None:
        """Note whether the ranks can leave early, whether they agree to, and that they did."""
        if kind == "ready" or (kind == "begins" and not self.leads):
            # A server ends with its workers.
            serves = self.meeting is not None and self.meeting.seat.rank >= self.job.workers
            end.can_leave(None if serves else LEAVE_S)
        elif kind == "leaving":
            end.is_leaving()
        elif kind == "left":
            # The launcher's own ranks do not know which signal it was.
            why = asked.SIGTERM if end.wish == signal.SIGTERM else content["why"]
            text, number = asked.told(why, content["step"], self.config.max_time)
            self.left = Interrupted(voiced(text), number)

    def _save_config(self) -> None:
        write_json(self.out / "config.json", self._described())

    def _described(self) -> dict[str, Any]:
        return self.config.described()

    def interrupted(self, end: Ending) -> Interrupted:
        """Return the failure of a run that a signal has ended."""
        reason = end.reason
        if self.meeting is not None:
            reason = (
                f"ended by {self.meeting.seat.launcher} (because another rank failed, perhaps) or"
                " interrupted by a signal"
            )
        failure = Interrupted(reason, end.heard or signal.SIGINT)
        failure.told = not self.leads
        return failure

    def tidy(self, failure: BaseException | None) -> None:
        """Remove what only a running session needs."""
        if self.leads or _lost_the_leader(failure):
            self.notices.close()
            self.last = last_picture(self.out, keep=failure is not None)
            reserve.release(self.out)
            checkpoint.sweep(self.out / "checkpoints")
            sweep(self.out)

    def conclude(
        self, failure: BaseException | None, interrupted: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Write the record and return it, or raise what went wrong.

        `interrupted` tells whether the user has asked to end the run.
        """
        # A resume that failed before its first step leaves the run as it was.
        if failure is not None and not self.started:
            raise failure
        if self.meeting is not None and not self.leads:
            if failure is None:
                left = self.meeting.recorded()
                # srun ends all tasks after one that fails: there rank 0's exit code is enough.
                if left is not None and self.meeting.seat.launcher != "srun":
                    left.told = True
                    raise left
                return read_run(self.out)
            if not _lost_the_leader(failure):
                raise failure
        events = read_worker_events(self.out)
        record = self._record(events, failure)
        failure = self._write(record, events, failure)
        completed = failure is None
        # The other ranks may have completed their parts, and wait for the record.
        over = completed or failure in (self.left, self.calls.failure)
        if self.meeting is not None and over:
            self.meeting.recorded(self.left)
            if self.left is not None and self.meeting.seat.launcher == "srun":
                self.meeting.ends_last()
        raised = self.calls.end(record, lambda: not completed or interrupted())
        failure = failure or raised
        if failure is not None:
            if isinstance(failure, WorkerFailed) and failure.worker_traceback:
                failure.add_note(f"In worker {failure.rank}:\n{failure.worker_traceback}")
            raise failure
        return record

    def _record(self, events: Events, failure: BaseException | None) -> dict[str, Any]:
        job, status = self.job, "completed"
        if failure is not None:
            status = "interrupted" if isinstance(failure, Interrupted) else "failed"
        config = {
            **self.config.described(),
            "batch_sizes": list(job.batch_sizes),
            "oversubscribed": job.oversubscribed,
        }
        error, wall_s = str(failure) if failure else None, time.perf_counter() - job.started
        about = {**environment(), **engine()}
        summary = summarise(events, config, about, status, error, wall_s)
        record = dict(clean_json(summary))
        record["model"] = {
            "input_shape": list(job.data.input_shape),
            "classes": job.data.classes,
        }
        if self.last:
            record["last"] = self.last
        if transports.entry(job.transport).make.traits.virtual_time:
            record["simulated"] = True
        if self.lost:
            record["lost"] = sorted(self.lost)
        if job.data.origin:
            unprotected = () if job.protection is None else ("report", "content")
            origin = {k: v for k, v in job.data.origin.items() if k not in unprotected}
            record["data"] = clean_json(origin)
        if job.protection is not None:
            record["privacy"] = clean_json(account(self.out, job.protection))
        return record

    def _write(
        self, record: dict[str, Any], events: Events, failure: BaseException | None
    ) -> BaseException | None:
        """Write run.json and the timeline. Returns what went wrong, before or here."""
        try:
            write_json(self.out / "run.json", record)
            write_trace(events, self.out / "trace.json")
        except RunFailed as error:
            if (self.out / "run.json").is_file():  # a missing timeline does not make a run fail
                self.listen("notice", {"text": str(error)})
            elif failure is not None:
                text = f"the record of the run could not be written: {error}"
                self.listen("notice", {"text": text})
            else:
                return error
        return failure


def _lost_the_leader(failure: BaseException | None) -> bool:
    """Whether rank 0 is gone: then this rank writes the record."""
    return isinstance(failure, PeerLost) and failure.rank == 0


def _starter(job: Job, clean: bool) -> Callable[[Session, Listen], None]:
    """Return what starts the ranks: as threads, under mpirun, as forks, or from a fresh process."""
    if transports.entry(job.transport).make.traits.runs_as == "threads":
        return run_threads
    if transports.entry(job.transport).make.traits.started_by == "mpirun":
        return run_under_mpirun
    on_cpu = job.config.device == "cpu"  # a script that has looked for GPUs cannot fork
    clean = clean and not threads_left()
    safe = clean or (on_cpu and fork_is_safe(job.threads))
    return run_processes if safe else run_in_fresh_process


def fork_is_safe(threads: int) -> bool:
    """Whether this process may fork workers.

    A fork copies one thread only. So no other thread may hold a lock, and the workers must not
    need torch's pool of threads.
    """
    alone = threading.active_count() == 1 and not torch.cuda.is_initialized()
    return hasattr(os, "fork") and threads == 1 and alone
