"""A real Spark cluster on this machine: a master and some workers, all on loopback, all
authenticated.

The secret is in a file that nobody else can read, and on no command line. (Spark itself hands it to
its executors in their environment, which the system shows to nobody but their owner.) A cluster
outlives the command that started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from paceline.errors import BadRequest, RunFailed
from paceline.spark import marked
from paceline.spark.java import LOOPBACK, pyspark_missing, spark_environment, spark_home

MOST_WORKERS = 32
START_S = 90.0  # for the master and all workers to be there
END_S = 8.0  # for them to end by themselves
POLL_S = 0.1
DAEMON_BYTES = 256 << 20  # the heap of the master, and of each worker beside its executor's
LEAST_BYTES = 512 << 20  # an executor's own minimum is 450 MiB
LOG_LINES = 12
MASTER, WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
QUICK = (  # compiles less: starts in half the time, and is slower in the long run
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
)

Say = Callable[[str], None]

_CHILDREN: dict[
    str, list[subprocess.Popen[bytes]]
] = {}  # of this process, by the mark of their cluster


@dataclass(frozen=True)
class Daemon:
    name: str  # master, worker-0
    pid: int
    started_s: float  # since 1970


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up, or was. A driver needs `master`, and `conf_dir` as its
    SPARK_CONF_DIR.
    """

    master: str  # spark://127.0.0.1:PORT
    ui: str  # http://127.0.0.1:PORT
    folder: Path
    mark: str
    workers: int
    cores: int  # of each worker
    memory: str  # of each worker
    daemons: tuple[Daemon, ...] = ()

    @property
    def conf_dir(self) -> Path:
        return self.folder / "conf"

    @property
    def pids(self) -> dict[str, int]:
        return {d.name: d.pid for d in self.daemons}

    def processes(self) -> list[psutil.Process]:
        """All that run: master, workers, executors, and the Pythons of these."""
        return marked.find(self.mark)

    def executors(self) -> list[psutil.Process]:
        return [p for p in self.processes() if EXECUTOR in marked.command(p)]

    def ended(self) -> list[str]:
        """The names of those that should run and do not."""
        return [d.name for d in self.daemons if not _runs(d, self.mark)]

    def drivers(self) -> list[int]:
        """The processes outside that use this cluster."""
        ours = {p.pid for p in self.processes()}
        return [
            p.pid
            for p in psutil.process_iter()
            if p.pid not in ours and str(self.conf_dir) in " ".join(marked.command(p))
        ]

    def listening(self) -> list[tuple[str, str, int]]:
        """Every listening port of every process: whose, on which address, which."""
        names, found = {d.pid: d.name for d in self.daemons}, set()
        for process in self.processes():
            name = names.get(process.pid) or (
                "executor" if EXECUTOR in marked.command(process) else "python"
            )
            found |= {(name, address, port) for address, port in marked.ports(process)}
        return sorted(found)

    def down(self) -> bool:
        """End its processes, remove its folder; whether any was running."""
        was_there = marked.end(self.mark, END_S)
        for child in _CHILDREN.pop(self.mark, []):
            child.wait(END_S)  # its end has to be noted by this process, which started it
        shutil.rmtree(self.folder, ignore_errors=True)
        return was_there


# --- the one that stands until it is taken down


def up(
    workers: int = 3,
    cores: int = 1,
    memory: str = "1g",
    folder: str | Path | None = None,
    say: Say = lambda _: None,
) -> Cluster:
    """Start the cluster that outlives this process; there is one at a time."""
    with _lock():
        if (there := _remembered()) is not None:
            raise BadRequest(
                f"a cluster is up already ({there.workers} workers, {there.master}): use it, or"
                " take it down first: paceline cluster down"
            )
        planned = _planned(workers, cores, memory, folder)
        try:
            _remember(
                planned
            )  # before anything is started: should this be killed, the next one cleans up
            cluster = _start(planned, say)
            _remember(cluster)
        except BaseException:
            planned.down()
            _state().unlink(missing_ok=True)
            raise
    return cluster


def standing() -> Cluster | None:
    """The one that is up; what is left of one that is no more is removed."""
    try:
        with _lock():
            return _remembered()
    except BadRequest:  # just being started, or taken down
        return None


def down() -> bool:
    """Take the standing one down; whether there was one."""
    with _lock():
        cluster = _read()
        was_there = cluster is not None and cluster.down()
        _state().unlink(missing_ok=True)
    return was_there


@contextmanager
def lasting(
    workers: int = 3, cores: int = 1, memory: str = "1g", quick: bool = True
) -> Iterator[Cluster]:
    """A cluster for as long as this lasts, beside the standing one; taken down also if this process
    is killed.

    `quick`: executors start in half the time, and are slower in the long run.
    """
    planned = _planned(workers, cores, memory, None)
    watcher = _watcher(planned)  # before anything is started
    try:
        yield _start(
            planned, lambda _: None, {"spark.executor.extraJavaOptions": QUICK} if quick else {}
        )
    finally:
        planned.down()
        assert watcher.stdin is not None
        watcher.stdin.close()
        watcher.wait()


