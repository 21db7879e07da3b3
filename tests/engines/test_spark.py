"""Spark for real: a standalone cluster of three workers, trained on, broken and resumed on.

test_cluster_training.py has the way from a table to a model; test_cluster.py has the cluster.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from paceline.errors import TransportError
from paceline.record.reader import read_run
from paceline.spark import marked
from paceline.spark.cluster import EXECUTOR, Cluster, Daemon
from paceline.spark.java import pyspark_missing
from paceline.transport.board.client import Board
from paceline.transport.status.line import FOLDER, read_line
from tests.engines.engine import until, used
from tests.engines.ray_cluster import BOARD
from tests.engines.test_ray import SLOW
from tests.small import identical

pytestmark = [
    pytest.mark.engines,
    pytest.mark.processes,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(pyspark_missing() is not None, reason=str(pyspark_missing())),
]
LONG = 400  # steps, so that the ranks still train when they hear that they shall leave
PACELINE = str(Path(sys.executable).with_name("paceline"))
WAIT_S = 600.0  # most of it is the start of a JVM and of PyTorch, several times


class Standing:
    """A cluster that `paceline cluster up` has started for a user with a home of their own."""

    def __init__(self, home: Path) -> None:
        self.env = {**os.environ, "HOME": str(home), "TMPDIR": str(home)}
        self.env.pop("XDG_CACHE_HOME", None)
        self.weights: dict[int, Any] = {}  # by steps: those of a run on this machine
        self._state = home / ".cache" / "paceline" / "cluster" / "cluster.json"

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PACELINE, *words],
            capture_output=True, text=True, timeout=400, check=False, env=self.env,
        )  # fmt: skip

    @property
    def cluster(self) -> Cluster:
        said = json.loads(self._state.read_text())
        daemons = tuple(Daemon(**one) for one in said.pop("daemons"))
        return Cluster(**{**said, "folder": Path(said["folder"])}, daemons=daemons)

    def at_work(self) -> list[str]:
        """The processes of the cluster that are not its master and workers."""
        cluster = self.cluster
        daemons = set(cluster.pids.values())
        return [
            " ".join(marked.command(one)) for one in cluster.processes() if one.pid not in daemons
        ]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    import pyspark

    used("spark", f"pyspark {pyspark.__version__}")
    made = Standing(tmp_path_factory.mktemp("home"))
    done = made.call("cluster", "up", "--workers", "3", "--memory", "512m")
    assert done.returncode == 0, done.stderr
    cluster = made.cluster
    yield made
    assert "the cluster is down" in made.call("cluster", "down").stdout
    assert cluster.processes() == []


@pytest.fixture(autouse=True)
def _nothing_is_left(up: Standing) -> Iterator[None]:
    """After each test no executor, rank or board is left, and the driver's JVM has ended."""
    yield
    until("the end of all executors and ranks", lambda: not up.at_work(), 60)
    until("the end of the drivers' JVMs", lambda: not up.cluster.drivers(), 60)


def words(out: str, steps: int = 60, *more: str) -> list[str]:
    Path("slow_net.py").write_text(SLOW)
    said = ["train", "--data", "fashion-mini", "--model", "slow_net:net", "--workers", "2"]
    said += ["--strategy", "allreduce:collective=ring", "--steps", str(steps), "--threads", "1"]
    said += ["--memory-format", "contiguous", "--overlap", "off", "--transport", "gloo"]
    return [*said, "--checkpoint-every", "10", "--out", out, *more]


ON_SPARK = ("--launcher", "spark")  # no --master: the cluster that is up is found


def completed(up: Standing, *command: str) -> str:
    done = up.call(*command)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr + done.stdout


def same_as_here(up: Standing, steps: int = 60) -> bool:
    """Whether the run ended with the weights of one on this machine without interruption."""
    if steps not in up.weights:
        completed(up, *words("here", steps))
        up.weights[steps] = load_file("here/model.safetensors")
    return identical(up.weights[steps], load_file("there/model.safetensors"))


