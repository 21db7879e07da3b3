"""What a run has spent, on disk, before it is spent: a crash, or going back to an earlier
checkpoint, gives nothing back.

    OUT/privacy/worker-0.json ...                 the first session: noise, sampling rate, steps, and what was promised
    OUT/privacy/worker-0-session-1.json ...       the second, and so on; no session writes the file of another
    OUT/privacy/earlier.json                      what a checkpoint that was taken elsewhere had spent before

A worker writes down a block of steps before it makes the first of them, and at the end what it has
made. Whoever is killed has spent the whole block. A sample is in one worker's shard only, so what
counts is the worker that has made the most steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.common.files import write_whole
from paceline.errors import DataCorrupt, RunFailed
from paceline.privacy.accounting import Spent

LEAST, MOST = 10, 1000  # steps that are written down at once


@dataclass
class LedgerEntry:
    """One session of one worker. `per`: steps in which a sample is seen once at most (1, or an
    epoch where it is shuffled).
    """

    session: int
    noise: float
    rate: float
    steps: int
    per: int = 1
    start: int = (
        0  # steps of an epoch that were made before: a session may begin in the middle of one
    )
    trust: str = "peers"
    secure: bool = True

    @property
    def spent(self) -> Spent:
        """Every epoch that was touched counts."""
        return Spent(
            self.noise,
            self.rate,
            -(-(self.start % self.per + self.steps) // self.per) if self.steps else 0,
        )


class Ledger:
    """One worker's; `planned` is all that it may make in this session."""

    def __init__(self, folder: Path, worker: int, line: LedgerEntry, planned: int) -> None:
        session = f"-session-{line.session}" if line.session else ""
        self.path = folder / "privacy" / f"worker-{worker}{session}.json"
        self._line, self.made, self.planned = line, 0, planned
        self._block = min(MOST, max(LEAST, planned // 100))

    def before_step(self) -> None:
        if self.made >= self.planned:
            raise RunFailed(
                f"privacy: all {self.planned} steps that were planned have been made: no further"
                " one is allowed"
            )
        if self.made >= self._line.steps:
            self._line.steps = min(self.planned, self.made + self._block)
            self._write()
        self.made += 1

    def settle(self) -> None:
        self._line.steps = self.made
        self._write()

    def _write(self) -> None:
        write_entries(self.path, [self._line])


def write_entries(path: Path, lines: Iterable[LedgerEntry]) -> None:
    """On the disk when this returns, whole or not at all."""
    content = json.dumps({"sessions": [asdict(line) for line in lines]}, indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content, durable=True)
    except OSError as error:
        raise RunFailed(f"{path} cannot be written: {error.strerror}") from None


def read_entries(path: Path) -> list[LedgerEntry]:
    try:
        return [LedgerEntry(**entry) for entry in json.loads(path.read_text())["sessions"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataCorrupt(
            f"{path} cannot be read, so nobody knows what has been spent: {error}"
        ) from None


def read_account(folder: Path) -> list[LedgerEntry]:
    """By session, the worker that has spent the most."""
    files = [
        *sorted((folder / "privacy").glob("worker-*.json")),
        folder / "privacy" / "earlier.json",
    ]
    return the_most(line for path in files for line in read_entries(path))


def the_most(lines: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    sessions: dict[int, LedgerEntry] = {}
    for line in lines:
        there = sessions.get(line.session)
        if there is None or line.spent.times > there.spent.times:
            sessions[line.session] = line
    return [sessions[number] for number in sorted(sessions)]


def begin(folder: Path, earlier: Sequence[LedgerEntry], at_least: int) -> int:
    """A new session in this folder: a number that nobody else has, and what came before it written
    down.
    """
    if earlier:
        write_entries(
            folder / "privacy" / "earlier.json", the_most([*earlier, *read_account(folder)])
        )
    (folder / "privacy").mkdir(parents=True, exist_ok=True)
    session = max([at_least, *(line.session + 1 for line in read_account(folder))])
    while True:
        try:
            (folder / "privacy" / f"session-{session}").touch(exist_ok=False)
            return session
        except FileExistsError:
            session += 1


def described(lines: Sequence[LedgerEntry]) -> list[dict[str, Any]]:
    return [asdict(line) for line in lines]
