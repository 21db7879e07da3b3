"""Reads files of events as they grow: every byte once, and a line when it is whole."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.record.reader import Event, parse_event

CHUNK_BYTES = 1 << 18  # read and parsed at once
LONGEST_LINE_BYTES = 1 << 24


@dataclass
class Lines:
    """Turns bytes, in pieces of any size, into events.

    A line without its end is kept until the rest arrives. `damaged` counts the lines that hold no
    event; a line longer than `LONGEST_LINE_BYTES` is one of them.
    """

    damaged: int = 0
    _begun: bytearray = field(default_factory=bytearray)
    _skips: bool = False  # until the end of a line that is too long

    def feed(self, piece: bytes) -> list[Event]:
        """Return the events whose lines this piece ends."""
        *ended, rest = piece.split(b"\n")
        events = []
        for part in ended:
            line, skipped = bytes(self._begun) + part, self._skips
            self._begun.clear()
            self._skips = False
            event = None if skipped or not line.strip() else _event(line)
            if event is not None:
                events.append(event)
            elif skipped or line.strip():
                self.damaged += 1
        if not self._skips:
            self._begun += rest
        if len(self._begun) > LONGEST_LINE_BYTES:
            self._begun.clear()
            self._skips = True
        return events


def _event(line: bytes) -> Event | None:
    if len(line) > LONGEST_LINE_BYTES:
        return None
    try:
        return parse_event(line)
    except UnicodeDecodeError:
        return None


class Tail:
    """Reads what was appended to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read_bytes = 0  # of this file, so far
        self.left_bytes = 0  # known to be there and not read yet
        self._lines, self._inode = Lines(), 0

    @property
    def damaged(self) -> int:
        return self._lines.damaged

    def skip(self) -> None:
        """Leave out what the file holds now."""
        with suppress(OSError):
            self.read_bytes = self.path.stat().st_size

    def replaced(self) -> bool:
        """Whether the file is another one, or shorter than what was read of it."""
        try:
            found = self.path.stat()
        except OSError:
            return self._inode != 0
        self.left_bytes = max(0, found.st_size - self.read_bytes)
        return self._inode not in (0, found.st_ino) or found.st_size < self.read_bytes

    def more(self) -> list[Event]:
        """Return the events of the next `CHUNK_BYTES`; a file that is gone has none."""
        try:
            with self.path.open("rb", buffering=0) as file:
                self._inode = os.fstat(file.fileno()).st_ino
                file.seek(self.read_bytes)
                piece = file.read(CHUNK_BYTES) or b""
        except OSError:
            self.left_bytes = 0
            return []
        self.read_bytes += len(piece)
        self.left_bytes = max(0, self.left_bytes - len(piece)) if piece else 0
        return self._lines.feed(piece)
