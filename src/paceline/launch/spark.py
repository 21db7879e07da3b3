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
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.common.parents import die_with_parent
from paceline.errors import BadRequest, Interrupted, PacelineError, RunFailed, TransportError
from paceline.launch.addresses import is_loopback
from paceline.launch.driver import conclude, content, keep, stopped, with_traceback
from paceline.launch.failures import as_failure
from paceline.launch.run import Listen
from paceline.launch.seat import find as find_seat
from paceline.launch.seat import refuse_inside_a_launcher
from paceline.launch.secret import SECRET
from paceline.launch.signals import Ending, ending, relaying
from paceline.launch.spark_desk import END_S, LOOK_S, Address, AtDesk, Desk, finished
from paceline.record import checkpoint
from paceline.request.job import Job
from paceline.spark.causes import ExecutorLost, cause_of_executors, translated, with_cause
from paceline.spark.session import Session
from paceline.transport.board.wire import TCP

# What each rank does with the options; rank 0 returns the record.
Rank = Callable[[dict[str, Any]], dict[str, Any] | None]
Say = Callable[[str], None]

ATTEMPTS = 4
# Log lines of torch that do not concern the user.
NOISE = re.compile(r"[WI]\d{4} |\*{5}|\[Gloo\]|\[rank\d+\]:|Setting OMP_NUM_THREADS")
# The first line of what torchrun says about a rank that has failed. The driver says it shorter.
AT_THE_END = re.compile(r"E\d{4} .*torch/distributed/elastic")
MARK = "paceline rank "  # before the token with which a rank shows that it is one
MOST_BYTES = 1 << 20  # of one message: pyspark's are shorter
TAIL_LINES = 400  # kept of what each rank prints
LAST_LINES_S = 1.0  # for the last lines to arrive after a failure
CORES_S = 30.0  # for the executors to register
LEAVE_S = 60.0  # for the ranks to leave with a checkpoint after a SIGTERM
GRACE_S = 3.0  # for the ranks of a failed attempt to end: they notice within a second
SETTINGS = {
    "spark.task.maxFailures": "1",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "5s",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "6",
}


def run_on_spark(rank: Rank, job: Job, listen: Listen) -> dict[str, Any]:
    """Run all ranks on the cluster and return the record.

    The job's options hold for every rank; relative paths in them start at this process's folder.
    Writes run.json in every case, as far as the run has begun and its folder is seen here.
    """
    refuse_inside_a_launcher(find_seat())
    folder = job.out.resolve()
    before = content(folder / "run.json")

    def say(line: str) -> None:
        listen("line", {"text": line})

    with ending() as end:
        try:
            with Session(str(job.config.master), "paceline train", SETTINGS) as session:
                record = _attempts(session, rank, job, folder, say, end)
        except (KeyboardInterrupt, PacelineError) as error:
            end.settling = True
            failure = error if isinstance(error, PacelineError | Interrupted) else stopped(end)
            conclude(job, folder, listen, failure, before)
            raise failure from None
        keep(record, folder)
    return record


def _attempts(
    session: Session, rank: Rank, job: Job, folder: Path, say: Say, end: Ending
) -> dict[str, Any]:
    """Start the ranks, again after a loss, until they complete the run. Returns the record."""
    own = {**job.asked, "out": str(folder)}
    for attempt in range(1, ATTEMPTS + 1):
        _enough_cores(session, job.ranks)
        try:
            return {**_attempt(session, rank, own, job.ranks, say, end), "attempts": attempt}
        except ExecutorLost as failure:
            if attempt == ATTEMPTS:
                raise
            time.sleep(GRACE_S)
            own = {**own, **_again(folder, failure, say)}
    raise AssertionError


def _attempt(
    session: Session, rank: Rank, options: dict[str, Any], ranks: int, say: Say, end: Ending
) -> dict[str, Any]:
    from pyspark.ml.torch.distributor import TorchDistributor

    printed = LastLines(secrets.token_hex(16))
    with _listening(say, printed), Desk(session.driver_host, say) as desk:
        distributor = TorchDistributor(num_processes=ranks, local_mode=False, use_gpu=False)
        logging.getLogger("TorchDistributor").setLevel(logging.WARNING)
        # Both secrets go to the ranks on Spark's authenticated channel.
        secret = secrets.token_hex(32)
        parts = (os.getcwd(), rank, options, printed.token, secret, desk.address)
        stage = _Stage(lambda: distributor.run(in_folder, *parts))
        stage.start()
        try:
            with relaying(desk.ask):
                _wait(stage, desk, end)
        except KeyboardInterrupt:
            printed.muted = True  # torchrun tells at length of ranks that were ended
            _stop(session, stage, desk)
            raise
        finally:
            end.cannot_leave()
        if (left := desk.left()) is not None:
            raise left
        failures = desk.failures(ranks)
    if stage.error is not None:
        raise _reason(stage.error, session, printed, failures) from None
    if stage.record is None:
        raise RunFailed("the ranks ended without a record")
    return dict(stage.record)


