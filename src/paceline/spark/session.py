"""A driver's session with Spark: started quietly, ended completely, its failures made into sentences."""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline import errors
from paceline.errors import BadRequest, PacelineError, RunFailed
from paceline.spark.java import find_java, pyspark_missing, spark_environment

REACH_S = 5.0  # for a master to answer
WATCH_S = 0.2
TROUBLE = re.compile(
    "Exception while bootstrapping client|Failed to connect to master|All masters are unresponsive|"
    "Disconnected from Spark cluster"
)
GONE = re.compile(r"Disconnected from Spark cluster|Application has been killed")
HOW = "Its secret belongs into spark-defaults.conf of your SPARK_CONF_DIR; `paceline cluster up` takes care of that by itself"
REASONS = {  # what Spark writes: what it means
    "bootstrapping client": f"refuses this driver: another secret (spark.authenticate.secret). {HOW}",
    "Authentication failed": f"refuses this driver: another secret (spark.authenticate.secret). {HOW}",
    "Unknown challenge": f"wants a secret (spark.authenticate), and this driver has none. {HOW}",
    "A secret key must be specified": f"needs spark.authenticate.secret beside spark.authenticate. {HOW}",
    "UnknownHostException": "is on a host that has no address",
    "Connection refused": "does not answer: Connection refused. Is it up? (paceline cluster status)",
}
COMMON = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.executorEnv.OMP_NUM_THREADS": "1",
}


class Session:
    """`with Session("local[*]", "a name") as spark:` A session that a program has already is used, and left to it."""

    def __init__(self, master: str, name: str, settings: Mapping[str, str] | None = None) -> None:
        self.master, self.name, self.settings = master, name, dict(settings or {})
        self.spark: Any = None
        self._theirs = False
        self._log: Path | None = None
        self._over = threading.Event()

    def __enter__(self) -> Session:
        if (reason := pyspark_missing()) is not None:
            raise BadRequest(reason)
        from pyspark.sql import SparkSession

        active = SparkSession.getActiveSession()
        if active is not None:
            self._theirs, self.spark = True, active
            for key, value in self.settings.items():
                with suppress(Exception):  # some are fixed once a session runs
                    active.conf.set(key, value)
            return self
        check_master(self.master)
        find_java()
        conf_dir = conf_of(self.master)
        local = self.master.startswith("local") or "127.0.0.1" in self.master
        builder = SparkSession.builder.master(self.master).appName(self.name)
        for key, value in {**COMMON, **self.settings}.items():
            builder = builder.config(key, value)
        if local:
            builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
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
        """The session, its JVM and its log."""
        self._over.set()
        if not self._theirs:
            with suppress(Exception):
                if self.spark is not None:
                    self.spark.stop()
            _end_jvm()
            if self._log is not None:
                with suppress(OSError):
                    self._log.unlink()
        self.spark = None

    def _watch(self) -> None:
        """Spark tries for a minute to reach a master that does not want it, and for ever to find one that is gone: not we."""
        from pyspark import SparkContext

        while not self._over.wait(WATCH_S):
            if TROUBLE.search(self.said()):
                self._over.wait(0.5)  # until the reason is written, too
                gateway = SparkContext._gateway
                process = getattr(gateway, "proc", None)
                if process is not None and not self._over.is_set():
                    process.kill()  # whoever waits for an answer is told
                return

    def said(self) -> str:
        """What Spark has written on its standard error."""
        with suppress(OSError):
            return self._log.read_text(errors="replace") if self._log is not None else ""
        return ""

    def progress(self) -> str:
        """`3 of 8 tasks`, while a job runs."""
        with suppress(Exception):
            tracker = self.spark.sparkContext.statusTracker()
            stages = [tracker.getStageInfo(s) for s in tracker.getActiveStageIds()]
            done, total = (sum(getattr(s, n) for s in stages if s) for n in ("numCompletedTasks", "numTasks"))
            return f"{done} of {total} tasks" if total else ""
        return ""


def conf_of(master: str) -> Path | None:
    """The settings (and the secret) of the cluster that stands on this machine, if that is the one meant."""
    from paceline.spark.standalone import standing

    cluster = standing()
    return cluster.conf_dir if cluster is not None and cluster.master == master else None


def check_master(master: str) -> None:
    """A master that is no master, or does not answer, is refused at once: Spark itself would try for minutes."""
    if re.fullmatch(r"local(\[(\*|\d+)(,\d+)?\])?", master) or master in ("yarn",) or master.startswith("k8s://"):
        return
    found = re.fullmatch(r"spark://([^:/,]+):(\d+)(?:,.*)?", master)
    if found is None:
        raise BadRequest(f"master={master}: write local[*], local[4] or spark://host:port")
    try:
        socket.create_connection((found[1], int(found[2])), REACH_S).close()
    except OSError as error:
        raise BadRequest(
            f"master={master} does not answer: {error.strerror or error}. Is it up? (paceline cluster status)"
        ) from None


@contextmanager
def as_sentence(session: Session) -> Iterator[None]:
    """What went wrong in an executor, as it was said there."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        raise translated(error, session.said()) from None


def translated(error: Exception, said: str = "") -> PacelineError:
    text = str(error)
    if GONE.search(said):
        return RunFailed("the Spark cluster is gone: its master does not answer any more")
    told = re.findall(r"paceline\.errors\.(\w+): (.+)", text)
    if told:  # who lost a peer only tells of the one that was lost
        name, words = next((t for t in told if t[0] not in ("PeerLost", "TransportError")), told[0])
        kind = getattr(errors, name, RunFailed)
        plain = kind if kind in (BadRequest, RunFailed, errors.DataCorrupt) else RunFailed
        return plain(words.strip())
    if "No space left on device" in text:
        return RunFailed("Spark has no room on its disk: No space left on device")
    lost = re.search(r"ExecutorLostFailure[^\n]*|Could not recover from a failed barrier ResultStage[^\n]*", text)
    if lost is not None:
        return RunFailed(f"Spark lost an executor: {lost[0][:200]}")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("at ")]
    reason = next(
        (line for line in lines if "Exception" in line or "Error" in line), lines[0] if lines else type(error).__name__
    )
    return RunFailed(f"Spark failed: {reason[:300]}")


def _not_started(master: str, error: Exception, said: str) -> PacelineError:
    if GONE.search(said):
        return RunFailed(f"the Spark cluster at {master} is gone: its master does not answer any more")
    for sign, meaning in REASONS.items():
        if sign in said:
            return BadRequest(f"master={master} {meaning}")
    reason = next((line for line in reversed(said.splitlines()) if re.search(r"Exception|Error|refused|denied", line)), "")
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return RunFailed(f"Spark at {master} could not be started: {(reason or first).strip()[:300]}")


@contextmanager
def _set(environment: Mapping[str, str]) -> Iterator[None]:
    """pyspark starts its JVM with this process's own environment."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _errors_into(handle: int) -> Iterator[None]:
    """The JVM that is started here inherits standard error: its chatter goes into a file, from which failures are told."""
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
    """pyspark leaves its JVM until the program ends; the next session may need other settings."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is None:
        return
    process = getattr(gateway, "proc", None)
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
