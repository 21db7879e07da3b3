"""A standalone Spark cluster on this machine: its processes, its ports, and how it is ended."""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.spark import marked

END_S = 8.0  # for the processes to end by themselves after SIGTERM
AGAIN_S = 0.1  # between two looks at a process
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"

# The processes that this process started, by the mark of their cluster.
CHILDREN: dict[str, list[subprocess.Popen[bytes]]] = {}


@dataclass(frozen=True)
class Daemon:
    name: str  # master, worker-0
    pid: int
    started_s: float  # since 1970


@dataclass(frozen=True)
class Cluster:
    """The description of a cluster. A driver needs `master`, and SPARK_CONF_DIR=`conf_dir`."""

    master: str  # spark://127.0.0.1:PORT
    ui: str  # http://127.0.0.1:PORT
    folder: Path
    mark: str  # in the environment of all its processes (see marked.py)
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
        """Return all running processes: master, workers, executors and their Python processes."""
        return marked.find(self.mark)

    def executors(self) -> list[psutil.Process]:
        return [p for p in self.processes() if EXECUTOR in marked.command(p)]

    def ended(self) -> list[str]:
        """Return the names of the daemons that have ended."""
        return [d.name for d in self.daemons if not _runs(d, self.mark)]

    def drivers(self) -> list[int]:
        """Return the pids of the drivers that use this cluster."""
        ours = {p.pid for p in self.processes()}
        return [
            p.pid
            for p in psutil.process_iter()
            if p.pid not in ours and str(self.conf_dir) in " ".join(marked.command(p))
        ]

    def listening(self) -> list[tuple[str, str, int]]:
        """Return (process name, address, port) for every port on which a process listens."""
        names, found = {d.pid: d.name for d in self.daemons}, set()
        for process in self.processes():
            name = names.get(process.pid) or (
                "executor" if EXECUTOR in marked.command(process) else "python"
            )
            found |= {(name, address, port) for address, port in marked.ports(process)}
        return sorted(found)

    def down(self) -> bool:
        """End all processes and remove the folder. Return whether any process was running."""
        was_there = marked.end(self.mark, END_S)
        for child in CHILDREN.pop(self.mark, []):
            child.wait(END_S)  # this process is their parent: without this they stay zombies
        shutil.rmtree(self.folder, ignore_errors=True)
        return was_there


def _runs(daemon: Daemon, mark: str) -> bool:
    """Return whether the daemon runs. The system may have given its pid to another process.

    A process that replaces its program (the script that becomes Java) shows no environment, and so
    no mark, for a moment: the second look counts.
    """
    process = marked.at(daemon.pid, mark)
    if process is None and psutil.pid_exists(daemon.pid):
        time.sleep(AGAIN_S)
        process = marked.at(daemon.pid, mark)
    try:
        # 2 s: the system's clock may have been adjusted meanwhile
        return process is not None and abs(process.create_time() - daemon.started_s) < 2
    except psutil.Error:
        return False
