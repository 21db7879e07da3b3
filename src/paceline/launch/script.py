"""`paceline launch -n N script.py`: a person's own program, N times, each with its seat; the first
failure ends them all.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from paceline.errors import BadRequest, RunFailed
from paceline.launch.local import HOST, dying_with_parent
from paceline.launch.seat import find
from paceline.launch.secret import SECRET
from paceline.record.machine import cores
from paceline.transport.c10d.transport import store_on

GRACE_S = 3.0


def launch(script: str, arguments: Sequence[str], ranks: int, threads: int | None = None) -> None:
    if find() is not None:
        raise BadRequest("this is inside a launcher already: start the script itself")
    if not os.path.isfile(script):
        raise BadRequest(f"{script} is not a file")
    listening = socket.create_server((HOST, 0))
    common = {
        **os.environ,
        "MASTER_ADDR": HOST,
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
        first_act = dying_with_parent(os.getpid())
        for rank in range(ranks):
            seat = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(
                _started([sys.executable, script, *arguments], {**common, **seat}, first_act)
            )
        # only now: its threads would be in the way of starting the ranks
        store = store_on(listening, 300.0)
        failed = _wait(processes)
        del store
    finally:
        _end(processes)
    if failed is not None:
        code = processes[failed].returncode
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        raise RunFailed(f"rank {failed} of {script} ended with {how}; the others were ended")


def _started(
    command: list[str], environment: dict[str, str], first_act: Callable[[], None]
) -> subprocess.Popen[bytes]:
    """A rank; whatever ends this process ends it too."""
    # this process has one thread
    return subprocess.Popen(command, env=environment, preexec_fn=first_act)  # noqa: PLW1509


def _wait(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """The rank that failed first; None when all went well."""
    while True:
        codes = [p.poll() for p in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.02)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + GRACE_S
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
