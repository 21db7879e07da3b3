"""Ranks that a launcher has started find each other, take part in one run, and leave one record:
rank 0's.

What goes wrong on another rank is told to rank 0, who says it; only when rank 0 is gone do the
others speak for themselves.

A launcher that starts failed ranks again (torchrun) starts the whole line again, with as many ranks
as there are then. Its agents, one per host, live on, and so does what earlier ranks have written
into their store; which agents a run's folder belongs to is written down there. Ranks that are
started again by one of these go on from the folder's last checkpoint.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from paceline.errors import (
    BadRequest,
    Interrupted,
    PacelineError,
    TransportError,
    from_plain,
    to_plain,
)
from paceline.launch.local import (
    GRACE_S,
    HOST,
    Hear,
    as_failure,
    keep_to_loopback,
    root_cause,
    train_rank,
)
from paceline.launch.seat import Seat
from paceline.record import checkpoint
from paceline.record.writer import write_json
from paceline.request.earlier import run_folder
from paceline.request.job import Job
from paceline.request.session import Session
from paceline.transport.base import Rendezvous, Transport
from paceline.transport.c10d.transport import first_line, open_store
from paceline.transport.mpi.transport import load as load_mpi

MEET_S = 300.0  # ranks read their data before they meet, and some disks are slow
# a wait inside torch's store would hear no signal: torchrun asks ranks to end before it starts them
# again
LOOK_EVERY_S = 0.01
MARK = "launcher.json"
THIS_PROCESS = uuid4().hex
PLACE_BYTES = 512  # of the message that tells MPI's ranks where they meet


@dataclass(frozen=True)
class Present:
    """A rank that has come, as it introduces itself."""

    ticket: int
    process: str
    agent: str
    restarts: int
    host: str
    address: str | None  # where not all are on one host

    @classmethod
    def read(cls, said: dict[str, Any]) -> Present:
        """From the board, where a stranger may have written: numbers and words of the right kind,
        or TypeError.
        """
        own = cls(**said)
        right = [isinstance(n, int) for n in (own.ticket, own.restarts)]
        right += [
            isinstance(word, str) for word in (own.process, own.agent, own.host, own.address or "")
        ]
        if not all(right):
            raise TypeError("not a rank")
        return own


class Meeting:
    """The ranks' common board: torch.distributed's store, which has no password. It carries JSON
    and nothing else.
    """

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.notices: list[str] = []
        # what only ranks of this run know; empty where the launcher hands nothing over in private
        self.secret = seat.secret
        self._server: Any = None
        if seat.meets_on_loopback:
            keep_to_loopback()
        host, port = self._address()
        try:
            self._store = self._server or dist.TCPStore(
                host, port, None, False, timedelta(seconds=MEET_S)
            )
        except RuntimeError as error:
            raise TransportError(
                f"rank {seat.rank}: no meeting point at {host}:{port}: {first_line(error)}"
            ) from None
        self._board: Any = None
        with self._reaching():
            address = None if seat.one_host else address_towards(host, port)
            ticket = self._store.add("paceline/tickets", 1)
            own = Present(
                ticket, THIS_PROCESS, seat.agent, seat.restarts, socket.gethostname(), address
            )
            number, self.present = self._open(own) if self.leads else self._enter(own)
        if seat.meets_on_loopback:
            address = HOST
        elif address is not None:
            address = reachable(address, [p.address for p in self.present if p.address])
        watched = seat.meets_on_loopback or seat.launcher == "mpirun"
        self.rendezvous = Rendezvous(
            seat.rank, seat.size, host, port, 30.0, number, address, watched=watched
        )

    def _open(self, own: Present) -> tuple[int, list[Present]]:
        """Rank 0 opens a meeting, with a number that no earlier one had, and lists who has come."""
        number = self._store.add("paceline/meetings", 1)
        self._board = dist.PrefixStore(f"paceline/{number}", self._store)
        present = [
            own,
            *(self._get(f"here/{rank}", Present.read) for rank in range(1, self.seat.size)),
        ]
        self._put("present", [asdict(p) for p in present])
        return number, present

    def _enter(self, own: Present) -> tuple[int, list[Present]]:
        """The others go to the last meeting that was opened. It may be a past one: then their names
        are not on its list.
        """
        number, until = 0, time.monotonic() + MEET_S
        while time.monotonic() < until:
            last = self._store.add("paceline/meetings", 0)
            if last > number:
                number, self._board = last, dist.PrefixStore(f"paceline/{last}", self._store)
                self._put(f"here/{self.seat.rank}", asdict(own))
            if number and self._board.check(["present"]):
                present: list[Present] = self._get(
                    "present", lambda said: [Present.read(one) for one in said]
                )
                if own in present:
                    return number, present
            time.sleep(LOOK_EVERY_S)
        raise TransportError(f"rank {self.seat.rank}: rank 0 did not come within {MEET_S:g} s")

    @property
    def leads(self) -> bool:
        return self.seat.rank == 0

    def _address(self) -> tuple[str, int]:
        seat = self.seat
        if seat.host:
            here = seat.meets_on_loopback and not seat.store_exists
            if self.leads and not seat.store_exists:
                self._server = host_store(seat.port, here)
            return HOST if here else seat.host, seat.port
        try:
            world = load_mpi().COMM_WORLD
        except BadRequest as error:
            raise BadRequest(f"inside mpirun the ranks meet through MPI: {error}") from None
        if world.size != seat.size:
            raise BadRequest(
                f"mpirun has started {seat.size} processes, but mpi4py sees {world.size}: is it"
                " another MPI?"
            )
        place: tuple[str, int, str] = ("", 0, "")
        if self.leads:
            self._server = host_store(0, seat.meets_on_loopback)
            name = HOST if seat.meets_on_loopback else socket.gethostname()
            place = (name, self._server.port, secrets.token_hex(32))
        told = bytearray(json.dumps(place).encode().ljust(PLACE_BYTES))
        world.Bcast(told)
        host, port, secret = json.loads(told)
        self.secret = bytes.fromhex(secret)
        return host, port

    @contextmanager
    def telling(self, stage: str) -> Iterator[None]:
        """Inside, a failure on any rank becomes known to all of them at the end."""
        own: PacelineError | None = None
        try:
            yield
        except PacelineError as error:
            own = error
        self._put(f"{stage}/{self.seat.rank}", None if own is None else to_plain(own))
        said = {rank: self._get(f"{stage}/{rank}") for rank in range(self.seat.size)}
        failed = [rank for rank, failure in said.items() if failure is not None]
        if failed:
            first = from_plain(said[failed[0]])
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
        with self._reaching():
            self._board.set(key, json.dumps(content, default=str))

    def _get(self, key: str, read: Callable[[Any], Any] = lambda said: said) -> Any:
        """What stands there, read as it should be; waits until it does."""
        until = time.monotonic() + MEET_S
        with self._reaching():
            while not self._board.check([key]):
                if time.monotonic() > until:
                    raise TransportError(
                        f"rank {self.seat.rank}: the other ranks did not come within {MEET_S:g} s"
                    )
                time.sleep(LOOK_EVERY_S)
            try:
                return read(json.loads(self._board.get(key).decode()))
            except (ValueError, TypeError, LookupError):
                raise TransportError(
                    f"{key} at the ranks' meeting point was not written by a rank of this run"
                ) from None

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except PacelineError:
            raise
        except KeyboardInterrupt:
            stop = Interrupted("interrupted")
            stop.told = not self.leads
            raise stop from None
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.seat.rank}: the ranks' meeting point is gone: {first_line(error)}"
            ) from None

    def going_on(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a run whose ranks the launcher has started again: from its last
        checkpoint, where it has one.
        """
        if self.leads:
            resume = None
            try:
                resume = self._last_checkpoint(options)
            finally:
                self._put("resume", resume)
        else:
            resume = self._get("resume")
        return {**options, **({"resume": resume} if resume else {})}

    def _last_checkpoint(self, options: Mapping[str, Any]) -> str | None:
        again = f"{self.seat.launcher} has started the ranks again"
        out, resume = options.get("out"), options.get("resume")
        if not out and not resume:
            if any(p.restarts for p in self.present):
                self.notices.append(
                    f"{again}: from the start; --out and --checkpoint-every would let it go on"
                )
            return None
        folder = Path(out) if out else run_folder(str(resume))
        if not self.began(folder):
            return None
        try:
            found = checkpoint.latest_whole(folder)
        except BadRequest:
            self.notices.append(
                f"{again}: there was no new checkpoint yet (--checkpoint-every), so it begins again"
            )
            return None
        self.notices.append(f"{again}: going on from {found}")
        return str(found)

    def began(self, folder: Path) -> bool:
        """Whether the run there is this launcher's, begun by ranks that are no more."""
        agents, processes = _mark_in(folder)
        here = {p.agent for p in self.present if p.agent}
        return bool(here & agents) and not {p.process for p in self.present} & processes

    def mark(self, folder: Path) -> None:
        """The run there is this launcher's: all its agents', those who have joined later too."""
        here, before = {p.agent for p in self.present if p.agent}, _mark_in(folder)[0]
        if here:
            agents, processes = (
                here | before if here & before else here,
                [p.process for p in self.present],
            )
            write_json(
                folder / MARK,
                {"launcher": self.seat.launcher, "agents": sorted(agents), "processes": processes},
            )

    def claim(self, job: Job, claim: Callable[[Job], Session]) -> Session:
        """Rank 0 claims the run's folder; all ranks use it."""
        hosts = tuple(p.host for p in self.present[: job.workers])
        with self.telling("claim"):
            if self.leads:
                session = claim(job)
                resumed_in = job.resume_from.resolve().parents if job.resume_from else ()
                # A run that is resumed in its own folder is marked when its workers are ready.
                if session.out.resolve() not in resumed_in:
                    self.mark(session.out)
                self._put("folder", (str(session.out.resolve()), session.number))
        if self.leads:
            return replace(session, hosts=hosts)
        out, number = self._get("folder", lambda said: (Path(said[0]), int(said[1])))
        return Session(job, out, number, hosts)

    def connect(self, kind: Any, deadline_s: float) -> Transport:
        """All ranks, over such a transport."""
        connected: Transport = kind.connect(replace(self.rendezvous, deadline_s=deadline_s))
        # the board may live in this process: it stays as long
        connected.meeting = self  # type: ignore[attr-defined]
        return connected

    def train(self, session: Session, hear: Hear) -> None:
        """This rank's part. Rank 0 raises what went wrong first, anywhere."""
        try:
            train_rank(
                session,
                replace(self.rendezvous, deadline_s=session.job.config.deadline_s),
                hear if self.leads else _of_slow_ranks,
            )
        except KeyboardInterrupt:
            raise
        except Exception as error:
            own = as_failure(self.seat.rank, error)
            if self.leads:
                raise self._first_failure(own) from None
            with suppress(RuntimeError):
                self._put(f"failed/{self.seat.rank}", to_plain(own))
                own.told = True
            raise own from None

    def _first_failure(self, own: PacelineError) -> PacelineError:
        failures = {0: own}
        until = time.monotonic() + GRACE_S
        # the launcher ends the others: what is known by now has to do
        with suppress(KeyboardInterrupt):
            while time.monotonic() < until and len(failures) < self.seat.size:
                for rank in range(1, self.seat.size):
                    key = f"failed/{rank}"
                    with suppress(RuntimeError):
                        if rank not in failures and self._board.check([key]):
                            failures[rank] = from_plain(self._get(key))
                time.sleep(0.05)
        return root_cause(failures, self.seat.size)

    def recorded(self) -> None:
        """Rank 0 has written the record; the others wait for it."""
        if self.leads:
            self._put("recorded", True)
        else:
            self._get("recorded")
        self._part("recorded")


