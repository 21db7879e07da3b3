"""The standalone Spark cluster of this machine: start it, find it again, take it down.

The cluster outlives the command that started it. One file in the user's cache describes it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.common.files import write_whole
from paceline.common.locks import try_lock
from paceline.common.places import cache_folder
from paceline.errors import BadRequest
from paceline.spark import cluster as clusters
from paceline.spark.cluster import Cluster, Daemon
from paceline.spark.starting import QUICK, Say, plan, start


def up(
    workers: int = 3,
    cores: int = 1,
    memory: str = "1g",
    folder: str | Path | None = None,
    say: Say = lambda _: None,
) -> Cluster:
    """Start the machine's cluster, which outlives this process. Only one can be up at a time."""
    with alone():
        if (there := remembered()) is not None:
            raise BadRequest(
                f"a cluster is up already ({there.workers} workers, {there.master}): use it, or"
                " take it down first: paceline cluster down"
            )
        if state_file().with_name("containers.json").exists():
            raise BadRequest(
                "a cluster is up already, in containers: use it, or take it down first: paceline"
                " cluster down"
            )
        planned = plan(workers, cores, memory, folder)
        try:
            # Before any process starts: if this one is killed, the next command cleans up.
            _remember(planned)
            cluster = start(planned, say)
            _remember(cluster)
        except BaseException:
            planned.down()
            state_file().unlink(missing_ok=True)
            raise
    return cluster


def standing() -> Cluster | None:
    """Return the cluster that is up, or None. Remove what is left of one that has ended."""
    try:
        with alone():
            return remembered()
    except BadRequest:  # another process starts it or takes it down
        return None


def down() -> bool:
    """Take the machine's cluster down. Return whether one was up."""
    with alone():
        cluster = _read()
        was_there = cluster is not None and cluster.down()
        state_file().unlink(missing_ok=True)
    return was_there


@contextmanager
def lasting(
    workers: int = 3, cores: int = 1, memory: str = "1g", quick: bool = True
) -> Iterator[Cluster]:
    """Start a cluster for the `with` block, independent of the machine's cluster.

    A watcher process takes it down even if this process is killed. With `quick`, executors start in
    half the time and are slower in the long run.
    """
    planned = plan(workers, cores, memory, None)
    watcher = _watcher(planned)  # before any process of the cluster starts
    try:
        yield start(
            planned, lambda _: None, {"spark.executor.extraJavaOptions": QUICK} if quick else {}
        )
    finally:
        planned.down()
        assert watcher.stdin is not None
        watcher.stdin.close()
        watcher.wait()


def _watcher(planned: Cluster) -> subprocess.Popen[bytes]:
    """Start a process that takes the cluster down when its standard input closes.

    The system closes it when this process ends, for whatever reason.
    """
    code = (
        "import shutil, sys; from paceline.spark import marked; sys.stdin.read();"
        " marked.end(sys.argv[1], float(sys.argv[2])); shutil.rmtree(sys.argv[3],"
        " ignore_errors=True)"
    )
    arguments = [planned.mark, str(clusters.END_S), str(planned.folder)]
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, start_new_session=True
    )


def state_file() -> Path:
    return cache_folder("cluster") / "cluster.json"


@contextmanager
def alone() -> Iterator[None]:
    """Let one process at a time start the cluster or take it down."""
    state_file().parent.mkdir(parents=True, exist_ok=True)
    lock = try_lock(state_file().with_name("lock"))
    if lock is None:
        raise BadRequest(
            "another process is starting a cluster or taking it down: wait until it has finished"
        )
    try:
        yield
    finally:
        lock.release()


def _remember(cluster: Cluster) -> None:
    content = {**asdict(cluster), "folder": str(cluster.folder)}
    write_whole(state_file(), json.dumps(content, indent=2), mode=0o600)


def _read() -> Cluster | None:
    try:
        said: dict[str, Any] = json.loads(state_file().read_text())
        return Cluster(
            **{
                **said,
                "folder": Path(said["folder"]),
                "daemons": tuple(Daemon(**d) for d in said["daemons"]),
            }
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remembered() -> Cluster | None:
    """Return the cluster if its start was completed and any of its daemons runs.

    Otherwise remove what is left of it. The caller holds the lock.
    """
    cluster = _read()
    if cluster is None or (cluster.master and len(cluster.ended()) < len(cluster.daemons)):
        return cluster
    cluster.down()
    state_file().unlink(missing_ok=True)
    return None
