"""A Spark cluster in containers for real: the image of deploy/Dockerfile is built by Podman, the
cluster started, trained on, broken and resumed on. containers.py makes what `FROM` names.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.spark.containers import ASK
from paceline.transport.status.line import FOLDER, read_line
from tests.commands import free_port, run
from tests.engines import containers
from tests.engines.containers import ROOT, podman, stats
from tests.engines.engine import needs, same_weights, until, used

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1500)]

MAIN = "from paceline.cli.entry import main; main()"
OPTIONS = {
    "data": "synthetic:shape=1x8x8,samples=600",
    "model": "mlp:hidden=16",
    "strategy": "allreduce:collective=ring",  # the same bits under every launcher
    "workers": 3,
    "batch_size": 8,
    "steps": 12,
    "threads": 1,
    "memory_format": "contiguous",
}
# Long enough to be struck in the middle: worker 0 sleeps after each step.
LONG = {"steps": 240, "checkpoint_every": 10, "faults": "slow:rank=0,factor=150"}
# Two readings of a container's own counters, with work between them; it waits for the test.
READS = """
import json, os, socket, sys, time
from dataclasses import asdict
from paceline.record.contained import Groups
groups = Groups.find()
def told():
    print(json.dumps(asdict(groups.read())), flush=True)
    return sys.stdin.readline().split()
host, port = told()
until = time.process_time() + 4
with socket.create_connection((host, int(port))) as peer:
    for _ in range(300):
        peer.sendall(bytes(100_000))
    peer.shutdown(socket.SHUT_WR)
    while peer.recv(65536):
        pass
file = os.open("/tmp/written", os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_SYNC)
import mmap
page = mmap.mmap(-1, 1 << 20)
for _ in range(40):
    os.write(file, page)
os.close(file)
file = os.open("/tmp/written", os.O_RDONLY | os.O_DIRECT)
for _ in range(20):
    os.readv(file, [page])
while time.process_time() < until:
    pass