def _watcher(planned: Cluster) -> subprocess.Popen[bytes]:
    """Takes the cluster down when its standard input closes: when this process ends, however it
    ends.
    """
    code = (
        "import shutil, sys; from paceline.spark import marked; sys.stdin.read();"
        " marked.end(sys.argv[1], float(sys.argv[2])); shutil.rmtree(sys.argv[3],"
        " ignore_errors=True)"
    )
    arguments = [planned.mark, str(END_S), str(planned.folder)]
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, start_new_session=True
    )


# --- starting


def _planned(workers: int, cores: int, memory: str, folder: str | Path | None) -> Cluster:
    """Checked, and with a folder of its own; nothing runs yet."""
    if not 1 <= workers <= MOST_WORKERS:
        raise BadRequest(f"{workers} workers: a cluster on one machine has 1 to {MOST_WORKERS}")
    if cores < 1:
        raise BadRequest(f"{cores} cores for each worker: it takes at least 1")
    each_bytes, there_bytes = _bytes(memory), psutil.virtual_memory().total
    needed_bytes = workers * (each_bytes + DAEMON_BYTES) + DAEMON_BYTES
    if each_bytes < LEAST_BYTES:
        raise BadRequest(f"memory={memory} for each worker: Spark's executors need 512m or more")
    if needed_bytes > there_bytes:
        raise BadRequest(
            f"{workers} workers with {memory} each take up to {needed_bytes / 2**30:.1f} GiB, with"
            f" Spark's own processes, and this machine has {there_bytes / 2**30:.1f} GiB: fewer"
            " workers, or less memory for each"
        )
    if (reason := pyspark_missing()) is not None:
        raise BadRequest(reason)
    return Cluster("", "", _own_folder(folder), secrets.token_hex(8), workers, cores, memory)


def _own_folder(folder: str | Path | None) -> Path:
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="paceline-cluster-"))  # mode 0700
    path = Path(folder).expanduser().absolute()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise BadRequest(
            f"{path} is not an empty folder: a cluster's folder is removed with it, so it needs one"
            " of its own"
        )
    if "," in str(path):
        raise BadRequest(
            f"{path} has a comma in it, which Spark takes for the end of a folder's name"
        )
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def _start(planned: Cluster, say: Say, extra: dict[str, str] | None = None) -> Cluster:
    """The master, then the workers, then a look at every port; the caller takes it down if any of
    it fails.
    """
    until = time.monotonic() + START_S
    environment = _environment(planned)
    _write_conf(planned, extra or {})
    say("starting the master")
    begun = replace(planned, daemons=(_spawn(planned, environment, "master", MASTER),))
    ui_port = _ui_port(begun, until)
    address = _asked(begun, ui_port, until, lambda state: bool(state.get("url")))["url"]
    say(f"starting {planned.workers} worker{'s' if planned.workers > 1 else ''}")
    size = ["--cores", str(planned.cores), "--memory", planned.memory]
    for index in range(planned.workers):
        work = ["--work-dir", str(planned.folder / "work" / str(index))]
        worker = _spawn(planned, environment, f"worker-{index}", WORKER, *size, *work, address)
        begun = replace(begun, daemons=(*begun.daemons, worker))
    _asked(begun, ui_port, until, lambda state: _alive(state) == planned.workers)
    cluster = replace(begun, master=address, ui=f"http://{LOOPBACK}:{ui_port}")
    for name, host, port in cluster.listening():
        if not marked.is_loopback(host):
            raise RunFailed(
                f"the {_spoken(name)} of the Spark cluster listened on {host}:{port}, which others"
                " can reach: taken down again"
            )
    return cluster


def _environment(cluster: Cluster) -> dict[str, str]:
    """Nothing of the person's own settings for Spark: the cluster is what was asked for."""
    plain = {k: v for k, v in spark_environment().items() if not k.startswith("SPARK_")}
    here = os.path.dirname(sys.executable)
    return {
        **plain,
        "PATH": (
            f"{here}{os.pathsep}{plain.get('PATH', os.defpath)}"
        ),  # a driver that names no Python gets this one
        "SPARK_HOME": str(spark_home()),
        "SPARK_CONF_DIR": str(cluster.conf_dir),
        "SPARK_LOCAL_IP": LOOPBACK,  # where the web pages listen, too
        "SPARK_LOCAL_DIRS": str(cluster.folder / "local"),
        "SPARK_DAEMON_MEMORY": f"{DAEMON_BYTES >> 20}m",
        "SPARK_DAEMON_JAVA_OPTS": QUICK,
        "SPARK_LAUNCHER_OPTS": QUICK,
        marked.MARK: cluster.mark,
    }


