"""One run from start to record: its folder, its workers, its run.json, whatever happens in
between.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.errors import BadRequest, Interrupted, PeerLost, RunFailed, WorkerFailed
from paceline.launch.fresh import run_in_fresh_process
from paceline.launch.joined import Meeting, refuse_inside_a_launcher
from paceline.launch.local import run_processes
from paceline.launch.mpi import run_under_mpirun
from paceline.launch.seat import find as find_seat
from paceline.launch.signals import Ending, ending
from paceline.launch.threads import run_threads
from paceline.privacy.ledger import read_account
from paceline.privacy.plan import account, begin_session
from paceline.record import checkpoint, reserve
from paceline.record.lock import alone_in
from paceline.record.machine import environment
from paceline.record.reader import read_run, read_worker_events, summarise
from paceline.record.trace import write_trace
from paceline.record.writer import clean as clean_json
from paceline.record.writer import write_json
from paceline.registry import transports
from paceline.request.job import Job, run_folder

Listen = Callable[
    [str, dict[str, Any]], None
]  # ("progress", {...}), ("evaluation", {...}), ("notice", {...}), ("chosen", {...})


def run(
    job: Job, listen: Listen, clean: bool = False, meeting: Meeting | None = None
) -> dict[str, Any]:
    """Run the job. `clean` promises that this process has run no multi-threaded torch operation
    (the CLI's has not).

    Writes run.json in every case; then raises what went wrong, if something did. With a `meeting`
    this process is one rank of several that a launcher has started; rank 0 writes.
    """
    with ending() as end, ExitStack() as held:  # the folder, until the record is written
        return _run(job, listen, clean, meeting, held, end)


def _run(
    job: Job, listen: Listen, clean: bool, meeting: Meeting | None, held: ExitStack, end: Ending
) -> dict[str, Any]:
    if meeting is None:
        refuse_inside_a_launcher(find_seat())
        _claim(job, held=held)
    else:
        if job.config.network is not None:
            raise BadRequest(
                f"network={job.config.network}: Paceline starts the ranks on its hosts itself, not"
                f" {meeting.seat.launcher}"
            )
        meeting.claim(job, partial(_claim, restarted=meeting.began, held=held))
    leads = meeting is None or meeting.leads
    failure: BaseException | None = None
    ready = job.resume_from is None
    lost: list[int] = []  # workers that died while the others went on

    def hear(kind: str, content: dict[str, Any]) -> None:
        nonlocal ready
        if kind == "lost":
            lost.append(content["rank"])
        if kind == "chosen":
            job.config.memory_format = content["memory_format"]
        ready = ready or kind == "ready"
        if ready and leads and kind in ("chosen", "ready"):
            write_json(job.out / "config.json", job.config.described())
            if meeting is not None:
                meeting.mark(job.out)
        listen("notice" if kind == "waiting" else kind, content)

    try:
        if leads:
            reserve.take(job.out)
        if ready and leads:
            write_json(job.out / "config.json", job.config.described())
        for notice in job.notices if leads else ():
            listen("notice", {"text": notice})
        (meeting.train if meeting else _runner(job, clean))(job, hear)
        end.settling = True
    except KeyboardInterrupt:
        failure = Interrupted(end.reason)
        if meeting is not None:
            failure = Interrupted(
                f"ended by {meeting.seat.launcher} (another rank has failed, perhaps) or"
                " interrupted"
            )
            failure.told = not leads
    except Exception as error:
        end.settling, failure = True, error
    if leads or lost_the_leader(failure):
        reserve.release(job.out)
        checkpoint.sweep(job.out / "checkpoints")
    if (
        failure is not None and not ready
    ):  # a resume that could not even start leaves the run as it was
        raise failure
    if meeting is not None and not leads:
        if failure is not None and not lost_the_leader(failure):
            raise failure
        if failure is None:
            meeting.recorded()
            return read_run(job.out)
    status = (
        "completed"
        if failure is None
        else "interrupted"
        if isinstance(failure, Interrupted)
        else "failed"
    )
    events = read_worker_events(job.out)
    record = clean_json(
        summarise(
            events,
            {
                **job.config.described(),
                "batch_sizes": list(job.batch_sizes),
                "oversubscribed": job.oversubscribed,
            },
            environment(),
            status,
            str(failure) if failure else None,
            time.perf_counter() - job.started,
        )
    )
    if lost:
        record["lost"] = sorted(lost)
    if job.data.origin:
        record["data"] = clean_json(
            {
                k: v
                for k, v in job.data.origin.items()
                if k not in ("report", "content") or job.protection is None
            }
        )
    if job.protection is not None:
        record["privacy"] = clean_json(account(job.out, job.protection))
    try:
        write_json(job.out / "run.json", record)
        write_trace(events, job.out / "trace.json")
    except RunFailed as error:
        if (
            job.out / "run.json"
        ).is_file():  # the timeline is a picture of the record; a run does not fail for it
            listen("notice", {"text": str(error)})
        elif failure is not None:
            listen("notice", {"text": f"the record of the run is missing: {error}"})
        else:
            failure = error
    if isinstance(failure, WorkerFailed) and failure.worker_traceback:
        failure.add_note(f"In worker {failure.rank}:\n{failure.worker_traceback}")
    if failure is not None:
        raise failure
    if meeting is not None:
        meeting.recorded()
    return dict(record)


def lost_the_leader(failure: BaseException | None) -> bool:
    """Then this rank writes the record: nobody else will."""
    return isinstance(failure, PeerLost) and failure.rank == 0


def _runner(job: Job, clean: bool) -> Callable[[Job, Listen], None]:
    if transports.entry(job.transport).declared.runs_as == "threads":
        return run_threads
    if job.transport == "mpi":
        return run_under_mpirun
    return run_processes if clean or fork_is_safe(job.threads) else run_in_fresh_process


def fork_is_safe(threads: int) -> bool:
    """A fork copies one thread only: no other may hold a lock, and torch's pool, if it was used,
    must not be needed.
    """
    return (
        hasattr(os, "fork")
        and threads == 1
        and threading.active_count() == 1
        and not torch.cuda.is_initialized()
    )


def _claim(
    job: Job, restarted: Callable[[Path], bool] = lambda out: False, held: ExitStack | None = None
) -> None:
    """The run's folder: writable, and nobody else's. Making `events/` is the claim: it succeeds
    once.

    Unless a launcher has started the ranks of the run there anew: they may begin again, as a
    further session. Until `held` is closed, no other process can go on there.
    """
    stem, again, refused = job.out, 1, False
    while True:
        try:
            job.out.mkdir(parents=True, exist_ok=True)
            (job.out / "events").mkdir()
            break
        except FileExistsError:
            if job.resume_from is not None and same_folder(
                job.out, run_folder(job.config.resume or "")
            ):
                break
            if restarted(job.out):
                _refuse_what_was_spent(job)
                break
            if job.out_is_given and _nothing_happened(job.out):
                refused = True  # a request that was refused before its first step
                break
            if job.out_is_given:
                raise BadRequest(
                    f"out={job.out} holds a run already: choose another folder, or go on with"
                    f" --resume {job.out}"
                ) from None
            again += 1
            job.out = stem.with_name(f"{stem.name}.{again}")
            job.config.out = str(job.out)
        except OSError as error:
            raise BadRequest(f"out={job.out} cannot be written: {error.strerror}") from None
    if held is not None:
        held.enter_context(alone_in(job.out, "this run is being continued by another process"))
    if refused:
        shutil.rmtree(job.out / "events")
        (job.out / "events").mkdir()
    if job.resume_from is not None:
        earlier = run_folder(job.config.resume or "")
        if not same_folder(job.out, earlier) and (earlier / "events").is_dir():
            shutil.copytree(
                earlier / "events", job.out / "events", dirs_exist_ok=True
            )  # the whole run's history
    job.session = 1 + max(
        (e["session"] for own in read_worker_events(job.out) for e in own), default=-1
    )
    if job.protection is not None:
        job.session = begin_session(job.out, job.protection, job.session)


def _refuse_what_was_spent(job: Job) -> None:
    """A private run that begins again would spend its budget once more."""
    if job.protection is not None and any(line.steps for line in read_account(job.out)):
        raise BadRequest(
            f"privacy: the run in {job.out} was started again before its first checkpoint, and what"
            " it has spent is gone: choose another folder, and a --checkpoint-every that comes"
            " sooner"
        )


def _nothing_happened(out: Path) -> bool:
    made_steps = any(e["kind"] == "step" for own in read_worker_events(out) for e in own)
    spent = (out / "privacy").exists() and any(line.steps for line in read_account(out))
    return (
        (out / "run.json").is_file()
        and not made_steps
        and not spent
        and not (out / "checkpoints").exists()
    )


def same_folder(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
