"""Ray for real: a cluster of several nodes, trained on, broken and resumed on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from paceline.errors import TransportError
from paceline.record.reader import read_run
from paceline.transport.board.client import Board
from paceline.transport.status.line import FOLDER, read_line
from tests.engines.engine import used
from tests.engines.ray_cluster import BOARD, MARK, RANK, RayCluster, marked
from tests.small import identical, weights_distance

pytestmark = [
    pytest.mark.engines,
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("ray") is None, reason="ray is not here: pip install 'paceline[ray]'"
    ),
]
PACELINE = str(Path(sys.executable).with_name("paceline"))
WAIT_S = 120.0
RING = "allreduce:collective=ring"
# Steps that take a moment, so that a rank can be killed between two checkpoints.
SLOW = """
import time
import torch

class Slow(torch.nn.Sequential):
    def forward(self, x):
        time.sleep(0.03)
        return super().forward(x)

def net():
    torch.manual_seed(0)
    return Slow(torch.nn.Flatten(), torch.nn.Linear(784, 16), torch.nn.ReLU(),
                torch.nn.Linear(16, 10))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    import ray

    used("ray", f"Ray {ray.__version__}")
    with RayCluster(3) as up:
        yield up
    assert marked(up.mark) == []


def options(out: str, strategy: str = RING, workers: int = 2, steps: int = 12) -> list[str]:
    words = ["train", "--data", "fashion-mini", "--model", "mlp:hidden=16", "--strategy", strategy]
    words += ["--workers", str(workers), "--steps", str(steps), "--threads", "1", "--out", out]
    return [*words, "--memory-format", "contiguous", "--overlap", "off", "--transport", "gloo"]


def slow(out: str, workers: int = 2, steps: int = 120) -> list[str]:
    Path("slow_net.py").write_text(SLOW)
    words = options(out, workers=workers, steps=steps)
    words[words.index("mlp:hidden=16")] = "slow_net:net"
    return [*words, "--checkpoint-every", "20"]


def on(cluster: RayCluster) -> list[str]:
    return ["--launcher", "ray", "--master", cluster.address]


def paceline(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PACELINE, *words], capture_output=True, text=True, timeout=300, check=False, env=env
    )


