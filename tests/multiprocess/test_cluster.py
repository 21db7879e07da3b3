"""A Spark cluster on this machine: a fast stand-in for failures, and a real one."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from paceline.errors import BadRequest, PacelineError, RunFailed
from paceline.spark import cluster as clusters
from paceline.spark import java, marked, standalone, starting
from paceline.spark.cluster import Cluster, Daemon

PACELINE = Path(sys.executable).parent / "paceline"


def lacking() -> str | None:
    try:
        java.find_java()
    except PacelineError as error:
        return str(error)
    return java.pyspark_missing()


needs_spark = pytest.mark.skipif(lacking() is not None, reason=str(lacking()))

# A stand-in for master and workers: a worker registers by making a file, and the master's page
# counts these files.
FAKE = """#!{python}
import glob, http.server, json, os, signal, subprocess, sys
if sys.argv[1].endswith("Master"):
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            workers = [{{"state": "ALIVE"}} for _ in glob.glob("registered-*")]
            body = json.dumps({{"url": "spark://127.0.0.1:1", "workers": workers}}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)
    server = http.server.HTTPServer(("{host}", 0), Page)
    said = f"Successfully started service 'MasterUI' on port {{server.server_port}}."
    print(said, file=sys.stderr, flush=True)
    server.serve_forever()
{worker}
"""
GOOD = """
open(f"registered-{os.getpid()}", "w").close()
subprocess.run(["sleep", "1000"])
"""


@pytest.fixture
def _home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a HOME of its own, with the real Java of this machine."""
    monkeypatch.setenv("JAVA_HOME", str(java.find_java().home))


def fake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str = GOOD, host: str = "127.0.0.1"
) -> None:
    script = tmp_path / "spark" / "bin" / "spark-class"
    script.parent.mkdir(parents=True)
    script.write_text(FAKE.format(python=sys.executable, worker=worker, host=host))
    script.chmod(0o755)
    monkeypatch.setattr(starting, "spark_home", lambda: tmp_path / "spark")
    monkeypatch.setattr(starting, "spark_environment", lambda: dict(os.environ))
    monkeypatch.setattr(starting, "pyspark_missing", lambda: None)


def leftovers(cluster: Cluster) -> list[str]:
    """Return the processes of a cluster, by mark or by command line."""
    mentions = [
        p for p in psutil.process_iter() if str(cluster.folder) in " ".join(marked.command(p))
    ]
    return [" ".join(marked.command(p)) for p in (*mentions, *cluster.processes())]


def gone(cluster: Cluster) -> bool:
    return not leftovers(cluster) and not cluster.folder.exists()


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PACELINE, *words], capture_output=True, text=True, timeout=110, check=False
    )


# --- with the stand-in


def test_it_is_remembered_until_it_is_taken_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, monkeypatch)
    assert standalone.standing() is None
    assert not standalone.down()
    said: list[str] = []
    cluster = standalone.up(2, say=said.append)
    try:
        assert said == ["starting the master", "starting 2 workers"]
        assert standalone.standing() == cluster
        assert (list(cluster.pids), cluster.ended()) == (["master", "worker-0", "worker-1"], [])
        assert len(cluster.processes()) == 5  # with those that the workers started
        # Each has a session of its own, so Ctrl-C in this terminal does not reach it.
        assert len({os.getsid(pid) for pid in cluster.pids.values()} - {os.getsid(0)}) == 3
        state = tmp_path / ".cache" / "paceline" / "cluster" / "cluster.json"
        assert stat.S_IMODE(state.stat().st_mode) == 0o600
        with pytest.raises(
            BadRequest,
            match=r"up already \(2 workers, spark://127.0.0.1:1\).*paceline cluster down",
        ):
            standalone.up()
        os.kill(cluster.pids["worker-1"], signal.SIGKILL)
        psutil.Process(cluster.pids["worker-1"]).wait(10)
        assert cluster.ended() == ["worker-1"]
        assert standalone.standing() == cluster
    finally:
        assert standalone.down()
    assert gone(cluster)
    assert not state.exists()


def test_a_process_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(
        tmp_path,
        monkeypatch,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
        + GOOD.replace('"sleep"', '"sh", "-c", "trap \'\' TERM; sleep 99; sleep"'),
    )
    monkeypatch.setattr(clusters, "END_S", 0.5)
    sent: list[str] = []

    def watch(word: str) -> None:
        send = getattr(psutil.Process, word)

        def watched(process: psutil.Process) -> None:
            sent.append(word)
            send(process)

        monkeypatch.setattr(psutil.Process, word, watched)

    watch("terminate")
    watch("kill")
    with standalone.lasting(1) as cluster:
        assert not gone(cluster)
    assert gone(cluster)
    assert sent[0] == "terminate"
    assert "kill" in sent


