"""Error messages from Spark's output, the owner of a session, and repeated attempts.

No Spark runs in these tests.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import BadRequest, DataCorrupt, NotFinite, PacelineError, RunFailed
from paceline.launch import spark as launcher
from paceline.launch.signals import Ending
from paceline.spark import standalone
from paceline.spark.causes import ExecutorLost, cause_in, translated, with_cause
from paceline.spark.java import pyspark_missing
from paceline.spark.master import check_master, usual_master
from paceline.spark.session import (
    TROUBLE,
    TROUBLE_OF_SEVERAL,
    Session,
)

needs_pyspark = pytest.mark.skipif(pyspark_missing() is not None, reason=str(pyspark_missing()))

CHILD_FAILED = """E1116 13:47:53.395000 4269 torch/distributed/elastic/api.py:1002] \
failed (exitcode: {code}) local_rank: 0
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/site-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
Root Cause (first observed failure):
  exitcode  : {code} (pid: 4272) {signal}
  error_file: <N/A>
  traceback : {why}
============================================================
"""
BARRIER = """An error occurred while calling o77.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: \
Could not recover from a failed barrier ResultStage. \
Most recent failure reason: Stage failed because barrier task ResultTask(0, 1) \
finished unsuccessfully.
{reason}
\tat org.apache.spark.scheduler.DAGScheduler.failJobAndIndependentStages(DAGScheduler.scala:2935)
\tat java.base/java.lang.Thread.run(Thread.java:840)
"""
PYTHON = """org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/site-packages/pyspark/ml/torch/distributor.py", line 680, in wrapped_train_fn
    output = TorchDistributor._get_output_from_framework_wrapper(
  File "/site-packages/pyspark/ml/torch/distributor.py", line 510, in _execute_command
    raise RuntimeError(
RuntimeError: {what}
"""
SILENT = BARRIER.format(
    reason=PYTHON.format(
        what="TorchDistributor failed during training.View stdout logs for detailed error message."
    )
)


def output(last: str, code: int = 1, prefix: str = "") -> str:
    """Return what a rank and its torchrun print when the rank ends with `last`."""
    killed = code == -9
    raised = (
        'Traceback (most recent call last):\n  File "train.py", line 8, in f\n    raise'
        f" Odd(\n{last}\n"
        if last
        else ""
    )
    lines = "".join(f"{prefix}{line}\n" for line in raised.splitlines())
    why = (
        "Signal 9 (SIGKILL) received by PID 4272"
        if killed
        else "To enable traceback see: https://pytorch.org"
    )
    return lines + CHILD_FAILED.format(code=code, signal="(SIGKILL)" if killed else "", why=why)


def included(printed: str, code: int = 1) -> str:
    """pyspark's error, with the task's output in it."""
    command = f"Command ['/bin/python', '-m', 'wrapper'] failed with return code {code}."
    return BARRIER.format(
        reason=PYTHON.format(what=f"{command} The task output is included below: {printed}")
    )


def both_ways(printed: str) -> Iterator[PacelineError]:
    """Yield the error for output that is in pyspark's error, and for output that is printed.

    pyspark's wrapper of torchrun succeeds even if torchrun failed.
    """
    yield translated(RuntimeError(included(printed)))
    yield translated(RuntimeError(SILENT), "", printed)


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
@pytest.mark.parametrize(
    ("last", "kind", "words"),
    [
        (
            "ValueError: my loss is odd",
            RunFailed,
            "a task of Spark failed: ValueError: my loss is odd",
        ),
        ("mine.Odd: with a reason", RunFailed, "a task of Spark failed: mine.Odd: with a reason"),
        ("AssertionError", RunFailed, "a task of Spark failed: AssertionError"),
        ("paceline.errors.BadRequest: no such thing", BadRequest, "no such thing"),
        ("paceline.errors.UnknownName: unknown data 'x'.", BadRequest, "unknown data 'x'."),
        ("paceline.errors.NotFinite: the loss is nan", NotFinite, "the loss is nan"),
        ("paceline.errors.DataCorrupt: a.npy is damaged", DataCorrupt, "a.npy is damaged"),
        (
            "paceline.errors.WorkerFailed: worker 1 failed: ValueError: odd",
            RunFailed,
            "worker 1 failed: ValueError: odd",
        ),
        ("paceline.errors.Interrupted: interrupted", RunFailed, "interrupted"),
        (
            "paceline.errors.PeerLost: rank 1 is gone",
            ExecutorLost,
            "Spark lost a rank: rank 1 is gone",
        ),
        (
            "paceline.errors.TransportError: no meeting point",
            ExecutorLost,
            "Spark lost a rank: no meeting point",
        ),
    ],
)
def test_the_reason_of_a_failed_rank(last: str, kind: type, words: str, prefix: str) -> None:
    for found in both_ways(output(last, prefix=prefix)):
        assert type(found) is kind
        assert str(found) == words


def test_what_counts_as_lost() -> None:
    for found in both_ways(output("", code=-9)):
        assert type(found) is ExecutorLost
        assert "SIGKILL" in str(found)
    assert type(translated(RuntimeError(included("", code=-9)))) is ExecutorLost
    lost = BARRIER.format(
        reason="ExecutorLostFailure (executor 1 exited unrelated to the running tasks) Reason: gone"
    )
    found = translated(
        RuntimeError(lost),
        "",
        output("paceline.errors.WorkerFailed: worker 0 failed: RuntimeError: reset"),
    )
    assert type(found) is ExecutorLost
    assert str(found).startswith("Spark lost an executor (rank 1): ExecutorLostFailure (executor 1")
    for other in (
        BARRIER.format(reason="Lost task 0.0 in stage 0.0"),
        SILENT,
        "",
        "not a word of Python",
    ):
        assert type(translated(RuntimeError(other))) is RunFailed
    gone = translated(
        RuntimeError(lost), "Disconnected from Spark cluster! Waiting for reconnection..."
    )
    assert type(gone) is RunFailed
    assert "is gone" in str(gone)


def test_another_reason_wins_over_lost_peers() -> None:
    peer, own = (
        output("paceline.errors.PeerLost: rank 1 is gone"),
        output("paceline.errors.NotFinite: the loss is nan"),
    )
    assert type(translated(RuntimeError(included(peer)), "", own)) is NotFinite
    assert type(translated(RuntimeError(SILENT), "", peer + own)) is NotFinite
    assert type(translated(RuntimeError(SILENT), "", own + output("", code=-9))) is NotFinite


PERMISSION = """An error occurred while calling o133.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Could not recover from a failed
 barrier ResultStage. Stage failed because barrier task ResultTask(0, 1) finished unsuccessfully.
java.io.IOException: Cannot run program "/x/python": error=13, Permission denied
	at java.base/java.lang.ProcessBuilder.start(ProcessBuilder.java:1143)
Caused by: java.io.IOException: error=13, Permission denied
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (PERMISSION, 'java.io.IOException: Cannot run program "/x/python": error=13, Permission'),
        (
            "Unrecognized VM option 'X'\nError: Could not create the JVM",
            "Unrecognized VM option 'X'",
        ),
        ("26/11/18 09:04:32 ERROR Executor: Exception in task 0.0 in stage 0.0", None),
        (": org.apache.spark.SparkException: Job aborted", None),
        ("/x/python3: No module named pyspark", "/x/python3: No module named pyspark"),
        ("\tat java.lang.Error: no line of its own", None),
    ],
)
def test_the_cause_in_a_log(text: str, cause: str | None) -> None:
    found = cause_in(text)
    assert found is None if cause is None else str(found).startswith(cause)


