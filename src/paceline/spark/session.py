"""A driver's session with Spark: started quietly, ended completely, its failures made into
sentences.
"""

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

import psutil

from paceline import errors
from paceline.errors import BadRequest, PacelineError, RunFailed
from paceline.spark.java import find_java, pyspark_missing, spark_environment

SUBMIT = re.compile(r"org\.apache\.spark\.deploy\.SparkSubmit|bin/spark-submit")
REACH_S = 5.0  # for a master to answer
WATCH_S = 0.2
LEFT = "All masters are unresponsive|Disconnected from Spark cluster"
TROUBLE = re.compile(f"Exception while bootstrapping client|Failed to connect to master|{LEFT}")
TROUBLE_OF_SEVERAL = re.compile(LEFT)  # one of them may be down, or on standby
GONE = re.compile(r"Disconnected from Spark cluster|Application has been killed")
HOW = (
    "Its secret belongs into spark-defaults.conf of your SPARK_CONF_DIR; `paceline cluster up`"
    " takes care of that by itself"
)
REASONS = {  # what Spark writes: what it means
    "bootstrapping client": (
        f"refuses this driver: another secret (spark.authenticate.secret). {HOW}"
    ),
    "Authentication failed": (
        f"refuses this driver: another secret (spark.authenticate.secret). {HOW}"
    ),
    "Unknown challenge": f"wants a secret (spark.authenticate), and this driver has none. {HOW}",
    "A secret key must be specified": (
        f"needs spark.authenticate.secret beside spark.authenticate. {HOW}"
    ),
    "UnknownHostException": "is on a host that has no address",
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
    """An executor or a rank's process is gone, by no fault of what it was doing: worth another
    attempt.
    """


class Session:
    """`with Session("local[*]", "a name") as spark:` A session that a program has already is used,
    and left to it.
    """

    def __init__(self, master: str, name: str, settings: Mapping[str, str] | None = None) -> None:
        self.master, self.name, self.settings = master, name, dict(settings or {})
        self.spark: Any = None
        self._theirs = False
        self._before: dict[str, str | None] = {}  # settings of theirs that were changed
        self._log: Path | None = None
        self._over = threading.Event()

    def __enter__(self) -> Session:
        if (reason := pyspark_missing()) is not None:
            raise BadRequest(reason)
        from pyspark.sql import SparkSession

        active = SparkSession.getActiveSession()
        if active is not None:
            if (other := active.sparkContext.master) != self.master:
                raise BadRequest(
                    f"master={self.master}, but this program has a Spark session with {other}"
                    " already: ask for that, or stop it"
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
        """The session, its JVM and its log; of a session that is not ours, only what was
        changed.
        """
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
        """Spark tries for a minute to reach a master that does not want it, and for ever to find
        one that is gone: not we.
        """
        from pyspark import SparkContext

        trouble = TROUBLE_OF_SEVERAL if "," in self.master else TROUBLE
        while not self._over.wait(WATCH_S):
            if trouble.search(self.said()):
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
            done, total = (
                sum(getattr(s, n) for s in stages if s) for n in ("numCompletedTasks", "numTasks")
            )
            return f"{done} of {total} tasks" if total else ""
        return ""


def conf_of(master: str) -> Path | None:
    """The settings (and the secret) of the cluster that stands on this machine, if that is the one
    meant.
    """
    from paceline.spark.standalone import standing

    cluster = standing()
    return cluster.conf_dir if cluster is not None and cluster.master == master else None


def check_master(master: str) -> None:
    """A master that is no master, or does not answer, is refused at once: Spark itself would try
    for minutes.
    """
    if (
        re.fullmatch(r"local(\[(\*|\d+)(,\d+)?\])?", master)
        or master in ("yarn",)
        or master.startswith("k8s://")
    ):
        return
    if re.fullmatch(r"spark://[^:/,]+:\d+(,[^:/,]+:\d+)*", master) is None:
        raise BadRequest(f"master={master}: write local[*], local[4] or spark://host:port")
    for place in master.removeprefix("spark://").split(","):
        host, port = place.split(":")
        try:
            socket.create_connection((host, int(port)), REACH_S).close()
            return
        except (OSError, OverflowError) as error:  # the latter: no such port
            reason = getattr(error, "strerror", None) or str(error)
    raise BadRequest(
        f"master={master} does not answer: {reason}. Is it up? (paceline cluster status)"
    )


def usual_master() -> str:
    """Where nobody asked for a master: that of the session which this program has already, else
    this machine.
    """
    if "pyspark" in sys.modules:
        from pyspark.sql import SparkSession

        if (active := SparkSession.getActiveSession()) is not None:
            return str(active.sparkContext.master)
    return "local[*]"


@contextmanager
def as_sentence(session: Session) -> Iterator[None]:
    """What went wrong in an executor, as it was said there."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        raise translated(error, session.said()) from None


def translated(error: Exception, said: str = "", printed: str = "") -> PacelineError:
    """`said` by Spark itself; `printed` by the tasks, where that came another way than in the
    error.
    """
    text = str(error)
    if GONE.search(said):
        return RunFailed("the Spark cluster is gone: its master does not answer any more")
    executor = re.search(r"ExecutorLostFailure[^\n]*", text)
    own = _told(text) or (
        None if executor else _told(printed)
    )  # those who outlive an executor may say all kinds of things
    if own is not None:
        return own
    if "No space left on device" in text:
        return RunFailed("Spark has no room on its disk: No space left on device")
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
    """The first reason of our own. Who lost a peer only tells of the one that was lost: that is
    none.
    """
    for name, words in TOLD.findall(text):
        if name not in ("PeerLost", "TransportError"):
            kind: type = getattr(errors, name, RunFailed)
            plain = [
                k
                for k in kind.__mro__
                if issubclass(k, PacelineError) and "__init__" not in vars(k)
            ]  # takes one message
            return next(iter(plain), RunFailed)(words.strip())
    return None


def _raised(text: str) -> str | None:
    """The last exception of a task's own Python, as its traceback ends with it."""
    found = RAISED.findall(re.sub(r"(?m)^\[rank\d+\]: ?", "", text))
    return next((line for line in reversed(found) if not WRAPPERS.match(line)), None)


def _not_started(master: str, error: Exception, said: str) -> PacelineError:
    if GONE.search(said):
        return RunFailed(
            f"the Spark cluster at {master} is gone: its master does not answer any more"
        )
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
    """The JVM that is started here inherits standard error: its chatter goes into a file, from
    which failures are told.
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
    """pyspark leaves its JVM until the program ends; the next session may need other settings."""
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
    for (
        child
    ) in psutil.Process().children():  # one that was just being started when this was interrupted
        with suppress(psutil.Error):
            if SUBMIT.search(" ".join(child.cmdline())):
                child.kill()
                child.wait(10)
