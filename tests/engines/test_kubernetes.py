"""The commands of the pods that `paceline launch --kubernetes` writes, run without Kubernetes.

A pod is a host on this machine with a name, a network, processes and mounts of its own, and with
exactly the variables that the Job's controller and Kubeflow set. There is no cluster here: what
Kubernetes does with the manifests (scheduling, DNS, restarts) was not run.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from paceline.common.cores import cores
from paceline.launch.kubernetes import FOLDER, KEY, Pods, indexed_job, train_job, words_of
from tests.commands import PACELINE, run
from tests.engines.engine import needs, same_weights, until, used
from tests.engines.hosts import TOOLS, Host, connect

pytestmark = [pytest.mark.engines, pytest.mark.timeout(420)]

NAME, ADDRESSES = "tj", ("10.231.7.1", "10.231.7.2")
OPTIONS = {
    "data": "synthetic:shape=1x8x8,samples=600",
    "model": "mlp:hidden=16",
    "strategy": "allreduce:collective=ring",
    "batch_size": 8,
    "steps": 12,
    "memory_format": "contiguous",
    "sample_every_s": 0,
    "threads": 1,
}
# Long enough to be struck in the middle: worker 0 sleeps after each step.
LONG = {**OPTIONS, "steps": 120, "checkpoint_every": 10}
SLOW = {**LONG, "faults": "slow:rank=0,factor=150"}
KINDS = {"job": indexed_job, "trainjob": train_job}
# As the kubelet mounts a Secret: a file system in memory, the mode of the manifest.
MOUNT = 'mount -t tmpfs none /run && mkdir -p "$1" && cat > "$1/$2" && chmod "$3" "$1/$2"'


def words(options: Mapping[str, Any], out: Path) -> list[str]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return words_of(["train", *flags, "--out", str(out)], {})


class Cluster:
    """Two pods, one per node, and what the controllers give to each."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind, self.folder = kind, folder
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.pods = Pods("unused", nodes=2, job_name=NAME, volume=f"data:{self.shared}")
        names = [f"{NAME}-{n}" if kind == "job" else f"{NAME}-node-0-{n}" for n in range(2)]
        hosts = folder / "hosts"
        lines = [f"{a} {n}.{NAME} {n}" for a, n in zip(ADDRESSES, names, strict=True)]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        self.nodes = [Host(name, hosts) for name in names]
        self.documents: list[dict[str, Any]] = []

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        connect(self.nodes[0], ADDRESSES[0], {ADDRESSES[1]: self.nodes[1]})

    def end(self) -> None:
        for node in self.nodes:
            node.end()

    def apply(self, command: list[str]) -> None:
        """Take what `paceline launch --kubernetes` writes."""
        self.documents = KINDS[self.kind](command, self.pods)

    def _container(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The container of a pod, and the volume of the Secret."""
        last = self.documents[-1]
        if self.kind == "job":
            pod = last["spec"]["template"]["spec"]
            return pod["containers"][0], pod["volumes"][0]["secret"]
        [replicated] = self.documents[-2]["spec"]["template"]["spec"]["replicatedJobs"]
        pod = replicated["template"]["spec"]["template"]["spec"]
        return last["spec"]["trainer"], pod["volumes"][0]["secret"]

    def mount(self, node: int, secret: str | None = None) -> None:
        _, volume = self._container()
        content = secret or self.documents[0]["stringData"][KEY]
        source = self.folder / f"secret-{node}"
        source.write_text(content)
        mode = oct(volume["defaultMode"])[2:]
        with source.open() as content_of:
            made = self.nodes[node].popen(
                ["sh", "-c", MOUNT, "sh", FOLDER, KEY, mode], os.environ, stdin=content_of
            )
        assert made.wait(30) == 0

    def run_pod(self, node: int, env: Mapping[str, str | None] | None = None) -> Any:
        """Start the container of one pod, as the kubelet does."""
        container, _ = self._container()
        known: dict[str, str] = {"JOB_COMPLETION_INDEX": str(node)}
        known |= {one["name"]: one["value"] for one in container["env"]}
        if self.kind == "trainjob":
            trainer = self.documents[-1]["spec"]["trainer"]
            known |= {
                "PET_NNODES": str(trainer["numNodes"]),
                "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
                "PET_NODE_RANK": str(node),
                "PET_MASTER_ADDR": f"{NAME}-node-0-0.{NAME}",
                "PET_MASTER_PORT": "29500",
            }
        command = [_expanded(w, known) for w in (*container["command"], *container["args"])]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        given = {**os.environ, "PATH": path, **known, **(env or {})}
        present = {name: value for name, value in given.items() if value is not None}
        with (self.folder / f"pod-{node}.log").open("a") as log:
            return self.nodes[node].popen(command, present, self.folder, stdout=log, stderr=log)

    def log(self, node: int) -> str:
        return (self.folder / f"pod-{node}.log").read_text()

    def codes(self, pods: list[Any]) -> list[int]:
        return until(
            "both pods end",
            lambda: [p.returncode for p in pods] if all(p.poll() is not None for p in pods) else [],
            150,
        )


def _expanded(word: str, known: Mapping[str, str]) -> str:
    """Replace $(NAME) by a variable of the container, and $$ by $, as Kubernetes does."""
    for name, value in known.items():
        word = word.replace(f"$({name})", value)
    return word.replace("$$(", "$(")


@pytest.fixture(params=["job", "trainjob"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    needs("a host of one's own", TOOLS, "apt-get install util-linux iproute2 mount", root=True)
    used("kubernetes", f"torchrun of torch {torch.__version__}; no Kubernetes was run")
    made = Cluster(tmp_path, request.param)
    try:
        made.start()
        yield made
    finally:
        made.end()


def reference(out: Path, options: Mapping[str, Any]) -> Path:
    """The same run on this machine, undisturbed."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [PACELINE, "train", *flags, "--workers=2", "--transport=gloo", "--out", str(out)]
    done = run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def test_the_pods_train(cluster: Cluster, tmp_path: Path) -> None:
    out = cluster.shared / "run"
    cluster.apply(words(OPTIONS, out))
    for node in range(2):
        cluster.mount(node)
    codes = cluster.codes([cluster.run_pod(node) for node in range(2)])
    assert codes == [0, 0], cluster.log(0) + cluster.log(1)
    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "completed"
    assert [one["host"] for one in record["workers"]] == [node.name for node in cluster.nodes]
    assert record["config"]["launcher"] == "torchrun"
    assert same_weights(out, reference(tmp_path / "alone", OPTIONS))


def test_a_node_is_lost_and_the_pods_that_start_again_go_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    out = cluster.shared / "run"
    cluster.apply(words(SLOW, out))
    for node in range(2):
        cluster.mount(node)
    first, _ = (cluster.run_pod(node) for node in range(2))
    in_the_middle(out)
    cluster.nodes[1].end()
    until("pod 0 ends, too", lambda: first.poll() is not None, 120)
    assert first.returncode != 0
    assert "rank 1" in cluster.log(0)
    # The controller makes pods with the same names; a node's loss has taken its network with it.
    cluster.nodes[0].end()
    cluster.start()
    for node in range(2):
        cluster.mount(node)
    the_containers_start_again_and_go_on(cluster, out, tmp_path / "alone")


def in_the_middle(out: Path) -> None:
    until("a checkpoint", lambda: list(out.glob("checkpoints/step-*/checkpoint.json")), 120)


def the_containers_start_again_and_go_on(cluster: Cluster, out: Path, alone: Path) -> None:
    """As the kubelet or the controller does it; the weights are those of an unbroken run."""
    codes = cluster.codes([cluster.run_pod(node) for node in range(2)])
    assert codes == [0, 0], cluster.log(0) + cluster.log(1)
    assert "going on" in cluster.log(0)
    record = json.loads((out / "run.json").read_text())
    assert (record["status"], record["result"]["steps"]) == ("completed", LONG["steps"])
    assert same_weights(out, reference(alone, LONG))


def test_a_rank_is_killed_and_the_containers_that_start_again_go_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    out = cluster.shared / "run"
    cluster.apply(words(SLOW, out))
    for node in range(2):
        cluster.mount(node)
    pods = [cluster.run_pod(node) for node in range(2)]
    in_the_middle(out)
    listed = cluster.nodes[1].processes()
    [rank] = [pid for pid, line in listed.items() if "train" in line and "torchrun" not in line]
    os.kill(rank, signal.SIGKILL)
    assert 0 not in cluster.codes(pods)
    assert "rank 1 is gone" in cluster.log(0)
    for node in cluster.nodes:
        until(f"nothing is left in {node.name}", lambda node=node: not node.processes(), 60)
    the_containers_start_again_and_go_on(cluster, out, tmp_path / "alone")


def test_the_pods_are_stopped_with_a_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    """The kubelet sends SIGTERM to the first process of each container, which is torchrun."""
    out = cluster.shared / "run"
    cluster.apply(words(SLOW, out))
    for node in range(2):
        cluster.mount(node)
    pods = [cluster.run_pod(node) for node in range(2)]
    in_the_middle(out)
    for pod in pods:
        [torchrun] = psutil.Process(pod.pid).children()  # of nsenter
        torchrun.terminate()
    assert 0 not in cluster.codes(pods)
    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "interrupted", cluster.log(0)
    last = sorted(out.glob("checkpoints/step-*/checkpoint.json"))[-1]
    assert json.loads(last.read_text())["step"] == record["result"]["steps"] < LONG["steps"]
    the_containers_start_again_and_go_on(cluster, out, tmp_path / "alone")


def test_a_folder_that_the_pods_do_not_share(cluster: Cluster) -> None:
    """torchrun on several hosts: rank 0 would wait for files that it never sees."""
    out = cluster.shared / "run"
    cluster.apply(words(OPTIONS, out))
    for node in range(2):
        cluster.mount(node)
    apart = cluster.nodes[1].run(["mount", "-t", "tmpfs", "none", str(cluster.shared)], os.environ)
    assert apart.returncode == 0
    codes = cluster.codes([cluster.run_pod(node) for node in range(2)])
    assert 0 not in codes
    told = [x for x in cluster.log(0).splitlines() if x.startswith("paceline: ")]
    assert len(told) == 1, cluster.log(0)
    names = [node.name for node in cluster.nodes]
    assert f"the hosts do not share {out}: {names[1]} does not see what {names[0]} has" in told[0]
    assert not (out / "events").exists()  # the same command works on another folder, or here


def test_the_doctor_in_a_pod_and_a_rank_without_the_secret(cluster: Cluster) -> None:
    look = ["--no-python", "paceline", "doctor", "--cluster", "--json"]
    cluster.apply([*look, "--wait", "60", "--out", str(cluster.shared / "run")])
    for node in range(2):
        cluster.mount(node)
    codes = cluster.codes([cluster.run_pod(node) for node in range(2)])
    assert codes == [0, 0], cluster.log(0) + cluster.log(1)
    told = json.JSONDecoder().raw_decode(cluster.log(0), cluster.log(0).index("{"))[0]
    assert [one["host"] for one in told["ranks"]] == [node.name for node in cluster.nodes]
    assert [one["address"] for one in told["ranks"]] == list(ADDRESSES)
    assert {one["threads"] for one in told["ranks"]} == {max(1, cores() // 2)}, "they share cores"
    assert told["findings"]["hosts"]["detail"].startswith("2 hosts on 1 machine: ")
    # another secret, then none
    cluster.apply([*look, "--wait", "5"])
    cluster.mount(1, "another secret, as long")
    codes = cluster.codes([cluster.run_pod(node) for node in range(2)])
    assert 0 not in codes
    assert "rank 1 of 2 did not come within 5 s" in cluster.log(0)
    assert "is not authenticated with this rank's secret" in cluster.log(1)
    codes = cluster.codes([cluster.run_pod(0), cluster.run_pod(1, {"PACELINE_SECRET_FILE": None})])
    assert 0 not in codes
    assert "hands over no secret" in cluster.log(1)
