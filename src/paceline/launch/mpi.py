"""Ranks under mpirun, on this machine: started here, and each connected to this process by a socket
of its own.

A rank first says who it is, is then given what to do, and reports as a forked worker does. When a
rank dies mpirun ends the others; what this process reports is the one that went first.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch

from paceline.errors import BadRequest, PacelineError, RunFailed, WorkerFailed
from paceline.launch.local import (
    Body,
    Hear,
    StoreElsewhere,
    as_failure,
    drain,
    meeting_point,
    network,
    one_at_a_time,
    root_cause,
    store_for,
    train_rank,
)
from paceline.launch.package import pack, unpack
from paceline.request.session import Session
from paceline.testbed.hosts import LAUNCHER, Testbed, host_name
from paceline.transport.base import Rendezvous
from paceline.transport.mpi.transport import HOW_TO_GET, mpirun

START_S = 120.0  # for all ranks to be up: each imports torch
GRACE_S = 3.0  # after the first failure: time for mpirun to say which rank it was
END_S = 5.0
# shared memory only: otherwise every rank listens on all interfaces
ON_THIS_HOST = ("--mca", "btl", "^tcp")


def run_under_mpirun(session: Session, hear: Hear) -> None:
    job = session.job
    config = job.config
    with network(job, hear) as bed:
        failures = on_mpi_ranks(
            partial(train_rank, session), job.ranks, hear, config.deadline_s, config.plugin, bed
        )[1]
    if failures:
        raise root_cause(failures, job.workers)


def on_mpi_ranks(
    body: Body,
    size: int,
    hear: Hear = lambda *_: None,
    deadline_s: float = 30.0,
    plugins: tuple[str, ...] = (),
    bed: Testbed | None = None,
) -> tuple[dict[int, Any], dict[int, PacelineError]]:
    """`body` on every rank of a new mpirun: what each returned, and what went wrong where."""
    package = pack(body if bed is None else partial(_on_host, bed, body), plugins)
    store = store_for(bed, deadline_s)
    try:
        with _started(size, bed) as (process, said, connections):
            for rank, connection in connections.items():
                connection.send(meeting_point(bed, rank, size, store.port, deadline_s))
                connection.send_bytes(package)
            return _listen(process, said, connections, hear)
    finally:
        if isinstance(store, StoreElsewhere):
            store.close()


def _on_host(bed: Testbed, body: Body, rendezvous: Rendezvous, say: Hear) -> Any:
    bed.take_names(bed.host(rendezvous.rank))
    return body(rendezvous, say)


def _over_hosts(bed: Testbed, size: int) -> list[str]:
    """mpirun's options for ranks on hosts: what ssh would start is started in a namespace, and only
    TCP connects them.
    """
    ranks = [sum(bed.host(r) == host for r in range(size)) for host in range(bed.hosts)]
    hosts = ",".join(f"{host_name(host)}:{count}" for host, count in enumerate(ranks) if count)
    interface = f"{bed.subnet}.0/24"
    return [
        *("--host", hosts, "--map-by", "node"),
        *(
            "--prtemca",
            "plm_ssh_agent",
            bed.remote_shell(),
            "--prtemca",
            "prte_if_include",
            interface,
        ),
        *(
            "--mca",
            "pml",
            "ob1",
            "--mca",
            "btl",
            "tcp,self",
            "--mca",
            "btl_tcp_if_include",
            interface,
        ),
        *("-x", "PACELINE_MEETING"),
    ]


@contextmanager
def _started(
    size: int, bed: Testbed | None = None
) -> Iterator[tuple[subprocess.Popen[str], list[str], dict[int, Connection]]]:
    """mpirun with `size` ranks, all of them connected; ended, with all its ranks, on the
    way out.
    """
    starter = mpirun()
    if starter is None:
        raise BadRequest(f"mpirun is not to be found: {HOW_TO_GET}")
    command = [starter, "--bind-to", "none", "-n", str(size)]
    command += ["--oversubscribe", *ON_THIS_HOST] if bed is None else _over_hosts(bed, size)
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    if bed is not None:
        command = ["ip", "netns", "exec", bed.namespace(LAUNCHER), *command]
    key = os.urandom(16)
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        address = str(Path(folder) / "s")
        listener = Listener(address, "AF_UNIX", backlog=size, authkey=key)
        process = subprocess.Popen(
            [*command, sys.executable, "-c", "from paceline.launch.mpi import main; main()"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C comes to this process, which ends the ranks
            env={**os.environ, "PACELINE_MEETING": f"{os.getpid()} {key.hex()} {address}"},
        )
        said: list[str] = []
        listens = threading.Thread(target=_collect, args=(process, said), daemon=True)
        listens.start()
        connections: dict[int, Connection] = {}
        try:
            _accept(listener, process, size, connections, said)
            yield process, said, connections
        finally:
            for connection in connections.values():
                connection.close()
            listener.close()
            _end(process)
            listens.join(END_S)
            if process.stderr is not None:
                process.stderr.close()


def _collect(process: subprocess.Popen[str], said: list[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        said.append(line)
        if not _is_from_mpirun(line):
            sys.stderr.write(line)


def _is_from_mpirun(line: str) -> bool:
    return line.startswith(
        (
            "---",
            "prterun",
            "mpirun",
            "Primary job",
            "   Process",
            "   Exit",
            "a non-zero",
            "signal ",
            "thus causing",
            "   Node",
        )
    )


def _accept(
    listener: Listener,
    process: subprocess.Popen[str],
    size: int,
    connections: dict[int, Connection],
    said: list[str],
) -> None:
    until = time.monotonic() + START_S
    heard = listener._listener._socket  # type: ignore[attr-defined]
    heard.settimeout(0.2)
    while len(connections) < size:
        if process.poll() is not None or time.monotonic() > until:
            raise RunFailed(
                f"mpirun did not start {size} ranks:"
                f" {' '.join(''.join(said).split()) or 'no reason given'}"
            )
        with suppress(TimeoutError):
            connection = listener.accept()
            connections[connection.recv()] = connection


def _listen(
    process: subprocess.Popen[str], said: list[str], connections: dict[int, Connection], hear: Hear
) -> tuple[dict[int, Any], dict[int, PacelineError]]:
    running = dict(connections)
    results: dict[int, Any] = {}
    failures: dict[int, PacelineError] = {}
    vanished: list[int] = []  # without a word, in this order
    give_up = float("inf")
    while running and time.monotonic() < give_up:
        patience = None if give_up == float("inf") else max(0.0, give_up - time.monotonic())
        for connection in wait(list(running.values()), patience):
            rank = next(r for r, c in running.items() if c is connection)
            messages, ended = drain(connection)  # type: ignore[arg-type]
            for kind, content in messages:
                if kind == "done":
                    results[rank] = pickle.loads(content["result"])
                elif kind == "error":
                    failures[rank] = pickle.loads(content["error"])
                else:
                    hear(kind, content)
            if rank in results or rank in failures:
                running.pop(rank)
            elif ended:
                running.pop(rank)
                vanished.append(rank)
        if (failures or vanished) and give_up == float("inf"):
            give_up = time.monotonic() + GRACE_S
    if vanished and not failures:
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        rank, reason = _who_died("".join(said), vanished)
        failures[rank] = WorkerFailed(rank, reason)
    return results, failures


def _who_died(said: str, vanished: list[int]) -> tuple[int, str]:
    """mpirun names the rank; where it does not, the first that went."""
    words = " ".join(said.split())
    found = re.search(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)", words)
    if found is None:
        return vanished[0], "its process ended, and mpirun ended the others"
    name = signal.Signals(int(found[2])).name
    return int(found[1]), f"its process was killed by {name}, and mpirun ended the others"


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(END_S)  # ranks that are done leave by themselves
    except subprocess.TimeoutExpired:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
                break


def main() -> None:
    """A rank's process."""
    launcher, key, address = os.environ.pop("PACELINE_MEETING").split(" ", 2)
    connection = Client(address, "AF_UNIX", authkey=bytes.fromhex(key))
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    connection.send(rank)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_leave_with, args=(int(launcher),), daemon=True).start()
    torch.set_num_threads(1)
    try:
        rendezvous = connection.recv()
        body = unpack(connection.recv_bytes())
        result = body(
            rendezvous, one_at_a_time(lambda kind, content: connection.send((kind, content)))
        )
        connection.send(("done", {"result": pickle.dumps(result)}))
    except BaseException as error:
        with suppress(OSError):
            connection.send(("error", {"error": pickle.dumps(as_failure(rank, error))}))
        sys.stderr.flush()
        os._exit(1)  # mpirun then ends the others, who wait for this one


def _leave_with(launcher: int) -> None:
    """When the launcher is gone, however it went, so is this rank, and then mpirun ends."""
    while Path(f"/proc/{launcher}").exists() or sys.platform != "linux":
        time.sleep(0.5)
    os._exit(1)
