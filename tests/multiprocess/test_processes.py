"""Real processes over real gloo: the same results, and a clear end whatever happens."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.commands import PACELINE, Popen, children
from tests.commands import run as command
from tests.conftest import identical, make_pairs, small_net, weights_distance
from torch import Tensor, nn

import paceline
from paceline.errors import BadRequest, NotFinite, ReplicasDiffer, WorkerFailed
from paceline.registry import collectives


def run(out: Path, **options: Any) -> paceline.Run:
    defaults: dict[str, Any] = {
        "model": small_net,
        "data": (make_pairs(60), make_pairs(20, seed=1)),
        "memory_format": "contiguous",
        "threads": 1,
        "transport": "gloo",
        "batch_size": 8,
        "deadline_s": 20,
    }
    return paceline.train(**{**defaults, **options, "out": str(out)})


@pytest.fixture
def no_orphans():
    """Nothing that a test started outlives it."""
    yield
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and children():
        time.sleep(0.05)
    assert children() == []


pytestmark = pytest.mark.usefixtures("no_orphans")


BOTH = pytest.mark.parametrize("transport", ["gloo", "shm"])


@BOTH
@pytest.mark.parametrize("strategy", ["allreduce", "ddp"])
@pytest.mark.parametrize("batch_size", ["7,6", "6,2,5"])
@pytest.mark.sampled(3)
def test_processes_follow_serial(
    tmp_path: Path, strategy: str, batch_size: str, transport: str
) -> None:
    """Uneven batches, momentum, several epochs with partial last steps."""
    workers = batch_size.count(",") + 1
    serial = run(tmp_path / "serial", batch_size=13, epochs=3)
    many = run(
        tmp_path / "many",
        strategy=strategy,
        workers=workers,
        batch_size=batch_size,
        epochs=3,
        transport=transport,
    )
    assert weights_distance(serial.weights, many.weights) < 1e-5
    assert many.test_accuracy == serial.test_accuracy
    n = sum(p.numel() for p in small_net().parameters())
    sent = [w["payload_sent_bytes"] for w in many.record["workers"]]
    assert sum(sent) == many.steps * 2 * (workers - 1) * 4 * n


def test_ddp_survives_empty_slices(tmp_path: Path) -> None:
    """13 samples, batches of 4 on 3 workers: the last step of an epoch has one sample for three
    workers.
    """
    data = make_pairs(13)
    serial = run(tmp_path / "serial", data=data, batch_size=12, epochs=3)
    many = run(tmp_path / "many", data=data, strategy="ddp", workers=3, batch_size=4, epochs=3)
    assert weights_distance(serial.weights, many.weights) < 1e-5


@BOTH
def test_one_process_is_a_plain_loop_bit_for_bit(tmp_path: Path, transport: str) -> None:
    inproc = run(tmp_path / "inproc", strategy="serial", steps=20, transport="inproc")
    for strategy in ("serial", "allreduce", "ddp"):
        one = run(tmp_path / strategy, strategy=strategy, steps=20, transport=transport)
        assert identical(one.weights, inproc.weights)


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    runs = [
        run(tmp_path / str(i), strategy="allreduce", workers=2, steps=15, seed=3) for i in range(2)
    ]
    assert identical(runs[0].weights, runs[1].weights)


class NoisyStart(nn.Module):
    """Not a function of the seed: every process starts with other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        with torch.no_grad():
            self.inner.weight += os.getpid() % 97

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_equal_starts_are_proved(tmp_path: Path) -> None:
    run(
        tmp_path / "sent",
        model=NoisyStart,
        strategy="allreduce",
        workers=2,
        steps=1,
        init="broadcast",
    )
    with pytest.raises(ReplicasDiffer, match="use init=broadcast, which sends worker 0's"):
        run(
            tmp_path / "seeded",
            model=NoisyStart,
            strategy="allreduce",
            workers=2,
            steps=1,
            init="seed",
        )
    assert run(tmp_path / "good", strategy="allreduce", workers=2, steps=1, init="seed").steps == 1