def one_sentence(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    said = [line for line in done.stderr.splitlines() if line.startswith("paceline: ")]
    assert len(said) == 1, done.stderr
    assert all(part in said[0] for part in parts), said[0]
    assert "Traceback" not in done.stderr


def checkpoints(out: str) -> list[Path]:
    return sorted(
        p for p in Path(out).glob("checkpoints/step-*") if (p / "checkpoint.json").exists()
    )


def process_of(out: str, rank: int) -> psutil.Process:
    seen = read_line(Path(out) / FOLDER / f"rank-{rank}")
    assert seen is not None
    return psutil.Process(seen.pid)


def executor_of(rank: psutil.Process) -> psutil.Process:
    """The executor that a rank runs on."""
    return next(one for one in rank.parents() if EXECUTOR in marked.command(one))


class Driver:
    """`paceline train --launcher spark` in the background; ended at the end of the block."""

    def __init__(self, up: Standing, *command: str) -> None:
        self.up, self.command = up, command

    def __enter__(self) -> Driver:
        with open("said", "w") as said:
            self.process = subprocess.Popen(
                [PACELINE, *self.command], stdout=said, stderr=said, env=self.up.env
            )
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)

    @property
    def text(self) -> str:
        return Path("said").read_text()

    def await_checkpoint(self) -> None:
        until(
            "a checkpoint",
            lambda: checkpoints("there") or self.process.poll() is not None,
            WAIT_S,
        )
        assert self.process.poll() is None, self.text

    def ends(self) -> int:
        return self.process.wait(WAIT_S)


# --- training


def test_the_cluster_is_found_and_gives_the_weights_of_one_machine(up: Standing) -> None:
    done = up.call(*words("there", 20), *ON_SPARK)
    assert done.returncode == 0, done.stderr
    record = read_run("there")
    assert (record["status"], record["attempts"]) == ("completed", 1)
    assert record["config"]["launcher"] == "spark"
    assert len(record["workers"]) == 2
    assert all(c.isprintable() or c == "\n" for c in done.stderr), "no control characters"
    assert "Started distributed training" not in done.stderr
    assert same_as_here(up, 20)


# --- a rank, an executor and the driver are killed


@pytest.mark.parametrize("victim", ["rank", "executor"])
def test_what_is_killed_is_started_again_from_the_checkpoint(up: Standing, victim: str) -> None:
    with Driver(up, *words("there"), *ON_SPARK) as driver:
        driver.await_checkpoint()
        rank = process_of("there", 1)
        (rank if victim == "rank" else executor_of(rank)).kill()
        assert driver.ends() == 0, driver.text
        said = driver.text
    assert "Spark lost" in said
    assert "going on from step-" in said
    record = read_run("there")
    assert (record["status"], record["attempts"]) == ("completed", 2)
    assert same_as_here(up)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 75), (signal.SIGKILL, -9)],
)
def test_nothing_is_left_after_the_driver(up: Standing, number: signal.Signals, code: int) -> None:
    """... and the same line goes on, to the weights of an unbroken run."""
    line = [*words("there", LONG), *ON_SPARK, "--resume", "auto"]
    with Driver(up, *line) as driver:
        driver.await_checkpoint()
        rank = process_of("there", 0)
        driver.process.send_signal(number)
        assert driver.ends() == code, driver.text
        said = driver.text
    until("the end of rank 0", lambda: not rank.is_running(), 60)
    until("the end of all executors and ranks", lambda: not up.at_work(), 60)
    assert "Traceback" not in said
    if number != signal.SIGKILL:
        assert [x for x in said.splitlines() if x.startswith("paceline: ")][-1].startswith(
            "paceline: interrupted"
        )
        assert read_run("there")["status"] == "interrupted"
    if number in (signal.SIGTERM, signal.SIGUSR1):
        assert f"interrupted by {number.name} after a checkpoint at step" in said
    assert json.loads((checkpoints("there")[-1] / "checkpoint.json").read_text())["step"] < LONG
    assert "going on from step" in completed(up, *line)
    assert same_as_here(up, LONG)


# --- strangers, and what goes wrong


def turned_away(port: tuple[str, int]) -> str:
    """What a process hears that tries to join without the secret."""
    with pytest.raises(TransportError) as told:
        Board(f"tcp:{port[0]}:{port[1]}", b"not the secret of this run", 1).check(["here"])
    return str(told.value)


