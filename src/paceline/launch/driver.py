"""What the driver of ranks on a cluster of Spark or Ray does at their end: it writes the record.

Rank 0 writes the record of a run that ends by itself. Where no rank could, the driver does.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import Interrupted, PacelineError, RunFailed, WorkerFailed
from paceline.launch.run import Attempt, Listen
from paceline.launch.signals import Ending
from paceline.record.writer import write_json
from paceline.request.job import Job
from paceline.request.session import Session


def stopped(end: Ending) -> Interrupted:
    """Return the error that tells of the signal that was heard."""
    return Interrupted(end.reason, end.heard) if end.heard else Interrupted(end.reason)


def content(path: Path) -> bytes:
    """Return what a file holds; nothing where it cannot be read."""
    with suppress(OSError):
        return path.read_bytes()
    return b""


def conclude(job: Job, out: Path, listen: Listen, failure: BaseException, before: bytes) -> None:
    """Write the record of a run that failed, unless a rank has done so.

    `before` is what run.json held when the run began.
    """
    if not (out / "events").is_dir() or content(out / "run.json") != before:
        return
    attempt = Attempt(Session(replace(job, callbacks=()), out), listen, None)
    attempt.started = True
    with suppress(BaseException), ExitStack() as held:
        held.callback(attempt.calls.close)
        attempt.tidy(failure)
        attempt.conclude(failure)


def with_traceback(failure: PacelineError) -> PacelineError:
    """Return the failure with the traceback of its worker, which --debug shows."""
    if isinstance(failure, WorkerFailed) and failure.worker_traceback:
        failure.add_note(f"In worker {failure.rank}:\n{failure.worker_traceback}")
    return failure


def keep(record: dict[str, Any], out: Path) -> None:
    """Write the record on the driver, whose disk may not be the ranks'."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFailed(
            f"the run is complete, but its folder {out} cannot be made here: {error.strerror}"
        ) from None
    write_json(out / "run.json", record)