told()
"""
ECHOES = """
import socket
with socket.create_server(("0.0.0.0", 5999)) as server:
    print("ready", flush=True)
    peer, _ = server.accept()
    received = 0
    while data := peer.recv(65536):
        received += len(data)
    peer.sendall(bytes(received // 3))
    peer.close()
"""


def environment(cache: Path) -> dict[str, str]:
    return {
        **os.environ,
        **containers.settings(),
        "XDG_CACHE_HOME": str(cache),
        "PYTHONPATH": str(ROOT / "src"),
    }


class Place:
    """The folder that the containers see, and commands that are typed there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder / "work", folder / "cache"
        self.folder.mkdir()

    def start(self, *words: object, **more: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", MAIN, *map(str, words)],
            cwd=more.pop("cwd", self.folder),
            env=environment(self.cache) | more.pop("env", {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def type(self, *words: object, timeout_s: float = 600, **more: Any) -> tuple[int, str, str]:
        """Run a command of paceline; return its exit code and what it prints."""
        process = self.start(*words, **more)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        return process.returncode, out, err

    def state(self) -> dict[str, Any]:
        path = self.cache / "paceline" / "cluster" / "containers.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def name(self, role: str) -> str:
        return f"paceline-{self.state()['mark']}-{role}"

    def record(self, out: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / out / "run.json").read_text())
        return found

    def drivers(self) -> list[str]:
        return [name for name in containers.nothing_is_left() if "-driver-" in name]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A cluster of a master and three workers, as `paceline cluster up --containers` starts it."""
    needs("Podman", containers.COMMANDS, containers.INSTALL, root=True)
    with containers.alone():
        yield from _up(tmp_path_factory)


def _up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    used("containers", podman("--version"))
    containers.base_image()
    found = Place(tmp_path_factory.mktemp("containers"))
    built = containers.build_options()
    code, out, err = found.type(
        "cluster", "up", "--containers", "--build-options", built, timeout_s=1400
    )
    try:
        assert code == 0, err
        assert "3 workers in containers of podman, with 2 tasks and 1g each" in out
        yield found
    finally:
        code, out, err = found.type("cluster", "down")
        assert (code, out) == (0, "the cluster is down\n"), err
        assert containers.nothing_is_left() == []
        assert not (found.cache / "paceline" / "cluster" / "containers.json").exists()


def train(**options: object) -> list[str]:
    given = {**OPTIONS, **options}
    return ["train", *(f"--{key.replace('_', '-')}={value}" for key, value in given.items())]


def locally(out: Path, **options: object) -> Path:
    words = [*train(**options), f"--out={out}", "--quiet"]
    run([sys.executable, "-c", MAIN, *words], check=True, timeout=300)
    return out


def in_the_middle(place: Place, out: str, deadline_s: float = 400) -> None:
    folder = place.folder / out / "checkpoints"
    until("a checkpoint", lambda: len([*folder.glob("step-*/checkpoint.json")]) > 0, deadline_s)


# --- it works


def test_training_on_three_containers(place: Place, tmp_path: Path) -> None:
    """The same weights as without containers, and what each container used, in the record."""
    code, _, err = place.type(*train(launcher="spark", out="run"))
    assert code == 0, err
    record = place.record("run")
    assert record["status"] == "completed"
    assert record["config"]["master"] == "spark://master:7077"
    assert sorted(w["host"] for w in record["workers"]) == ["worker-1", "worker-2", "worker-3"]
    for worker in record["workers"]:
        own = worker["container"]
        assert own["source"].startswith("cgroup v")
        assert own["cpu_s"] > 0
        assert own["net_sent_bytes"] >= worker["net_sent_bytes"] > 0
        assert own["memory_peak_bytes"] >= own["memory_bytes"] > 50e6
        assert own["from_s"] < own["until_s"]
    assert same_weights(place.folder / "run", locally(tmp_path / "local"))
    assert place.drivers() == []


def test_the_figures_are_those_of_podman_stats(place: Place) -> None:
    """Two readings while the container waits: the same counters, by both ways of reading them."""
    network = f"paceline-{place.state()['mark']}"
    # With version 1 of cgroups Linux counts block I/O only of devices that have a limit.
    device = os.stat(containers.home()).st_dev
    names = [
        line.split()[-1]
        for line in Path("/proc/partitions").read_text().splitlines()[2:]
        if line.split()[:2] == [str(os.major(device)), str(os.minor(device))]
    ]
    limits = [f"--device-{way}-bps=/dev/{names[0]}:100gb" for way in ("read", "write")]
    common = ["run", "--rm", "--interactive", *limits, "--network", network, "--label"]
    common += [f"paceline.cluster={place.state()['mark']}", "--entrypoint", "python"]

    def begin(name: str, code: str) -> "subprocess.Popen[str]":
        words = [*common, "--name", name, "--network-alias", name, "localhost/paceline-spark"]
        return subprocess.Popen(
            ["podman", *words, "-c", code],
            env=environment(place.cache),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    peer, reader = begin("reads-peer", ECHOES), begin("reads", READS)
    assert peer.stdout is not None
    assert reader.stdout is not None
    assert reader.stdin is not None
    try:
        assert peer.stdout.readline() == "ready\n"
        before = json.loads(reader.stdout.readline())
        told_before = stats(["reads"])["reads"]
        reader.stdin.write("reads-peer 5999\n")
        reader.stdin.flush()
        after = json.loads(reader.stdout.readline())
        told_after = stats(["reads"])["reads"]
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.wait(60) == 0
    finally:
        for process in (peer, reader):
            process.kill()
            process.communicate()
        podman("rm", "--force", "--time", "0", "reads", "reads-peer", check=False)
    shares = {"cpu_s": 0.10, "net_received_bytes": 0.05, "net_sent_bytes": 0.05}
    shares |= {"block_read_bytes": 0.05, "block_write_bytes": 0.05}
    for key, share in shares.items():
        own, told = after[key] - before[key], told_after[key] - told_before[key]
        assert own == pytest.approx(told, rel=share), key
    assert after["net_sent_bytes"] - before["net_sent_bytes"] > 30e6
    assert after["net_received_bytes"] - before["net_received_bytes"] > 10e6
    assert after["cpu_s"] - before["cpu_s"] > 3.5
    assert after["block_write_bytes"] - before["block_write_bytes"] >= 40 << 20
    assert after["block_read_bytes"] - before["block_read_bytes"] >= 20 << 20
    key = "memory_with_cache_bytes"
    assert after[key] == pytest.approx(told_after[key], rel=0.05)
    assert after["memory_bytes"] <= after[key]


def test_status_and_a_command_of_ones_own(place: Place) -> None:
    code, out, _ = place.type("cluster", "status")
    assert code == 0
    assert all(place.name(f"worker-{n}") in out for n in (1, 2, 3))
    code, out, err = place.type("cluster", "run", "--", "hostname")
    assert code == 0, err
    assert out.startswith("driver-")
    assert place.type("cluster", "run", "--", "sh", "-c", "exit 7")[0] == 7


def test_the_compose_file(place: Place, tmp_path: Path) -> None:
    """deploy/compose.yaml as it is, but for the port of the page: started, trained on, removed."""
    program = shutil.which(
        "podman-compose", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    if program is None:
        pytest.skip("podman-compose is not here: pip install podman-compose")
    deploy = tmp_path / "deploy"
    shutil.copytree(containers.DEPLOY, deploy)
    text = (deploy / "compose.yaml").read_text()
    assert "127.0.0.1:8080:8080" in text
    (deploy / "compose.yaml").write_text(
        text.replace("127.0.0.1:8080:8080", f"127.0.0.1:{free_port()}:8080")
    )
    secret = deploy / "spark_secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    common = [program, "--file", str(deploy / "compose.yaml"), "--project-name", "paceline-test"]

    def compose(*words: str, timeout_s: float = 600) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*common, *words],
            env=environment(place.cache),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    try:
        began = compose("up", "--detach")
        assert began.returncode == 0, began.stderr
        until("all workers register", lambda: alive("paceline-test_master_1") == 3, 400, 2)
        words = [*train(launcher="spark", steps=4), "--out=/shared/run", "--json"]
        done = compose("--profile", "driver", "run", "--rm", "-T", "driver", "paceline", *words)
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout[done.stdout.index("{") :])
        assert record["status"] == "completed"
        assert {w["host"] for w in record["workers"]} == {"worker-1", "worker-2", "worker-3"}
    finally:
        compose("down", "--volumes")
    label = "label=io.podman.compose.project=paceline-test"
    for what in (["ps", "--all"], ["network", "ls"], ["volume", "ls"]):
        assert podman(*what, "--quiet", "--filter", label).split() == []


# --- what goes wrong


def test_a_worker_container_is_killed_and_the_run_goes_on(place: Place, tmp_path: Path) -> None:
    process = place.start(*train(**LONG, launcher="spark", out="killed"))
    try:
        in_the_middle(place, "killed")
        podman("kill", place.name("worker-2"))
        out, err = process.communicate(timeout=900)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "going on from step-" in out + err
    assert "lost" in out + err
    record = place.record("killed")
    assert (record["status"], record["attempts"]) == ("completed", 2)
    assert {w["host"] for w in record["workers"]} == {"worker-1", "worker-3"}
    plain = {**LONG, "faults": "slow:rank=0"}
    assert same_weights(place.folder / "killed", locally(tmp_path / "local", **plain))
    _, _, err = place.type("cluster", "status")
    assert "note: worker-2 has ended" in err
    podman("start", place.name("worker-2"))
    until("the worker is back", lambda: alive(place.name("master")) == 3, 200)


def test_a_rank_is_killed_and_the_run_goes_on(place: Place, tmp_path: Path) -> None:
    process = place.start(*train(**LONG, launcher="spark", out="rank"))
    try:
        in_the_middle(place, "rank")
        seen = read_line(place.folder / "rank" / FOLDER / "rank-1")
        assert seen is not None
        podman("exec", place.name(seen.host), "kill", "-KILL", str(seen.pid))
        out, err = process.communicate(timeout=900)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "Spark lost" in out + err
    assert "going on from step-" in out + err
    record = place.record("rank")
    assert (record["status"], record["attempts"]) == ("completed", 2)
    plain = {**LONG, "faults": "slow:rank=0"}
    assert same_weights(place.folder / "rank", locally(tmp_path / "local", **plain))


def alive(master: str) -> int:
    """How many workers have registered with a master."""
    said = podman("exec", master, "python", "-c", ASK, check=False)
    return sum(w["state"] == "ALIVE" for w in json.loads(said)["workers"]) if said else 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_command_is_ended(place: Place, number: signal.Signals, tmp_path: Path) -> None:
    """Its container ends with it, also when it is killed; the run is resumed."""
    out = f"ended-{number.name}"
    process = place.start(*train(**LONG, launcher="spark", out=out))
    try:
        in_the_middle(place, out)
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), err
    until("its container ends", lambda: place.drivers() == [], 200)
    assert "Traceback" not in err
    until("no rank is left", lambda: not ranks(place), 120)
    record = place.record(out)
    assert record["status"] == "interrupted", err
    assert record["result"]["steps"] < LONG["steps"]
    if number == signal.SIGTERM:
        assert "interrupted by SIGTERM after a checkpoint at step" in err
    again = ["train", "--launcher=spark", f"--resume={out}", "--faults=slow:rank=0"]
    code, _, err = place.type(*again)
    assert code == 0, err
    assert place.record(out)["status"] == "completed"
    plain = {**LONG, "faults": "slow:rank=0"}
    assert same_weights(place.folder / out, locally(tmp_path / "local", **plain))


def ranks(place: Place) -> list[str]:
    """The processes of ranks in the workers' containers."""
    found = []
    for n in (1, 2, 3):
        listed = podman("exec", place.name(f"worker-{n}"), "ps", "-eo", "args")
        found += [line for line in listed.splitlines() if "torch.distributed.run" in line]
    return found


def test_wrong_requests_are_refused(place: Place, tmp_path: Path) -> None:
    began = time.monotonic()
    code, _, err = place.type("cluster", "up", "--containers")
    assert (code, "a cluster is up already (3 workers, in containers)" in err) == (2, True)
    code, _, err = place.type("cluster", "up")
    assert (code, "a cluster is up already, in containers" in err) == (2, True)
    code, _, err = place.type(*train(launcher="spark"), cwd=tmp_path)
    assert (code, f"see the folder {place.folder}" in err) == (2, True)
    (tmp_path / "run.toml").write_text('launcher = "spark"\n')
    code, _, err = place.type("train", tmp_path / "run.toml")
    assert (code, "is not in it: copy it there" in err) == (2, True)
    assert time.monotonic() - began < 60
    (tmp_path / "bin").mkdir()
    other = Place(tmp_path)
    code, _, err = other.type("cluster", "up", "--containers", env={"PATH": str(tmp_path / "bin")})
    assert (code, "neither is on PATH: apt-get install podman" in err) == (2, True)
    code, _, err = other.type("train", "--launcher=spark", "--master=containers")
    assert (code, "paceline cluster up --containers" in err) == (2, True)