def test_a_cause_that_only_an_executors_log_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's web page has the log; the page that its own links name shows it as HTML."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path.startswith("/log/?appId=a&executorId=0&logType=stderr&byteLength=")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"==== Bytes\njava.lang.OutOfMemoryError: Java heap space\n")

        def log_message(self, *_: Any) -> None:
            pass

    class Seq:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

        def size(self) -> int:
            return len(self.parts)

        def apply(self, index: int) -> Any:
            return self.parts[index]

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/logPage/?appId=a&executorId=0&logType=stderr"
        option = SimpleNamespace(isDefined=lambda: True, get=lambda: url)
        logs = SimpleNamespace(get=lambda name: option)
        store = SimpleNamespace(
            executorList=lambda alive: Seq(SimpleNamespace(executorLogs=lambda: logs))
        )
        context = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: SimpleNamespace(
            statusStore=lambda: store
        )))  # fmt: skip
        session: Any = SimpleNamespace(spark=SimpleNamespace(sparkContext=context), master="m")
        found = with_cause(translated(RuntimeError("a stage failed")), session)
        server.shutdown()
    assert "an executor of Spark failed: java.lang.OutOfMemoryError: Java heap space" in str(found)
    assert url in str(found)
    explained = RunFailed("worker 1 failed: ValueError")
    assert with_cause(explained, session) is explained


