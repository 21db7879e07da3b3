"""`paceline doctor --cluster`: what the ranks of a job would find, before the job is started.

A launcher starts this the way it would start the job. The ranks meet through the same code as a
run, with short waits, and every rank tries what a run needs: its address, the shared folder.
"""

from __future__ import annotations

import platform
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.common.cores import as_ranges, usable
from paceline.doctor.machine import Finding
from paceline.errors import BadRequest, PacelineError, PeerSlow
from paceline.launch.joined import Meeting
from paceline.launch.looked import claimed_rank, looked_for
from paceline.launch.place import Wanted, way
from paceline.launch.seat import Seat
from paceline.launch.seat import find as find_seat
from paceline.transport.base import Waits

CONNECT_S = 3.0  # to reach another rank
VISIBLE_S = 2.0  # for another rank's file to appear: network file systems remember old answers
TOKEN_BYTES = 16
MOST_REACHED = 64  # each rank tries so many others
WAYS = {
    "launcher": "the launcher hosts the board and hands over its secret",
    "mpi": "rank 0 hands over the secret by MPI",
    "file": "rank 0 hands over the secret in a file of mode 0600",
    "store": "the address is in the launcher's store, the secret in PACELINE_SECRET_FILE",
    "port": "at the launcher's address, the secret in PACELINE_SECRET_FILE",
}


@dataclass
class Report:
    """What was found, the same on all ranks that met."""

    rank: int = 0
    findings: list[Finding] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    meeting: Meeting | None = None
    complete: bool = False  # all ranks have met and said everything

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def ok(self) -> bool:
        return all(found.ok for found in self.findings)

    def add(self, name: str, ok: bool, detail: str, fix: str = "") -> None:
        self.findings.append(Finding(name, ok, detail, fix))

    def described(self) -> dict[str, Any]:
        facts = {f.name: {"ok": f.ok, "detail": f.detail, "fix": f.fix} for f in self.findings}
        return {"ok": self.ok, "findings": facts, "ranks": self.ranks}

    def end(self) -> None:
        """Leave the other ranks. Rank 0, which may host the board, waits for them."""
        if self.meeting is not None and self.complete:
            with suppress(PacelineError):
                self.meeting.recorded()


def examine_cluster(out: Path | None, insecure: bool, wait_s: float) -> Report:
    """Meet the other ranks and try what a run needs. `wait_s`: for ranks that have not come."""
    try:
        seat = find_seat()
    except BadRequest as error:
        report = Report(claimed_rank() or 0)
        report.add("launcher", False, str(error))
        return report
    return examine_seat(seat, out, insecure, wait_s) if seat is not None else _no_launcher()


def examine_seat(seat: Seat, out: Path | None, insecure: bool, wait_s: float) -> Report:
    """Do the part of one rank that a launcher has started."""
    report = Report(seat.rank)
    report.add("launcher", True, f"{seat.launcher}, {_count(seat.size, 'rank')}")
    absent = [path for path in (out, *out.parents) if not path.exists()] if out else []
    wanted = Wanted(out, insecure, Waits(wait_s, wait_s, max(wait_s, 10.0)), wait_s)
    try:
        report.meeting = Meeting(seat, wanted)
        _look_round(report, report.meeting, out)
        report.complete = True
    except PacelineError as error:
        _failed(report, seat, error, wait_s)
    finally:
        for path in absent:  # made for this look only
            with suppress(OSError):
                path.rmdir()
    return report


def _no_launcher() -> Report:
    report = Report()
    report.add(
        "launcher",
        False,
        "no launcher has started this process as one of several ranks: start it as the job would be"
        " started",
    )
    for looked in looked_for():
        report.add(looked.launcher, False, looked.found, looked.start)
    return report


def _failed(report: Report, seat: Seat, error: PacelineError, wait_s: float) -> None:
    met = report.meeting is not None
    if isinstance(error, PeerSlow) and error.ranks and not met:
        ranks = _ranks(error.ranks)
        report.add(
            "ranks",
            False,
            f"{ranks} of {seat.size} did not come within {wait_s:g} s",
            "look at their own output; where they start later, give --wait more seconds",
        )
        return
    report.add("ranks" if met else "meeting", False, str(error))


def _look_round(report: Report, meeting: Meeting, out: Path | None) -> None:
    """Exchange with all ranks what each has found."""
    seat, sharing, own = meeting.seat, meeting.sharing, usable()
    report.ranks = meeting.exchange(
        "about",
        {
            "rank": seat.rank,
            "host": meeting.present[seat.rank].host,
            "machine": meeting.present[seat.rank].machine,
            "address": meeting.rendezvous.own,
            "cores": own.count,
            "cores_from": own.source,
            "threads": sharing.threads(seat.rank),
            "paceline": version("paceline"),
            "torch": version("torch"),
            "python": platform.python_version(),
        },
    )
    hosts = _grouped((one["host"], one["rank"]) for one in report.ranks)
    machines = f" on {_count(sharing.machines, 'machine')}"
    listed = "; ".join(f"{host}: {_ranks(ranks)}" for host, ranks in hosts.items())
    report.add("hosts", True, f"{_count(len(hosts), 'host')}{machines}: {listed}")
    _cores(report, meeting)
    secure = "--insecure: there is no secret" if not meeting.secret else WAYS[way(seat)]
    report.add("meeting", True, f"{meeting.board}: {secure}")
    _versions(report)
    _addresses(report, meeting)
    _folder(report, meeting, out)


def _cores(report: Report, meeting: Meeting) -> None:
    each = _grouped(
        (f"{_count(one['cores'], 'core')} ({one['cores_from']}), {_threads(one)}", one["rank"])
        for one in report.ranks
    )
    told = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in each.items())
    if not meeting.sharing.fits(meeting.seat.size):
        told += f"; oversubscribed: {meeting.seat.size} ranks on {meeting.sharing.cores} cores"
    report.add("cores", True, told)


