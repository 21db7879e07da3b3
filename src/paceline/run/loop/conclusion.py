"""The files of a run that rank 0 writes for a loop of the user's own: config.json, run.json, ..."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.common.files import write_whole
from paceline.common.sharing import Sharing
from paceline.errors import PacelineError, RunFailed, TransportError
from paceline.record import reserve
from paceline.record.machine import environment
from paceline.record.reader import Event, read_worker_events, summarise
from paceline.record.trace import write_trace
from paceline.record.writer import clean, write_json
from paceline.request.config import Config
from paceline.run.loop.talk import say
from paceline.transport.base import Transport
from paceline.transport.status.picture import last_picture

if TYPE_CHECKING:
    from paceline.run.loop.pair import Pair

EVENTS_TAG = 98


class Terminated(SystemExit):
    """A signal has asked this process to end. The exit code is that of a shell."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number).name


@dataclass(frozen=True)
class Failure:
    """Why a loop has ended before `finish`."""

    status: str  # failed, or interrupted by a signal
    text: str
    follows: bool = False  # the end of another rank may be the cause

    @classmethod
    def of(cls, error: BaseException | None) -> Failure:
        """Describe what ended the script."""
        if isinstance(error, Terminated):
            return cls("interrupted", f"interrupted by {error.signal}", follows=True)
        if isinstance(error, KeyboardInterrupt):
            return cls("interrupted", str(error) or "interrupted")
        if isinstance(error, SystemExit):
            return cls("failed", f"the script ended by sys.exit({error.code!r})")
        if error is None:
            return cls("failed", "the record could not be completed at the end of the script")
        ours = isinstance(error, PacelineError)
        text = str(error) if ours else f"{type(error).__name__}: {error}"
        return cls("failed", text, isinstance(error, TransportError))

    def fields(self) -> dict[str, Any]:
        return {"status": self.status, "error": self.text, "follows": self.follows}


def cause(
    events: list[list[Event]], own: Failure | None, rank: int, session: int
) -> Failure | None:
    """Return the failure that caused the others: the first that does not follow from another."""
    told = [e for own in events for e in own if e["kind"] == "failed" and e["session"] == session]
    first = min((e for e in told if not e["follows"]), key=lambda e: float(e["t"]), default=None)
    if first is None or (own is not None and not own.follows):
        return own
    said = first["error"] if first["rank"] == rank else f"rank {first['rank']}: {first['error']}"
    return Failure(first["status"], said)


class Conclusion:
    """The config and the record of one run, in its folder.

    `known`: the options of `join`. What only `train` has is null in the config. `engine`: what is
    known of the job that runs the script, for the record's `environment`.
    """

    def __init__(
        self,
        out: Path,
        known: dict[str, Any],
        command: str,
        rank: int = 0,
        engine: dict[str, Any] | None = None,
    ) -> None:
        self.out, self.command, self.rank, self.engine = out, command, rank, engine or {}
        self.started = time.perf_counter()
        self.begun = False
        threads = torch.get_num_threads()
        workers, servers = int(known.get("workers") or 1), int(known.get("servers") or 0)
        sharing = known.pop("sharing", None) or Sharing.here(workers + servers)
        self.config: dict[str, Any] = {
            **dict.fromkeys(Config.options()),
            **known,
            "out": str(out),
            "threads": threads,
            "batch_sizes": None,
            "oversubscribed": not sharing.with_threads(threads).fits(workers),
            "own_loop": True,
        }

    def know(self, pair: Pair) -> None:
        """Note the first model, its optimizer and its data, and write config.json."""
        optimizer, batches = pair.optimizer, pair.batches
        size = batches.batch_size if batches is not None else None
        self.config |= {
            "model": type(pair.replica.model).__name__,
            "data": _named(batches.dataset if batches is not None else None),
            "optimizer": type(optimizer).__name__,
            "lr": optimizer.param_groups[0].get("lr"),
            "device": str(next(pair.replica.model.parameters()).device),
            "batch_size": size,
            "batch_sizes": None if size is None else [size] * self.config["workers"],
        }
        reserve.take(self.out)
        self._save_config()

    def _save_config(self) -> None:
        write_json(self.out / "config.json", self.config)

    def begin(self) -> None:
        """Steps begin: a record of an earlier session no longer holds."""
        if not self.begun:
            self.begun = True
            self._save_config()
            (self.out / "run.json").unlink(missing_ok=True)

    def take_over(self) -> None:
        """Write the record for rank 0, which has ended without one."""
        self.config, self.begun = json.loads((self.out / "config.json").read_text()), True
        self.conclude(Failure("failed", "rank 0 has ended without a record: it was killed", True))

    def conclude(self, failure: Failure | None) -> None:
        """Write run.json and trace.json."""
        # A loop that was to go on in this folder and failed before its first step
        # leaves the record as it was.
        if failure is not None and not self.begun and (self.out / "run.json").is_file():
            return
        events = read_worker_events(self.out)
        session = max((e["session"] for own in events for e in own), default=0)
        status, error = "completed", None
        failure = cause(events, failure, self.rank, session)
        if failure is not None:
            status, error = failure.status, failure.text
        about = {**environment(), **self.engine, "command": self.command}
        wall_s = time.perf_counter() - self.started
        reserve.release(self.out)
        record = summarise(events, self.config, about, status, error, wall_s)
        if last := last_picture(self.out, keep=failure is not None):
            record["last"] = last
        write_json(self.out / "run.json", clean(record))
        try:
            write_trace(events, self.out / "trace.json")
        except RunFailed as error_of_trace:  # a missing timeline does not make a run fail
            say(str(error_of_trace))


def _named(data: Any) -> str:
    """A name for the user's data."""
    if data is None:
        return "batches of its own"
    if isinstance(data, (tuple, list)):
        return "tensors"
    return str(getattr(data, "name", None) or getattr(data, "__name__", type(data).__name__))


def collect(line: Transport, path_of: Callable[[int], Path]) -> None:
    """Bring all ranks' files of events to rank 0. All ranks call it when theirs are complete.

    Ranks on hosts that share no folder with rank 0 send theirs. A rank that has ended meanwhile is
    left out.
    """
    with suppress(TransportError):
        if line.rank != 0:
            _hand_over(line, path_of(line.rank))
            return
        for rank in range(1, line.size):
            _take(line, rank, path_of(rank))


def _hand_over(line: Transport, path: Path) -> None:
    content = path.read_bytes()
    line.send(torch.tensor([len(content)]), 0, EVENTS_TAG)
    wanted = torch.zeros(1, dtype=torch.int64)
    line.recv(wanted, 0, EVENTS_TAG)
    if int(wanted):
        line.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), 0, EVENTS_TAG)


def _take(line: Transport, rank: int, path: Path) -> None:
    length = torch.zeros(1, dtype=torch.int64)
    line.recv(length, rank, EVENTS_TAG)
    there = path.is_file() and path.stat().st_size >= int(length)
    line.send(torch.tensor([int(not there)]), rank, EVENTS_TAG)
    if not there:
        content: Tensor = torch.zeros(int(length), dtype=torch.uint8)
        line.recv(content, rank, EVENTS_TAG)
        write_whole(path, content.numpy().tobytes())