def completed(*words: str, env: dict[str, str] | None = None) -> str:
    done = paceline(*words, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr + done.stdout


def weights(out: str) -> dict[str, Any]:
    return load_file(Path(out) / "model.safetensors")


def until(what: str, look: Callable[[], Any]) -> Any:
    end = time.monotonic() + WAIT_S
    while not (found := look()):
        assert time.monotonic() < end, f"{what}: not within {WAIT_S:g} s"
        time.sleep(0.1)
    return found


def checkpoints(out: str) -> list[Path]:
    return sorted(Path(out, "checkpoints").glob("step-*"))


def pid_of(out: str, rank: int) -> int:
    seen = read_line(Path(out) / FOLDER / f"rank-{rank}")
    assert seen is not None
    return seen.pid


class Driver:
    """A command in the background; ended at the end of the block."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.command, self.env = command, env

    def __enter__(self) -> Driver:
        self.said = open("said", "w+")
        self.process = subprocess.Popen(
            self.command, stdout=self.said, stderr=self.said, env=self.env
        )
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self.said.close()

    @property
    def text(self) -> str:
        return Path("said").read_text()

    def await_checkpoint(self, out: str) -> None:
        until("a checkpoint", lambda: checkpoints(out) or self.process.poll() is not None)
        assert self.process.poll() is None, self.text

    def ends(self) -> int:
        return self.process.wait(300)


# --- the same weights and the same record


@pytest.mark.parametrize("workers", [2, 3])
def test_all_reduce_gives_the_weights_of_one_machine(cluster: RayCluster, workers: int) -> None:
    completed(*options("here", workers=workers))
    said = completed(*options("there", workers=workers), *on(cluster), env=cluster.environment)
    assert identical(weights("here"), weights("there"))
    record, alone = read_run("there"), read_run("here")
    assert record["status"] == "completed"
    assert record["config"]["launcher"] == "ray"
    assert record["attempts"] == 1
    assert record["result"]["samples"] == alone["result"]["samples"]
    assert [w["role"] for w in record["workers"]] == ["worker"] * workers
    ray = record["environment"]["ray"]
    assert len({place["node"] for place in ray["ranks"]}) == workers
    assert ray["store"]["authenticated"] is False
    assert "gloo keys" in ray["store"]["note"]
    assert "test accuracy" in said
    assert len({place["address"] for place in ray["ranks"]}) == workers
    assert json.loads(Path("there/run.json").read_text()) == record


def test_a_parameter_server_and_a_loop_on_a_local_cluster(tmp_path: Path) -> None:
    """Without an address the cluster starts and ends with the run."""
    env = {**os.environ, MARK: tmp_path.name}
    completed(*options("here", "ps"))
    completed(*options("there", "ps"), "--launcher", "ray", env=env)
    assert weights_distance(weights("here"), weights("there")) < 1e-5
    record = read_run("there")
    assert [w["role"] for w in record["workers"]] == ["worker", "worker", "server"]
    until("the end of the local cluster", lambda: not marked(tmp_path.name))


def test_ddp_has_a_process_group_of_its_own(cluster: RayCluster) -> None:
    completed(*options("here", "ddp"))
    completed(*options("there", "ddp"), *on(cluster), env=cluster.environment)
    assert weights_distance(weights("here"), weights("there")) < 1e-5


# --- ray_train

TRAIN = """
import json, sys
import paceline, ray

if sys.argv[1] != "none":
    ray.init(address=sys.argv[1], log_to_driver=False)
run = paceline.ray_train(
    data="fashion-mini", model="mlp:hidden=16", strategy="allreduce:collective=ring", workers=2,
    steps=40, checkpoint_every=10, evaluate_every=10, out="there", memory_format="contiguous",
    overlap="off", transport="gloo",
)
found = {
    "metrics": run.ray.metrics,
    "checkpoint": run.ray.checkpoint.path,
    "accuracy": run.test_accuracy,
    "session": ray.is_initialized(),
}
print(json.dumps(found))
"""


def test_ray_train_reports_metrics_and_checkpoints(cluster: RayCluster) -> None:
    Path("script.py").write_text(TRAIN)
    done = subprocess.run(
        [sys.executable, "script.py", cluster.address],
        capture_output=True, text=True, timeout=300, check=False, env=cluster.environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["session"]  # the program's own session goes on
    assert found["metrics"]["step"] == 40
    assert found["metrics"]["test/accuracy"] == pytest.approx(found["accuracy"])
    assert found["metrics"]["run/steps"] == 40
    kept = Path(found["checkpoint"])
    assert Path("there/ray").resolve() in kept.parents
    assert json.loads((kept / "checkpoint.json").read_text())["step"] == 40
    assert identical(load_file(kept / "model.safetensors"), weights("there"))
    completed(*options("here", steps=40), "--checkpoint-every", "10", "--evaluate-every", "10")
    assert identical(weights("here"), weights("there"))
    assert read_run("there")["environment"]["ray"]["ranks"]
    assert not list(Path("there/ray").glob(".reported-*"))


OWN_LOOP = """
import sys
import ray, torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def loop():
    import paceline

    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    targets = inputs.sum(1, keepdim=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with paceline.join("allreduce:collective=ring", out=sys.argv[2]) as pace:
        data = torch.utils.data.TensorDataset(inputs, targets)
        model, optimizer, batches = pace.prepare(model, optimizer, data, batch_size=8)
        for _ in range(5):
            for x, y in batches:
                pace.step(torch.nn.functional.mse_loss(model(x), y))

secret = {"env_vars": {"PACELINE_SECRET_FILE": sys.argv[3]}}
ray.init(address=sys.argv[1], log_to_driver=False, runtime_env=secret)
TorchTrainer(
    loop,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=sys.argv[2] + "-ray"),
).fit()
"""


def test_a_loop_of_ones_own_inside_a_torch_trainer(cluster: RayCluster, tmp_path: Path) -> None:
    """`join` finds its seat; Ray's store, which owns MASTER_PORT, is not opened again."""
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    Path("script.py").write_text(OWN_LOOP.replace("sys.argv[2]", repr(str(tmp_path / "there"))))
    done = subprocess.run(
        [sys.executable, "script.py", cluster.address, "", str(secret)],
        capture_output=True, text=True, timeout=300, check=False, env=cluster.environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    record = read_run("there")
    assert record["status"] == "completed"
    assert len(record["workers"]) == 2
    assert record["result"]["steps"] == 20


# --- a rank, a node and the driver are killed


def test_a_killed_rank_is_started_again_from_the_last_checkpoint(cluster: RayCluster) -> None:
    completed(*slow("here"))
    with Driver([PACELINE, *slow("there"), *on(cluster)], cluster.environment) as driver:
        driver.await_checkpoint("there")
        os.kill(pid_of("there", 1), signal.SIGKILL)
        assert driver.ends() == 0, driver.text
        said = driver.text
    assert "Ray lost rank 1 (its process ended)" in said
    assert "raylet" not in said
    assert "going on from" in said
    assert "epoch 1, step " in said  # a line of rank 0
    assert identical(weights("here"), weights("there"))
    record = read_run("there")
    assert record["attempts"] == 2
    assert record["status"] == "completed"
    assert record["result"]["samples"] == read_run("here")["result"]["samples"]


def test_a_run_goes_on_without_a_lost_node(cluster: RayCluster) -> None:
    completed(*slow("here"))
    with Driver([PACELINE, *slow("there"), *on(cluster)], cluster.environment) as driver:
        driver.await_checkpoint("there")
        place = node_of(pid_of("there", 0))
        cluster.remove(place)
        try:
            assert driver.ends() == 0, driver.text
        finally:
            cluster.add()
        said = driver.text
    assert re.search(
        r"Ray lost rank 0 \((its node is gone|it or its node no longer answers)\)", said
    )
    assert "raylet" not in said
    assert identical(weights("here"), weights("there"))
    ray = read_run("there")["environment"]["ray"]
    assert place not in {told["node"] for told in ray["ranks"]}
    assert any("rank 0" in loss for loss in ray["losses"])


def node_of(pid: int) -> str:
    """The node of a worker process, from the command that its raylet has started it with."""
    raylet = psutil.Process(pid).parent()
    assert raylet is not None
    words = raylet.cmdline()
    named = [word for word in words if word.startswith(("--node_id=", "--node-id="))]
    return named[0].partition("=")[2]


@pytest.mark.parametrize("local", [False, True], ids=["cluster", "local"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_the_driver(
    request: pytest.FixtureRequest, number: signal.Signals, local: bool, tmp_path: Path
) -> None:
    """... and the run goes on from its checkpoint, to the weights of an unbroken run."""
    if local:
        mark, where = tmp_path.name, ["--launcher", "ray"]
        env = {**os.environ, MARK: mark}
    else:
        cluster: RayCluster = request.getfixturevalue("cluster")
        mark, where, env = cluster.mark, on(cluster), cluster.environment
    with Driver([PACELINE, *slow("there"), *where], env) as driver:
        driver.await_checkpoint("there")
        assert marked(mark, RANK)
        driver.process.send_signal(number)
        code = driver.ends()
        said = driver.text
    left = [RANK, BOARD] if not local else []
    until("the end of all ranks", lambda: not marked(mark, *left))
    if number != signal.SIGKILL:
        assert code == 128 + number
        assert "Traceback" not in said
        record = read_run("there")
        assert record["status"] == "interrupted"
        assert record["environment"]["ray"]["ranks"]
    if number == signal.SIGTERM:
        assert "interrupted by SIGTERM after a checkpoint at step" in said
    step = int(checkpoints("there")[-1].name.removeprefix("step-"))
    assert step < 120
    completed("train", "--resume", "there", "--threads", "1", *where, env=env)
    completed(*slow("here"))
    assert identical(weights("here"), weights("there"))


def test_one_command_line_begins_leaves_and_goes_on(cluster: RayCluster) -> None:
    words = [*slow("there"), "--resume", "auto", *on(cluster)]
    done = paceline(*words, "--max-time", "2s", env=cluster.environment)
    assert done.returncode == 75, done.stderr
    assert read_run("there")["status"] == "interrupted"
    assert "going on from step" in completed(*words, env=cluster.environment)
    assert "is complete already" in completed(*words, env=cluster.environment)
    completed(*slow("here"))
    assert identical(weights("here"), weights("there"))


STOPPED = """
import sys, time
import paceline, ray
from slow_net import net

ray.init(address=sys.argv[1], log_to_driver=False)
try:
    paceline.ray_train(
        data="fashion-mini", model=net, workers=2, steps=2000, checkpoint_every=20, out="there"
    )
except KeyboardInterrupt as error:
    print("ended:", error)
until = time.monotonic() + 60
while ray.available_resources().get("CPU") != 3 and time.monotonic() < until:
    time.sleep(0.2)
print("free:", ray.available_resources()["CPU"])
"""


def test_ctrl_c_leaves_the_programs_own_session_as_it_was(cluster: RayCluster) -> None:
    Path("slow_net.py").write_text(SLOW)
    Path("script.py").write_text(STOPPED)
    command = [sys.executable, "script.py", cluster.address]
    with Driver(command, cluster.environment) as driver:
        driver.await_checkpoint("there")
        driver.process.send_signal(signal.SIGINT)
        assert driver.ends() == 0, driver.text
        said = driver.text
    assert "ended: interrupted" in said
    assert "free: 3.0" in said
    assert read_run("there")["status"] == "interrupted"
    assert marked(cluster.mark, RANK, BOARD) == []


# --- strangers, mistakes


def test_a_stranger_without_the_secret_is_no_rank(cluster: RayCluster) -> None:
    with Driver([PACELINE, *slow("there"), *on(cluster)], cluster.environment) as driver:
        driver.await_checkpoint("there")
        (board,) = marked(cluster.mark, BOARD)
        (place,) = [c.laddr for c in board.net_connections("tcp") if c.status == "LISTEN"]
        address = f"tcp:{place.ip}:{place.port}"
        with pytest.raises(TransportError):
            Board(address, b"not the secret of this run", 1).check(["paceline/meetings"])
        assert driver.ends() == 0, driver.text
        assert "that does not know this run's secret has tried to join this run" in driver.text
    assert read_run("there")["status"] == "completed"
    secrets = {word for process in marked(cluster.mark) for word in process.cmdline()}
    assert not any(len(word) == 64 and set(word) <= set("0123456789abcdef") for word in secrets)


def listening() -> Iterator[str]:
    """Something that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()
        kept = []

        def accept() -> None:
            server.settimeout(0.1)
            while not over.is_set():
                try:
                    kept.append(server.accept()[0])
                except TimeoutError:
                    continue

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        over.set()
        thread.join()
        for each in kept:
            each.close()


mute = pytest.fixture(listening)


def refused(*words: str, env: dict[str, str] | None = None) -> str:
    done = paceline(*options("run"), *words, env=env)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("paceline: ")]
    assert len(told) == 1, done.stderr
    assert not Path("run").exists()
    return told[0]


def test_an_address_that_does_not_answer(mute: str) -> None:
    ray = ["--launcher", "ray", "--master"]
    assert "no Ray cluster answers there" in refused(*ray, "127.0.0.1:1")
    assert "no Ray cluster answers there" in refused(*ray, "no-such-host.invalid:6379")
    assert "does not answer as the head of a Ray cluster" in refused(*ray, mute)
    assert "host:port" in refused(*ray, "somewhere")
    assert "on a node of the cluster" in refused(*ray, "ray://127.0.0.1:10001")


def test_more_ranks_than_the_cluster_has_room_for(cluster: RayCluster) -> None:
    said = refused(*on(cluster), "--workers", "7", env=cluster.environment)
    assert "7 ranks, but the Ray cluster" in said
    assert "3 CPU(s)" in said


def test_a_failure_of_the_users_own_code_is_not_repeated(cluster: RayCluster) -> None:
    Path("slow_net.py").write_text(SLOW.replace("time.sleep(0.03)", "raise ValueError('mine')"))
    words = options("run")
    words[words.index("mlp:hidden=16")] = "slow_net:net"
    done = paceline(*words, *on(cluster), env=cluster.environment)
    assert done.returncode != 0
    assert "ValueError: mine" in done.stderr
    assert "Ray lost" not in done.stderr
