"""`--plugin tests/faults/plugin.py`: a fault that strikes one rank at one point of its run.

The points are those of transport/activity.py, and three that lie inside of them:

in exchange   after the rank has started a send (or entered a collective) and before it waits for it
in save       between the rank's own file of a checkpoint and the checkpoint's new name
in finish     at the first barrier or exchange after the last step

`strike:plan=FILE` reads a JSON object (`Plan`). When the fault strikes it makes a file beside it
(.struck), which says which process was struck, where and when. So it strikes once, also in a run
that is resumed.
This module imports nothing of the tests: ranks of mpirun and of `paceline launch` load it by its
path.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from paceline.faults.base import Fault
from paceline.registry import faults
from paceline.transport.base import Again, Message, Op, Transport, Work
from paceline.transport.wrapper import Wrapper

STACKS = signal.SIGRTMIN + 5  # asks for the stacks of a hang; SIGUSR2 is Paceline's

SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "segv": signal.SIGSEGV,
    "term": signal.SIGTERM,
}
# A point inside another one: the fault is armed when the rank enters that one.
WITHIN = {"in exchange": "compute", "in save": "save", "in finish": "finish"}
LATE_S = 0.001  # into a collective or a backward pass, on a thread of its own
LONG_S = 600.0  # the GIL is held for good: until the launcher ends the process
LAUNCHER_S = 15.0  # the longest wait of a rank for the harness to strike the launcher
NO_RANK = -1


@dataclass(frozen=True)
class Plan:
    """What strikes whom, where and when."""

    how: str  # kill, stop, segv, term, memory, gil, cut, link, launcher
    rank: int
    point: str
    step: int = 1  # in this step or a later one
    seconds: float = 0.0  # the GIL is held, or the link is down, for so long; 0: for good
    messages: int = 0  # a server has no steps: it is struck in its n-th message
    late: bool = False  # ddp exchanges inside the backward pass: a moment after the point


class Striker:
    """The fault of one rank: armed at a point, struck there or a moment later."""

    def __init__(self, plan: Plan, mark: Path) -> None:
        self.plan, self.mark = plan, mark
        self.armed = False
        self.seen = 0  # barriers since it was armed, or messages of a server

    def at(self, point: str, step: int, rank: int) -> None:
        plan = self.plan
        if rank != plan.rank or plan.messages:
            return
        if step < plan.step and point not in ("connect", "set up", "finish"):
            return
        if WITHIN.get(plan.point) == point:
            self.armed = True
            if plan.late:
                self.strike(late=True)
        elif plan.point == point:
            self.strike()

    def started(self, collective: bool = False) -> None:
        """A send has started, or a collective is about to."""
        if self.plan.messages:
            self.seen += 1
            if self.seen >= self.plan.messages:
                self.strike(late=collective)
        elif self.armed and self.plan.point in ("in exchange", "in finish"):
            self.strike(late=collective)

    def barrier(self) -> None:
        """A barrier is about to be entered."""
        if self.armed and self.plan.point == "in save":
            self.seen += 1
            if self.seen == 2:
                self.strike()
        elif self.armed and self.plan.point == "in finish":
            self.strike()

    def strike(self, late: bool = False) -> None:
        about = {"pid": os.getpid(), "at": time.time(), "point": self.plan.point}
        try:
            with open(self.mark, "x") as file:  # the first of all processes and sessions
                file.write(json.dumps(about))
        except FileExistsError:
            return
        act = {
            **dict.fromkeys(SIGNALS, lambda: os.kill(os.getpid(), SIGNALS[self.plan.how])),
            "memory": out_of_memory,
            "gil": lambda: hold_gil(self.plan.seconds or LONG_S),
            "cut": cut_connections,
            "link": lambda: cut_link(self.plan.seconds),
            "launcher": self._await_launcher,
        }[self.plan.how]
        if late and self.plan.how not in ("memory", "launcher"):
            threading.Thread(target=_later, args=(act,), daemon=True).start()
        else:
            act()

    def _await_launcher(self) -> None:
        """Stay at this point until the harness has struck the launcher."""
        until = time.monotonic() + LAUNCHER_S
        done = self.mark.with_suffix(".done")
        while not done.exists() and time.monotonic() < until:
            time.sleep(0.005)


def _later(act: Callable[[], None]) -> None:
    time.sleep(LATE_S)
    act()


# --- the faults


def out_of_memory() -> None:
    """Lower this process's limit to what it has, and ask for more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20), hard))
    torch.empty(1 << 26)


