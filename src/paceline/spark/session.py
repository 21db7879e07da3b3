"""A driver's session with Spark: its start without log output, its end, and its error messages."""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from paceline import errors
from paceline.errors import BadRequest, PacelineError, RunFailed
from paceline.spark.java import find_java, pyspark_missing, spark_environment
from paceline.spark.master import check_master, conf_of

SUBMIT = re.compile(r"org\.apache\.spark\.deploy\.SparkSubmit|bin/spark-submit")
WATCH_S = 0.2
LEFT = "All masters are unresponsive|Disconnected from Spark cluster"
TROUBLE = re.compile(f"Exception while bootstrapping client|Failed to connect to master|{LEFT}")
TROUBLE_OF_SEVERAL = re.compile(LEFT)  # one of several masters may be down or on standby
GONE = re.compile(r"Disconnected from Spark cluster|Application has been killed")
HOW = (
    "Put the master's secret into spark-defaults.conf of your SPARK_CONF_DIR (`paceline cluster"
    " up` does that by itself)"
)
REASONS = {  # what Spark's log contains, and what it means
    "bootstrapping client": (
        f"refuses this driver: their secrets differ (spark.authenticate.secret). {HOW}"
    ),
    "Authentication failed": (
        f"refuses this driver: their secrets differ (spark.authenticate.secret). {HOW}"
    ),
    "Unknown challenge": (
        f"requires a secret (spark.authenticate), and this driver has none. {HOW}"
    ),
    "A secret key must be specified": (
        f"needs spark.authenticate.secret beside spark.authenticate. {HOW}"
    ),
    "UnknownHostException": "is on a host whose name cannot be resolved",
    "Connection refused": (
        "does not answer: Connection refused. Is it up? (paceline cluster status)"
    ),
}
KILLED = re.compile(r"return code -9\b|exitcode\s*: -9\b|Signal 9 \(SIGKILL\)")
TOLD = re.compile(r"paceline\.errors\.(\w+): (.+)")
RAISED = re.compile(
    r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(?=([A-Za-z_][\w.]*(?:: .*)?)$)",
    re.MULTILINE,
)
WRAPPERS = re.compile(
    r"torch\.distributed\.elastic\.|RuntimeError: (?:Command \[.* failed|TorchDistributor failed)"
)
COMMON = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.executorEnv.OMP_NUM_THREADS": "1",
}


class ExecutorLost(RunFailed):
    """An executor or a rank's process was lost, not through an error of its own: try again."""


class Session:
    """Start a Spark session for a `with` block, or use the one that the program already has.

    A session of the program is left running, with its settings restored.
    """

    def __init__(self, master: str, name: str, settings: Mapping[str, str] | None = None) -> None:
        self.master, self.name, self.settings = master, name, dict(settings or {})
        self.spark: Any = None
        self._theirs = False
        self._before: dict[str, str | None] = {}  # changed settings of the program's session
        self._log: Path | None = None
        self._over = threading.Event()

    def __enter__(self) -> Session:
        if (reason := pyspark_missing()) is not None:
            raise BadRequest(reason)
        from pyspark.sql import SparkSession

        logging.getLogger().addFilter(_is_no_echo)
        active = SparkSession.getActiveSession()
        if active is not None:
            if (other := active.sparkContext.master) != self.master:
                raise BadRequest(
                    f"master={self.master}, but this program already has a Spark session with"
                    f" {other}: use that master, or stop the session"
                )
            self._theirs, self.spark = True, active
            for key, value in self.settings.items():
                with suppress(Exception):  # some are fixed once a session runs
                    before = active.conf.get(key, None)
                    active.conf.set(key, value)
                    self._before[key] = before
            return self
        check_master(self.master)
        find_java()
        conf_dir = conf_of(self.master)
        local = self.master.startswith("local") or "127.0.0.1" in self.master
        builder = SparkSession.builder.master(self.master).appName(self.name)
        for key, value in {**COMMON, **self.settings}.items():
            builder = builder.config(key, value)
        if local:
            builder = builder.config("spark.driver.host", "127.0.0.1").config(
                "spark.driver.bindAddress", "127.0.0.1"
            )
        handle, name = tempfile.mkstemp(prefix="paceline-spark-", suffix=".log")
        self._log = Path(name)
        environment = spark_environment(conf_dir, "127.0.0.1" if local else None)
        try:
            with _set(environment), _errors_into(handle):
                threading.Thread(target=self._watch, daemon=True).start()
                self.spark = builder.getOrCreate()
        except BaseException as error:
            said = self.said()
            self.end()
            if not isinstance(error, Exception):
                raise
            raise _not_started(self.master, error, said) from None
        finally:
            os.close(handle)
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def end(self) -> None:
        """End the session, its JVM and its log; in a program's own session, restore settings."""
        self._over.set()
        if self._theirs:
            for key, value in self._before.items():
                with suppress(Exception):
                    if value is None:
                        self.spark.conf.unset(key)
                    else:
                        self.spark.conf.set(key, value)
            self._before.clear()
        else:
            with suppress(Exception):
                if self.spark is not None:
                    self.spark.stop()
            _end_jvm()
            if self._log is not None:
                with suppress(OSError):
                    self._log.unlink()
        self.spark = None

    def _watch(self) -> None:
        """Kill the JVM when Spark's log says that the master refuses or is gone.

        Spark itself retries for a minute, or for ever.
        """
        from pyspark import SparkContext

        trouble, seen = TROUBLE_OF_SEVERAL if "," in self.master else TROUBLE, 0
        while not self._over.wait(WATCH_S):
            lines, seen = self.said_since(seen)
            if trouble.search(lines):
                self._over.wait(0.5)  # until Spark has written the reason, too
                gateway = SparkContext._gateway
                process = getattr(gateway, "proc", None)
                if process is not None and not self._over.is_set():
                    process.kill()  # a pending call into the JVM then raises
                return

    def said(self) -> str:
        """Return what Spark has written to its standard error."""
        with suppress(OSError):
            return self._log.read_text(errors="replace") if self._log is not None else ""
        return ""

    def said_since(self, offset: int) -> tuple[str, int]:
        """Return the whole lines of Spark's log from this byte on, and the byte after them."""
        with suppress(OSError):
            if self._log is not None and self._log.stat().st_size > offset:
                with self._log.open("rb") as log:
                    log.seek(offset)
                    new = log.read()
                lines = new[: new.rfind(b"\n") + 1]
                return lines.decode(errors="replace"), offset + len(lines)
        return "", offset

    def progress(self) -> str:
        """Return, say, `3 of 8 tasks` while a job runs, else an empty text."""
        with suppress(Exception):
            tracker = self.spark.sparkContext.statusTracker()
            stages = [tracker.getStageInfo(s) for s in tracker.getActiveStageIds()]
            done, total = (
                sum(getattr(s, n) for s in stages if s) for n in ("numCompletedTasks", "numTasks")
            )
            return f"{done} of {total} tasks" if total else ""
        return ""


