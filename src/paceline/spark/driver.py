"""Run a command beside the containers of a cluster, in a container of its own: a driver.

Executors call a driver back, and they cannot reach a program that listens on the machine's
loopback. So commands that use the cluster are started again inside its network.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from paceline.errors import BadRequest, RunFailed
from paceline.spark.containers import ContainerCluster
from paceline.spark.engine import Engine
from paceline.spark.java import given_master

SYMBOL = "containers"  # --master containers: the cluster of `paceline cluster up --containers`
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def wanted(master: str | None) -> ContainerCluster | None:
    """Return the cluster in whose network this command must run; None: it can run here.

    `master` is what the command was given.
    """
    if given_master() is not None or master not in (None, "", SYMBOL):
        return None
    from paceline.spark.containers import standing

    cluster = standing()
    if cluster is None and master == SYMBOL:
        raise BadRequest(
            f"--master {SYMBOL}: no cluster of containers is up: paceline cluster up --containers"
        )
    return cluster


def run(cluster: ContainerCluster, command: Sequence[str]) -> int:
    """Run a command in a driver's container until it ends, and return its exit code.

    Signals are passed on. The driver ends, too, when this process is killed: it notices that its
    standard input has closed.
    """
    here = _working_folder(cluster)
    role = f"driver-{secrets.token_hex(3)}"
    words = cluster.command(role, "driver", "--rm", "--interactive", "--workdir", str(here))
    words += ["--env", "SPARK_NODE_HELD=1"]
    if sys.stdout.isatty():
        words += ["--env", f"COLUMNS={shutil.get_terminal_size().columns}"]
    process = subprocess.Popen(
        [cluster.engine, *words, cluster.image, "driver", *command],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches it once, through this process
    )
    heard: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        code = process.wait()
        if heard and code > 128:
            code = 128 + heard[0]
        return code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.stdin is not None:
            process.stdin.close()
        if process.poll() is None:
            process.kill()
            Engine(cluster.engine).tried("rm", "--force", cluster.name(role))


def _working_folder(cluster: ContainerCluster) -> Path:
    here = Path(os.getcwd()).resolve()
    if not here.is_relative_to(cluster.folder):
        raise BadRequest(
            f"the containers of the cluster see the folder {cluster.folder}, and this is {here}:"
            f" cd {cluster.folder}, or take the cluster down and start it here"
        )
    if "master" in cluster.ended():
        raise RunFailed(
            "the container of the cluster's master has ended: paceline cluster down, then paceline"
            " cluster up --containers"
        )
    return here