class Fails(nn.Module):
    """Something happens in the fourth forward pass of the worker with batches of five."""

    def __init__(self, how: str = "raise") -> None:
        super().__init__()
        self.inner, self.how, self.calls = nn.Linear(6, 3), how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == 4 and len(x) == 5:
            if self.how == "raise":
                raise ZeroDivisionError("a bug in a person's model")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "nan":
                return self.inner(x) * float("nan")
        return self.inner(x)


@pytest.mark.parametrize(
    ("strategy", "transport"), [("allreduce", "gloo"), ("allreduce", "shm"), ("ddp", "gloo")]
)
@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raise", WorkerFailed, r"worker 1 failed: ZeroDivisionError: a bug in a person's model"),
        ("kill", WorkerFailed, r"worker 1 failed: its process was killed by SIGKILL"),
        ("nan", NotFinite, r"worker 1: the loss is nan at step 4"),
    ],
)
@pytest.mark.sampled(2)
def test_a_failing_worker_ends_the_run_with_its_reason(
    tmp_path: Path, strategy: str, transport: str, how: str, error: type, message: str
) -> None:
    options = {
        "strategy": strategy,
        "transport": transport,
        "workers": 3,
        "batch_size": "4,5,4",
        "epochs": 5,
        "deadline_s": 3600,  # the others do not wait for it: the test would time out
    }
    with pytest.raises(error, match=message) as caught:
        run(tmp_path / "out", model=Fails(how), **options)
    if how == "raise":
        assert "in forward" in caught.value.worker_traceback
    record = paceline.Run.open(tmp_path / "out").record
    assert (record["status"], record["result"]["steps"]) == ("failed", 3)
    assert "worker 1" in record["error"]


def test_an_error_of_request_inside_a_worker_stays_one(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="auc needs"):
        run(tmp_path / "out", metric="auc", steps=1)


def script(tmp_path: Path, body: str) -> Path:
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(body))
    return file


