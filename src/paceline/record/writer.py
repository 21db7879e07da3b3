"""Events: one JSON object per line, written as they happen, so that a killed worker loses nothing
but the last line.

Kinds: `start` (a worker begins, or begins again from a checkpoint), `step`, `evaluation`,
`checkpoint`, `choice` (what `auto` took), `distance` (from the mean of all replicas), `lost`
(workers that have died), `sample` (what was used by then), `aside` (what was not training),
`profile` (tables), `summary` (the counters, at the end).
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from paceline.common.files import write_whole
from paceline.errors import RunFailed


class Recorder:
    """One worker's events; `session` counts how often the run was resumed."""

    def __init__(self, path: Path, rank: int, session: int = 0) -> None:
        self.rank, self.session = rank, session
        self.spent_s = 0.0  # writing
        self._lock = threading.Lock()  # samples come from a thread of their own
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torn = (
                path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
            )
            self._file: TextIO = path.open("a", buffering=1)
            if torn:  # a killed worker's last line stays its own
                self._file.write("\n")
        except OSError as error:
            raise RunFailed(f"{path} cannot be written: {error.strerror}") from None

    def write(self, kind: str, **fields: Any) -> None:
        began = time.perf_counter()
        event = {
            "kind": kind,
            "rank": self.rank,
            "session": self.session,
            "t": time.time(),
            **fields,
        }
        try:
            line = json.dumps(event, allow_nan=False) + "\n"
        except ValueError:  # nan or inf somewhere in it
            line = json.dumps(clean(event)) + "\n"
        with self._lock:
            try:
                self._file.write(line)
            except OSError as error:
                raise RunFailed(
                    f"the records cannot be written: {error.strerror} ({self._file.name})"
                ) from None
            self.spent_s += time.perf_counter() - began

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
    write_text(path, json.dumps(clean(content), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file of a run or a report, whole or not at all; a failure is a `RunFailed`."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise RunFailed(f"{path} cannot be written: {error.strerror}") from None