@pytest.mark.parametrize("folder", [None, "mine"])
def test_a_worker_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str | None
) -> None:
    fake(tmp_path, monkeypatch, "sys.exit('no such thing as a port')")
    with pytest.raises(
        RunFailed,
        match=r"(?s)worker 0 of the Spark cluster ended while it started.*no such thing as a port",
    ):
        standalone.up(1, folder=folder)
    assert standalone.standing() is None
    assert not (tmp_path / "mine").exists()
    assert not [
        p for p in psutil.process_iter() if str(tmp_path / "spark") in " ".join(marked.command(p))
    ]


def test_a_worker_that_never_comes_is_waited_for_until_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(
        tmp_path,
        monkeypatch,
        "print('still thinking', flush=True)\nsubprocess.run(['sleep', '1000'])",
    )
    monkeypatch.setattr(starting, "START_S", 1.5)
    with pytest.raises(
        RunFailed, match=r"(?s)not up within 2 s \(2 of 2 processes were started.*still thinking"
    ):
        standalone.up(1)
    assert standalone.standing() is None


def test_a_port_that_others_can_reach_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, monkeypatch, host="0.0.0.0")
    with pytest.raises(
        RunFailed,
        match=(
            r"the master of the Spark cluster listened on 0\.0\.0\.0:\d+, which other machines can"
            r" reach"
        ),
    ):
        standalone.up(1)
    assert standalone.standing() is None


def test_loopback() -> None:
    assert all(map(marked.is_loopback, ("127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1")))
    assert not any(
        map(marked.is_loopback, ("0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "fe80::1"))
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": 0}, "0 workers: a cluster on one machine has 1 to 32"),
        ({"workers": 33}, "33 workers"),
        ({"cores": 0}, "0 cores for each worker"),
        ({"memory": "much"}, "memory='much' is not an amount of memory: write 512m, 1g"),
        ({"memory": "64m"}, "512m or more"),
        ({"memory": "99999g"}, "this machine has .* fewer workers, or less memory"),
        ({"folder": "."}, "not an empty folder"),
        ({"folder": "a,b"}, "comma"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], sentence: str
) -> None:
    fake(tmp_path, monkeypatch)
    with pytest.raises(BadRequest, match=sentence):
        standalone.up(**options)
    assert standalone.standing() is None


def test_without_pyspark_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "find_spec", lambda name: None)
    with pytest.raises(BadRequest, match=r"pip install 'paceline\[spark\]'"):
        standalone.up()


def test_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch)
    with standalone.alone():
        for act in (standalone.up, standalone.down):
            with pytest.raises(BadRequest, match="another process is starting a cluster"):
                act()
        assert standalone.standing() is None


def test_a_pid_of_another_process_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart of the machine, the pids in the state belong to other processes."""
    fake(tmp_path, monkeypatch)
    cluster = standalone.up(1)
    standalone.down()
    with subprocess.Popen(["sleep", "1000"]) as other:
        cluster.folder.mkdir()
        started = psutil.Process(other.pid).create_time()
        stale = replace(cluster, daemons=(Daemon("master", other.pid, started),))
        standalone._remember(stale)
        assert standalone.standing() is None
        assert not stale.folder.exists()
        assert not standalone.state_file().exists()
        standalone._remember(stale)
        assert not standalone.down()
        assert other.poll() is None
        other.kill()


def test_a_start_that_was_killed_is_cleaned_up_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, monkeypatch)
    planned = starting.plan(1, 1, "1g", None)
    with standalone.alone():
        standalone._remember(planned)
    child = subprocess.Popen(["sleep", "1000"], env={**os.environ, marked.MARK: planned.mark})
    while not planned.processes():  # forked, but it has not executed its command yet
        assert child.poll() is None
    assert standalone.standing() is None
    assert child.wait(10) == -signal.SIGTERM
    assert gone(planned)


def test_nothing_is_left_when_its_owner_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, monkeypatch)
    planned = starting.plan(1, 1, "1g", None)
    watcher = standalone._watcher(planned)
    cluster = starting.start(planned, lambda _: None)
    assert watcher.stdin is not None
    watcher.stdin.close()  # as the system does when this process ends
    watcher.wait(20)
    assert gone(cluster)
    assert not cluster.down()


# --- a real one


@needs_spark
@pytest.mark.usefixtures("_home_of_its_own")
def test_a_real_cluster_comes_up_and_goes_down() -> None:
    cluster = standalone.up(1)
    try:
        running = cluster.processes()
        assert {p.pid for p in running} == set(cluster.pids.values())
        conf = cluster.conf_dir / "spark-defaults.conf"
        assert [
            stat.S_IMODE(p.stat().st_mode) for p in (cluster.folder, cluster.conf_dir, conf)
        ] == [0o700, 0o700, 0o600]
        assert cluster.master.startswith("spark://127.0.0.1:")
        ports = cluster.listening()
        assert {name for name, _, _ in ports} == {"master", "worker-0"}
        assert len(ports) == 4  # each has one port for Spark and one for its page
        assert all(marked.is_loopback(address) for _, address, _ in ports)
        assert secret_of(cluster) not in everything_said(cluster)
        assert "all 4 on loopback" in call("cluster", "status").stdout
    finally:
        assert standalone.down()
    assert gone(cluster)
    assert not any(p.is_running() for p in running)


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with standalone.lasting(3) as cluster:
        yield cluster


def secret_of(cluster: Cluster) -> str:
    lines = (cluster.conf_dir / "spark-defaults.conf").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("spark.authenticate.secret "))


def everything_said(cluster: Cluster) -> str:
    """Return all command lines of this machine and all logs of the cluster."""
    logs = [
        p.read_text(errors="replace")
        for p in cluster.folder.rglob("*")
        if p.is_file() and p.parent != cluster.conf_dir
    ]
    return subprocess.run(
        ["ps", "auxww"], capture_output=True, text=True, check=True
    ).stdout + "".join(logs)


JOB = """
import json, os, sys
from pyspark import SparkContext
sc = SparkContext(master=sys.argv[1])
def look(n):
    return os.getpid(), sys.executable, os.environ["OMP_NUM_THREADS"]
