"""Events: one JSON object per line, written as they happen, so that a killed worker loses nothing but the last line.

Kinds: `start` (a worker begins, or begins again from a checkpoint), `step`, `evaluation`, `checkpoint`, `notice`,
`summary` (the worker's counters, at its end).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import RunFailed


class Recorder:
    """One worker's events; `session` counts how often the run was resumed."""

    def __init__(self, path: Path, rank: int, session: int = 0) -> None:
        self.rank, self.session = rank, session
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
            self._file: TextIO = path.open("a", buffering=1)
            if torn:  # a killed worker's last line stays its own
                self._file.write("\n")
        except OSError as error:
            raise RunFailed(f"{path} cannot be written: {error.strerror}") from None

    def write(self, kind: str, **fields: Any) -> None:
        event = {"kind": kind, "rank": self.rank, "session": self.session, "t": time.time(), **fields}
        try:
            self._file.write(json.dumps(clean(event)) + "\n")
        except OSError as error:
            raise RunFailed(f"the records cannot be written: {error.strerror} ({self._file.name})") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk has been reported by `write`
            self._file.close()


def clean(value: Any) -> Any:
    """JSON has no nan and no inf: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    return value


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(clean(content), indent=2) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunFailed(f"{path} cannot be written: {error.strerror}") from None
