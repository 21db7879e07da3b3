"""All ranks as threads of this process that run one at a time (inproc, simulated)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from paceline.common.asked import Asked
from paceline.common.devices import take_device
from paceline.common.links import Links
from paceline.common.seeding import derive
from paceline.errors import PacelineError, PeerLost, RunFailed
from paceline.launch.failures import as_failure, root_cause
from paceline.launch.local import may_die
from paceline.launch.messages import Hear
from paceline.launch.signals import relaying
from paceline.launch.start import begin
from paceline.registry import transports
from paceline.request.session import Session
from paceline.run.worker import run_worker
from paceline.transport.base import Transport
from paceline.transport.inproc import Hub
from paceline.transport.status.line import FOLDER


def run_threads(session: Session, hear: Hear) -> None:
    """Run all ranks of a session; raise the root cause of a failure."""
    job = session.job
    kind: Any = transports.entry(job.transport).make
    links = Links.read(job.config.network) if job.config.network is not None else None
    seed = derive(job.config.seed, "baton")
    hub: Hub = kind.hub(job.ranks, seed, job.config.deadline_s, links)
    threads = torch.get_num_threads()
    asked = Asked()
    try:
        with relaying(asked.hear):
            results = hub.run(partial(_train_rank, session, hear, hub, asked))
    finally:
        torch.set_num_threads(threads)
    failures: dict[int, PacelineError] = {
        rank: as_failure(rank, result)
        for rank, result in enumerate(results)
        if isinstance(result, BaseException)
    }
    for rank, failure in list(failures.items()):
        died = isinstance(failure, RunFailed) and not isinstance(failure, PeerLost)
        if died and rank in may_die(job):
            hear("lost", {"rank": rank})
            hear("notice", {"text": f"worker {rank}: {failures.pop(rank)}; the others go on"})
    if failures:
        raise root_cause(failures, job.workers)


def _train_rank(session: Session, hear: Hear, hub: Hub, asked: Asked, transport: Transport) -> None:
    """Do one rank's part of the run, in its own thread.

    All ranks take the same device, because they add each other's tensors.
    """
    taken = take_device(session.job.config.device, 0)
    for fault in session.job.faults():
        fault.reached("connect", 0, transport.rank)
    session, rank = replace(session, taken=taken), transport.rank
    tries: Iterator[Callable[[], Transport]] = chain(
        [lambda: transport], (partial(hub.connect, rank, n) for n in range(1, hub.size))
    )
    begin(tries, partial(_work, session, hear, asked if session.leaves else None))


def _work(session: Session, hear: Hear, asked: Asked | None, transport: Transport) -> None:
    # Threads share one process, so there is no stack of one rank to ask for.
    transport.patience.open_status(session.out / FOLDER, gives_stack=False)
    run_worker(session, transport, hear, asked=asked)
    transport.patience.activity.end()