@cache
def host_store(port: int, one_host: bool) -> Any:
    """Rank 0's; it lasts as long as its process, in which several runs may follow each other."""
    try:
        return open_store(HOST if one_host else "0.0.0.0", port, MEET_S)
    except (OSError, RuntimeError) as error:
        raise TransportError(
            f"rank 0 cannot open port {port} for the others: {first_line(error)}"
        ) from None


def _mark_in(folder: Path) -> tuple[set[str], set[str]]:
    """The agents, and the last processes, of the launcher that the run there belongs to."""
    try:
        said = json.loads((folder / MARK).read_text())
        return set(said["agents"]), set(said["processes"])
    except (OSError, ValueError, KeyError, TypeError):
        return set(), set()


def address_towards(host: str, port: int) -> str:
    """This host's own address, on the way to another (nothing is sent)."""
    with suppress(OSError):
        # IPv4 first
        for family, kind, _, _, where in sorted(
            socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        ):
            with suppress(OSError), socket.socket(family, kind) as there:
                there.connect(where)
                return str(there.getsockname()[0])
    return host


def reachable(own: str, others: Sequence[str]) -> str:
    """The host of the meeting point reaches it by an address that is of use to itself only: rather
    the one towards another.
    """
    abroad = [other for other in others if not _is_local(other)]
    return address_towards(abroad[0], 1) if _is_local(own) and abroad else own


def _is_local(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def refuse_inside_a_launcher(seat: Seat | None) -> None:
    if seat is not None:
        raise BadRequest(f"this starts its own workers: run it once, not inside {seat.launcher}")


def _of_slow_ranks(kind: str, content: dict[str, Any]) -> None:
    """Rank 0 speaks for all; but it may be the slow one, and then another rank tells it."""
    if kind == "waiting":
        print(f"paceline: {content['text']}", file=sys.stderr, flush=True)
