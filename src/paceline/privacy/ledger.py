"""What a run has spent, on disk, before it is spent: a crash, or going back to an earlier checkpoint, gives nothing back.

    OUT/privacy/worker-0.json ...     by session: noise, sampling rate, steps

A worker writes down a block of steps before it makes the first of them, and at the end what it has made. Whoever is killed has
spent the whole block. A sample is in one worker's shard only, so what counts is the worker that has made the most steps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DataCorrupt
from paceline.privacy.accounting import Spent
from paceline.record.writer import write_json

LEAST, MOST = 10, 1000  # steps that are written down at once


@dataclass
class Line:
    """One session of one worker. `per`: steps in which a sample is seen once at most (1, or an epoch where it is shuffled)."""

    session: int
    noise: float
    rate: float
    steps: int
    per: int = 1

    @property
    def spent(self) -> Spent:
        return Spent(self.noise, self.rate, -(-self.steps // self.per))


class Ledger:
    """One worker's."""

    def __init__(self, folder: Path, worker: int, line: Line, planned: int | None) -> None:
        self.path = folder / "privacy" / f"worker-{worker}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._earlier = [entry for entry in read_lines(self.path) if entry.session < line.session]
        self._line, self.made = line, 0
        self._block = min(MOST, max(LEAST, (planned or 0) // 100))

    def before_step(self) -> None:
        if self.made >= self._line.steps:
            self._line.steps = self.made + self._block
            self._write()
        self.made += 1

    def settle(self) -> None:
        self._line.steps = self.made
        self._write()

    def _write(self) -> None:
        write_json(self.path, {"sessions": [asdict(line) for line in (*self._earlier, self._line)]})


def read_lines(path: Path) -> list[Line]:
    try:
        return [Line(**entry) for entry in json.loads(path.read_text())["sessions"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataCorrupt(f"{path} cannot be read, so nobody knows what has been spent: {error}") from None


def read_account(folder: Path) -> list[Line]:
    """By session, the worker that has spent the most."""
    sessions: dict[int, Line] = {}
    for path in sorted((folder / "privacy").glob("worker-*.json")):
        for line in read_lines(path):
            there = sessions.get(line.session)
            if there is None or line.spent.times > there.spent.times:
                sessions[line.session] = line
    return [sessions[number] for number in sorted(sessions)]


def described(lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [asdict(line) for line in lines]
