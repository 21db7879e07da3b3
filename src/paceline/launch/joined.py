"""Ranks that a launcher (torchrun, mpirun, srun) has started meet, run one job, leave one record.

Rank 0 writes the record and prints; the other ranks report their failures to it through the board.
Only when rank 0 is gone do they print themselves.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.common.asked import Asked
from paceline.common.devices import take_device
from paceline.common.sharing import Sharing
from paceline.errors import Interrupted, PacelineError, TransportError, from_plain, to_plain
from paceline.launch import again, shared
from paceline.launch.addresses import LOOPBACK, address_towards, reachable
from paceline.launch.again import Again
from paceline.launch.awaiting import Awaiting
from paceline.launch.failures import GRACE_S, as_failure, root_cause
from paceline.launch.local import train_rank
from paceline.launch.messages import Hear
from paceline.launch.place import Place, Wanted, find_place
from paceline.launch.present import Present
from paceline.launch.restarts import Mark, last_checkpoint
from paceline.launch.seat import Seat
from paceline.launch.signals import relaying
from paceline.launch.unshared import Unshared
from paceline.request.job import Job
from paceline.request.session import Session
from paceline.transport.base import Rendezvous, Transport, Waits
from paceline.transport.c10d.store import first_line

# The board is polled, so that a rank that a launcher signals meanwhile ends at once.
POLL_S = 0.01
END_S = 3.0  # for the other ranks to end before rank 0, where its exit code counts


class Meeting:
    """The ranks of one run, with the board that connects them.

    What ranks read there is JSON and never unpickled.
    """

    def __init__(self, seat: Seat, wanted: Wanted = Wanted()) -> None:  # noqa: B008 (frozen)
        self.seat, self._waits = seat, wanted.waits
        self.notices: list[str] = []
        place = find_place(seat, wanted)
        if not place.secure:
            self.notices.append(
                "--insecure: the ranks met without a secret, so that any program that reaches"
                " their network can take part in this run"
            )
        self.secret = place.secret if place.secure else b""
        self.board = place.address
        self._shared = place.board  # with the keys of all meetings that were held there
        self._store: Any = None  # with the keys of this meeting
        with self._reaching():
            address = None if seat.one_host else address_towards(*place.endpoint)
            ticket = self._shared.add("paceline/tickets", 1)
            own = Present.of(ticket, seat, address)
            number, self.present = self._open(own, place) if self.leads else self._enter(own)
        self.rendezvous = self._rendezvous(place, number, address)
        self.sharing = Sharing(tuple(p.room for p in self.present), seat.rank)
        if place.handed is not None:  # all ranks have read it
            place.handed.unlink(missing_ok=True)

    def _rendezvous(self, place: Place, number: int, address: str | None) -> Rendezvous:
        seat = self.seat
        if seat.meets_on_loopback:
            address = LOOPBACK
        elif address is not None:
            address = reachable(address, [p.address for p in self.present if p.address])
        return Rendezvous(
            seat.rank,
            seat.size,
            place.address,
            place.secret,
            generation=number,
            own=address or LOOPBACK,
            watched=True,
            joined=True,
        )

    def _open(self, own: Present, place: Place) -> tuple[int, list[Present]]:
        """As rank 0, open a meeting with a new number and list the ranks that have joined it."""
        number = self._shared.add("paceline/meetings", 1)
        self._store = self._shared.under(f"paceline/{number}")
        wait = self._awaiting(self._missing, "to join the run", unmet=True)
        unshared = Unshared(self.seat, place.handed) if place.handed is not None else None
        while self._missing():
            wait.look()
            try:
                if unshared is not None:
                    unshared.look()
            except PacelineError as refusal:
                self._put("refused", to_plain(refusal))
                self._leave("refused")
                raise
            time.sleep(POLL_S)
        others = range(1, self.seat.size)
        present = [own, *(self._get(f"here/{rank}", Present.read) for rank in others)]
        self._put("present", [asdict(p) for p in present])
        return number, present

    def _enter(self, own: Present) -> tuple[int, list[Present]]:
        """Join the newest meeting.

        After a restart the newest may still be that of the previous attempt. Its list of ranks
        does not contain this one, so this rank keeps looking.
        """
        number = 0
        wait = self._awaiting(self._missing, "to join the run", unmet=True)
        while True:
            newest = self._shared.add("paceline/meetings", 0)
            if newest > number:
                number = newest
                self._store = self._shared.under(f"paceline/{number}")
                self._put(f"here/{self.seat.rank}", asdict(own))
            if number and self._store.check(["present"]):
                present: list[Present] = self._get(
                    "present", lambda content: [Present.read(one) for one in content]
                )
                if own in present:
                    return number, present
            if number and self._store.check(["refused"]):
                refusal = from_plain(self._get("refused"))
                self._leave("refused")
                refusal.told = True
                raise refusal
            wait.look()
            time.sleep(POLL_S)

    def _missing(self) -> list[int]:
        """The ranks that have not joined this meeting yet; rank 0 opens it."""
        if self._store is None:
            return [0]
        return [r for r in range(1, self.seat.size) if not self._store.check([f"here/{r}"])]

    def _awaiting(self, whom: Callable[[], list[int]], what: str, unmet: bool = False) -> Awaiting:
        return Awaiting(self._shared, self.seat.rank, self._waits, whom, what, unmet)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.seat.rank == 0

    @contextmanager
    def telling(self, stage: str) -> Iterator[None]:
        """Raise a failure of any rank inside this block on all ranks, at the end of the block."""
        own: PacelineError | None = None
        try:
            yield
        except PacelineError as error:
            own = error
        self._put(f"{stage}/{self.seat.rank}", None if own is None else to_plain(own))
        ranks = range(self.seat.size)
        failures = {rank: self._get(f"{stage}/{rank}", rank=rank) for rank in ranks}
        failed = [rank for rank, failure in failures.items() if failure is not None]
        if failed:
            first = from_plain(failures[failed[0]])
            first.told = not self.leads
            if failed[0]:
                first.args = (f"rank {failed[0]}: {first}",)
            self._leave(stage)
            raise first

    def exchange(self, what: str, own: Any) -> list[Any]:
        """Return what each rank says about something, in the order of the ranks."""
        self._put(f"{what}/{self.seat.rank}", own)
        return [self._get(f"{what}/{rank}", rank=rank) for rank in range(self.seat.size)]

    def _leave(self, stage: str) -> None:
        """Note that this rank reads no more. Rank 0, which may host the board, waits for all."""
        if not self.leads:
            self._put(f"left {stage}/{self.seat.rank}", True)
            return
        until = time.monotonic() + GRACE_S
        others = [f"left {stage}/{rank}" for rank in range(1, self.seat.size)]
        while others and not self._store.check(others) and time.monotonic() < until:
            time.sleep(POLL_S)

    def _put(self, key: str, content: Any) -> None:
        with self._reaching():
            self._store.set(key, json.dumps(content, default=str))

    def _get(
        self, key: str, read: Callable[[Any], Any] = lambda content: content, rank: int = 0
    ) -> Any:
        """Wait until a rank has set a key, and return its content as `read` understands it."""
        wait = self._awaiting(lambda: [rank], f"to say its {key.partition('/')[0]}")
        with self._reaching():
            while not self._store.check([key]):
                wait.look()
                time.sleep(POLL_S)
            try:
                return read(json.loads(self._store.get(key).decode()))
            except (ValueError, TypeError, LookupError):
                raise TransportError(
                    f"{key} in the ranks' board was not written by a rank of this run"
                ) from None

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Translate what can go wrong while this rank uses the board."""
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
                f"rank {self.seat.rank} has lost the ranks' board (rank 0 or the launcher may have"
                f" ended): {first_line(error)}"
            ) from None

    def going_on(self, options: Mapping[str, Any]) -> Again:
        """Return what rank 0 has found: where the ranks were started again, a checkpoint."""
        if not self.leads:
            found: Again = self._get("resume", Again.read)
            return found
        found = Again()
        try:
            if again.asks(options):
                found = again.look(options)
            else:
                counted = any(p.restarts for p in self.present)
                launcher = self.seat.launcher
                resume, notice = last_checkpoint(self._own_mark, launcher, counted, options)
                found = Again("nothing", resume, notice)
        finally:
            self._put("resume", asdict(found))
        self.notices += [found.notice] if found.notice else []
        return found

    @property
    def _own_mark(self) -> Mark:
        agents = frozenset(p.agent for p in self.present if p.agent)
        return Mark(agents, tuple(p.process for p in self.present))

    def began(self, folder: Path) -> bool:
        """Whether earlier ranks of the same launcher began the run in a folder."""
        return self._own_mark.continues(folder)

    def mark(self, folder: Path) -> None:
        """Mark the run in a folder as this launcher's."""
        self._own_mark.write(folder, self.seat.launcher)

    def claim(self, job: Job, claim: Callable[[Job], Session]) -> Session:
        """Claim the run's folder on rank 0, for all ranks."""
        hosts = tuple(p.host for p in self.present[: job.workers])
        with self.telling("claim"):
            if self.leads:
                session = claim(job)
                resumed_in = job.resume_from.resolve().parents if job.resume_from else ()
                # A run that is resumed in its own folder is marked when its workers are ready.
                if session.out.resolve() not in resumed_in:
                    self.mark(session.out)
                shared.leave(session.out)
                self._put("folder", (str(session.out.resolve()), session.number))
        if not self.leads:
            said = self._get("folder", lambda content: (Path(content[0]), int(content[1])))
            session = Session(job, *said)
        if not self.seat.one_host:
            with shared.taken_back(session.out, self.leads), self.telling("shared"):
                shared.look(session.out, self.present[0].host)
        return replace(session, hosts=hosts)

    def claim_own(self, claim: Callable[[], tuple[Path, int] | None]) -> tuple[Path, int] | None:
        """Claim the folder of a loop's record on rank 0, for all ranks; None without a record."""
        if self.leads:
            try:
                claimed = claim()
            except PacelineError as error:
                self._put("folder", {"refused": to_plain(error)})
                self._leave("folder")
                raise
            if claimed is not None:
                self.mark(claimed[0])
            said = None if claimed is None else (str(claimed[0]), claimed[1])
            self._put("folder", {"claimed": said})
            return claimed
        refused, folder = self._get("folder", _read_claim)
        if refused is not None:
            self._leave("folder")
            raise refused
        return (folder[0], folder[1]) if folder is not None else None

    def connect(self, kind: Any, waits: Waits) -> Transport:
        """Connect all ranks by a transport of this kind, for a user's own loop."""
        # A loop that uses CUDA already has chosen its device.
        moves_cuda = "cuda" in kind.traits.devices
        if moves_cuda and torch.cuda.is_available() and not torch.cuda.is_initialized():
            take_device("cuda", self.seat.local_rank)
        connected: Transport = kind.connect(replace(self.rendezvous, waits=waits))
        # Its board must live as long as the transport.
        connected.meeting = self  # type: ignore[attr-defined]
        return connected

    def train(self, session: Session, hear: Hear) -> None:
        """Do this rank's part of the run. Rank 0 raises the root cause of a failure anywhere."""
        asked = Asked()
        try:
            with relaying(asked.hear):
                train_rank(
                    session,
                    replace(self.rendezvous, waits=session.job.config.waits),
                    hear if self.leads else partial(_beside_rank_0, hear),
                    self.seat.local_rank,
                    asked if session.leaves else None,
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
        """Wait a moment for the other ranks' failures and return the root cause."""
        failures = {0: own}
        until = time.monotonic() + GRACE_S
        # The launcher may interrupt rank 0: then the failures that have arrived are enough.
        with suppress(KeyboardInterrupt):
            while time.monotonic() < until and len(failures) < self.seat.size:
                for rank in range(1, self.seat.size):
                    key = f"failed/{rank}"
                    with suppress(RuntimeError):
                        if rank not in failures and self._store.check([key]):
                            failures[rank] = from_plain(self._get(key))
                time.sleep(0.05)
        return root_cause(failures, self.seat.size)

    def recorded(self, left: Interrupted | None = None) -> Interrupted | None:
        """Wait until rank 0 has written the record; rank 0 calls this when it has.

        Returns why all ranks have left early, as rank 0 says it; None: they have not.
        """
        if self.leads:
            self._put("recorded", None if left is None else (str(left), left.number))
        else:
            left = self._get(
                "recorded", lambda said: None if said is None else Interrupted(said[0], said[1])
            )
        self._leave("recorded")
        return left

    def ends_last(self) -> None:
        """As rank 0, wait a moment for the end of all other ranks."""
        others, until = set(range(1, self.seat.size)), time.monotonic() + END_S
        with suppress(RuntimeError, PacelineError):
            while others - self._shared.gone().keys() and time.monotonic() < until:
                time.sleep(POLL_S)


def _read_claim(
    content: dict[str, Any],
) -> tuple[PacelineError | None, tuple[Path, int] | None]:
    """Read what rank 0 says about the folder: why it was refused, or where it is."""
    if content.get("refused") is not None:
        return from_plain(content["refused"]), None
    said = content["claimed"]
    return None, None if said is None else (Path(said[0]), int(said[1]))


def _beside_rank_0(hear: Hear, kind: str, content: dict[str, Any]) -> None:
    """Print notices of slow ranks, since rank 0 may be the slow one, and hear of leaving."""
    if kind in ("begins", "leaving"):
        hear(kind, content)
    if kind == "waiting":
        print(f"paceline: {content['text']}", file=sys.stderr, flush=True)