def _threads(one: dict[str, Any]) -> str:
    return f"{_count(one['threads'], 'thread')} for each rank"


def _versions(report: Report) -> None:
    names = ("paceline", "torch", "python")
    each = _grouped(
        (" ".join(f"{name} {one[name]}" for name in names), one["rank"]) for one in report.ranks
    )
    if len(each) == 1:
        report.add("versions", True, next(iter(each)))
        return
    told = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in each.items())
    report.add("versions", False, told, "install the same versions everywhere")


# --- can the ranks reach each other?


def _addresses(report: Report, meeting: Meeting) -> None:
    """Every rank listens at its address, as gloo would, and is called by the others."""
    me, token = meeting.seat.rank, secrets.token_hex(TOKEN_BYTES)
    refused = ""
    try:
        listening = socket.create_server((meeting.rendezvous.own, 0), backlog=128)
    except OSError as error:
        refused = f"{meeting.rendezvous.own}: {error.strerror}"
        listening = socket.create_server(("127.0.0.1", 0))
    with listening:
        where = (meeting.rendezvous.own, listening.getsockname()[1], token, refused)
        answering = threading.Thread(target=_answer, args=(listening, token.encode()), daemon=True)
        answering.start()
        everyone = meeting.exchange("listens", where)
        failures = [
            f"rank {me} on {report.ranks[me]['host']} does not reach rank {rank} at"
            f" {everyone[rank][0]} ({report.ranks[rank]['host']}): {reason}"
            for rank in _others(me, meeting.seat.size)
            if not everyone[rank][3] and (reason := _call(*everyone[rank][:3])) is not None
        ]
        told = meeting.exchange("reached", failures)
        listening.shutdown(socket.SHUT_RDWR)  # ends the thread's wait; `close` alone does not
        answering.join(CONNECT_S)
    wrong = [f"rank {rank} cannot listen at {said[3]}" for rank, said in enumerate(everyone)]
    wrong = [text for text, said in zip(wrong, everyone, strict=True) if said[3]]
    wrong += [text for failures in told for text in failures]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        report.add(
            "addresses",
            False,
            wrong[0] + more,
            "let all ports between the hosts through, or choose another network for the host names",
        )
        return
    addresses = _grouped((said[0], rank) for rank, said in enumerate(everyone))
    listed = "; ".join(f"{_ranks(ranks)}: {address}" for address, ranks in addresses.items())
    report.add("addresses", True, f"every rank reaches the others ({listed})")


def _others(me: int, size: int) -> list[int]:
    """The ranks that this one calls: all, or the next ones where there are many."""
    return [(me + step) % size for step in range(1, min(size, MOST_REACHED + 1))]


def _answer(listening: socket.socket, token: bytes) -> None:
    """Send the token to every rank that connects, until the socket is closed."""
    with suppress(OSError):
        while True:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(token)


def _call(host: str, port: int, token: str) -> str | None:
    """Return why a rank cannot be reached; None: it answered with its own token."""
    try:
        with socket.create_connection((host, port), CONNECT_S) as connection:
            heard = b""
            while len(heard) < len(token) and (more := connection.recv(len(token))):
                heard += more
    except OSError as error:
        return error.strerror or str(error)
    return None if heard == token.encode() else "something else answers there"


# --- is the folder one that all hosts see?


def _folder(report: Report, meeting: Meeting, out: Path | None) -> None:
    """Every rank writes a file into the folder, and looks for the files of the others."""
    if out is None:
        report.add("folder", True, "not tried: add --out DIR, the folder of the job")
        return
    me, size = meeting.seat.rank, meeting.seat.size
    [name, *_] = meeting.exchange("name", secrets.token_hex(8))
    own, refused = out / f".doctor-{name}-{me}", ""
    try:
        out.mkdir(parents=True, exist_ok=True)
        own.write_text(f"{name}-{me}")
    except OSError as error:
        refused = error.strerror or str(error)
    try:
        wrote = meeting.exchange("wrote", refused)
        unseen = _unseen(out, name, [r for r in range(size) if not wrote[r]])
        saw = meeting.exchange("unseen", unseen)
    finally:
        with suppress(OSError):
            own.unlink()
    hosts = [one["host"] for one in report.ranks]
    wrong = [f"rank {r} on {hosts[r]} cannot write: {why}" for r, why in enumerate(wrote) if why]
    wrong += [
        f"rank {r} on {hosts[r]} does not see the file of rank {unseen[0]} on {hosts[unseen[0]]}:"
        " it is not the same folder"
        for r, unseen in enumerate(saw)
        if unseen
    ]
    meeting.exchange("swept", True)  # a rank that has made the folder can now remove it
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        report.add(
            "folder",
            False,
            f"{out}: {wrong[0]}{more}",
            "name a folder of a file system that all hosts have mounted",
        )
        return
    report.add("folder", True, f"{out}: all ranks write to it, and it is the same folder for all")


def _unseen(out: Path, name: str, ranks: Sequence[int]) -> list[int]:
    """The ranks whose files this rank does not find."""
    until, left = time.monotonic() + VISIBLE_S, list(ranks)
    while True:
        left = [rank for rank in left if not _holds(out / f".doctor-{name}-{rank}")]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)


def _holds(path: Path) -> bool:
    with suppress(OSError):
        return path.read_text() == path.name.removeprefix(".doctor-")
    return False


# --- words


def _grouped(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for text, rank in pairs:
        found.setdefault(text, []).append(rank)
    return found


def _ranks(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {as_ranges(listed)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
