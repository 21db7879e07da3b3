"""Ranks under an mpirun that this process starts, each connected to it by a Unix socket.

A rank sends its number, receives what to do, and reports as a forked rank does (messages.py). When
a rank dies, mpirun ends the others; this process reports the rank that died first.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch

from paceline.errors import BadRequest, PacelineError, RunFailed, WorkerFailed
from paceline.launch.board import Hosted, board_for, rendezvous_for
from paceline.launch.failures import root_cause
from paceline.launch.local import network, train_rank_told_once
from paceline.launch.messages import Body, Hear, Outcome, tell_error, tell_result, teller
from paceline.launch.package import pack, unpack
from paceline.launch.processes import leave_terminal_to_parent
from paceline.launch.signals import LEAVING, delayed, relaying
from paceline.request.session import Session
from paceline.testbed.hosts import LAUNCHER, Testbed, host_name
from paceline.transport.base import WAITS, Rendezvous, Waits
from paceline.transport.mpi.transport import HOW_TO_GET, mpirun
from paceline.transport.status.line import FOLDER
from paceline.transport.status.picture import keep_last

START_S = 120.0  # for all ranks to connect: each imports torch first
GRACE_S = 3.0  # after the first failure: for mpirun to print which rank it was
LOOK_S = 1.0  # between two looks whether MPI has started
END_S = 5.0  # for mpirun to end by itself, then after SIGTERM
FINISH_S = 60.0  # the same after a result from every rank: a busy machine is no failure
# Shared memory only: with TCP every rank would listen on all interfaces.
ON_THIS_HOST = ("--mca", "btl", "^tcp")
DEATH = r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)"  # as it says
# It imports torch after it has begun to watch the launcher.
MAIN = """
from paceline.launch.follow import follow
follow()
from paceline.launch.mpi import main
main()
"""
# How the lines begin that mpirun itself prints when a rank fails.
FROM_MPIRUN = (
    *("---", "prterun", "mpirun", "Primary job", "   Process", "   Exit", "   Node"),
    *("a non-zero", "signal ", "thus causing"),
)


def run_under_mpirun(session: Session, hear: Hear) -> None:
    """Run all ranks of a session; raise the root cause of a failure."""
    job = session.job
    config = job.config
    with network(job, hear) as bed:
        failures = on_mpi_ranks(
            partial(train_rank_told_once, session),
            job.ranks,
            hear,
            config.waits,
            config.plugin,
            bed,
            partial(keep_last, session.out / FOLDER),
        )[1]
    if failures:
        raise root_cause(failures, job.workers)


def on_mpi_ranks(
    body: Body,
    size: int,
    hear: Hear = lambda *_: None,
    waits: Waits = WAITS,
    plugins: tuple[str, ...] = (),
    bed: Testbed | None = None,
    failing: Callable[[], None] = lambda: None,
) -> tuple[dict[int, Any], dict[int, PacelineError]]:
    """Run `body` on every rank of a new mpirun. Returns results and failures by rank."""
    package = pack(body if bed is None else partial(_on_host, bed, body), plugins)
    board = board_for(bed, waits.lost_s)
    try:
        with _started(size, bed) as (process, printed, connections):
            for rank, connection in connections.items():
                with suppress(OSError):  # that rank is gone: `_listen` says so
                    connection.send(rendezvous_for(board, bed, rank, size, waits))
                    connection.send_bytes(package)
            try:
                starting = Starting(hear, size, waits)
                parts = (process, printed, connections, board, starting, failing)
                # mpirun passes this signal on to all ranks.
                with relaying(lambda number: process.send_signal(LEAVING)):
                    results, failures = _listen(*parts)
            except BaseException:
                failing()
                raise
            if not failures:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(FINISH_S)
            return results, failures
    finally:
        board.close()


class Starting:
    """MPI's own start, which waits without end when its daemons lose each other meanwhile.

    A rank says `connecting` before it starts MPI, and `connected` afterwards. From the moment that
    all are inside, `lost_s` may pass; the time in which this process was stopped is not counted.
    """

    def __init__(self, hear: Hear, size: int, waits: Waits) -> None:
        self._hear, self._size = hear, size
        self._limit_s = waits.lost_s if waits.give_up_s is None else waits.give_up_s
        self._entered = self._left = 0
        self._waited_s, self._looked = 0.0, time.monotonic()

    def hear(self, kind: str, content: dict[str, Any]) -> None:
        self._entered += kind == "connecting"
        self._left += kind == "connected"
        if kind not in ("connecting", "connected"):
            self._hear(kind, content)

    @property
    def look_s(self) -> float | None:
        """The seconds until the next look; None: MPI has started."""
        return None if self._left >= self._size else LOOK_S

    def look(self) -> None:
        now = time.monotonic()
        if self._entered == self._size > self._left:
            self._waited_s += min(now - self._looked, 2 * LOOK_S)
        self._looked = now
        if self._waited_s > self._limit_s:
            raise RunFailed(
                f"MPI has not started within {self._limit_s:g} s on {self._size - self._left} of"
                f" {self._size} ranks: its daemons may have lost a connection; start the run again"
            )


def _on_host(bed: Testbed, body: Body, rendezvous: Rendezvous, say: Hear) -> Any:
    """Run `body` with the host names of the testbed; mpirun has put this rank on its host."""
    bed.take_names(bed.host(rendezvous.rank))
    return body(rendezvous, say)


def _over_hosts(bed: Testbed, size: int) -> list[str]:
    """Return mpirun's options for ranks on the testbed's hosts, connected by TCP only.

    The testbed's remote shell stands in for ssh: it starts mpirun's daemons in the namespaces.
    """
    ranks = [sum(bed.host(r) == host for r in range(size)) for host in range(bed.hosts)]
    hosts = ",".join(f"{host_name(host)}:{count}" for host, count in enumerate(ranks) if count)
    interface = f"{bed.subnet}.0/24"
    return [
        *("--host", hosts, "--map-by", "node"),
        *("--prtemca", "plm_ssh_agent", bed.remote_shell()),
        *("--prtemca", "prte_if_include", interface),
        *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self"),
        *("--mca", "btl_tcp_if_include", interface),
        *("-x", "PACELINE_MEETING"),
    ]


@contextmanager
def _started(
    size: int, bed: Testbed | None = None
) -> Iterator[tuple[subprocess.Popen[str], list[str], dict[int, Connection]]]:
    """Start mpirun and wait until all ranks are connected; end it, with its ranks, on exit.

    Gives mpirun's process, the lines on its stderr so far, and the connections by rank.
    """
    starter = mpirun()
    if starter is None:
        raise BadRequest(f"mpirun is not available here: {HOW_TO_GET}")
    command = [starter, "--bind-to", "none", "-n", str(size)]
    command += ["--oversubscribe", *ON_THIS_HOST] if bed is None else _over_hosts(bed, size)
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    if bed is not None:
        command = ["ip", "netns", "exec", bed.namespace(LAUNCHER), *command]
    key = os.urandom(16)
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        address = str(Path(folder) / "s")
        # what it leaves there when a host is lost goes with the folder
        command += ["--prtemca", "prte_tmpdir_base", folder]
        listener = Listener(address, "AF_UNIX", backlog=size, authkey=key)
        printed: list[str] = []
        connections: dict[int, Connection] = {}
        started: list[tuple[subprocess.Popen[str], threading.Thread]] = []
        patience_s = 0.0
        try:
            with delayed():
                process = subprocess.Popen(
                    [*command, sys.executable, "-c", MAIN],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C reaches this process only: it ends the ranks
                    env={**os.environ, "PACELINE_MEETING": f"{os.getpid()} {key.hex()} {address}"},
                )
                reader = threading.Thread(target=_collect, args=(process, printed), daemon=True)
                reader.start()
                started.append((process, reader))
            _accept(listener, process, size, connections, printed)
            yield process, printed, connections
            patience_s = END_S
        finally:
            for connection in connections.values():
                connection.close()
            listener.close()
            for process, reader in started:
                _end(process, patience_s)
                reader.join(END_S)
                # mpirun's daemons on a host that is lost may hold its other end for a while.
                if process.stderr is not None and not reader.is_alive():
                    process.stderr.close()


def _collect(process: subprocess.Popen[str], printed: list[str]) -> None:
    """Keep all lines of stderr, and print those that come from ranks."""
    assert process.stderr is not None
    for line in process.stderr:
        printed.append(line)
        if not line.startswith(FROM_MPIRUN):
            sys.stderr.write(line)


def _accept(
    listener: Listener,
    process: subprocess.Popen[str],
    size: int,
    connections: dict[int, Connection],
    printed: list[str],
) -> None:
    """Wait until all ranks have connected and sent their numbers."""
    until = time.monotonic() + START_S
    # The public interface has no timeout.
    waiting = listener._listener._socket  # type: ignore[attr-defined]
    waiting.settimeout(0.2)
    while len(connections) < size:
        if process.poll() is not None or time.monotonic() > until:
            reason = " ".join("".join(printed).split()) or "it gave no reason"
            raise RunFailed(f"mpirun did not start {size} ranks: {reason}")
        with suppress(TimeoutError):
            connection = listener.accept()
            connections[connection.recv()] = connection


def _listen(
    process: subprocess.Popen[str],
    printed: list[str],
    connections: dict[int, Connection],
    board: Hosted,
    starting: Starting,
    failing: Callable[[], None],
) -> tuple[dict[int, Any], dict[int, PacelineError]]:
    """Pass on messages until all ranks have ended, or until GRACE_S after the first failure."""
    running = dict(connections)
    outcome = Outcome(starting.hear)
    vanished: list[int] = []  # ranks that ended without a result or an error, in this order
    give_up = float("inf")
    while running and time.monotonic() < give_up:
        ending = give_up < float("inf")
        patience = max(0.0, give_up - time.monotonic()) if ending else starting.look_s
        for connection in wait([*running.values(), board.told], patience):
            if connection is board.told:
                for text in board.notices():
                    starting.hear("notice", {"text": text})
                continue
            rank = next(r for r, c in running.items() if c is connection)
            closed = outcome.take(rank, running[rank])
            if outcome.has(rank):
                running.pop(rank)
            elif closed:
                running.pop(rank)
                vanished.append(rank)
        if not ending:
            starting.look()
        if (outcome.failures or vanished) and not ending:
            failing()
            give_up = time.monotonic() + GRACE_S
    if vanished and not outcome.failures:
        until = time.monotonic() + GRACE_S
        # its last line may come after its end
        while not re.search(DEATH, _words(printed)) and time.monotonic() < until:
            time.sleep(0.02)
        rank, reason = _who_died(_words(printed), vanished)
        outcome.failures[rank] = WorkerFailed(rank, reason)
    return outcome.results, outcome.failures


def _words(printed: list[str]) -> str:
    return " ".join("".join(printed).split())


def _who_died(printed: str, vanished: list[int]) -> tuple[int, str]:
    """Return the rank that mpirun names, else the first that vanished, and how it died."""
    found = re.search(DEATH, printed)
    if found is None:
        return vanished[0], "its process ended, and mpirun ended the others"
    name = signal.Signals(int(found[2])).name
    return int(found[1]), f"its process was killed by {name}, and mpirun ended the others"


def _end(process: subprocess.Popen[str], patience_s: float) -> None:
    """Wait so long for ranks that have finished, which end by themselves; then end them."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
                break


def main() -> None:
    """Run one rank; its process calls this."""
    _, key, address = os.environ.pop("PACELINE_MEETING").split(" ", 2)
    connection = Client(address, "AF_UNIX", authkey=bytes.fromhex(key))
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    connection.send(rank)
    leave_terminal_to_parent()
    torch.set_num_threads(1)
    try:
        rendezvous = connection.recv()
        body = unpack(connection.recv_bytes())
        tell_result(connection, body(rendezvous, teller(connection)))
    except BaseException as error:
        tell_error(connection, rank, error)
        sys.stderr.flush()
        os._exit(1)  # mpirun then ends the other ranks, which may wait for this one
