"""A driver's session with Spark: its start without log output, its end, and its error messages."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from paceline.errors import BadRequest, PacelineError, RunFailed
from paceline.spark.causes import GONE, translated, with_cause
from paceline.spark.java import find_java, pyspark_missing, spark_environment
from paceline.spark.master import check_master, conf_of

SUBMIT = re.compile(r"org\.apache\.spark\.deploy\.SparkSubmit|bin/spark-submit")
WATCH_S = 0.2
LEFT = "All masters are unresponsive|Disconnected from Spark cluster"
TROUBLE = re.compile(f"Exception while bootstrapping client|Failed to connect to master|{LEFT}")
TROUBLE_OF_SEVERAL = re.compile(LEFT)  # one of several masters may be down or on standby
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
COMMON = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.executorEnv.OMP_NUM_THREADS": "1",
}


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
                with _own_handlers():
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

    @property
    def driver_host(self) -> str:
        """The driver's address, as executors reach it."""
        return str(self.spark.sparkContext.getConf().get("spark.driver.host", "127.0.0.1"))

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
        raise with_cause(translated(error, session.said()), session) from None


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
def _own_handlers() -> Iterator[None]:
    """Keep this program's handler of Ctrl-C, which pyspark replaces by its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


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