def hold_gil(seconds: float) -> None:
    """Wait without releasing the GIL: no thread of this process runs Python meanwhile.

    It waits for a lock that it holds itself, since a signal (for a stack) would end a sleep.
    """
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    until = (ctypes.c_long * 2)(int(time.time() + seconds), 0)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, until)


def cut_connections() -> None:
    """Shut down this rank's connections to its peers and to the board, not that to its launcher."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                peer = found.getpeername()  # raises where it only listens
                if found.family == socket.AF_UNIX and (not peer or _is_launcher(peer)):
                    continue
                found.shutdown(socket.SHUT_RDWR)


def _is_launcher(peer: str | bytes) -> bool:
    """Whether this is launch/mpi.py's socket, which stands for a forked rank's pipe."""
    path = Path(os.fsdecode(peer))
    return path.name == "s" and path.parent.name.startswith("paceline-")


def cut_link(seconds: float) -> None:
    """Take this host's link down. This process is in the host's namespace, which the run made."""
    _link("down")
    if seconds:
        back = threading.Timer(seconds, _link, ["up"])
        back.daemon = True
        back.start()


def _link(state: str) -> None:
    inside = os.stat("/proc/self/ns/net").st_ino != os.stat(f"/proc/{_first()}/ns/net").st_ino
    if not inside:
        raise RuntimeError("this rank is not on a host of a testbed")
    subprocess.run(["ip", "link", "set", "eth0", state], check=True)


def _first() -> int:
    """The oldest process above this one that can be looked at; it is in the machine's network."""
    own = os.getpid()
    while True:
        fields = Path(f"/proc/{own}/stat").read_text().rpartition(")")[2].split()
        parent = int(fields[1])
        if parent <= 1 or not os.access(f"/proc/{parent}/ns/net", os.R_OK):
            return own
        own = parent


# --- its ways into a run


@faults.register("strike")
@dataclass
class Strike(Fault):
    """One fault, at one point, on one rank, once. For the tests."""

    plan: Annotated[str, "a JSON file: what strikes whom, where and when"] = ""

    def __post_init__(self) -> None:
        file = Path(self.plan)
        self.striker = Striker(Plan(**json.loads(file.read_text())), file.with_suffix(".struck"))

    def wrap(self, transport: Transport) -> Transport:
        if transport.rank != self.striker.plan.rank:
            return transport
        return Watched(transport, self.striker)

    def reached(self, point: str, step: int, rank: int) -> None:
        self.striker.at(point, step, rank)


class Watched(Wrapper):
    """Tells the striker of every send, collective and barrier."""

    name = "struck"

    def __init__(self, inner: Transport, striker: Striker) -> None:
        super().__init__(inner)
        self.striker = striker

    def around(self, other: Transport) -> Transport:
        return Watched(other, self.striker)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        work = self.inner.isend(tensor, to, tag)
        self.striker.started()
        return work

    def sending(self, tensor: Tensor, to: int) -> Message:
        if self.striker.plan.point in ("in exchange", "in finish") or self.striker.plan.messages:
            return Again(lambda: self.isend(tensor, to))
        return self.inner.sending(tensor, to)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        self.striker.started(collective=True)
        self.inner.all_reduce(tensor, op)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self.striker.started(collective=True)
        self.inner.broadcast(tensor, root)

    def barrier(self) -> None:
        self.striker.barrier()
        self.inner.barrier()


# --- the launcher, which also loads this file


def _hold_launchers_gil(number: int, frame: Any) -> None:
    hold_gil(float(os.environ.get("PACELINE_TEST_GIL_S", "3")))


if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGUSR1, _hold_launchers_gil)
with contextlib.suppress(ValueError, OSError, RuntimeError, AttributeError):
    faulthandler.register(STACKS, all_threads=True)  # a hang is recorded with its stacks