class _Stage(threading.Thread):
    """The call that runs the barrier stage, while the main thread hears signals."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(name="spark-stage", daemon=True)
        self._call = call
        self.over = threading.Event()
        self.record: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.record = self._call()
        except Exception as error:
            self.error = error
        finally:
            self.over.set()


def _wait(stage: _Stage, desk: Desk, end: Ending) -> None:
    """Wait for the end of the stage. From the moment that a rank has begun, it can be left."""
    told = False
    while not finished(stage.over, desk, LOOK_S):
        if not told and desk.begun():
            told = True
            end.can_leave(LEAVE_S)


def _stop(session: Session, stage: _Stage, desk: Desk) -> None:
    """After a signal, end the ranks; Spark ends those that do not hear it."""
    with suppress(TransportError):
        if desk.begun():
            desk.stop()
            if finished(stage.over, desk, END_S):
                return
    with suppress(Exception):
        session.spark.sparkContext.cancelAllJobs()
    finished(stage.over, desk, END_S)


class LastLines:
    """The last lines that each rank printed: pyspark's error only says that a rank failed.

    Any program that reaches the driver's port can send lines. A rank prints the token of this
    attempt first.
    """

    def __init__(self, token: str = "") -> None:
        self.token = token
        self.muted = False  # nothing is shown any more
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
        ending = any(map(AT_THE_END.match, tail)) or AT_THE_END.match(text)
        tail.extend(text.splitlines())
        return bool(text.strip()) and not (self.muted or ending or NOISE.match(text))

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


def _reason(
    error: Exception, session: Session, printed: LastLines, failures: dict[int, PacelineError]
) -> PacelineError:
    """Return why an attempt failed. Only what ranks say can be a reason to try again."""
    own = {r: f for r, f in failures.items() if not isinstance(f, TransportError)}
    # After the loss of an executor other ranks may have errors that only follow from it.
    if own and "ExecutorLostFailure" not in str(
        error
    ):  # rank 0 knows the cause of all; else the lowest rank that knows one
        return with_traceback(own[min(own)])
    said, lines = session.said(), printed.text()
    if lines or failures:
        lines += "".join(f"\npaceline.errors.PeerLost: {one}" for one in failures.values())
        return with_cause(translated(error, said, lines), session)
    failure = translated(error, said, printed.text(strangers=True))
    if isinstance(failure, ExecutorLost) and not isinstance(translated(error, said), ExecutorLost):
        return RunFailed(str(failure))
    return with_cause(failure, session)


def in_folder(
    folder: str, rank: Rank, options: dict[str, Any], token: str, secret: str, desk: Address
) -> Any:
    """Run a rank in the driver's working folder, if this host has such a folder."""
    die_with_parent(os.getppid())  # Spark kills the process that started this one
    os.environ[SECRET] = secret
    _stay_on_loopback(desk)
    print(f"{MARK}{token}", flush=True)
    with suppress(OSError):
        os.chdir(folder)
    number = int(os.environ.get("RANK", "0"))
    with AtDesk(desk, number) as at_desk:
        try:
            return rank(options)
        except KeyboardInterrupt as stop:
            if not at_desk.left(stop):
                raise
            return None
        except Exception as error:
            if not at_desk.failed(as_failure(number, error)):
                raise
            sys.exit(1)  # the driver says it: here is no reader of a traceback


def _stay_on_loopback(desk: Address) -> None:
    """Meet the other ranks on loopback if the driver is there: then all are on its machine.

    torchrun names the machine by its host name. Where that is loopback, too, other hosts might know
    it as another address, and rank 0 would listen on all.
    """
    host, _, _ = desk.address.removeprefix(TCP).rpartition(":")
    if is_loopback(host):
        os.environ["MASTER_ADDR"] = host


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
    while True:
        try:
            cores = context.defaultParallelism
        except Exception as error:  # Spark has given the application up
            raise with_cause(translated(error, session.said()), session) from None
        if cores >= ranks:
            return
        if time.monotonic() > until:
            break
        time.sleep(0.2)
    few = f"{ranks} ranks, but the Spark cluster at {session.master} has {cores} free core(s)"
    if (cause := cause_of_executors(session)) is not None:
        raise RunFailed(f"{few}, because an executor failed: {cause}")
    raise BadRequest(f"{few}: use fewer workers")


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
