"""What a worker of Ray Train does as a rank: it meets the others, trains, and tells the driver.

Ray Train has opened a process group of its own when this begins. Its store, at MASTER_PORT, holds
that group's gloo keys and has no authentication, so that nothing of ours is there: rank 0 hosts the
run's board beside it and leaves its address at the desk.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.common.extras import need
from paceline.errors import PacelineError, TransportError, to_plain
from paceline.launch.board import HostedApart, listen_for, listen_here
from paceline.launch.failures import GRACE_S, as_failure
from paceline.launch.ray_reports import Reporter
from paceline.launch.seat import RAY_RUN, Seat
from paceline.launch.seat import find as find_seat
from paceline.launch.secret import BOARD, SECRET
from paceline.launch.signals import relay

# What each rank does with the options; rank 0 returns the record.
Rank = Callable[[dict[str, Any]], dict[str, Any] | None]

MEET_S = 300.0  # for rank 0 to host the board
AGAIN_S = 0.05  # between two looks at the desk
LEAVE, LEAVE_S = "leave", 0.5  # where the driver asks the ranks to leave; between two looks there


@dataclass(frozen=True)
class Work:
    """What the driver hands to every rank, through Ray's object store."""

    rank: Rank
    options: dict[str, Any]
    folder: str  # the driver's working folder
    run: str  # names this run; ranks that Ray starts again find the same name
    secret: str = field(repr=False)
    desk: Any
    reports: bool  # whether the run reports to Ray Train
    lost_s: float = 60.0


def in_rank(work: Work) -> None:
    """Run one rank. Raises only where Ray shall start the ranks again.

    Other failures are told at the desk, and Ray sees that the rank has ended.
    """
    desk, ray = work.desk, need("ray", "ray[train]", "ray", "launcher=ray")
    store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"  # of this attempt only
    os.environ |= {SECRET: work.secret, RAY_RUN: work.run}
    _leave_rays_group()
    seat = find_seat()
    assert seat is not None
    context = ray.get_runtime_context()
    about = {"rank": seat.rank, "pid": os.getpid(), "node": context.get_node_id()}
    about |= {"ip": ray.util.get_node_ip_address(), "store": store}
    desk.tell.remote("began", about)
    with suppress(OSError):
        os.chdir(work.folder)
    events = Path(work.options["out"]) / "events" / "worker-0.jsonl"
    reports = Reporter(desk, seat.rank, store, events, work.reports)
    with _told(desk), _leaving(ray, desk), reports as reporter:
        try:
            os.environ[BOARD] = _meet(ray, desk, seat, store, work.lost_s)
            record = work.rank(work.options)
            reporter.finish(record)
        except KeyboardInterrupt as stop:  # all ranks have left with a checkpoint
            number = getattr(stop, "number", signal.SIGINT)
            left = {"rank": seat.rank, "text": str(stop), "number": int(number)}
            ray.get(desk.tell.remote("left", left))
            return
        except Exception as error:
            _fail(ray, desk, seat.rank, store, as_failure(seat.rank, error))
            return
        if record is not None:
            ray.get(desk.tell.remote("record", record))


def _leave_rays_group() -> None:
    """End Ray's process group: ours has the board for a store, and DDP wants to be the only one.

    Ray ends a group when it ends its workers, so that it finds one of this process alone.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(ray: Any, desk: Any, seat: Seat, store: str, lost_s: float) -> str:
    """Return the address of this attempt's board; rank 0 hosts it."""
    key = f"board/{store}"
    if seat.rank == 0:
        address = _host(seat, ray.util.get_node_ip_address(), lost_s, desk).address
        ray.get(desk.put.remote(key, address))
        return address
    until = time.monotonic() + MEET_S
    while (found := ray.get(desk.get.remote(key))) is None:
        if time.monotonic() > until:
            raise TransportError(f"rank {seat.rank}: rank 0 did not appear within {MEET_S:g} s")
        time.sleep(AGAIN_S)
    return str(found)


@cache
def _host(seat: Seat, ip: str, lost_s: float, desk: Any) -> HostedApart:
    """Start the board, which lasts as long as this process. The driver hears its notices."""
    listening, address = listen_here() if seat.meets_on_loopback else listen_for(ip)

    def say(text: str) -> None:
        desk.tell.remote("line", {"text": text})

    return HostedApart(listening, address, seat.secret, lost_s, say)


def _fail(ray: Any, desk: Any, rank: int, store: str, failure: PacelineError) -> None:
    """Tell why this rank ends. Raises it if only a lost peer or connection is the reason.

    A rank that lost its peer waits a moment, since the peer may have ended because of an error
    that another start would repeat.
    """
    key = f"failed/{store}"
    if not isinstance(failure, TransportError):
        ray.get(desk.put.remote(key, True))
        ray.get(desk.tell.remote("failed", {"rank": rank, "error": to_plain(failure)}))
        return
    until = time.monotonic() + 2 * GRACE_S
    while time.monotonic() < until:
        if ray.get(desk.get.remote(key)):
            return
        time.sleep(AGAIN_S)
    ray.get(desk.tell.remote("lost", {"rank": rank, "text": str(failure)}))
    raise failure


@contextmanager
def _leaving(ray: Any, desk: Any) -> Iterator[None]:
    """Pass on the driver's request to leave with a checkpoint (SIGTERM, SIGUSR1)."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(LEAVE_S):
            with suppress(Exception):  # the desk ends with the driver
                if (number := ray.get(desk.get.remote(LEAVE))) is not None:
                    relay(number)

    threading.Thread(target=look, name="leaving", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class Lines(io.TextIOBase):
    """A stream that hands whole lines to the desk."""

    encoding = "utf-8"

    def __init__(self, desk: Any) -> None:
        self._desk, self._begun = desk, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        if any(line.strip() for line in lines):
            self._desk.tell.remote("line", {"text": "\n".join(lines)})
        return len(text)

    def end(self) -> None:
        if self._begun:
            self.write("\n")


@contextmanager
def _told(desk: Any) -> Iterator[None]:
    """Hand to the driver what this rank prints."""
    out, err = Lines(desk), Lines(desk)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            yield
        finally:
            out.end()
            err.end()
            sys.stdout.flush()
