"""A rank that gets a signal at a point of the run, or at a message after it."""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from torch import Tensor

from paceline.errors import BadRequest, RunFailed
from paceline.faults.base import Fault
from paceline.registry import faults
from paceline.transport.activity import Point
from paceline.transport.base import Again, Message, Op, Transport, Work
from paceline.transport.wrapper import Wrapper

POINTS: tuple[Point, ...] = get_args(Point)


@faults.register("kill")
@dataclass
class Kill(Fault):
    """One rank gets a signal at a point of the run: it is killed, stopped, or it crashes."""

    runs_as: Literal["processes", "threads"]
    rank: Annotated[int, "which rank; the servers come after the workers"] = 0
    at: Annotated[str, f"at which point: {', '.join(POINTS)}"] = "compute"
    step: Annotated[int, "at this step, counted from 1; 0: the first time"] = 0
    signal: Annotated[Literal["SIGKILL", "SIGSTOP", "SIGSEGV", "SIGTERM"], "what the rank gets"] = (
        "SIGKILL"
    )
    messages: Annotated[int, "so many messages or collectives of this rank after the point"] = 0

    def __post_init__(self) -> None:
        self.at = self.at.replace("-", " ")
        if self.at not in POINTS:
            raise BadRequest(f"fault kill: at={self.at}: allowed are {', '.join(POINTS)}")
        if self.step < 0 or self.messages < 0:
            raise BadRequest("fault kill: step and messages must be 0 or more")
        if self.at == "connect" and self.messages:
            raise BadRequest("fault kill: at=connect: a rank has no messages before it connects")
        if self.runs_as == "threads" and self.signal != "SIGKILL":
            raise BadRequest(
                f"fault kill: signal={self.signal} needs ranks that are processes: use --transport"
                " shm, or signal=SIGKILL"
            )
        self._left = 0  # messages until the signal; 0: the point has not come, or is over
        self._over = False

    def wrap(self, transport: Transport) -> Transport:
        return CountsDown(transport, self) if self.messages else transport

    def reached(self, point: Point, step: int, rank: int) -> None:
        if self._over or (rank, point) != (self.rank, self.at) or self.step not in (0, step):
            return
        self._over = True
        self._left = self.messages
        if not self.messages:
            self.strike(f"at {point}, step {step}")

    def count(self) -> None:
        """Count a message of this rank, and send the signal before the last of them."""
        if self._left:
            self._left -= 1
            if not self._left:
                self.strike(f"{self.messages} messages after {self.at}")

    def strike(self, when: str) -> None:
        """Send the signal to this rank; a rank that is a thread raises instead."""
        if self.runs_as == "threads":
            raise RunFailed(f"died {when}, as --faults asked")
        os.kill(os.getpid(), getattr(signals, self.signal))


class CountsDown(Wrapper):
    """Tells a fault of every message and collective before it begins."""

    name = "counts-down"

    def __init__(self, inner: Transport, fault: Kill) -> None:
        super().__init__(inner)
        self._fault = fault

    def around(self, other: Transport) -> Transport:
        return CountsDown(other, self._fault)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        self._fault.count()
        return self.inner.isend(tensor, to, tag)

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        self._fault.count()
        return self.inner.irecv(tensor, source, tag)

    def sending(self, tensor: Tensor, to: int) -> Message:
        return Again(lambda: self.isend(tensor, to))

    def receiving(self, tensor: Tensor, source: int) -> Message:
        return Again(lambda: self.irecv(tensor, source))

    def barrier(self) -> None:
        self._fault.count()
        self.inner.barrier()

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        self._fault.count()
        self.inner.all_reduce(tensor, op)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self._fault.count()
        self.inner.broadcast(tensor, root)

    def group(self, ranks: Sequence[int]) -> Transport:
        self._fault.count()
        return super().group(ranks)
