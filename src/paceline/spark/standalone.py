"""The standalone Spark cluster of this machine: start it, find it again, take it down.

The cluster outlives the command that started it. One file in the user's cache describes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
    """Start the cluster that outlives this process; there is one at a time."""
    with _lock():
        if (there := _remembered()) is not None:
            raise BadRequest(
                f"a cluster is up already ({there.workers} workers, {there.master}): use it, or"
                " take it down first: paceline cluster down"
            )
        planned = plan(workers, cores, memory, folder)
        try:
            _remember(
                planned
            )  # before anything is started: should this be killed, the next one cleans up
            cluster = start(planned, say)
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
    planned = plan(workers, cores, memory, None)
    watcher = _watcher(planned)  # before anything is started
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
    """Takes the cluster down when its standard input closes: when this process ends, however it
    ends.
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
