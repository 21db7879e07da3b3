"""The status of one rank: a small file that the rank has mapped, OUT/status/rank-N.

The rank writes it by plain memory writes, without system calls, about one per point of the run
(transport/activity.py) and one at the beginning and the end of a long wait. The file keeps the
last values when the process has ended, however it ended. Two numbers around each part tell a
reader that it has read the part while it was written.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from paceline.transport.activity import Point
from paceline.transport.status.process import machine_id, start_of

FOLDER = "status"
MAGIC, SIZE = b"paceline status\1", 1024
POINTS: tuple[Point, ...] = get_args(Point)
ENDED = len(POINTS)  # the number of the point after the last one
NUMBERS = {point: number for number, point in enumerate(POINTS)}
COMPUTE = NUMBERS["compute"]
# rank, ranks, process, when it began (clock ticks), whether it gives its stack; machine, host, role
ABOUT = struct.Struct("<iiqqB16s64s16s")
# count, point, step, since when, seconds and number of the steps that it has computed; count
NOW = struct.Struct("<IBqddqI")
# count, since when (0: no wait), idle, what, the ranks that are waited for; count
WAIT = struct.Struct("<IdB96s200sI")
ABOUT_AT, NOW_AT, WAIT_AT = 16, 256, 384
TRIES = 20  # of a reader, while the rank writes


@dataclass(frozen=True)
class Seen:
    """What a rank's file says."""

    rank: int
    ranks: int
    pid: int
    start: int
    gives_stack: bool
    machine: bytes
    host: str
    role: str
    point: Point | None  # None: the rank has ended
    step: int
    at: float  # since when it is at this point, by time.time
    computed_s: float
    computed: int
    waits_since: float | None  # None: it is in no long wait
    idle: bool
    what: str
    waits_for: tuple[int, ...]  # empty: all others

    @property
    def steps_per_s(self) -> float | None:
        """The steps that the rank computes in a second, without its waits."""
        return self.computed / self.computed_s if self.computed and self.computed_s > 0 else None


class Line:
    """One rank's own line. All errors of the disk are raised here, when it is opened."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            folder.chmod(folder.parent.stat().st_mode & 0o777)
        path = folder / f"rank-{rank}"
        path.unlink(missing_ok=True)  # an earlier session's process may still have it mapped
        with path.open("w+b") as file:
            # Written, not only made longer: a full disk is an error here, not a signal later.
            file.write(MAGIC.ljust(SIZE, b"\0"))
            file.flush()
            self._map = mmap.mmap(file.fileno(), SIZE)
        self.rank, self._ranks, self._role, self.gives_stack = rank, ranks, b"rank", False
        self._thread = threading.get_ident()
        self._count = self._waits = 0
        self._point, self._at = NUMBERS["connect"], time.time()
        self._computed_s, self._computed = 0.0, 0
        self.describe()
        self._write(0)
        self.wait_over()

    def describe(self, role: str | None = None) -> None:
        """Write what stays the same while the process lives."""
        self._role = self._role if role is None else role.encode()[:16]
        pid = os.getpid()
        host = socket.gethostname().encode()[:64]
        about = (self.rank, self._ranks, pid, start_of(pid) or 0, self.gives_stack)
        ABOUT.pack_into(self._map, ABOUT_AT, *about, machine_id(), host, self._role)

    def enter(self, point: Point, step: int) -> None:
        now = time.time()
        if self._point == COMPUTE:
            self._computed_s += now - self._at
            self._computed += 1
        self._point, self._at = NUMBERS[point], now
        self._write(step)

    def _write(self, step: int) -> None:
        count = self._count = (self._count + 1) & 0xFFFFFFFF
        spent = (self._computed_s, self._computed)
        NOW.pack_into(self._map, NOW_AT, count, self._point, step, self._at, *spent, count)

    def wait(self, what: str, peers: Sequence[int], since: float, idle: bool) -> None:
        """Write a long wait that began at `since`, by time.time."""
        count = self._waits = (self._waits + 1) & 0xFFFFFFFF
        ranks = ",".join(map(str, peers)).encode()
        if len(ranks) > 200:
            ranks = b""
        WAIT.pack_into(self._map, WAIT_AT, count, since, idle, what.encode()[:96], ranks, count)

    def wait_over(self) -> None:
        self.wait("", (), 0.0, False)

    def end(self, step: int) -> None:
        """The rank leaves the run."""
        self._point, self._at = ENDED, time.time()
        self._write(step)
        self.wait_over()


def read_line(path: Path) -> Seen | None:
    """Read a rank's file; None if it is missing or damaged."""
    for _ in range(TRIES):
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if len(content) < SIZE or not content.startswith(MAGIC):
            return None
        count, point, step, at, computed_s, computed, again = NOW.unpack_from(content, NOW_AT)
        waits, since, idle, what, peers, waits_again = WAIT.unpack_from(content, WAIT_AT)
        if count == again and waits == waits_again:
            break
        time.sleep(0.0005)
    rank, ranks, pid, start, gives_stack, machine, host, role = ABOUT.unpack_from(content, ABOUT_AT)
    if point > ENDED or rank < 0 or pid <= 0 or not 0 <= at < 1e12 or not 0 <= since < 1e12:
        return None
    return Seen(
        rank,
        ranks,
        pid,
        start,
        bool(gives_stack),
        machine,
        _text(host),
        _text(role),
        POINTS[point] if point < ENDED else None,
        step,
        at,
        computed_s,
        computed,
        since or None,
        bool(idle),
        _text(what),
        tuple(int(peer) for peer in _text(peers).split(",") if peer.isdigit()),
    )


def read_lines(folder: Path) -> list[Seen]:
    """The lines of all ranks in a folder that can be read, in the order of the ranks."""
    with suppress(OSError):
        found = [read_line(path) for path in folder.glob("rank-*")]
        return sorted((seen for seen in found if seen is not None), key=lambda seen: seen.rank)
    return []


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")
