"""What the driver of ranks on a cluster of Spark or Ray does at their end: it writes the record.

Rank 0 writes the record of a run that ends by itself. Where no rank could, the driver does.
"""

from __future__ import annotations

import json
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

    `before` is what run.json held when the run began. A rank that was ended by the driver's signal
    may have lost another one first, and have written that the run failed: the driver knows better.
    """
    if not (out / "events").is_dir():
        return
    if content(out / "run.json") != before:
        if isinstance(failure, Interrupted):
            _say_interrupted(out / "run.json", failure)
        return
    attempt = Attempt(Session(replace(job, callbacks=()), out), listen, None)
    attempt.started = True
    with suppress(BaseException), ExitStack() as held:
        held.callback(attempt.calls.close)
        attempt.tidy(failure)
        attempt.conclude(failure)


def _say_interrupted(path: Path, failure: Interrupted) -> None:
    with suppress(OSError, ValueError):
        record = json.loads(path.read_text())
        if record.get("status") == "failed":
            write_json(path, {**record, "status": "interrupted", "error": str(failure)})


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
