"""The picture of real runs: Ctrl-\\, a stopped job that goes on, and what a failed run keeps."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.commands import Popen
from tests.conftest import make_pairs
from tests.multiprocess.test_slow_is_not_gone import Slow

from paceline.api import make_job, start
from paceline.errors import PeerSlow
from paceline.results.status import read_status

MORE = [
    ("allreduce", "gloo"),
    ("allreduce:collective=ring", "gloo"),
    ("ps", "shm"),
    ("ps", "gloo"),
]
PROGRAM = """
import sys, time, torch, paceline
from pathlib import Path
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)
    def forward(self, x):
        while self.training and Path("hold").exists():
            time.sleep(0.01)
        return self.inner(x)
data = (torch.randn(64, 6), torch.arange(64) % 3)
paceline.train(model=Net, data=data, workers=2, transport=sys.argv[1], strategy="allreduce",
               steps=10**6, batch_size=4, threads=1, progress=False, out="run", deadline_s=0.5,
               sample_every_s=0)
"""


class Started:
    def __init__(self, tmp_path: Path, transport: str) -> None:
        self.out, self.said = tmp_path / "run", tmp_path / "said"
        (tmp_path / "program.py").write_text(PROGRAM)
        with self.said.open("w") as said:
            command = [sys.executable, "program.py", transport]
            self.process = Popen(command, stdout=said, stderr=said, start_new_session=True)

    def steps(self) -> int:
        events = self.out / "events" / "worker-0.jsonl"
        return events.read_text().count('"kind": "step"') if events.exists() else 0

    def notices(self) -> str:
        path = self.out / "events" / "notices.jsonl"
        return path.read_text() if path.exists() else ""

    def until(self, holds: Callable[[], Any]) -> None:
        until = time.monotonic() + 60
        while not holds():
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < until, self.said.read_text()
            time.sleep(0.02)

    def makes_steps(self) -> None:
        before = self.steps()
        self.until(lambda: self.steps() > before + 10)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[str], Started]]:
    made: list[Started] = []

    def begin(transport: str) -> Started:
        made.append(Started(tmp_path, transport))
        return made[-1]

    yield begin
    for each in made:
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()


def held(stack: str | None) -> bool:
    return stack is not None and stack.startswith("program.py:1")


def test_ctrl_backslash_prints_the_picture_and_the_run_goes_on(started, tmp_path: Path) -> None:
    run = started("shm")
    run.makes_steps()
    (tmp_path / "hold").touch()
    run.until(lambda: any(held(shown.stack) for shown in read_status(run.out).picture))
    os.killpg(run.process.pid, signal.SIGQUIT)  # as a terminal does
    run.until(lambda: run.said.read_text().count("worker 1  ") == 1)
    assert "computing step" in run.said.read_text()
    assert "program.py:1" in run.said.read_text(), "the line of the user's own code"
    assert read_status(run.out).status == "running"
    (tmp_path / "hold").unlink()
    run.makes_steps()
    os.killpg(run.process.pid, signal.SIGINT)
    run.process.wait(60)
    record = json.loads((run.out / "run.json").read_text())
    assert record["status"] == "interrupted"
    assert [(each["rank"], each["role"]) for each in record["last"]] == [
        (0, "worker"),
        (1, "worker"),
    ]
    assert all(each["step"] > 10 and each["stack"] for each in record["last"])
    assert not (run.out / "status").exists()
    said = "\n".join(read_status(run.out).lines())
    assert "interrupted" in said
    assert "its last picture:" in said


@pytest.mark.parametrize(
    ("transport", "whom"),
    [("shm", "one"), pytest.param("gloo", "all", marks=pytest.mark.slow)],
)
def test_13_a_job_that_was_stopped_goes_on(started, transport: str, whom: str) -> None:
    run = started(transport)
    run.makes_steps()
    ranks = psutil.Process(run.process.pid).children()
    chosen = [rank for rank in ranks if rank.name()][-1:] if whom == "one" else ranks
    for rank in chosen:
        rank.suspend()
    if whom == "one":
        run.until(lambda: "stopped (SIGSTOP); it goes on with SIGCONT" in run.notices())
    else:
        time.sleep(1.0)  # two deadlines, of ranks that cannot tell it
    for rank in chosen:
        rank.resume()
    run.makes_steps()
    assert run.process.poll() is None, "it goes on"


@pytest.mark.parametrize(
    ("strategy", "transport"),
    [
        ("allreduce", "shm"),
        ("ddp", "gloo"),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE),
    ],
)
def test_give_up_s_ends_the_run_and_names_the_slow_worker(
    tmp_path: Path, strategy: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.multiprocess.test_slow_is_not_gone.SLOW_S", 600.0)
    mark = tmp_path / "slow-once"
    job = make_job(
        {
            "model": lambda: Slow("train", mark, 5),
            "data": (make_pairs(78), make_pairs(19, seed=1)),
            "workers": 3,
            "batch_size": "4,5,4",
            "threads": 1,
            "epochs": 2,
            "deadline_s": 0.4,
            "give_up_s": 3.0,
            "strategy": strategy,
            "transport": transport,
            "out": str(tmp_path / "run"),
            "memory_format": "contiguous",
        }
    )
    with pytest.raises(PeerSlow, match="no answer from rank 1 within 3 s") as raised:
        start(job, lambda kind, content: None)
    assert mark.exists()
    assert raised.value.rank == 1
    assert "test_slow_is_not_gone.py:" in str(raised.value)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    last = {each["rank"]: each for each in record["last"]}
    assert last[1]["doing"].startswith("computing step"), last
    assert last[1]["stack"].startswith("test_slow_is_not_gone.py:")
    assert last[0]["step"] == last[1]["step"]
    waited = [each for each in record["last"] if each["rank"] != 1]
    assert all(each["waits_for"] is not None for each in waited), "who waited when it was given up"
