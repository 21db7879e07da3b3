"""Reports a run to Ray Train: the numbers of worker 0's events, and its checkpoints.

Ray Train's `report` returns when all ranks have called it, so that all call it equally often. A
thread beside the training does that, and no step waits for it: rank 0 follows the events that
worker 0 writes and announces each report at the desk. A report holds what is new since the last
one, so that reports that Ray takes slowly are fewer, not late.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.callbacks.scalars import of_evaluation, of_record, of_step
from paceline.common.extras import need
from paceline.record.following import Tail

STORAGE = "ray"  # in the run's folder: what Ray Train keeps of the run
POLL_S = 0.5
END_S = 60.0  # for Ray to take the last report


class Reporter:
    """Follows a run for a `with` block; does nothing unless it is `wanted`."""

    def __init__(self, desk: Any, rank: int, store: str, events: Path, wanted: bool) -> None:
        self._desk, self._rank, self._wanted = desk, rank, wanted
        self._key = f"reports/{store}"
        self._tail = Tail(events)
        self._tail.skip()  # the events of earlier sessions
        self._numbers: dict[str, Any] = {}
        self._out = events.parent.parent
        self._newest: Path | None = None  # checkpoint
        self._fresh = False  # it was not reported
        self._new = False  # an evaluation or a checkpoint since the last report
        self._reported = 0
        self._over = threading.Event()
        self._record: dict[str, Any] | None = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)

    def __enter__(self) -> Reporter:
        if self._wanted:
            self._ray = need("ray", "ray[train]", "ray", "ray_train")
            self._train = need("ray.train", "ray[train]", "ray", "ray_train")
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()

    def finish(self, record: dict[str, Any] | None) -> None:
        """Make the last report, which has the numbers of the whole run."""
        if not self._wanted:
            return
        self._record = record
        self._over.set()
        self._thread.join(END_S)
        if self._failure is not None:
            raise self._failure

    # --- in the thread

    def _run(self) -> None:
        try:
            if self._rank == 0:
                self._lead()
            else:
                self._accompany()
        except Exception as error:
            self._failure = error

    def _lead(self) -> None:
        while not self._over.wait(POLL_S):
            self._look()
            if self._new:
                self._report()
        if self._record is not None:
            self._look()
            self._numbers |= of_record(self._record)
            self._report(self._last_of(self._record["result"]["steps"]))
        self._ray.get(self._desk.put.remote(f"{self._key}/all", self._reported))

    def _accompany(self) -> None:
        """Report nothing as often as rank 0 reports."""
        until = float("inf")
        while time.monotonic() < until:
            announced = self._ray.get(self._desk.get.remote(self._key)) or 0
            if self._reported < announced:
                self._train.report({})
                self._reported += 1
            elif self._ray.get(self._desk.get.remote(f"{self._key}/all")) == self._reported:
                return
            elif self._over.wait(POLL_S):
                until = min(until, time.monotonic() + END_S)
                time.sleep(0.05)

    def _look(self) -> None:
        """Take in what worker 0 has written since the last time."""
        if self._tail.replaced():  # a run that begins again has a new file
            self._tail = Tail(self._tail.path)
            self._tail.replaced()
        while self._tail.left_bytes:
            for event in self._tail.more():
                if event["kind"] == "step":
                    self._numbers |= {"step": event["step"], "epoch": event["epoch"]}
                    self._numbers |= of_step(event)
                elif event["kind"] == "evaluation":
                    self._numbers |= {"step": event["step"], **of_evaluation(event)}
                    self._new = True
                elif event["kind"] == "checkpoint":
                    self._newest, self._fresh, self._new = Path(event["path"]), True, True

    def _last_of(self, steps: int) -> list[Path]:
        """Return the files of the last report: Ray's result has the numbers of a checkpoint only.

        The checkpoint of the last step, or the final weights where there is none.
        """
        if self._newest is not None and self._newest.name == f"step-{steps:08d}":
            return _files(self._newest)
        return [self._out / "model.safetensors"]

    def _report(self, files: list[Path] | None = None) -> None:
        self._reported += 1
        self._ray.get(self._desk.put.remote(self._key, self._reported))
        if files is None:
            files = _files(self._newest) if self._fresh and self._newest is not None else []
        kept, self._fresh, self._new = self._snapshot(files), False, False
        if kept is None:
            self._train.report(dict(self._numbers))
            return
        checkpoint = self._train.Checkpoint.from_directory(str(kept))
        try:
            self._train.report(dict(self._numbers), checkpoint=checkpoint)
        finally:
            shutil.rmtree(kept, ignore_errors=True)

    def _snapshot(self, files: list[Path]) -> Path | None:
        """Link files into a folder of ours: the run may remove a checkpoint meanwhile."""
        if not files:
            return None
        folder = self._out / STORAGE  # on the same disk, as links need
        folder.mkdir(exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".reported-", dir=folder))
        with suppress(OSError):
            for file in files:
                os.link(file, aside / file.name)
            return aside
        shutil.rmtree(aside, ignore_errors=True)
        return None


def _files(folder: Path) -> list[Path]:
    """Return the files in a folder; none if it has been removed."""
    with suppress(OSError):
        return list(folder.iterdir())
    return []
