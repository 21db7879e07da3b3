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
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.common.cores import cores
from paceline.common.parents import dying_with_parent
from paceline.errors import BadRequest, RunFailed
from paceline.launch.addresses import LOOPBACK
from paceline.launch.board import Hosted, listen_here
from paceline.launch.seat import find
from paceline.launch.secret import BOARD, SECRET
from paceline.launch.signals import delayed

LOST_S = 60.0  # ranks are on this host, whose kernel tells at once when one ends
GRACE_S = 1.5  # after the first failure: another rank may be the cause
END_S = 3.0  # between asking a rank to end (SIGTERM) and killing it


def launch(script: str, arguments: Sequence[str], ranks: int, threads: int | None = None) -> None:
    """Start the script once per rank and wait. The first rank that fails ends all others."""
    if find() is not None:
        raise BadRequest("paceline launch runs inside a launcher already: start the script itself")
    if not os.path.isfile(script):
        raise BadRequest(f"{script} is not a file")
    listening = socket.create_server((LOOPBACK, 0))
    board_listens, address = listen_here()
    common = {
        **os.environ,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(listening.getsockname()[1]),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        SECRET: (secret := secrets.token_bytes(32)).hex(),
        BOARD: address,
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
        # Board and store start threads, so they are opened after the ranks are started.
        board = Hosted(board_listens, address, LOST_S, secret)
        store = _store_on(listening)
        failed = _wait(processes, board)
        board.close()
        del store
    finally:
        _end(processes)
    if failed is not None:
        code = processes[failed].returncode
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        raise RunFailed(f"rank {failed} of {script} ended with {how}; the others were ended")


def _store_on(listening: socket.socket) -> Any:
    """Open PyTorch's own store, for scripts that call `torch.distributed.init_process_group`.

    Nothing of Paceline is written there.
    """
    host, port = listening.getsockname()[:2]
    timeout = timedelta(seconds=300)
    return dist.TCPStore(
        host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _wait(processes: list[subprocess.Popen[bytes]], board: Hosted) -> int | None:
    """Wait until all ranks have ended, or one has failed: return that one."""
    first: int | None = None
    until = float("inf")  # after a failure: for the others to end, too
    while True:
        for text in board.notices():
            print(f"paceline: {text}", file=sys.stderr, flush=True)
        codes = [p.poll() for p in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed and first is None:
            first, until = failed[0], time.monotonic() + GRACE_S
        if time.monotonic() > until or all(code is not None for code in codes):
            # A rank that a signal has ended is the cause; the others only lost it.
            return next((rank for rank in failed if _by_signal(codes[rank])), first)
        time.sleep(0.02)


def _by_signal(code: int | None) -> bool:
    return code is not None and (code < 0 or code > 128)


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