def wait(n):  # a barrier: all three tasks at the same time
    from pyspark import BarrierTaskContext
    BarrierTaskContext.get().barrier()
    yield look(n)
print(json.dumps(sc.parallelize(range(3), 3).barrier().mapPartitions(wait).collect()), flush=True)
sys.stdin.read()
sc.stop()
"""


def driver(cluster: Cluster, conf_dir: Path, stderr: Path) -> subprocess.Popen[str]:
    with stderr.open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", JOB, cluster.master],
            env=java.spark_environment(conf_dir), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip


@needs_spark
@pytest.mark.slow
def test_a_job_runs_on_three_workers_and_gives_nothing_away(tmp_path: Path, three: Cluster) -> None:
    with driver(three, three.conf_dir, tmp_path / "said") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (tmp_path / "said").read_text()
        found = json.loads(line)
        assert len({pid for pid, _, _ in found}) == 3
        assert {(python, threads) for _, python, threads in found} == {(sys.executable, "1")}
        assert len(three.executors()) == 3
        assert three.drivers()
        ports = three.listening()
        assert {"master", "worker-2", "executor", "python"} <= {name for name, _, _ in ports}
        assert all(marked.is_loopback(address) for _, address, _ in ports)
        own = [
            p
            for child in psutil.Process(process.pid).children(recursive=True)
            for p in marked.ports(child)
        ]
        assert own
        assert all(marked.is_loopback(address) for address, _ in own)
        assert secret_of(three) not in everything_said(three)
        process.communicate(timeout=60)
    assert process.returncode == 0


@needs_spark
@pytest.mark.slow
@pytest.mark.parametrize(
    ("secret", "said"),
    [
        ("spark.authenticate.secret wrong\n", "Exception while bootstrapping client"),
        ("", "Unknown challenge message"),
    ],
)
def test_a_driver_without_the_secret_is_refused(
    tmp_path: Path, three: Cluster, secret: str, said: str
) -> None:
    lines = (three.conf_dir / "spark-defaults.conf").read_text().splitlines(keepends=True)
    known = ("spark.authenticate.secret",) if secret else ("spark.authenticate", "spark.network")
    (tmp_path / "spark-defaults.conf").write_text(
        "".join(line for line in lines if not line.startswith(known)) + secret
    )
    log = three.folder / "logs" / "master.log"
    registered = log.read_text().count("Registering app")
    with driver(three, tmp_path, tmp_path / "said") as process:
        until = time.monotonic() + 60
        while (
            said not in (tmp_path / "said").read_text()
            and process.poll() is None
            and time.monotonic() < until
        ):
            time.sleep(0.1)
        assert said in (tmp_path / "said").read_text()
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()  # Spark would retry for a minute
        process.kill()
    assert log.read_text().count("Registering app") == registered


@needs_spark
@pytest.mark.slow
@pytest.mark.usefixtures("_home_of_its_own")
def test_the_command_line(tmp_path: Path) -> None:
    assert "no cluster is up: paceline cluster up" in call("cluster", "status").stdout
    try:
        first = call("cluster", "up", "--workers", "2", "--memory", "512m", "--folder", "mine")
        assert first.returncode == 0, first.stderr
        assert "2 workers with 1 core and 512m each" in first.stdout
        assert "all 6 on loopback" in first.stdout
        again = call("cluster", "up")
        assert (again.returncode, again.stderr.count("up already")) == (2, 1)
        cluster = standalone.standing()  # it outlived the command
        assert cluster is not None
        assert json.loads(standalone.state_file().read_text())["folder"] == str(tmp_path / "mine")
        with driver(cluster, cluster.conf_dir, tmp_path / "said") as process:
            until = time.monotonic() + 60
            while not cluster.executors() and time.monotonic() < until:
                time.sleep(0.1)
            executor = cluster.executors()[0]
            down = call("cluster", "down")
            assert "the cluster is down" in down.stdout
            assert "used the cluster" in down.stderr
            assert not executor.is_running()
            assert not cluster.processes()
            assert not cluster.folder.exists()
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
    finally:
        call("cluster", "down")
    assert gone(cluster)
    assert "no cluster was up" in call("cluster", "down").stdout