def test_no_room() -> None:
    found = translated(RuntimeError("java.io.IOException: No space left on device"))
    assert str(found) == "Spark's disk is full: No space left on device"


# --- a session that the program has already


class Conf(dict[str, str]):
    """Some settings cannot be changed."""

    def set(self, key: str, value: str) -> None:
        if key == "fixed":
            raise RuntimeError("CANNOT_MODIFY_CONFIG")
        self[key] = value

    def unset(self, key: str) -> None:
        self.pop(key, None)


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> Any:
    from pyspark.sql import SparkSession

    stopped: list[bool] = []
    theirs = SimpleNamespace(
        conf=Conf(zone="CET", fixed="1"),
        sparkContext=SimpleNamespace(master="local[2]"),
        stop=lambda: stopped.append(True),
    )
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: theirs)
    yield theirs
    assert not stopped


def test_the_usual_master_is_this_machines_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """user.md, task 5: the cluster's port had to be copied by hand."""
    found: list[Any] = [None, SimpleNamespace(master="spark://127.0.0.1:7077")]
    monkeypatch.setattr(standalone, "standing", lambda: found.pop(0))
    assert usual_master() == "local[*]"
    assert usual_master() == "spark://127.0.0.1:7077"


@needs_pyspark
def test_a_session_of_the_program_is_given_back_as_it_was(active: Any) -> None:
    assert usual_master() == "local[2]"
    with Session("local[2]", "tests", {"zone": "UTC", "new": "x", "fixed": "2"}) as session:
        assert session.spark is active
        assert active.conf == {"zone": "UTC", "new": "x", "fixed": "1"}
    assert active.conf == {"zone": "CET", "fixed": "1"}


@needs_pyspark
def test_another_master_than_the_programs_is_refused(active: Any) -> None:
    with pytest.raises(
        BadRequest,
        match=(
            r"master=spark://a:7077, but this program already has a Spark session with local\[2\]"
        ),
    ):
        Session("spark://a:7077", "tests", {"zone": "UTC"}).__enter__()
    assert active.conf == {"zone": "CET", "fixed": "1"}


# --- masters


@pytest.fixture
def open_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_one_master_that_answers_is_enough(open_port: int, closed_port: int) -> None:
    check_master(f"spark://127.0.0.1:{open_port}")
    check_master(f"spark://127.0.0.1:{closed_port},127.0.0.1:{open_port}")
    check_master(f"spark://127.0.0.1:{open_port},127.0.0.1:{closed_port}")
    for masters in (f"127.0.0.1:{closed_port}", f"127.0.0.1:{closed_port},127.0.0.1:{closed_port}"):
        with pytest.raises(BadRequest, match="does not answer: Connection refused"):
            check_master(f"spark://{masters}")


@pytest.mark.parametrize(
    "master",
    [
        "spark://a",
        "spark://a:7077,b",
        "spark://a:7077,",
        "spark://a:7077,spark://b:7077",
        "a:7077",
        "",
    ],
)
def test_no_master(master: str) -> None:
    with pytest.raises(BadRequest, match="write local"):
        check_master(master)


