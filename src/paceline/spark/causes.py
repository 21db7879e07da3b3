"""Why Spark failed, in one sentence: from its error, from what tasks print, from executors' logs.

The error of a stage often says only that a task has failed. The cause then stands in the log of the
executor that ran it, which the worker's web page shows.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

from paceline import errors
from paceline.errors import PacelineError, RunFailed

GONE = re.compile(r"Disconnected from Spark cluster|Application has been killed")
KILLED = re.compile(r"return code -9\b|exitcode\s*: -9\b|Signal 9 \(SIGKILL\)")
# As torchrun says it: "rank      : 1 (local_rank: 0)", "exitcode  : -9"
KILLED_RANK = re.compile(r"rank\s+: (\d+) \(local_rank: \d+\)\s+exitcode\s+: -9\b")
TASK = re.compile(r"barrier task ResultTask\(\d+, (\d+)\)")  # a task is the rank of its number
TOLD = re.compile(r"paceline\.errors\.(\w+): (.+)")
RAISED = re.compile(
    r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(?=([A-Za-z_][\w.]*(?:: .*)?)$)",
    re.MULTILINE,
)
WRAPPERS = re.compile(
    r"torch\.distributed\.elastic\.|RuntimeError: (?:Command \[.* failed|TorchDistributor failed)"
)
UNEXPLAINED = "Spark failed: "  # how a sentence begins that does not name the cause
REMOVED = "Master removed our application: FAILED"  # after ten executors that have failed
# How an error's line begins in Java, in Python, and in a JVM or an interpreter that cannot start.
CAUSE = re.compile(
    r"^(?:\d\d/\S+ \S+ ERROR [\w.$]+: )?(?:: )?(?P<cause>[\w.$]*(?:Exception|Error)\b:? .+"
    r"|Unrecognized .+|Error occurred during .+|Error: .+|\S*python\S*: No module named .+)$",
    re.MULTILINE,
)
# Errors that only say that a task, a stage or another process has failed.
FOLLOWS = re.compile(
    r"SparkException: |SparkDriverExecutionException|TaskKilledException|InterruptedException"
    r"|Py4J|EOFException|PythonException|SocketException|ClosedChannel|PySparkRuntimeError"
    r"|Exception in task|in stage|BarrierTask|ExecutorDeadException|RpcEnv|ExecutorLostFailure"
)
LOG_BYTES = 64 << 10  # of the end of an executor's log
LOG_S = 3.0  # for a worker's web page to answer
MOST_LOGS = 16


class ExecutorLost(RunFailed):
    """An executor or a rank's process was lost, not through an error of its own: try again."""


def translated(error: Exception, said: str = "", printed: str = "") -> PacelineError:
    """Return an error of Paceline for one of Spark.

    `said` is Spark's log. `printed` is the output of the tasks, where it is not in the error.
    """
    text = str(error)
    if REMOVED in said:
        return RunFailed(f"{UNEXPLAINED}its executors end as soon as they are started")
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
        rank = f" (rank {found[1]})" if (found := TASK.search(text)) else ""
        return ExecutorLost(f"Spark lost an executor{rank}: {executor[0][:200]}")
    both = f"{text}\n{printed}"
    if KILLED.search(both):
        which = f"rank {found[1]}" if (found := KILLED_RANK.search(both)) else "a rank"
        return ExecutorLost(
            f"Spark lost {which}: its process was killed by SIGKILL (out of memory, perhaps)"
        )
    if (lost := TOLD.search(both)) is not None:
        return ExecutorLost(f"Spark lost a rank: {lost[2].strip()}")
    raised = _raised(text) or _raised(printed)
    if raised is not None:
        return RunFailed(f"a task of Spark failed: {raised[:300]}")
    if (cause := cause_in(text)) is not None:
        return RunFailed(f"a task of Spark failed: {cause[:300]}")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = next(
        (line for line in lines if "Exception" in line or "Error" in line),
        lines[0] if lines else type(error).__name__,
    )
    return RunFailed(f"{UNEXPLAINED}{reason[:300]}")


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


def cause_in(text: str) -> str | None:
    """Return the first error in a text that does not only follow from another one."""
    found = (match["cause"].strip() for match in CAUSE.finditer(text))
    return next((line for line in found if not FOLLOWS.search(line)), None)


class Driver(Protocol):
    """What is needed of a session to find the logs of its executors."""

    spark: Any
    master: str


def with_cause(failure: PacelineError, session: Driver) -> PacelineError:
    """Return the failure; where it does not name the cause, one that the executors' logs name."""
    if not str(failure).startswith(UNEXPLAINED):
        return failure
    cause = cause_of_executors(session)
    return failure if cause is None else RunFailed(f"an executor of Spark failed: {cause}")


def cause_of_executors(session: Driver) -> str | None:
    """Return the first cause that a log of the executors names, with the place of the log."""
    for place, text in _logs(session):
        if (cause := cause_in(text)) is not None:
            return f"{cause[:300]} (its log: {place})"
    return None


def _logs(session: Driver) -> Iterator[tuple[str, str]]:
    """Give the logs of the executors, from their workers, and from this machine's cluster.

    The driver does not know executors that have never registered with it.
    """
    for url in _log_urls(session):
        yield url, _log(url)
    from paceline.spark.standalone import standing

    cluster = standing()
    if cluster is not None and cluster.master == session.master:
        files = cluster.folder.glob("work/*/*/*/stderr")
        for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)[:MOST_LOGS]:
            with suppress(OSError):
                yield str(path), path.read_text(errors="replace")[-LOG_BYTES:]


def _log_urls(session: Driver) -> list[str]:
    """Return the addresses of the executors' logs, those that have ended as well."""
    found: list[str] = []
    with suppress(Exception):  # the JVM may be gone
        executors = session.spark.sparkContext._jsc.sc().statusStore().executorList(False)
        for index in range(min(executors.size(), MOST_LOGS)):
            url = executors.apply(index).executorLogs().get("stderr")
            if url.isDefined():
                found.append(str(url.get()))
    return found


def _log(url: str) -> str:
    """Return the end of an executor's log, from its worker's web page."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        return ""
    with suppress(OSError, http.client.HTTPException):
        # urllib would go through the user's proxy
        connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=LOG_S)
        try:
            path = parts.path.replace("/logPage", "/log")
            connection.request("GET", f"{path}?{parts.query}&byteLength={LOG_BYTES}")
            answer = connection.getresponse()
            return answer.read(4 * LOG_BYTES).decode(errors="replace")
        finally:
            connection.close()
    return ""
