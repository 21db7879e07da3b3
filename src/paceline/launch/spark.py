"""Ranks as tasks of a Spark cluster, started together (barrier mode) by pyspark's TorchDistributor.

Each task starts torchrun with one process, which finds its seat as under any torchrun. Spark does
not repeat a barrier stage that has lost an executor. The driver does: it starts the ranks again,
and they continue from the last checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
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

from paceline.errors import BadRequest, PacelineError, RunFailed
from paceline.launch.seat import find as find_seat
from paceline.launch.seat import refuse_inside_a_launcher
from paceline.launch.secret import SECRET
from paceline.record import checkpoint
from paceline.record.writer import write_json
from paceline.spark.session import ExecutorLost, Session, translated

# What each rank does with the options; rank 0 returns the record.
Rank = Callable[[dict[str, Any]], dict[str, Any] | None]
Say = Callable[[str], None]

ATTEMPTS = 4
# Log lines of torch that do not concern the user.
NOISE = re.compile(r"[WI]\d{4} |\*{5}|\[Gloo\]|\[rank\d+\]:|Setting OMP_NUM_THREADS")
MARK = "paceline rank "  # before the token with which a rank shows that it is one
MOST_BYTES = 1 << 20  # of one message: pyspark's are shorter
TAIL_LINES = 400  # kept of what each rank prints
LAST_LINES_S = 1.0  # for the last lines to arrive after a failure
CORES_S = 30.0  # for the executors to register
GRACE_S = 3.0  # for the ranks of a failed attempt to end: they notice within a second
SETTINGS = {
    "spark.task.maxFailures": "1",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "5s",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "6",
}


def run_on_spark(
    rank: Rank, options: Mapping[str, Any], master: str, ranks: int, out: Path, say: Say
) -> dict[str, Any]:
    """Run all ranks on the cluster and return the record.

    `options` hold for every rank; relative paths in them start at this process's folder.
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
    """Write the record on the driver, whose disk may not be the ranks'."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFailed(
            f"the run is complete, but its folder {folder} cannot be made here: {error.strerror}"
        ) from None
    write_json(folder / "run.json", record)


def _attempt(
    session: Session, rank: Rank, options: dict[str, Any], ranks: int, say: Say
) -> dict[str, Any]:
    from pyspark.ml.torch.distributor import TorchDistributor

    logging.getLogger("TorchDistributor").setLevel(logging.WARNING)
    printed = LastLines(secrets.token_hex(16))
    with _listening(say, printed):
        try:
            distributor = TorchDistributor(num_processes=ranks, local_mode=False, use_gpu=False)
            secret = secrets.token_hex(32)  # goes to the ranks on Spark's authenticated channel
            record = distributor.run(in_folder, os.getcwd(), rank, options, printed.token, secret)
        except Exception as error:
            raise _reason(error, session.said(), printed) from None
    if record is None:
        raise RunFailed("the ranks ended without a record")
    return dict(record)


class LastLines:
    """The last lines that each rank printed: pyspark's error only says that a rank failed.

    Any program that reaches the driver's port can send lines. A rank prints the token of this
    attempt first.
    """

    def __init__(self, token: str = "") -> None:
        self.token = token
        self._tails: list[deque[str]] = []
        self._ranks: set[int] = set()  # the tails of ranks, by index
        self._connected = 0
        self._changed = threading.Condition()

    @contextmanager
    def of_one_rank(self) -> Iterator[deque[str]]:
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        with self._changed:
            self._tails.append(tail)
            self._connected += 1
        try:
            yield tail
        finally:
            with self._changed:
                self._connected -= 1
                self._changed.notify_all()

    def add(self, tail: deque[str], text: str) -> bool:
        """Keep the lines of one message. Returns whether the user should see it."""
        if self.token and f"{MARK}{self.token}" in text:
            with self._changed:
                self._ranks.add(next(i for i, t in enumerate(self._tails) if t is tail))
            return False
        tail.extend(text.splitlines())
        return bool(text.strip()) and not NOISE.match(text)

    def text(self, strangers: bool = False) -> str:
        """Return the lines of all ranks, or of all connections, once these are closed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._connected, LAST_LINES_S)
            return "\n".join(
                line
                for index, tail in enumerate(self._tails)
                if strangers or index in self._ranks
                for line in tuple(tail)
            )


def _reason(error: Exception, said: str, printed: LastLines) -> PacelineError:
    """Return why an attempt failed. Only lines of ranks can be a reason to try again."""
    own = printed.text()
    if own:
        return translated(error, said, own)
    failure = translated(error, said, printed.text(strangers=True))
    if isinstance(failure, ExecutorLost) and not isinstance(translated(error, said), ExecutorLost):
        return RunFailed(str(failure))
    return failure


def in_folder(folder: str, rank: Rank, options: dict[str, Any], token: str, secret: str) -> Any:
    """Run a rank in the driver's working folder, if this host has such a folder."""
    os.environ[SECRET] = secret
    print(f"{MARK}{token}", flush=True)
    with suppress(OSError):
        os.chdir(folder)
    return rank(options)


def shown(text: str) -> str:
    """Return the text without characters that would control the terminal."""
    return "".join(c if c.isprintable() or c in "\t\n" else "\ufffd" for c in text.rstrip())


def _again(folder: Path, failure: ExecutorLost, say: Say) -> dict[str, Any]:
    """Return the options that change for the next attempt."""
    try:
        found, _ = checkpoint.latest(folder)
    except BadRequest:
        if (folder / "privacy").exists():
            raise failure from None  # another attempt would spend privacy again: the user decides
        say(f"{failure}; there was no checkpoint yet, so it begins again")
        shutil.rmtree(folder / "events", ignore_errors=True)
        return {}
    say(f"{failure}; going on from {found.name}")
    return {"resume": str(folder)}


def _enough_cores(session: Session, ranks: int) -> None:
    """Refuse more ranks than the cluster has cores: a barrier stage needs all its tasks at once.

    Spark itself would wait for minutes before it fails.
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
def _listening(say: Say, printed: LastLines) -> Iterator[None]:
    """Pass what ranks print to `say`, line by line.

    Replaces pyspark's own server for these lines, which listens on all interfaces.
    """
    from pyspark.ml.torch import distributor

    class Lines(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError, struct.error), printed.of_one_rank() as tail:
                while head := self.rfile.read(4):
                    (length,) = struct.unpack("!i", head)
                    if not 0 <= length <= MOST_BYTES:
                        return  # no line of pyspark's
                    text = self.rfile.read(length).decode("utf-8", "replace")
                    if printed.add(tail, text):
                        say(shown(text))

    class Server:
        """Stands in for pyspark's LogStreamingServer."""

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
