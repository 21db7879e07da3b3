"""All ranks in this process, as threads that take turns (transport inproc)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.common.seeding import derive
from paceline.errors import PacelineError, PeerLost, RunFailed
from paceline.launch.local import as_failure, may_die, root_cause
from paceline.request.session import Session
from paceline.run.worker import run_worker
from paceline.transport.inproc import Hub


def run_threads(session: Session, hear: Callable[[str, dict[str, Any]], None]) -> None:
    job = session.job
    hub = Hub(job.ranks, derive(job.config.seed, "baton"), job.config.deadline_s)
    threads = torch.get_num_threads()
    try:
        results = hub.run(lambda transport: run_worker(session, transport, hear))
    finally:
        torch.set_num_threads(threads)
    failures: dict[int, PacelineError] = {
        rank: as_failure(rank, result)
        for rank, result in enumerate(results)
        if isinstance(result, BaseException)
    }
    for rank in list(failures):
        if (
            rank in may_die(job)
            and isinstance(failures[rank], RunFailed)
            and not isinstance(failures[rank], PeerLost)
        ):
            hear("lost", {"rank": rank})
            hear("notice", {"text": f"worker {rank}: {failures.pop(rank)}; the others go on"})
    if failures:
        raise root_cause(failures, job.workers)
