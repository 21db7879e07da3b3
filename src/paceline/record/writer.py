"""Writes a worker's events: one JSON object per line, as they happen.

A worker that is killed loses at most its last line. The kinds of events are `start` (a worker
begins, or resumes from a checkpoint), `step`, `evaluation`, `checkpoint`, `choice` (what `auto`
chose), `distance` (of a replica from the mean of all), `lost` (workers that died), `sample` (the
resources used so far), `aside` (time that was not training), `profile` (tables), `failed` (why a
loop of the user's own ended before its end) and `summary` (the counters, at the end).
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
from paceline.common.shortage import why_not_written
from paceline.errors import RunFailed


class Recorder:
    """Writes the events of one worker in one session of the run."""

    def __init__(self, path: Path, rank: int, session: int = 0) -> None:
        self.rank, self.session = rank, session
        self.spent_s = 0.0  # time spent writing
        self._lock = threading.Lock()  # the sampler's thread writes too
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torn = (
                path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
            )
            self._file: TextIO = path.open("a", buffering=1)
            if torn:  # do not append to the half-written line of a worker that was killed
                self._file.write("\n")
        except OSError as error:
            raise RunFailed(f"{path} cannot be written: {why_not_written(error)}") from None

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
        except ValueError:  # a nan or inf in it
            line = json.dumps(clean(event)) + "\n"
        with self._lock:
            try:
                self._file.write(line)
            except OSError as error:
                raise RunFailed(
                    f"the events cannot be written to {self._file.name}: {why_not_written(error)}"
                ) from None
            self.spent_s += time.perf_counter() - began

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `write` has reported a full disk
            self._file.close()


def clean(value: Any) -> Any:
    """Replace nan and inf by None, because JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    return value


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file of a run, whole or not at all."""
    write_text(path, json.dumps(clean(content), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file of a run or a report, whole or not at all; a failure is a `RunFailed`."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise RunFailed(f"{path} cannot be written: {why_not_written(error)}") from None
