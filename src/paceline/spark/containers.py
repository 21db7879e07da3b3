"""A Spark cluster in containers: a master and workers, each with a network address of its own.

The cluster outlives the command that started it. One file in the user's cache describes it, and a
label is on everything that belongs to it: containers, network. All containers see one folder of the
machine, under the same path, and run as the user who started them.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.common.files import write_whole
from paceline.errors import BadRequest, RunFailed
from paceline.spark import image as images
from paceline.spark import standalone
from paceline.spark.cluster import Cluster
from paceline.spark.engine import Engine, find_engine
from paceline.spark.starting import LEAST_BYTES, MOST_WORKERS, memory_bytes

Say = Callable[[str], None]
START_S = 240.0  # for the master and all workers to register
POLL_S = 0.5
STOP_S = 3  # for a container to end by itself
LOG_LINES = 12
LABEL, ROLE = "paceline.cluster", "paceline.role"
MASTER = "spark://master:7077"
# Prints the state of the master; run inside its container.
ASK = (
    "import urllib.request;"
    "print(urllib.request.urlopen('http://master:8080/json/', timeout=5).read().decode())"
)


@dataclass(frozen=True)
class ContainerCluster:
    """The description of a cluster in containers."""

    engine: str  # docker, podman
    mark: str  # random: in the names, and in the label
    workers: int
    cores: int  # tasks that each worker takes at once
    memory: str  # of each worker's executor
    image: str
    folder: str  # the folder that all containers see
    private: str  # the folder with the secret
    run_options: str = ""  # further options of `docker run`, for the workers
    page: str = ""  # http://127.0.0.1:PORT, the master's web page; empty until it is up

    @property
    def network(self) -> str:
        return f"paceline-{self.mark}"

    def name(self, role: str) -> str:
        """Return the name of a container: that of `master`, `worker-1`, `driver-1a2b`."""
        return f"paceline-{self.mark}-{role}"

    @property
    def roles(self) -> list[str]:
        return ["master", *(f"worker-{n}" for n in range(1, self.workers + 1))]

    def command(self, role: str, kind: str, *more: str) -> list[str]:
        """Return the words after `docker` that start one container."""
        private = Path(self.private)
        words = ["run", "--init", "--name", self.name(role), "--hostname", role]
        words += ["--label", f"{LABEL}={self.mark}", "--label", f"{ROLE}={kind}"]
        words += ["--network", self.network, "--network-alias", role]
        words += ["--user", f"{os.getuid()}:{os.getgid()}", "--cap-drop", "ALL"]
        words += ["--security-opt", "no-new-privileges", "--security-opt", "label=disable"]
        if self.engine == "podman" and os.geteuid() != 0:
            words += ["--userns", "keep-id"]
        words += ["--tmpfs", "/run/spark:mode=1777"]
        for source, target in (
            (private / "secret", "/run/secrets/spark_secret:ro"),
            (private / "passwd", "/etc/passwd:ro"),
            (Path(self.folder), self.folder),
        ):
            words += ["--volume", f"{source}:{target}"]
        for key, value in (
            ("SPARK_NODE_USER", "own"),
            ("SPARK_WORKER_CORES", str(self.cores)),
            ("SPARK_WORKER_MEMORY", self.memory),
            ("SPARK_DAEMON_MEMORY", "256m"),
            ("PYTHONUNBUFFERED", "1"),
        ):
            words += ["--env", f"{key}={value}"]
        if kind == "worker":
            words += shlex.split(self.run_options)
        return [*words, *more]

    def states(self) -> dict[str, str]:
        """Return the state of every container by role: `Up 2 minutes`, `Exited (137) ...`."""
        form = "{{.Names}}\t{{.Status}}"
        found = Engine(self.engine).run(
            "ps", "--all", "--filter", f"label={LABEL}={self.mark}", "--format", form
        )
        pairs = (line.split("\t") for line in found.splitlines() if "\t" in line)
        return {name.removeprefix(f"paceline-{self.mark}-"): state for name, state in pairs}

    def drivers(self) -> list[str]:
        return [role for role in self.states() if role.startswith("driver")]

    def ended(self) -> list[str]:
        """Return the roles whose containers do not run."""
        states = self.states()
        return [role for role in self.roles if not states.get(role, "").startswith("Up")]

    def down(self) -> bool:
        """Remove all containers, the network and the secret. Return whether there was any."""
        engine, label = Engine(self.engine), f"label={LABEL}={self.mark}"
        there = engine.run("ps", "--all", "--quiet", "--filter", label).split()
        if there:
            engine.tried("stop", "--time", str(STOP_S), *there)
            engine.run("rm", "--force", "--volumes", *there)
        for network in engine.run("network", "ls", "--quiet", "--filter", label).split():
            engine.run("network", "rm", network)
        shutil.rmtree(self.private, ignore_errors=True)
        return bool(there)


def up(
    workers: int = 3,
    cores: int = 2,
    memory: str = "1g",
    folder: str | Path | None = None,
    *,
    image: str = "",
    build_options: str = "",
    run_options: str = "",
    page_port: int = 0,
    say: Say = lambda _: None,
) -> ContainerCluster:
    """Start the cluster. Only one is up at a time, in containers or not."""
    with standalone.alone():
        there = standalone.remembered() or _remembered()
        if there is not None:
            where = there.master if isinstance(there, Cluster) else "in containers"
            raise BadRequest(
                f"a cluster is up already ({there.workers} workers, {where}): use it, or take it"
                " down first: paceline cluster down"
            )
        shared = _shared(folder)
        _check(workers, cores, memory, page_port)
        images.split(run_options, "run-options")
        engine = find_engine()
        if image and engine.tried("image", "inspect", image)[0] != 0:
            raise BadRequest(f"--image {image}: {engine.name} has no such image here")
        image = image or images.ensure(engine, build_options, say)
        planned = ContainerCluster(
            *(engine.name, secrets.token_hex(4), workers, cores, memory, image, str(shared)),
            private=tempfile.mkdtemp(prefix="paceline-cluster-"),  # mode 0700
            run_options=run_options,
        )
        try:
            _remember(planned)  # before anything starts: the next command can clean up
            cluster = _start(planned, page_port, say)
            _remember(cluster)
        except BaseException:
            planned.down()
            _state().unlink(missing_ok=True)
            raise
    return cluster


def standing() -> ContainerCluster | None:
    """Return the cluster in containers that is up, or None."""
    if not _state().exists():
        return None
    try:
        with standalone.alone():
            return _remembered()
    except BadRequest:  # another process starts it or takes it down
        return None


def down() -> bool:
    """Take the cluster in containers down. Return whether one was up."""
    with standalone.alone():
        cluster = _read()
        was_there = cluster is not None and cluster.down()
        _state().unlink(missing_ok=True)
    return was_there


def _check(workers: int, cores: int, memory: str, page_port: int) -> None:
    if not 1 <= workers <= MOST_WORKERS:
        raise BadRequest(f"{workers} workers: a cluster on one machine has 1 to {MOST_WORKERS}")
    if cores < 1:
        raise BadRequest(f"{cores} cores for each worker: at least 1 is needed")
    if memory_bytes(memory) < LEAST_BYTES:
        raise BadRequest(f"memory={memory} for each worker: Spark's executors need 512m or more")
    if not 0 <= page_port <= 65535:
        raise BadRequest(f"--page-port {page_port}: a port is a number from 1 to 65535")
    if page_port:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", page_port))
            except OSError as error:
                raise BadRequest(
                    f"--page-port {page_port} cannot be used: {error.strerror}; leave it out, and a"
                    " free port is chosen"
                ) from None


def _shared(folder: str | Path | None) -> Path:
    path = Path(folder or os.getcwd()).expanduser().resolve()
    if not path.is_dir():
        raise BadRequest(f"--folder {path}: there is no such folder for the containers to share")
    if path == Path("/"):
        raise BadRequest(
            "the containers would share / with this machine: change to the folder of your work, or"
            " name it with --folder"
        )
    if ":" in str(path):
        raise BadRequest(f"{path} has a colon in it, which container engines split: use another")
    if not os.access(path, os.W_OK):
        raise BadRequest(f"the folder {path}, which the containers would share, is not writable")
    return path


def _start(planned: ContainerCluster, page_port: int, say: Say) -> ContainerCluster:
    engine, private = Engine(planned.engine), Path(planned.private)
    write_whole(private / "secret", secrets.token_urlsafe(32), mode=0o600)
    # Java asks for the name of the user, whom the image does not know.
    user = f"paceline:x:{os.getuid()}:{os.getgid()}::/tmp/home:/bin/bash\n"
    root = "root:x:0:0::/root:/bin/bash\n" if os.getuid() else ""
    write_whole(private / "passwd", root + user, mode=0o644)
    engine.run("network", "create", "--label", f"{LABEL}={planned.mark}", planned.network)
    say("starting the master")
    port = f"127.0.0.1:{page_port or ''}:8080"
    _begin(engine, planned, "master", "--publish", port)
    say(f"starting {planned.workers} worker{'s' if planned.workers > 1 else ''}")
    for role in planned.roles[1:]:
        _begin(engine, planned, role)
    _await(engine, planned)
    published = engine.run("port", planned.name("master"), "8080").split()[0]
    return replace(planned, page=f"http://{published}")


def _begin(engine: Engine, planned: ContainerCluster, role: str, *more: str) -> None:
    kind = role.partition("-")[0]
    what = ["worker", MASTER] if kind == "worker" else [kind]
    engine.run(*planned.command(role, kind, "--detach", *more, planned.image, *what))


def _await(engine: Engine, planned: ContainerCluster) -> None:
    """Wait until all workers have registered with the master."""
    until = time.monotonic() + START_S
    alive = 0
    while alive < planned.workers:
        if ended := planned.ended():
            raise RunFailed(
                f"the container of the {ended[0].replace('-', ' ')} ended while the cluster"
                f" started.{_last_lines(engine, planned, ended[0])}"
            )
        if time.monotonic() > until:
            late = f"worker-{alive + 1}"
            raise RunFailed(
                f"the Spark cluster was not up within {START_S:.0f} s ({alive} of"
                f" {planned.workers} workers have registered): is this machine very"
                f" busy?{_last_lines(engine, planned, late)}"
            )
        code, out, _ = engine.tried("exec", planned.name("master"), "python", "-c", ASK)
        if code == 0:
            state: dict[str, Any] = json.loads(out)
            alive = sum(w.get("state") == "ALIVE" for w in state.get("workers", []))
        time.sleep(POLL_S if alive < planned.workers else 0)


def _last_lines(engine: Engine, planned: ContainerCluster, role: str) -> str:
    _, out, err = engine.tried("logs", "--tail", str(LOG_LINES), planned.name(role))
    lines = (out + err).splitlines()[-LOG_LINES:]
    return "\n".join([" Its log ends:", *lines]) if lines else " Its log is empty."


def _state() -> Path:
    return standalone.state_file().with_name("containers.json")


def _remember(cluster: ContainerCluster) -> None:
    write_whole(_state(), json.dumps(asdict(cluster), indent=2), mode=0o600)


def _read() -> ContainerCluster | None:
    try:
        return ContainerCluster(**json.loads(_state().read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _remembered() -> ContainerCluster | None:
    """Return the cluster if its start was completed and any container of it runs.

    Otherwise remove what is left of it. The caller holds the lock.
    """
    cluster = _read()
    if cluster is None or (cluster.page and len(cluster.ended()) < len(cluster.roles)):
        return cluster
    cluster.down()
    _state().unlink(missing_ok=True)
    return None