def _write_conf(cluster: Cluster, extra: dict[str, str]) -> None:
    """For the master, the workers, and the drivers to come; the only file with the secret."""
    settings = {
        "spark.authenticate": "true",
        "spark.authenticate.secret": secrets.token_urlsafe(32),
        "spark.network.crypto.enabled": "true",
        "spark.network.crypto.saslFallback": "false",
        "spark.master.rest.enabled": "false",
        "spark.master.ui.decommission.allow.mode": "DENY",
        "spark.ui.killEnabled": "false",
        "spark.ui.enabled": "false",  # the driver's
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.executor.cores": str(cluster.cores),
        "spark.executor.memory": cluster.memory,
        "spark.executorEnv.OMP_NUM_THREADS": str(cluster.cores),
        **extra,
    }
    for folder in ("conf", "logs", "work", "local"):
        (cluster.folder / folder).mkdir(mode=0o700)
    file = os.open(
        cluster.conf_dir / "spark-defaults.conf", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
    )
    with open(file, "w") as out:
        out.writelines(f"{name} {value}\n" for name, value in settings.items())


def _spawn(
    cluster: Cluster, environment: dict[str, str], name: str, kind: str, *arguments: str
) -> Daemon:
    command = [
        str(spark_home() / "bin" / "spark-class"),
        kind,
        "--host",
        LOOPBACK,
        "--port",
        "0",
        "--webui-port",
        "0",
    ]
    with open(_log(cluster, name), "wb") as log:
        process = subprocess.Popen(
            [*command, *arguments], env=environment, cwd=cluster.folder,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    _CHILDREN.setdefault(cluster.mark, []).append(process)
    return Daemon(name, process.pid, psutil.Process(process.pid).create_time())


def _ui_port(cluster: Cluster, until: float) -> int:
    """The port that the system gave to the master's page: its log says it."""
    while True:
        if found := re.search(
            r"service 'MasterUI' on port (\d+)", _log(cluster, "master").read_text(errors="replace")
        ):
            return int(found[1])
        _wait(cluster, until)


def _asked(
    cluster: Cluster, port: int, until: float, enough: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """What the master says of itself, once it is what is waited for."""
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            connection = http.client.HTTPConnection(
                LOOPBACK, port, timeout=5
            )  # urllib would ask a proxy
            try:
                connection.request("GET", "/json/")
                state: dict[str, Any] = json.loads(connection.getresponse().read())
            finally:
                connection.close()
            if enough(state):
                return state
        _wait(cluster, until)


def _wait(cluster: Cluster, until: float) -> None:
    """A moment; a sentence when a process has ended, or the time is over."""
    time.sleep(POLL_S)
    if ended := cluster.ended():
        raise RunFailed(
            f"the {_spoken(ended[0])} of the Spark cluster ended at its"
            f" start{_last_lines(cluster, ended[0])}"
        )
    if time.monotonic() > until:
        raise RunFailed(
            f"the Spark cluster was not up within {START_S:.0f} s, with {len(cluster.daemons)} of"
            f" {cluster.workers + 1} processes started: is this machine very"
            f" busy?{_last_lines(cluster, cluster.daemons[-1].name)}"
        )


def _alive(state: dict[str, Any]) -> int:
    return sum(w.get("state") == "ALIVE" for w in state.get("workers", []))


# --- what is remembered


def _state() -> Path:
    return Path("~/.cache/paceline/cluster/cluster.json").expanduser()


@contextmanager
def _lock() -> Iterator[None]:
    """One process at a time starts the cluster or takes it down."""
    _state().parent.mkdir(parents=True, exist_ok=True)
    with open(_state().with_name("lock"), "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadRequest(
                "another process is just starting a cluster, or taking it down: wait until it is"
                " done"
            ) from None
        yield


def _remember(cluster: Cluster) -> None:
    aside = _state().with_name(f"cluster.json.{os.getpid()}")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        json.dump({**asdict(cluster), "folder": str(cluster.folder)}, out, indent=2)
    aside.replace(_state())


def _read() -> Cluster | None:
    try:
        said: dict[str, Any] = json.loads(_state().read_text())
        return Cluster(
            **{
                **said,
                "folder": Path(said["folder"]),
                "daemons": tuple(Daemon(**d) for d in said["daemons"]),
            }
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remembered() -> Cluster | None:
    """The standing one, if its start was completed and any of it runs; its remains are removed
    otherwise. Needs the lock.
    """
    cluster = _read()
    if cluster is None or (cluster.master and len(cluster.ended()) < len(cluster.daemons)):
        return cluster
    cluster.down()
    _state().unlink(missing_ok=True)
    return None


# --- small things


def _runs(daemon: Daemon, mark: str) -> bool:
    """Its number is not enough: it may be another's by now."""
    process = marked.at(daemon.pid, mark)
    try:
        return (
            process is not None and abs(process.create_time() - daemon.started_s) < 2
        )  # the clock may have been set
    except psutil.Error:
        return False


def _bytes(memory: str) -> int:
    found = re.fullmatch(r"(\d+)([mg])", memory)
    if found is None:
        raise BadRequest(f"memory={memory!r} is not an amount that Spark reads: 512m, 1g, 4g")
    return int(found[1]) << (20 if found[2] == "m" else 30)


def _log(cluster: Cluster, name: str) -> Path:
    return cluster.folder / "logs" / f"{name}.log"


def _spoken(name: str) -> str:
    return name.replace("-", " ")


def _last_lines(cluster: Cluster, name: str) -> str:
    lines = _log(cluster, name).read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([" Its log ends:", *lines]) if lines else " Its log is empty."
