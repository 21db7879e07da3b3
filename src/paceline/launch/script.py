"""`paceline launch -n N script.py`: the user's own program as N ranks on this host."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from paceline.common.parents import dying_with_parent
from paceline.errors import BadRequest, RunFailed
from paceline.launch.addresses import LOOPBACK
from paceline.launch.seat import find
from paceline.launch.secret import SECRET
from paceline.launch.signals import delayed
from paceline.record.machine import cores
from paceline.transport.c10d.store import store_on

END_S = 3.0  # between asking a rank to end (SIGTERM) and killing it


def launch(script: str, arguments: Sequence[str], ranks: int, threads: int | None = None) -> None:
    """Start the script once per rank and wait. The first rank that fails ends all others."""
    if find() is not None:
        raise BadRequest("paceline launch runs inside a launcher already: start the script itself")
    if not os.path.isfile(script):
        raise BadRequest(f"{script} is not a file")
    listening = socket.create_server((LOOPBACK, 0))
    common = {
        **os.environ,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(listening.getsockname()[1]),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        SECRET: secrets.token_hex(32),
    }
    if threads is not None or "OMP_NUM_THREADS" not in os.environ:
        common["OMP_NUM_THREADS"] = str(threads or max(1, cores() // ranks))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        die_with_this = dying_with_parent(os.getpid())
        command = [sys.executable, script, *arguments]
        for rank in range(ranks):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # A preexec_fn is safe here: this process has one thread.
            with delayed():
                processes.append(
                    subprocess.Popen(command, env=environment, preexec_fn=die_with_this)  # noqa: PLW1509
                )
        # The store starts threads, so it is opened after the ranks are started.
        store = store_on(listening, 300.0)
        failed = _wait(processes)
        del store
    finally:
        _end(processes)
    if failed is not None:
        code = processes[failed].returncode
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        raise RunFailed(f"rank {failed} of {script} ended with {how}; the others were ended")


def _wait(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all ranks have ended, or one has failed: return that one."""
    while True:
        codes = [p.poll() for p in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.02)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + END_S
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
