"""Ranks as tasks of a Spark cluster, all at once (barrier mode), by pyspark's TorchDistributor; the
run outlives them.

Each task starts torchrun with one process, which finds its seat as under any torchrun. Spark does
not repeat a barrier stage that has lost an executor, so the driver does: it starts the ranks again,
and they go on from the last checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import socketserver
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest, RunFailed
from paceline.launch.joined import refuse_inside_a_launcher
from paceline.launch.seat import find as find_seat
from paceline.record import checkpoint
from paceline.record.writer import write_json
from paceline.spark.session import ExecutorLost, Session, translated

# what each rank does with the options; rank 0 gives the record
Rank = Callable[[dict[str, Any]], dict[str, Any] | None]
Say = Callable[[str], None]

ATTEMPTS = 4
# of torch, which is not a person's concern
NOISE = re.compile(r"[WI]\d{4} |\*{5}|\[Gloo\]|\[rank\d+\]:|Setting OMP_NUM_THREADS")
TAIL_LINES = 400  # of each rank: its last words
LAST_WORDS_S = 1.0  # for them to come
CORES_S = 30.0  # for the executors to come
GRACE_S = 3.0  # for the ranks of a lost attempt to be gone: they notice within a second
SETTINGS = {
    "spark.task.maxFailures": "1",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "5s",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "6",
}


def run_on_spark(
    rank: Rank, options: Mapping[str, Any], master: str, ranks: int, out: Path, say: Say
) -> dict[str, Any]:
    """The record of the run. `options` hold for every rank; files in them are looked for from this
    process's folder.
    """
    refuse_inside_a_launcher(find_seat())
    folder = out.resolve()
    own = {**options, "out": str(folder)}
    with Session(master, "paceline train", SETTINGS) as session:
        _enough_cores(session, ranks)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                record = _attempt(session, rank, own, ranks, say)
                break
            except KeyboardInterrupt:
                session.spark.sparkContext.cancelAllJobs()
                raise
            except ExecutorLost as failure:
                if attempt == ATTEMPTS:
                    raise
                time.sleep(GRACE_S)
                own = {**own, **_again(folder, failure, say)}
            _enough_cores(session, ranks)
    record["attempts"] = attempt
    _keep(record, folder)
    return record


def _keep(record: dict[str, Any], folder: Path) -> None:
    """Also where the ranks' folder is not this one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFailed(
            f"the run is complete, but {folder} cannot be made here: {error.strerror}"
        ) from None
    write_json(folder / "run.json", record)


def _attempt(
    session: Session, rank: Rank, options: dict[str, Any], ranks: int, say: Say
) -> dict[str, Any]:
    from pyspark.ml.torch.distributor import TorchDistributor

    logging.getLogger("TorchDistributor").setLevel(logging.WARNING)
    heard = Heard()
    with _listening(say, heard):
        try:
            distributor = TorchDistributor(num_processes=ranks, local_mode=False, use_gpu=False)
            record = distributor.run(in_folder, os.getcwd(), rank, options)
        except Exception as error:
            raise translated(error, session.said(), heard.text()) from None
    if record is None:
        raise RunFailed("the ranks ended without a record")
    return dict(record)


class Heard:
    """The last words of each rank. pyspark's error says only that one failed."""

    def __init__(self) -> None:
        self._tails: list[deque[str]] = []
        self._speaking = 0
        self._changed = threading.Condition()

    @contextmanager
    def one(self) -> Iterator[deque[str]]:
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        with self._changed:
            self._tails.append(tail)
            self._speaking += 1
        try:
            yield tail
        finally:
            with self._changed:
                self._speaking -= 1
                self._changed.notify_all()

    def text(self) -> str:
        with self._changed:
            self._changed.wait_for(lambda: not self._speaking, LAST_WORDS_S)
            return "\n".join(line for tail in self._tails for line in tuple(tail))


def in_folder(folder: str, rank: Rank, options: dict[str, Any]) -> dict[str, Any] | None:
    """A rank's process: where the driver was, if there is such a folder on this host."""
    with suppress(OSError):
        os.chdir(folder)
    return rank(options)


def _again(folder: Path, failure: ExecutorLost, say: Say) -> dict[str, Any]:
    """What changes for the next attempt."""
    try:
        found = checkpoint.latest(folder)
    except BadRequest:
        if (folder / "privacy").exists():
            raise failure from None  # what was spent stays spent: a person decides
        say(f"{failure}; there was no checkpoint yet, so it begins again")
        shutil.rmtree(folder / "events", ignore_errors=True)
        return {}
    say(f"{failure}; going on from {found.name}")
    return {"resume": str(folder)}


def _enough_cores(session: Session, ranks: int) -> None:
    """A barrier stage needs all its tasks at once; Spark alone would wait for minutes before it
    says so.
    """
    context = session.spark.sparkContext
    until = time.monotonic() + CORES_S
    while (cores := context.defaultParallelism) < ranks:
        if time.monotonic() > until:
            raise BadRequest(
                f"{ranks} ranks, but the Spark cluster at {session.master} has {cores} free"
                " core(s): use fewer workers"
            )
        time.sleep(0.2)


@contextmanager
def _listening(say: Say, heard: Heard) -> Iterator[None]:
    """What ranks print comes to `say`, line by line. pyspark's own server for it would listen on
    all interfaces.
    """
    from pyspark.ml.torch import distributor

    class Lines(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError, struct.error), heard.one() as tail:
                while head := self.rfile.read(4):
                    text = self.rfile.read(struct.unpack("!i", head)[0]).decode("utf-8", "replace")
                    tail.extend(text.splitlines())
                    if text.strip() and not NOISE.match(text):
                        say(text.rstrip())

    class Server:
        """In the place of pyspark's LogStreamingServer."""

        port: int | None = None

        def start(self, spark_host_address: str = "") -> None:
            self.server = socketserver.ThreadingTCPServer((spark_host_address, 0), Lines)
            self.server.daemon_threads = True
            self.port = self.server.server_address[1]
            threading.Thread(
                target=self.server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
            ).start()

        def shutdown(self) -> None:
            self.server.shutdown()
            self.server.server_close()

    theirs = vars(distributor)["LogStreamingServer"]
    vars(distributor)["LogStreamingServer"] = Server
    try:
        yield
    finally:
        vars(distributor)["LogStreamingServer"] = theirs