@pytest.mark.slow
def test_classes_of_a_script_without_a_guard(tmp_path: Path) -> None:
    """As in a notebook: classes in __main__, another thread running, torch used with several
    threads before.
    """
    file = script(
        tmp_path,
        """
        import threading, torch, paceline
        from dataclasses import dataclass
        from paceline.registry import strategies
        from paceline.strategies.base import Strategy

        torch.randn(3000, 3000).mm(torch.randn(3000, 3000))
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        print("top of the script")

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(6, 3)
            def forward(self, x):
                return self.layer(x)

        @strategies.register("mine")
        @dataclass
        class Mine(Strategy):
            '''My own.'''
            def step(self, replica, batch):
                self.ctx.peers.all_reduce(replica.regions[0].grads)
                replica.update()

        torch.manual_seed(0)
        x = torch.randn(40, 6)
        data = (x, x[:, :3].argmax(1))
        run = paceline.train(model=Net, data=data, strategy="mine", workers=2, threads=2, steps=5)
        print("steps", run.steps, type(run.model).__name__)
        """,
    )
    done = subprocess.run(
        [sys.executable, file],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["top of the script", "steps 5 Net"]


@pytest.mark.slow
def test_errors_come_back_from_a_fresh_process(tmp_path: Path) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(WorkerFailed, match="ZeroDivisionError"):
            run(
                tmp_path / "out",
                model=Fails("raise"),
                strategy="allreduce",
                workers=2,
                batch_size="4,5",
                epochs=5,
            )
    finally:
        stop.set()
        thread.join()


def start_long_run(tmp_path: Path) -> Popen:
    """`paceline train` with two workers that would take minutes; returns once both have made a few
    steps.
    """
    train = [
        PACELINE,
        "train",
        "--data",
        "fashion-mini",
        "--strategy",
        "allreduce",
        "--workers",
        "2",
        "--epochs",
        "500",
    ]
    with open(tmp_path / "said", "w") as said:
        process = Popen(
            [*train, "--out", tmp_path / "long", "--checkpoint-every", "5"],
            cwd=tmp_path,
            stderr=said,
        )
    files = [tmp_path / "long" / "events" / f"worker-{r}.jsonl" for r in range(2)]
    deadline = time.monotonic() + 60
    while not all(f.exists() and f.read_text().count('"step"') > 12 for f in files):
        assert process.poll() is None, (tmp_path / "said").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def gone(family: list[psutil.Process]) -> bool:
    return psutil.wait_procs(family, timeout=60)[1] == []


@pytest.mark.parametrize(
    "how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_ctrl_c_leaves_no_process_and_a_record(tmp_path: Path, how: signal.Signals) -> None:
    process = start_long_run(tmp_path)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    process.send_signal(how)
    assert process.wait(60) == 128 + how
    assert gone(family)
    record = json.loads((tmp_path / "long" / "run.json").read_text())
    assert record["status"] == "interrupted"
    assert record["result"]["steps"] > 5
    assert "interrupted" in (tmp_path / "said").read_text()


def test_a_killed_parent_takes_its_workers_along_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    process = start_long_run(tmp_path)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert gone(family)
    done = command(
        [PACELINE, "train", "--resume", tmp_path / "long", "--epochs", "1", "--json", "--quiet"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["status"] == "completed"
    assert record["result"]["samples"] == 6000


def test_a_killed_worker_is_named(tmp_path: Path) -> None:
    process = start_long_run(tmp_path)
    family = psutil.Process(process.pid).children(recursive=True)
    family[1].kill()
    assert process.wait(60) == 1
    assert gone(family)
    assert "worker 1 failed: its process was killed by SIGKILL" in (tmp_path / "said").read_text()
    assert json.loads((tmp_path / "long" / "run.json").read_text())["status"] == "failed"


class Weighs(nn.Module):
    """Notes the memory of its process that nobody shares."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.inner, self.folder = nn.Linear(1000, 2), folder

    def forward(self, x: Tensor) -> Tensor:
        info = psutil.Process().memory_full_info()
        (Path(self.folder) / f"uss-{os.getpid()}").write_text(str(info.uss))
        return self.inner(x)


def test_workers_share_the_data(tmp_path: Path) -> None:
    """400 MB of samples, touched by both workers: neither has them to itself."""
    data = torch.ones(100_000, 1000), torch.zeros(100_000, dtype=torch.int64)
    data[1][0] = 1
    run(
        tmp_path / "out",
        model=Weighs(str(tmp_path)),
        data=data,
        strategy="allreduce",
        workers=2,
        batch_size=5000,
    )
    notes = [int(f.read_text()) for f in tmp_path.glob("uss-*")]
    assert len(notes) == 2
    assert max(notes) < 300e6


@pytest.mark.slow
def test_a_worker_stays_below_600_mb(tmp_path: Path) -> None:
    """The course's network on as many images as MNIST has; started by a process that has done
    nothing else.
    """
    script = f"""
import json, torch, paceline
from paceline.data.base import Data, TensorSamples
from paceline.data.mnist import MNIST_SCALE
torch.set_num_threads(1)
random = torch.Generator().manual_seed(0)
images = torch.randint(0, 255, (60_000, 1, 28, 28), dtype=torch.uint8, generator=random)
samples = TensorSamples(images, torch.arange(60_000) % 10, MNIST_SCALE)
data = Data("mnist-sized", samples, samples, (1, 28, 28), 10)
options = dict(model="cnn", data=data, strategy="allreduce", workers=2, batch_size=64)
options |= dict(steps=30, threads=1, progress=False)
done = paceline.train(out={str(tmp_path / "out")!r}, **options)
print(max(w["rss_peak_bytes"] for w in done.record["workers"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 600e6


@pytest.mark.parametrize(
    ("collective", "transport"),
    [
        pytest.param(name, kind, marks=[pytest.mark.slow] if (place + at) % 2 else [])
        for place, name in enumerate(collectives.names())
        for at, kind in enumerate(("gloo", "shm"))
    ],
)
@pytest.mark.sampled(2)
def test_every_collective_follows_serial(tmp_path: Path, collective: str, transport: str) -> None:
    serial = run(tmp_path / "serial", batch_size=12, steps=8)
    many = run(
        tmp_path / "many",
        strategy=f"allreduce:collective={collective}",
        workers=3,
        batch_size=4,
        steps=8,
        transport=transport,
    )
    assert weights_distance(serial.weights, many.weights) < 1e-5
    n = sum(p.numel() for p in small_net().parameters())
    assert sum(w["payload_sent_bytes"] for w in many.record["workers"]) == 2 * 2 * 4 * n * 8