def _is_no_echo(record: logging.LogRecord) -> bool:
    """Drop the traceback that py4j logs of what it raises: a signal while it waits for the JVM."""
    return record.msg != "Exception while sending command."


@contextmanager
def as_sentence(session: Session) -> Iterator[None]:
    """Raise the errors of executors as errors of Paceline, with the executor's own message."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        raise translated(error, session.said()) from None


def translated(error: Exception, said: str = "", printed: str = "") -> PacelineError:
    """Return an error of Paceline for one of Spark.

    `said` is Spark's log. `printed` is the output of the tasks, where it is not in the error.
    """
    text = str(error)
    if GONE.search(said):
        return RunFailed("the Spark cluster is gone: its master no longer answers")
    executor = re.search(r"ExecutorLostFailure[^\n]*", text)
    # After an executor is lost, the other ranks may print errors that only follow from that.
    own = _told(text) or (None if executor else _told(printed))
    if own is not None:
        return own
    if "No space left on device" in text:
        return RunFailed("Spark's disk is full: No space left on device")
    if executor is not None:
        return ExecutorLost(f"Spark lost an executor: {executor[0][:200]}")
    both = f"{text}\n{printed}"
    if KILLED.search(both):
        return ExecutorLost(
            "Spark lost a rank: its process was killed by SIGKILL (out of memory, perhaps)"
        )
    if (lost := TOLD.search(both)) is not None:
        return ExecutorLost(f"Spark lost a rank: {lost[2].strip()}")
    raised = _raised(text) or _raised(printed)
    if raised is not None:
        return RunFailed(f"a task of Spark failed: {raised[:300]}")
    lines = [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not line.strip().startswith("at ")
    ]
    reason = next(
        (line for line in lines if "Exception" in line or "Error" in line),
        lines[0] if lines else type(error).__name__,
    )
    return RunFailed(f"Spark failed: {reason[:300]}")


def _told(text: str) -> PacelineError | None:
    """Return the first error of Paceline in the text, but not that a rank lost a peer.

    That one only follows from the error of the peer.
    """
    for name, words in TOLD.findall(text):
        if name not in ("PeerLost", "TransportError"):
            kind: type = getattr(errors, name, RunFailed)
            # The nearest class that takes one message.
            plain = [
                k
                for k in kind.__mro__
                if issubclass(k, PacelineError) and "__init__" not in vars(k)
            ]
            return next(iter(plain), RunFailed)(words.strip())
    return None


def _raised(text: str) -> str | None:
    """Return the last line of the last traceback of a task's own Python code."""
    found = RAISED.findall(re.sub(r"(?m)^\[rank\d+\]: ?", "", text))
    return next((line for line in reversed(found) if not WRAPPERS.match(line)), None)


def _not_started(master: str, error: Exception, said: str) -> PacelineError:
    if GONE.search(said):
        return RunFailed(f"the Spark cluster at {master} is gone: its master no longer answers")
    for sign, meaning in REASONS.items():
        if sign in said:
            return BadRequest(f"master={master} {meaning}")
    reason = next(
        (
            line
            for line in reversed(said.splitlines())
            if re.search(r"Exception|Error|refused|denied", line)
        ),
        "",
    )
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return RunFailed(f"Spark at {master} could not be started: {(reason or first).strip()[:300]}")


@contextmanager
def _set(environment: Mapping[str, str]) -> Iterator[None]:
    """Set the environment of this process, with which pyspark starts its JVM, and restore it."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _errors_into(handle: int) -> Iterator[None]:
    """Redirect standard error to a file, for a JVM that inherits it.

    The reasons of failures are read from that file.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        os.dup2(handle, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _end_jvm() -> None:
    """End the JVM. pyspark would keep it, but the next session may need other settings."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if gateway is not None:
        with suppress(Exception):
            gateway.shutdown()
    SparkContext._gateway = None
    SparkContext._jvm = None
    if process is not None:
        with suppress(Exception):
            process.stdin.close()
        try:
            process.wait(10)
        except Exception:
            process.kill()
            process.wait()
    # pyspark does not know a JVM yet that was being started when this was interrupted.
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if SUBMIT.search(" ".join(child.cmdline())):
                child.kill()
                child.wait(10)