def test_a_port_that_is_none() -> None:
    with pytest.raises(BadRequest, match="does not answer"):
        check_master("spark://127.0.0.1:77077")


@needs_pyspark
@pytest.mark.parametrize(
    ("master", "said", "ends"),
    [
        ("spark://a:7077", "Failed to connect to master a:7077", True),
        ("spark://a:7077,b:7077", "Failed to connect to master b:7077", False),
        ("spark://a:7077,b:7077", "Exception while bootstrapping client", False),
        ("spark://a:7077,b:7077", "All masters are unresponsive! Giving up.", True),
        ("spark://a:7077,b:7077", "Disconnected from Spark cluster!", True),
    ],
)
def test_when_the_watcher_gives_up(
    master: str, said: str, ends: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from pyspark import SparkContext

    killed: list[bool] = []
    monkeypatch.setattr(
        SparkContext,
        "_gateway",
        SimpleNamespace(proc=SimpleNamespace(kill=lambda: killed.append(True))),
        raising=False,
    )
    session = Session(master, "tests")
    looks = iter(range(3))

    def wait(_: float) -> bool:
        return next(looks, None) is None

    session._log = tmp_path / "log"
    session._log.write_text(f"{said}\n")
    monkeypatch.setattr(session, "_over", SimpleNamespace(wait=wait, is_set=lambda: False))
    session._watch()
    assert bool(killed) is ends
    assert bool((TROUBLE_OF_SEVERAL if "," in master else TROUBLE).search(said)) is ends


def test_the_watcher_reads_each_line_of_the_log_once(tmp_path: Path) -> None:
    session = Session("local", "tests")
    assert session.said_since(0) == ("", 0)
    session._log = log = tmp_path / "log"
    log.write_text("one\ntwo\nhalf a ")
    assert session.said_since(0) == ("one\ntwo\n", 8)
    assert session.said_since(8) == ("", 8)
    with log.open("a") as more:
        more.write("line\n")
    assert session.said_since(8) == ("half a line\n", 20)


# --- attempts


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Fake attempts that end as the test says, and record the options of each."""

    class Nothing:
        def __init__(self, *_: Any) -> None:
            self.spark = None

        def __enter__(self) -> Nothing:
            return self

        def __exit__(self, *_: Any) -> None:
            return

    def prepare(*ends: Exception | dict[str, Any]) -> list[dict[str, Any]]:
        options: list[dict[str, Any]] = []

        def attempt(
            session: Any, rank: Any, own: dict[str, Any], ranks: int, say: Any, end: Any
        ) -> dict[str, Any]:
            end = ends[len(options)]
            options.append(own)
            if isinstance(end, Exception):
                raise end
            return end

        monkeypatch.setattr(launcher, "_attempt", attempt)
        return options

    monkeypatch.setattr(launcher, "Session", Nothing)
    monkeypatch.setattr(launcher, "_enough_cores", lambda *_: None)
    monkeypatch.setattr(launcher, "GRACE_S", 0.0)
    return prepare


def start(out: Path, said: list[str] | None = None) -> dict[str, Any]:
    heard = said if said is not None else []
    config = SimpleNamespace(master="local[2]")
    job: Any = SimpleNamespace(asked={}, config=config, ranks=2, out=out)
    return launcher.run_on_spark(
        lambda _: None, job, lambda kind, content: heard.append(content["text"])
    )


def test_only_a_loss_is_tried_again(
    attempts: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    said: list[str] = []
    tried = attempts(ExecutorLost("an executor is gone"), {"status": "completed"})
    assert start(tmp_path / "a", said)["attempts"] == 2
    assert len(tried) == 2
    assert said == ["an executor is gone; there was no checkpoint yet, so it begins again"]
    for failure in (
        RunFailed("a lost executor, signal, barrier"),
        NotFinite("nan"),
        DataCorrupt("x"),
        BadRequest("y"),
    ):
        tried = attempts(failure)
        with pytest.raises(type(failure)):
            start(tmp_path / "b")
        assert len(tried) == 1
    tried = attempts(*[ExecutorLost("gone")] * launcher.ATTEMPTS)
    with pytest.raises(ExecutorLost):
        start(tmp_path / "c")
    assert len(tried) == launcher.ATTEMPTS


def test_the_record_is_kept_where_there_was_no_folder(
    attempts: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    attempts({"status": "completed"})
    start(tmp_path / "not" / "there")
    assert json.loads((tmp_path / "not" / "there" / "run.json").read_text()) == {
        "status": "completed",
        "attempts": 1,
    }


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_record_that_cannot_be_written_repeats_nothing(
    name: str, attempts: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    tried = attempts({"status": "completed"}, {"status": "completed"})
    with pytest.raises(RunFailed, match=r"the run is complete, but .* cannot be made here"):
        start(tmp_path / name)
    assert len(tried) == 1


@needs_pyspark
def test_the_last_words_of_ranks_explain_pysparks_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.ml.torch import distributor
    from pyspark.ml.torch.log_communication import LogStreamingClient

    class Failing:
        def __init__(self, **_: Any) -> None:
            pass

        def run(self, *_: Any) -> None:
            server = vars(distributor)["LogStreamingServer"]()
            server.start("127.0.0.1")
            client = LogStreamingClient("127.0.0.1", server.port)
            for line in [
                "step 1",
                *output("ValueError: my loss is odd", prefix="[rank0]: ").splitlines(),
            ]:
                client.send(line)
            client.close()
            until = time.monotonic() + 10
            while not said and time.monotonic() < until:
                time.sleep(0.01)
            try:
                raise RuntimeError(SILENT)
            finally:
                server.shutdown()

    monkeypatch.setattr(distributor, "TorchDistributor", Failing)
    said: list[str] = []
    session = SimpleNamespace(said=lambda: "", driver_host="127.0.0.1", spark=None, master="m")
    with pytest.raises(RunFailed, match=r"^a task of Spark failed: ValueError: my loss is odd$"):
        launcher._attempt(session, None, {}, 1, said.append, Ending())  # type: ignore[arg-type]
    assert said[0] == "step 1"


LOST = "paceline.errors.PeerLost: rank 1 is gone"


@needs_pyspark
@pytest.mark.parametrize("stranger", [False, True])
def test_only_a_ranks_own_lines_are_a_reason_to_try_again(
    stranger: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any program that reaches the port can send lines, but it does not know the token."""
    from pyspark.ml.torch import distributor
    from pyspark.ml.torch.log_communication import LogStreamingClient

    class Losing:
        def __init__(self, **_: Any) -> None:
            pass

        def run(self, body: Any, folder: str, rank: Any, options: Any, *more: Any) -> None:
            token, secret, desk = more
            assert body(folder, lambda _: None, {}, token, secret, desk) is None
            assert os.environ.pop("PACELINE_SECRET") == secret
            first = capsys.readouterr().out.strip()  # what a rank prints first
            assert token in first
            server = vars(distributor)["LogStreamingServer"]()
            server.start("127.0.0.1")
            client = LogStreamingClient("127.0.0.1", server.port)
            client.send("paceline rank 0123" if stranger else first)
            for line in ("\x1b]0;a title\x07\x9b2Jcleared", *output(LOST).splitlines()):
                client.send(line)
            client.close()
            until = time.monotonic() + 10
            while not any(LOST in line for line in said) and time.monotonic() < until:
                time.sleep(0.01)
            server.shutdown()
            raise RuntimeError(SILENT)

    monkeypatch.setattr(distributor, "TorchDistributor", Losing)
    monkeypatch.setattr(launcher, "die_with_parent", lambda parent: None)
    said: list[str] = []
    session = SimpleNamespace(said=lambda: "", driver_host="127.0.0.1", spark=None, master="m")
    with pytest.raises(RunFailed, match="rank 1 is gone") as failed:
        launcher._attempt(session, None, {}, 1, said.append, Ending())  # type: ignore[arg-type]
    assert type(failed.value) is (RunFailed if stranger else ExecutorLost)
    assert all(line.isprintable() for line in said)
    assert any("cleared" in line for line in said)
