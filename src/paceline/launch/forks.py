"""Ranks as forked processes: they start within milliseconds and share the data in memory."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from paceline.errors import PacelineError, WorkerFailed
from paceline.launch.addresses import keep_to_loopback
from paceline.launch.board import Hosted, board_for, rendezvous_for
from paceline.launch.failures import GRACE_S
from paceline.launch.messages import Body, Hear, Outcome, tell_error, tell_result, teller
from paceline.launch.processes import describe_end, end_processes, obey_parent
from paceline.launch.signals import ENDING, LEAVING, relaying
from paceline.testbed.hosts import Testbed
from paceline.transport.base import WAITS, Waits

BOARD = -1  # stands for the board among ranks


def on_forked_ranks(
    body: Body,
    size: int,
    hear: Hear = lambda *_: None,
    waits: Waits = WAITS,
    expendable: frozenset[int] = frozenset(),
    bed: Testbed | None = None,
    failing: Callable[[], None] = lambda: None,
) -> tuple[dict[int, Any], dict[int, PacelineError]]:
    """Run `body` on `size` forked ranks. Returns results and failures by rank.

    The death of an `expendable` rank is no failure. With a testbed each rank runs on one of its
    hosts. `failing` is called before ranks that may still run are ended because of a failure or a
    signal.
    """
    context = get_context("fork")
    pipes: list[Connection] = []
    processes: list[Any] = []
    board: Hosted | None = None
    try:
        for rank in range(size):
            # Python's hooks around a fork would swallow a KeyboardInterrupt.
            held = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_child, args=(body, rank, theirs, os.getpid(), bed), name=f"worker-{rank}"
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        # The board has a thread, and a process with running threads must not be forked.
        board = board_for(bed, waits.lost_s)
        for rank, pipe in enumerate(pipes):
            pipe.send(rendezvous_for(board, bed, rank, size, waits))
        with relaying(lambda number: _ask_to_leave(processes)):
            return _listen(pipes, processes, board, hear, expendable, failing)
    except BaseException:
        failing()
        raise
    finally:
        end_processes(processes)
        for pipe in pipes:
            pipe.close()
        if board is not None:
            board.close()


def _listen(
    pipes: list[Connection],
    processes: list[Any],
    board: Hosted,
    hear: Hear,
    expendable: frozenset[int],
    failing: Callable[[], None],
) -> tuple[dict[int, Any], dict[int, PacelineError]]:
    """Pass on messages until all ranks have ended, or until GRACE_S after the first failure."""
    running = set(range(len(pipes)))
    outcome = Outcome(hear)
    give_up = float("inf")
    while running and time.monotonic() < give_up:
        handles: dict[Any, int] = {board.told: BOARD}
        for rank in running:
            handles[pipes[rank]] = rank
            handles[processes[rank].sentinel] = rank
        patience = None if give_up == float("inf") else max(0.0, give_up - time.monotonic())
        for handle in wait(list(handles), patience):
            rank = handles[handle]
            for text in board.notices() if rank == BOARD else ():
                hear("notice", {"text": text})
            if rank not in running:
                continue
            # Looked at before the messages are read, so that a rank's last message is not lost.
            ended = processes[rank].exitcode is not None
            outcome.take(rank, pipes[rank])
            if outcome.has(rank):
                running.discard(rank)
                if rank in outcome.failures:
                    _tell_ended(rank, pipes, running)
            elif ended:
                running.discard(rank)
                _tell_ended(rank, pipes, running)
                died = WorkerFailed(rank, describe_end(processes[rank].exitcode))
                if rank in expendable:
                    hear("lost", {"rank": rank})
                    hear("notice", {"text": f"{died}; the others go on"})
                else:
                    outcome.failures[rank] = died
        if outcome.failures and give_up == float("inf"):
            failing()
            give_up = time.monotonic() + GRACE_S
    return outcome.results, outcome.failures


def _ask_to_leave(processes: list[Any]) -> None:
    for process in processes:
        if process.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, LEAVING)


def _tell_ended(rank: int, pipes: list[Connection], running: set[int]) -> None:
    """Tell the other ranks that one has ended."""
    for other in running:
        with suppress(OSError):  # it is about to end itself
            pipes[other].send(rank)


class Ended:
    """The ranks that have ended, as the launcher says on a rank's pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._ranks = pipe, frozenset[int]()
        self._lock = threading.Lock()

    def __call__(self) -> frozenset[int]:
        with self._lock, suppress(EOFError, OSError):
            while self._pipe.poll():
                self._ranks |= {self._pipe.recv()}
        return self._ranks


def _child(body: Body, rank: int, pipe: Connection, parent: int, bed: Testbed | None) -> None:
    """Run `body` in this process, one rank, and report its result or its error."""
    # The parent's objects must not be collected here: some would join threads that a fork does
    # not copy.
    gc.freeze()
    obey_parent(parent)
    code = 1
    try:
        if bed is None:
            keep_to_loopback()
        else:
            bed.enter(bed.host(rank))
            # Set by an earlier run on this host alone. Other hosts are not on this loopback.
            if os.environ.get("GLOO_SOCKET_IFNAME") == "lo":
                del os.environ["GLOO_SOCKET_IFNAME"]
        rendezvous = replace(pipe.recv(), ended=Ended(pipe))
        tell_result(pipe, body(rendezvous, teller(pipe)))
        code = 0
    except BaseException as error:
        tell_error(pipe, rank, error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
