"""A run whose ranks are forked from this process, on this host or on the hosts of a testbed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from paceline.common.allocator import keep_freed_memory
from paceline.common.asked import Asked
from paceline.common.devices import take_device
from paceline.common.links import Links
from paceline.common.warned import warnings_once
from paceline.errors import BadRequest, PacelineError, PeerLost
from paceline.launch.failures import as_failure, root_cause
from paceline.launch.forks import on_forked_ranks
from paceline.launch.messages import Hear
from paceline.launch.signals import LEAVING
from paceline.launch.start import attempts, begin
from paceline.registry import transports
from paceline.request.job import Job
from paceline.request.session import Session
from paceline.run.worker import run_worker
from paceline.testbed.build import lasting
from paceline.testbed.hosts import Testbed
from paceline.testbed.standing import standing
from paceline.transport.base import Rendezvous, Transport
from paceline.transport.status.line import FOLDER
from paceline.transport.status.picture import keep_last


def run_processes(session: Session, hear: Hear) -> None:
    """Start the ranks, pass on their messages, end them all; raise the root cause of a failure."""
    job = session.job
    with network(job, hear) as bed:
        _, failures = on_forked_ranks(
            partial(train_rank_told_once, session),
            job.ranks,
            hear,
            job.config.waits,
            may_die(job),
            bed,
            partial(keep_last, session.out / FOLDER),
        )
    if failures:
        raise root_cause(failures, job.workers)


@contextmanager
def network(job: Job, hear: Hear) -> Iterator[Testbed | None]:
    """Give the testbed that the job asks for; None: all ranks run on this host."""
    asked = job.config.network
    if asked is None:
        yield None
    elif asked == "standing":
        bed = standing()
        if bed is None:
            raise BadRequest(
                "network=standing, but no testbed is up: paceline testbed up --hosts 4"
                " --rate 100mbit"
            )
        yield bed
    else:
        with lasting(job.ranks, Links.read(asked)) as bed:
            for notice in bed.notices:
                hear("notice", {"text": notice})
            yield bed


def may_die(job: Job) -> frozenset[int]:
    """Return the workers whose death the others survive.

    Never worker 0, which reports progress and writes checkpoints for all.
    """
    return frozenset(range(1, job.workers)) if job.strategy().traits.survives else frozenset()


def train_rank(
    session: Session,
    rendezvous: Rendezvous,
    say: Hear,
    local_rank: int | None = None,
    asked: Asked | None = None,
) -> None:
    """Connect this process to the other ranks and do its part of the run.

    `local_rank`: this rank's number on its host; None: all ranks are on this host. `asked`: tells
    whether this rank was asked to leave.
    """
    keep_freed_memory()
    number = rendezvous.rank if local_rank is None else local_rank
    session = replace(session, taken=take_device(session.job.config.device, number))
    for fault in session.job.faults():
        fault.reached("connect", 0, rendezvous.rank)
    rendezvous = replace(
        rendezvous,
        status=session.out / FOLDER,
        say=lambda text: say("waiting", {"text": text}),
    )
    kind, survives = transports.entry(session.job.transport).make, bool(may_die(session.job))
    say("connecting", {})
    work = partial(_work, session, say, rendezvous.alone, asked)
    begin(attempts(kind, rendezvous, survives), work)


def _work(
    session: Session, say: Hear, alone: bool, asked: Asked | None, transport: Transport
) -> None:
    say("connected", {})
    try:
        run_worker(session, transport, say, alone_on_host=alone, asked=asked)
        transport.patience.activity.end()
    except RuntimeError as error:
        if isinstance(error, PacelineError):
            raise
        failure = as_failure(transport.rank, error)
        if not isinstance(failure, PeerLost) and transport.patience.verdict is None:
            raise
        # PyTorch's DDP has lost a connection, or its wait was aborted
        lost = PeerLost(None, "its connection closed during DDP's exchange")
        raise transport.patience.blame(lost) from None


def train_rank_told_once(session: Session, rendezvous: Rendezvous, say: Hear) -> None:
    """Run `train_rank` in its own process. The launcher prints each of its warnings once.

    The launcher's SIGUSR1 asks it to leave with a checkpoint.
    """
    asked = Asked() if session.leaves else None
    if asked is not None:
        signal.signal(LEAVING, asked.hear)
    with warnings_once(lambda told: say("warning", told)):
        train_rank(session, rendezvous, say, asked=asked)
