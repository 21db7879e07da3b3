"""Workers as forked processes of this one: they start in a moment and share the data in memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from paceline.common.allocator import keep_freed_memory
from paceline.common.links import Links
from paceline.errors import (
    BadRequest,
    PacelineError,
    PeerLost,
    RunFailed,
    TransportError,
    WorkerFailed,
)
from paceline.registry import transports
from paceline.request.job import Job
from paceline.request.session import Session
from paceline.run.worker import run_worker
from paceline.testbed.build import lasting
from paceline.testbed.hosts import LAUNCHER, Testbed
from paceline.testbed.standing import standing
from paceline.transport.base import Rendezvous
from paceline.transport.c10d.transport import open_store

Hear = Callable[[str, dict[str, Any]], None]
Body = Callable[[Rendezvous, Hear], Any]  # what a rank does; its result, or its error, comes back

HOST = "127.0.0.1"
GRACE_S = 1.5  # after the first failure: time for the others to say what they know
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_S = 3.0  # between asking a worker to end and ending it


def run_processes(session: Session, hear: Hear) -> None:
    """Start the workers, pass on what they say, end them all, and raise the root cause if one
    failed.
    """
    job = session.job
    with network(job, hear) as bed:
        _, failures = on_forked_ranks(
            partial(train_rank, session), job.ranks, hear, job.config.deadline_s, may_die(job), bed
        )
    if failures:
        raise root_cause(failures, job.workers)


@contextlib.contextmanager
def network(job: Job, hear: Hear) -> Iterator[Testbed | None]:
    """The hosts that the ranks run on, where not all are to be on this one."""
    asked = job.config.network
    if asked is None:
        yield None
    elif asked == "standing":
        bed = standing()
        if bed is None:
            raise BadRequest("no testbed is up: paceline testbed up --hosts 4 --rate 100mbit")
        yield bed
    else:
        with lasting(job.ranks, Links.read(asked)) as bed:
            for notice in bed.notices:
                hear("notice", {"text": notice})
            yield bed


def may_die(job: Job) -> frozenset[int]:
    """The workers without whom the others go on: all but the first, who speaks and saves
    for all.
    """
    return frozenset(range(1, job.workers)) if job.strategy().survives else frozenset()


def train_rank(session: Session, rendezvous: Rendezvous, say: Hear) -> None:
    """What a worker's process does."""
    keep_freed_memory()
    transport = transports.entry(session.job.transport).declared.connect(rendezvous)
    try:
        run_worker(session, transport, say, alone_on_host=rendezvous.alone)
    finally:
        with contextlib.suppress(Exception):  # the process ends anyway
            transport.close()


def on_forked_ranks(
    body: Body,
    size: int,
    hear: Hear = lambda *_: None,
    deadline_s: float = 30.0,
    expendable: frozenset[int] = frozenset(),
    bed: Testbed | None = None,
) -> tuple[dict[int, Any], dict[int, PacelineError]]:
    """`body` in forked processes: what each returned, and what went wrong where. Expendable ranks
    may die.

    With a testbed each rank is on one of its hosts.
    """
    context = get_context("fork")
    pipes: list[Connection] = []
    processes: list[Any] = []
    store: Any = None
    try:
        for rank in range(size):
            # Ctrl-C during a fork would be swallowed by its hooks
            held = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_child, args=(body, rank, theirs, os.getpid(), bed), name=f"worker-{rank}"
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        # Only now, so that no worker was forked from a process with running threads.
        store = store_for(bed, deadline_s)
        for rank, pipe in enumerate(pipes):
            pipe.send(meeting_point(bed, rank, size, store.port, deadline_s))
        return _listen(pipes, processes, hear, expendable)
    finally:
        _end(processes)
        for pipe in pipes:
            pipe.close()
        if isinstance(store, StoreElsewhere):
            store.close()
        # now, not when a traceback that holds this frame goes: a later fork must not inherit it
        del store


def store_for(bed: Testbed | None, deadline_s: float) -> Any:
    """What the ranks meet through: on loopback, or at the launcher's end of a testbed's network, by
    a process that is there.
    """
    return open_store(HOST, 0, deadline_s) if bed is None else StoreElsewhere(bed, deadline_s)


class StoreElsewhere:
    def __init__(self, bed: Testbed, deadline_s: float) -> None:
        context = get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_keep_store, args=(bed, deadline_s, theirs, os.getpid()), name="store"
        )
        self._process.start()
        theirs.close()
        try:
            self.port = int(self._pipe.recv())
        except EOFError:
            raise RunFailed("the ranks' meeting point in the testbed could not be opened") from None

    def close(self) -> None:
        self._pipe.close()
        _end([self._process])


