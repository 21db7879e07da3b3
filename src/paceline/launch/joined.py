"""Ranks that a launcher has started find each other, take part in one run, and leave one record: rank 0's.

What goes wrong on another rank is told to rank 0, who says it; only when rank 0 is gone do the others speak for themselves.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.errors import BadRequest, PacelineError, TransportError
from paceline.job import Job
from paceline.launch.local import GRACE_S, Hear, as_failure, root_cause, train_rank
from paceline.launch.seat import Seat
from paceline.transport.base import Rendezvous, Transport
from paceline.transport.c10d import first_line
from paceline.transport.mpi import load as load_mpi

MEET_S = 300.0  # ranks read their data before they meet, and some disks are slow


class Meeting:
    """The ranks' common board (torch.distributed's store)."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self._server: Any = None
        host, port = self._address()
        self.rendezvous = Rendezvous(seat.rank, seat.size, host, port, 30.0, seat.generation)
        try:
            self._store = self._server or dist.TCPStore(host, port, None, False, timedelta(seconds=MEET_S))
        except RuntimeError as error:
            raise TransportError(f"rank {seat.rank}: no meeting point at {host}:{port}: {first_line(error)}") from None
        self._board = dist.PrefixStore(f"paceline/{seat.generation}", self._store)

    @property
    def leads(self) -> bool:
        return self.seat.rank == 0

    def _address(self) -> tuple[str, int]:
        seat = self.seat
        if seat.host:
            if self.leads and not seat.store_exists:
                self._server = self._host_store(seat.port)
            return seat.host, seat.port
        try:
            world = load_mpi().COMM_WORLD
        except BadRequest as error:
            raise BadRequest(f"inside mpirun the ranks meet through MPI: {error}") from None
        if world.size != seat.size:
            raise BadRequest(f"mpirun has started {seat.size} processes, but mpi4py sees {world.size}: is it another MPI?")
        place = None
        if self.leads:
            self._server = self._host_store(0)
            name = "127.0.0.1" if seat.local_size == seat.size else socket.gethostname()
            place = (name, self._server.port)
        found: tuple[str, int] = world.bcast(place)
        return found

    def _host_store(self, port: int) -> Any:
        try:
            return dist.TCPStore("0.0.0.0", port, None, True, timedelta(seconds=MEET_S), wait_for_workers=False)
        except RuntimeError as error:
            raise TransportError(f"rank 0 cannot open port {port} for the others: {first_line(error)}") from None

    @contextmanager
    def telling(self, stage: str) -> Iterator[None]:
        """Inside, a failure on any rank becomes known to all of them at the end."""
        own: PacelineError | None = None
        try:
            yield
        except PacelineError as error:
            own = error
        self._put(f"{stage}/{self.seat.rank}", own)
        said = {rank: self._get(f"{stage}/{rank}") for rank in range(self.seat.size)}
        failed = [rank for rank, failure in said.items() if failure is not None]
        if failed:
            first: PacelineError = said[failed[0]]
            first.told = not self.leads
            if failed[0]:
                first.args = (f"rank {failed[0]}: {first}",)
            self._part(stage)
            raise first

    def _part(self, stage: str) -> None:
        """The board may be in rank 0's process: it goes last, or after a while."""
        if not self.leads:
            self._put(f"left {stage}/{self.seat.rank}", True)
            return
        until = time.monotonic() + GRACE_S
        others = [f"left {stage}/{rank}" for rank in range(1, self.seat.size)]
        while others and not self._board.check(others) and time.monotonic() < until:
            time.sleep(0.01)

    def _put(self, key: str, content: Any) -> None:
        self._board.set(key, pickle.dumps(content).hex())

    def _get(self, key: str) -> Any:
        try:
            return pickle.loads(bytes.fromhex(self._board.get(key).decode()))
        except RuntimeError as error:
            raise TransportError(f"rank {self.seat.rank}: the other ranks did not come: {first_line(error)}") from None

    def claim(self, job: Job, claim: Callable[[Job], None]) -> None:
        """Rank 0 takes the run's folder; all use it."""
        with self.telling("claim"):
            if self.leads:
                claim(job)
                self._put("folder", (str(job.out.resolve()), job.session))
        if not self.leads:
            folder, job.session = self._get("folder")
            job.out = Path(folder)

    def connect(self, kind: Any, deadline_s: float) -> Transport:
        """All ranks, over such a transport."""
        connected: Transport = kind.connect(replace(self.rendezvous, deadline_s=deadline_s))
        connected.meeting = self  # type: ignore[attr-defined]  # the board may live in this process: it stays as long
        return connected

    def train(self, job: Job, hear: Hear) -> None:
        """This rank's part. Rank 0 raises what went wrong first, anywhere."""
        try:
            train_rank(job, replace(self.rendezvous, deadline_s=job.config.deadline_s), hear if self.leads else _nobody)
        except KeyboardInterrupt:
            raise
        except Exception as error:
            own = as_failure(self.seat.rank, error)
            if self.leads:
                raise self._first_failure(own) from None
            with suppress(RuntimeError):
                self._put(f"failed/{self.seat.rank}", own)
                own.told = True
            raise own from None

    def _first_failure(self, own: PacelineError) -> PacelineError:
        failures = {0: own}
        until = time.monotonic() + GRACE_S
        with suppress(KeyboardInterrupt):  # the launcher ends the others: what is known by now has to do
            while time.monotonic() < until and len(failures) < self.seat.size:
                for rank in range(1, self.seat.size):
                    key = f"failed/{rank}"
                    with suppress(RuntimeError):
                        if rank not in failures and self._board.check([key]):
                            failures[rank] = self._get(key)
                time.sleep(0.05)
        return root_cause(failures, self.seat.size)

    def recorded(self) -> None:
        """Rank 0 has written the record; the others wait for it."""
        if self.leads:
            self._put("recorded", True)
        else:
            self._get("recorded")
        self._part("recorded")


def refuse_inside_a_launcher(seat: Seat | None) -> None:
    if seat is not None:
        raise BadRequest(f"this starts its own workers: run it once, not inside {seat.launcher}")


def _nobody(kind: str, content: dict[str, Any]) -> None:
    return