def test_a_stranger_without_the_secret_is_no_rank(up: Standing) -> None:
    """At the board of the ranks, and at the desk where the driver asks the ranks to leave."""
    with Driver(up, *words("there", LONG), *ON_SPARK) as driver:
        driver.await_checkpoint()
        [board] = [p for p in up.cluster.processes() if BOARD in " ".join(marked.command(p))]
        ports = {*marked.ports(board), *marked.ports(psutil.Process(driver.process.pid))}
        assert len(ports) >= 2
        assert all(marked.is_loopback(address) for address, _ in ports)
        # All at once: the port for the lines that ranks print says nothing to a stranger.
        with ThreadPoolExecutor(len(ports)) as pool:
            heard = list(pool.map(turned_away, ports))
        assert sum("does not accept this rank's secret" in one for one in heard) == 2, heard
        assert driver.ends() == 0, driver.text
        assert driver.text.count("that does not know this run's secret has tried to join") == 2
    assert read_run("there")["status"] == "completed"


def test_an_error_of_the_users_own_code_reaches_the_driver_once(up: Standing) -> None:
    line = words("there", 20)
    Path("slow_net.py").write_text(SLOW.replace("time.sleep(0.03)", "raise ValueError('mine')"))
    done = up.call(*line, *ON_SPARK)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("paceline: ")]
    assert said == ["paceline: worker 0 failed: ValueError: mine"]
    assert done.stderr.count("Traceback") == 1  # it shows the line of the user's file
    assert 'slow_net.py", line' in done.stderr
    assert "Spark lost" not in done.stderr


NO_PYTHON = """
import sys
from paceline.spark import session
real, python = session.spark_environment, sys.argv.pop(1)
session.spark_environment = lambda *a, **k: {**real(*a, **k), "PYSPARK_PYTHON": python}
from paceline.cli.entry import main
main()
"""


def test_executors_that_cannot_start_python(up: Standing, tmp_path: Path) -> None:
    """FACTS3: the person read that a barrier stage had "finished unsuccessfully"."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o644)
    Path("driver.py").write_text(NO_PYTHON)
    done = subprocess.run(
        [sys.executable, "driver.py", str(python), *words("there"), *ON_SPARK],
        capture_output=True, text=True, timeout=300, check=False, env=up.env,
    )  # fmt: skip
    assert done.returncode == 1
    one_sentence(done, f'Cannot run program "{python}"', "Permission denied")


def test_executors_that_cannot_start_at_all(up: Standing) -> None:
    """The reason stands in the executors' own logs only: Spark says that there are no cores.

    Spark starts executors with an option of Java's that makes it ignore options it does not know.
    """
    conf = up.cluster.conf_dir / "spark-defaults.conf"
    before = conf.read_text()
    conf.write_text(f"{before}spark.executor.extraJavaOptions -javaagent:/nowhere.jar\n")
    try:
        done = up.call(*words("there"), *ON_SPARK)
    finally:
        conf.write_text(before)
    assert done.returncode == 1, done.stderr
    one_sentence(done, "executor", "/nowhere.jar")


def test_a_master_that_does_not_answer(up: Standing) -> None:
    began = time.monotonic()
    done = up.call(*words("there"), *ON_SPARK, "--master", "spark://127.0.0.1:1")
    assert done.returncode == 2
    one_sentence(done, "master=spark://127.0.0.1:1 does not answer", "paceline cluster status")
    assert time.monotonic() - began < 60  # 15 s on a machine that does nothing else
    assert not Path("there").exists()


# --- a node is killed: last, because two workers are left


def test_a_node_is_killed(up: Standing) -> None:
    """A worker's daemon, its executor and everything below end at once."""
    with Driver(up, *words("there"), *ON_SPARK) as driver:
        driver.await_checkpoint()
        executor = executor_of(process_of("there", 1))
        node = executor.parent()
        assert node is not None
        lost = [node, *node.children(recursive=True)]
        for one in lost:
            one.kill()
        assert driver.ends() == 0, driver.text
        said = driver.text
    assert "Spark lost" in said
    assert "going on from step-" in said
    assert read_run("there")["attempts"] >= 2
    assert same_as_here(up)