def _keep_store(bed: Testbed, deadline_s: float, pipe: Connection, parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(parent)
    bed.enter(LAUNCHER)
    store = open_store(bed.launcher, 0, deadline_s)
    pipe.send(store.port)
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # until the launcher closes it
    os._exit(0)


def meeting_point(
    bed: Testbed | None, rank: int, size: int, port: int, deadline_s: float
) -> Rendezvous:
    """Where a rank finds the others: on this host, or across a testbed's network."""
    if bed is None:
        return Rendezvous(rank, size, HOST, port, deadline_s, watched=True)
    own = bed.address(bed.host(rank))
    return Rendezvous(
        rank, size, bed.launcher, port, deadline_s, own=own, alone=bed.hosts >= size, watched=True
    )


def _listen(
    pipes: list[Connection], processes: list[Any], hear: Hear, expendable: frozenset[int]
) -> tuple[dict[int, Any], dict[int, PacelineError]]:
    """Until all workers are done, or a moment after the first failed."""
    running = set(range(len(pipes)))
    results: dict[int, Any] = {}
    failures: dict[int, PacelineError] = {}
    give_up = float("inf")
    while running and time.monotonic() < give_up:
        handles: dict[Any, int] = {}
        for rank in running:
            handles[pipes[rank]] = rank
            handles[processes[rank].sentinel] = rank
        patience = None if give_up == float("inf") else max(0.0, give_up - time.monotonic())
        for handle in wait(list(handles), patience):
            rank = handles[handle]
            if rank not in running:
                continue
            # before draining: what it said last is not lost
            ended = processes[rank].exitcode is not None
            for kind, content in drain(pipes[rank])[0]:
                if kind == "done":
                    running.discard(rank)
                    results[rank] = pickle.loads(content["result"])
                elif kind == "error":
                    running.discard(rank)
                    failures[rank] = pickle.loads(content["error"])
                else:
                    hear(kind, content)
            if rank in running and ended:
                running.discard(rank)
                died = WorkerFailed(rank, _death(processes[rank].exitcode))
                if rank in expendable:
                    hear("lost", {"rank": rank})
                    hear("notice", {"text": f"{died}; the others go on"})
                else:
                    failures[rank] = died
        if failures and give_up == float("inf"):
            give_up = time.monotonic() + GRACE_S
    return results, failures


def drain(pipe: Connection) -> tuple[list[tuple[str, dict[str, Any]]], bool]:
    """What has been said, and whether nothing more will be."""
    messages = []
    try:
        while pipe.poll():
            messages.append(pipe.recv())
    except (EOFError, OSError):
        return messages, True
    return messages, False


def root_cause(failures: dict[int, PacelineError], workers: int) -> PacelineError:
    """A worker that lost its peer only tells of the one that was lost: prefer others, then whoever
    spoke first.
    """

    def depth(item: tuple[int, PacelineError]) -> int:
        return (
            2 if isinstance(item[1], PeerLost) else 1 if isinstance(item[1], TransportError) else 0
        )

    rank, error = min(failures.items(), key=depth)
    if workers > 1 and not isinstance(error, WorkerFailed):
        error.args = (f"worker {rank}: {error}",)
    return error


def _death(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its process was killed by {name}" + (
        " (out of memory, perhaps)" if name == "SIGKILL" else ""
    )


def _end(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    until = time.monotonic() + END_S
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _child(body: Body, rank: int, pipe: Connection, parent: int, bed: Testbed | None) -> None:
    """A worker's process: it ends with its parent, whatever ends the parent."""
    # what the parent left behind is not this process's to clean up: some of it joins threads that
    # are not here
    gc.freeze()
    # a terminal sends them to all: the parent ends the workers
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    die_with_parent(parent)
    code = 1
    try:
        if bed is not None:
            bed.enter(bed.host(rank))
            # of an earlier run on this host: other hosts are not on it
            if os.environ.get("GLOO_SOCKET_IFNAME") == "lo":
                del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            keep_to_loopback()
        rendezvous = pipe.recv()
        result = body(rendezvous, one_at_a_time(lambda kind, content: pipe.send((kind, content))))
        pipe.send(("done", {"result": pickle.dumps(result)}))  # tensors too, as plain bytes
        code = 0
    except BaseException as error:
        _report(pipe, rank, error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def one_at_a_time(say: Hear) -> Hear:
    """For several threads of a rank: one that computes, and one that tells of a slow peer."""
    lock = threading.Lock()

    def locked(kind: str, content: dict[str, Any]) -> None:
        with lock:
            say(kind, content)

    return locked


def _report(pipe: Connection, rank: int, error: BaseException) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        pipe.send(("error", {"error": pickle.dumps(as_failure(rank, error))}))


def as_failure(rank: int, error: BaseException) -> PacelineError:
    """Our own errors as they are; anything else with its rank and traceback."""
    if isinstance(error, PacelineError):
        return error
    # PyTorch's DDP talks to gloo on its own
    if isinstance(error, RuntimeError) and "gloo/transport/" in str(error):
        return PeerLost(None, "its connection closed during DDP's exchange")
    if isinstance(error, EOFError):
        return WorkerFailed(rank, "it lost its launcher")
    return WorkerFailed(
        rank, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    )


def keep_to_loopback() -> None:
    """All ranks are on this host: what PyTorch opens by itself (DDP's group) listens on loopback
    too, unless a person chose.
    """
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def die_with_parent(parent: int) -> None:
    """Linux: be killed when the parent ends, even if that was by SIGKILL."""
    dying_with_parent(parent)()


def dying_with_parent(parent: int) -> Callable[[], None]:
    """The same, for a process that is about to be started: nothing is left to load between its fork
    and its program.
    """
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return lambda: None

    def first_act() -> None:
        prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    return first_act
