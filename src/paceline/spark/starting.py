"""Start a standalone Spark cluster on this machine: a master, then its workers, all on loopback.

Spark authenticates every connection with a secret. The secret is in one file that only its owner
can read, and on no command line. Spark hands it to its executors in their environment, which only
their owner can read, too.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from paceline.errors import BadRequest, RunFailed
from paceline.spark import marked
from paceline.spark.cluster import CHILDREN, Cluster, Daemon
from paceline.spark.java import LOOPBACK, pyspark_missing, spark_environment, spark_home

MOST_WORKERS = 32
START_S = 90.0  # for the master and all workers to register
POLL_S = 0.1
DAEMON_BYTES = 256 << 20  # the heap of the master, and of each worker beside its executor's
LEAST_BYTES = 512 << 20  # an executor's own minimum is 450 MiB
LOG_LINES = 12
MASTER, WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"
# The JVM optimises less: it starts in half the time, and is slower in the long run.
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

Say = Callable[[str], None]


def plan(workers: int, cores: int, memory: str, folder: str | Path | None) -> Cluster:
    """Check the request and make the cluster's folder. No process is started."""
    if not 1 <= workers <= MOST_WORKERS:
        raise BadRequest(f"{workers} workers: a cluster on one machine has 1 to {MOST_WORKERS}")
    if cores < 1:
        raise BadRequest(f"{cores} cores for each worker: at least 1 is needed")
    each_bytes, there_bytes = memory_bytes(memory), psutil.virtual_memory().total
    needed_bytes = workers * (each_bytes + DAEMON_BYTES) + DAEMON_BYTES
    if each_bytes < LEAST_BYTES:
        raise BadRequest(f"memory={memory} for each worker: Spark's executors need 512m or more")
    if needed_bytes > there_bytes:
        raise BadRequest(
            f"{workers} workers with {memory} each take up to {needed_bytes / 2**30:.1f} GiB, with"
            f" Spark's own processes, and this machine has {there_bytes / 2**30:.1f} GiB: use"
            " fewer workers, or less memory for each"
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
            f"{path} is not an empty folder: `paceline cluster down` removes the cluster's folder,"
            " so give it an empty or a new one"
        )
    if "," in str(path):
        raise BadRequest(
            f"{path} has a comma in it, and Spark splits lists of folders at commas: choose"
            " another folder"
        )
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def start(planned: Cluster, say: Say, extra: dict[str, str] | None = None) -> Cluster:
    """Start the master and the workers, and check that all ports are on loopback.

    The caller takes the cluster down if this raises.
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
                f"the {_spoken(name)} of the Spark cluster listened on {host}:{port}, which other"
                " machines can reach. The cluster was taken down again"
            )
    return cluster


def _environment(cluster: Cluster) -> dict[str, str]:
    """Return the environment of the daemons, without the user's own SPARK_* variables."""
    plain = {k: v for k, v in spark_environment().items() if not k.startswith("SPARK_")}
    here = os.path.dirname(sys.executable)
    return {
        **plain,
        # Executors of a driver that names no Python take the first one on PATH.
        "PATH": f"{here}{os.pathsep}{plain.get('PATH', os.defpath)}",
        "SPARK_HOME": str(spark_home()),
        "SPARK_CONF_DIR": str(cluster.conf_dir),
        "SPARK_LOCAL_IP": LOOPBACK,  # the web pages listen there, too
        "SPARK_LOCAL_DIRS": str(cluster.folder / "local"),
        # What tasks that are killed leave there is removed with the cluster.
        "TMPDIR": str(cluster.folder / "local"),
        "SPARK_DAEMON_MEMORY": f"{DAEMON_BYTES >> 20}m",
        "SPARK_DAEMON_JAVA_OPTS": QUICK,
        "SPARK_LAUNCHER_OPTS": QUICK,
        marked.MARK: cluster.mark,
    }


def _write_conf(cluster: Cluster, extra: dict[str, str]) -> None:
    """Write the settings for master, workers and drivers. Only this file has the secret."""
    settings = {
        "spark.authenticate": "true",
        "spark.authenticate.secret": secrets.token_urlsafe(32),
        "spark.network.crypto.enabled": "true",
        "spark.network.crypto.saslFallback": "false",
        "spark.master.rest.enabled": "false",
        "spark.master.ui.decommission.allow.mode": "DENY",
        "spark.ui.killEnabled": "false",
        "spark.ui.enabled": "false",  # the driver's web page
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
    CHILDREN.setdefault(cluster.mark, []).append(process)
    return Daemon(name, process.pid, psutil.Process(process.pid).create_time())


def _ui_port(cluster: Cluster, until: float) -> int:
    """Return the port of the master's web page, which the master writes into its log."""
    while True:
        if found := re.search(
            r"service 'MasterUI' on port (\d+)", _log(cluster, "master").read_text(errors="replace")
        ):
            return int(found[1])
        _wait(cluster, until)


def _asked(
    cluster: Cluster, port: int, until: float, enough: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Poll the master's state until `enough` accepts it, and return it."""
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            # urllib would go through the user's proxy
            connection = http.client.HTTPConnection(LOOPBACK, port, timeout=5)
            try:
                connection.request("GET", "/json/")
                state: dict[str, Any] = json.loads(connection.getresponse().read())
            finally:
                connection.close()
            if enough(state):
                return state
        _wait(cluster, until)


def _wait(cluster: Cluster, until: float) -> None:
    """Wait for one poll. Raise RunFailed if a daemon has ended or the deadline has passed."""
    time.sleep(POLL_S)
    if ended := cluster.ended():
        raise RunFailed(
            f"the {_spoken(ended[0])} of the Spark cluster ended while it"
            f" started.{_last_lines(cluster, ended[0])}"
        )
    if time.monotonic() > until:
        raise RunFailed(
            f"the Spark cluster was not up within {START_S:.0f} s"
            f" ({len(cluster.daemons)} of {cluster.workers + 1} processes were started): is this"
            f" machine very busy?{_last_lines(cluster, cluster.daemons[-1].name)}"
        )


def _alive(state: dict[str, Any]) -> int:
    return sum(w.get("state") == "ALIVE" for w in state.get("workers", []))


def memory_bytes(memory: str) -> int:
    found = re.fullmatch(r"(\d+)([mg])", memory)
    if found is None:
        raise BadRequest(f"memory={memory!r} is not an amount of memory: write 512m, 1g or 4g")
    return int(found[1]) << (20 if found[2] == "m" else 30)


def _log(cluster: Cluster, name: str) -> Path:
    return cluster.folder / "logs" / f"{name}.log"


def _spoken(name: str) -> str:
    return name.replace("-", " ")


def _last_lines(cluster: Cluster, name: str) -> str:
    lines = _log(cluster, name).read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([" Its log ends:", *lines]) if lines else " Its log is empty."
