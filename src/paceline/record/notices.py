"""Keeps what a run tells its user while it trains, for `paceline watch`: `events/notices.jsonl`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import RunFailed
from paceline.record.writer import Recorder

NAME = "notices.jsonl"


class Notices:
    """Writes the notices of one session, and the epsilon that a private run has spent so far.

    The file is made with the first of them. A disk that is full loses notices, not the run.
    """

    def __init__(self, folder: Path, session: int) -> None:
        self._path, self._session = folder / "events" / NAME, session
        self._recorder: Recorder | None = None

    def take(self, kind: str, content: dict[str, Any]) -> None:
        """Write a message of a rank if it is a notice or tells an epsilon."""
        if kind in ("notice", "waiting"):
            self._write("notice", text=content["text"])
        elif kind == "lost":
            self._write("notice", text=f"rank {content['rank']} has ended; the others go on")
        elif kind == "progress" and content.get("epsilon") is not None:
            self._write("privacy", epsilon=content["epsilon"])

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def _write(self, kind: str, **fields: Any) -> None:
        with suppress(RunFailed):
            if self._recorder is None:
                self._recorder = Recorder(self._path, 0, self._session)
            self._recorder.write(kind, **fields)
