"""The ledger: what a run spends of its privacy, written to disk before it is spent.

    OUT/privacy/worker-0.json               first session: noise, sampling rate, steps, trust
    OUT/privacy/worker-0-session-1.json     second session; no session writes another one's file
    OUT/privacy/earlier.json                what a checkpoint from another folder had spent before

A crash, or going back to an earlier checkpoint, gives nothing back. A worker records a block of
steps before it makes the first of them, and at its end the number of steps it made. A worker that
is killed has spent the whole block. A sample is in one worker's shard only, so the worker with the
most steps decides what the run has spent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.common.files import write_whole
from paceline.common.shortage import why_not_written
from paceline.errors import DataCorrupt, RunFailed
from paceline.privacy.accounting import Spent

LEAST, MOST = 10, 1000  # steps in a block


@dataclass
class LedgerEntry:
    """What one worker spent in one session."""

    session: int
    noise: float
    rate: float
    steps: int
    per: int = 1  # steps in which a sample is used at most once: 1, or an epoch if shuffled
    start: int = 0  # steps of the first epoch that an earlier session made
    trust: str = "peers"
    secure: bool = True

    @property
    def spent(self) -> Spent:
        """Count each epoch in which the session made at least one step."""
        return Spent(
            self.noise,
            self.rate,
            -(-(self.start % self.per + self.steps) // self.per) if self.steps else 0,
        )


class Ledger:
    """Records the steps of one worker in one session; it may make `planned` steps at most."""

    def __init__(self, folder: Path, worker: int, entry: LedgerEntry, planned: int) -> None:
        session = f"-session-{entry.session}" if entry.session else ""
        self.path = folder / "privacy" / f"worker-{worker}{session}.json"
        self._entry, self.made, self.planned = entry, 0, planned
        self._block = min(MOST, max(LEAST, planned // 100))

    def before_step(self) -> None:
        """Record the next step, and refuse a step beyond the plan."""
        if self.made >= self.planned:
            raise RunFailed(
                f"privacy: all {self.planned} planned steps have been made; no further step is"
                " allowed"
            )
        if self.made >= self._entry.steps:
            self._entry.steps = min(self.planned, self.made + self._block)
            self._write()
        self.made += 1

    def settle(self) -> None:
        """Record the steps that were made, in place of the block that was reserved."""
        self._entry.steps = self.made
        self._write()

    def _write(self) -> None:
        write_entries(self.path, [self._entry])


def write_entries(path: Path, entries: Iterable[LedgerEntry]) -> None:
    """Write a file of the ledger; it is on the disk when this returns."""
    content = json.dumps({"sessions": [asdict(entry) for entry in entries]}, indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content, durable=True)
    except OSError as error:
        raise RunFailed(f"{path} cannot be written: {why_not_written(error)}") from None


def read_entries(path: Path) -> list[LedgerEntry]:
    """Read a file of the ledger; a file that does not exist has no entries."""
    try:
        content = json.loads(path.read_text())["sessions"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unknown(path, error) from None
    return entries_in(content, path)


def entries_in(content: Any, path: Path) -> list[LedgerEntry]:
    """Read the entries of a file of the ledger or of a checkpoint, and check every number."""
    try:
        found = [LedgerEntry(**entry) for entry in content]
    except TypeError as error:
        raise _unknown(path, error) from None
    for entry in found:
        counts = (entry.session, entry.steps, entry.start, entry.per)
        if (
            not all(type(count) is int and 0 <= count < 2**53 for count in counts)
            or entry.per < 1
            or not (_is_number(entry.noise) and entry.noise >= 0)
            or not (_is_number(entry.rate) and 0 <= entry.rate <= 1)
            or entry.trust not in ("peers", "curator")
            or not isinstance(entry.secure, bool)
        ):
            raise _unknown(path, f"{asdict(entry)} is not an entry")
    return found


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _unknown(path: Path, why: Any) -> DataCorrupt:
    return DataCorrupt(f"{path} cannot be read, so it is unknown what the run has spent: {why}")


def read_account(folder: Path) -> list[LedgerEntry]:
    """Return for each session of a run the entry of the worker that spent the most."""
    files = [
        *sorted((folder / "privacy").glob("worker-*.json")),
        folder / "privacy" / "earlier.json",
    ]
    return the_most(entry for path in files for entry in read_entries(path))


def the_most(entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """Return for each session the entry that spent the most, in the order of the sessions."""
    sessions: dict[int, LedgerEntry] = {}
    for entry in entries:
        there = sessions.get(entry.session)
        if there is None or entry.spent.times > there.spent.times:
            sessions[entry.session] = entry
    return [sessions[number] for number in sorted(sessions)]


def begin(folder: Path, earlier: Sequence[LedgerEntry], at_least: int) -> int:
    """Begin a session in a run's folder, and return its number, which no other session has.

    `earlier` is what was spent before the checkpoint that the session resumes; it is recorded too.
    """
    if earlier:
        write_entries(
            folder / "privacy" / "earlier.json", the_most([*earlier, *read_account(folder)])
        )
    (folder / "privacy").mkdir(parents=True, exist_ok=True)
    session = max([at_least, *(entry.session + 1 for entry in read_account(folder))])
    while True:
        try:
            (folder / "privacy" / f"session-{session}").touch(exist_ok=False)
            return session
        except FileExistsError:
            session += 1


def described(entries: Sequence[LedgerEntry]) -> list[dict[str, Any]]:
    """Return the entries as they are in run.json and in checkpoints."""
    return [asdict(entry) for entry in entries]
