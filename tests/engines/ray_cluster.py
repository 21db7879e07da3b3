"""A real Ray cluster of several nodes on this machine, in a process of its own.

Run as a program it starts the nodes, prints the address of the head, and obeys the lines `add` and
`remove`; it ends all nodes at the end of its input. `RayCluster` is the test's side of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

STORE_BYTES = 100 << 20  # of each node's object store
START_S = 90.0
MARK = "PACELINE_TEST_MARK"  # in the environment of all processes of one test
# Processes of a cluster that last as long as it, and workers that wait for work.
RANK, BOARD = "ray::RayTrainWorker", "paceline.transport.board.server"


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    nodes = int(sys.argv[1])
    own = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    # The head, where the driver runs, has no room for a rank: a lost node is never the head.
    cluster = Cluster(initialize_head=True, head_node_args={**own, "num_cpus": 0})
    added: list[Any] = []

    def add() -> None:
        """Add a node with an address of its own, so that Ray Train takes it for another host."""
        own = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
        added.append(cluster.add_node(node_ip_address=f"127.0.0.{len(added) + 2}", **own))

    for _ in range(nodes):
        add()
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "add":
            add()
        elif line.strip():
            found = next(node for node in added if node.node_id == line.split()[1])
            cluster.remove_node(found, allow_graceful=False)
        print("done", flush=True)
    cluster.shutdown()
    assert not ray.is_initialized()


class RayCluster:
    """A cluster of `nodes` nodes with one CPU each, beside the head."""

    def __init__(self, nodes: int) -> None:
        self.nodes, self.mark = nodes, uuid.uuid4().hex

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the test's processes, by which they are found."""
        return {**os.environ, MARK: self.mark, "RAY_USAGE_STATS_ENABLED": "0"}

    def __enter__(self) -> RayCluster:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(self.nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self.environment,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert ":" in self.address, "the Ray cluster has not started"
        return self

    def remove(self, node_id: str) -> None:
        """Kill a node and all its processes, as a machine that loses its power."""
        self._ask(f"remove {node_id}")

    def add(self) -> None:
        """Add a node."""
        self._ask("add")

    def _ask(self, what: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == "done"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(START_S)
        finally:
            self._process.kill()
            self._process.wait()
            for process in marked(self.mark):
                process.kill()


def marked(mark: str, *words: str) -> list[psutil.Process]:
    """The processes of a test, by its mark; with `words`, those whose command has one of them."""
    found = []
    for process in psutil.process_iter():
        try:
            of_test = process.environ().get(MARK) == mark
            command = " ".join(process.cmdline())
        except (psutil.Error, OSError):
            continue
        running = process.status() != psutil.STATUS_ZOMBIE
        if of_test and running and (not words or any(word in command for word in words)):
            found.append(process)
    return found


if __name__ == "__main__":
    main()
