"""One run from start to record: its folder, its workers, its run.json, whatever happens in between."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.errors import BadRequest, Interrupted, PacelineError, RunFailed
from paceline.job import Job
from paceline.launch.fresh import run_in_fresh_process
from paceline.launch.local import run_processes
from paceline.launch.threads import run_threads
from paceline.record.machine import environment
from paceline.record.reader import read_worker_events, summarise
from paceline.record.writer import write_json
from paceline.registry import transports

Listen = Callable[
    [str, dict[str, Any]], None
]  # ("progress", {...}), ("evaluation", {...}), ("notice", {...}), ("chosen", {...})


def run(job: Job, listen: Listen, clean: bool = False) -> dict[str, Any]:
    """Run the job. `clean` promises that this process has run no multi-threaded torch operation (the CLI's has not).

    Writes run.json in every case; then raises what went wrong, if something did.
    """
    _claim(job)
    started = time.perf_counter()
    failure: PacelineError | None = None

    def hear(kind: str, content: dict[str, Any]) -> None:
        if kind == "chosen":
            job.config.memory_format = content["memory_format"]
            write_json(job.out / "config.json", job.config.described())
        listen(kind, content)

    try:
        write_json(job.out / "config.json", job.config.described())
        for notice in job.notices:
            listen("notice", {"text": notice})
        _runner(job, clean)(job, hear)
    except KeyboardInterrupt:
        failure = Interrupted("interrupted")
    except PacelineError as error:
        failure = error
    status = "completed" if failure is None else "interrupted" if isinstance(failure, Interrupted) else "failed"
    record = summarise(
        read_worker_events(job.out),
        {**job.config.described(), "batch_sizes": list(job.batch_sizes), "oversubscribed": job.oversubscribed},
        environment(),
        status,
        str(failure) if failure else None,
        time.perf_counter() - started,
    )
    try:
        write_json(job.out / "run.json", record)
    except RunFailed as error:
        failure = failure or error
    if failure is not None:
        raise failure
    return record


def _runner(job: Job, clean: bool) -> Callable[[Job, Listen], None]:
    if transports.entry(job.transport).make.runs_as == "threads":  # type: ignore[attr-defined]
        return run_threads
    return run_processes if clean or fork_is_safe(job.threads) else run_in_fresh_process


def fork_is_safe(threads: int) -> bool:
    """A fork copies one thread only: no other may hold a lock, and torch's pool, if it was used, must not be needed."""
    return hasattr(os, "fork") and threads == 1 and threading.active_count() == 1 and not torch.cuda.is_initialized()


def _claim(job: Job) -> None:
    """The run's folder: writable, and nobody else's."""
    out: Path = job.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise BadRequest(f"out={out} cannot be written: {error.strerror}") from None
    earlier = out / "events"
    if earlier.is_dir() and any(earlier.iterdir()):
        if job.resume_from is None or Path(job.config.resume or "") not in (out, job.resume_from):
            raise BadRequest(f"out={out} holds a run already: choose another folder, or go on with --resume {out}")
        job.session = 1 + max((e["session"] for own in read_worker_events(out) for e in own), default=0)
