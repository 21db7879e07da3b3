"""The record of a loop of the user's own, on real processes, however its script ends."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.commands import PACELINE, Popen, free_port, run

import paceline
from paceline.errors import BadRequest
from paceline.report.reading import read_study

pytestmark = pytest.mark.processes

SCRIPT = """
import os, sys, torch, paceline
from torch import nn
mode, strategy = sys.argv[1:3]
torch.manual_seed(3)
x = torch.randn(40, 6)
y = torch.randint(0, 3, (40,))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pace = paceline.join(strategy, out="run")
model, optimizer, batches = pace.prepare(model, optimizer, (x, y), batch_size=5)
for epoch in range(2 if mode != "endless" else 10**6):
    for inputs, targets in batches:
        optimizer.zero_grad()
        pace.log_loss(nn.functional.cross_entropy(model(inputs), targets)).backward()
        optimizer.step()
        if mode == "raise" and pace.rank == 1 and pace.steps == 3:
            raise ValueError("an odd batch")
    pace.evaluated(accuracy=(epoch + 1) / 4)
    if pace.leads and epoch == 1:
        with open("process", "w") as file:
            file.write(str(os.getpid()))
if mode != "forget":
    pace.finish()
"""
BYTES = 4 * (6 * 8 + 8 + 8 * 3 + 3)  # of the gradient


@pytest.fixture(autouse=True)
def script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)


def record(folder: Path = Path("run")) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return content


def launch(ranks: int, *arguments: str, code: int = 0) -> str:
    command = [PACELINE, "launch", "-n", str(ranks), "script.py", *arguments]
    done = run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stderr
    return str(done.stderr)


def started(*command: Any) -> Popen:
    """Start an endless loop, and return when two passes have been made."""
    process, until = Popen(command, start_new_session=True), time.monotonic() + 100
    while not (Path("process").exists() and Path("process").read_text()):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    return process


def ranks(size: int, *arguments: str) -> None:
    """Run the script on ranks without an interpreter each."""
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "script.py", *arguments]
    started = [
        Popen(command, env={**os.environ, **place, "RANK": str(rank)}) for rank in range(size)
    ]
    assert [rank.wait(100) for rank in started] == [0] * size


@pytest.mark.parametrize("mode", ["ok", "forget"])
def test_two_processes_leave_one_record(mode: str) -> None:
    """Also without `pace.finish()`."""
    ranks(2, mode, "allreduce")
    opened = paceline.Run.open("run")
    result, workers = opened.record["result"], opened.record["workers"]
    assert (result["steps"], result["samples"], result["test_accuracy"]) == (8, 80, 0.5)
    assert [w["samples"] for w in workers] == [40, 40]
    # of an all-reduce between two: each rank sends half of the buffer twice
    assert [w["payload_sent_bytes"] for w in workers] == [8 * BYTES] * 2
    assert all(w["cpu_percent"] is not None for w in workers)
    assert sum(w.nbytes for w in opened.weights.values()) == BYTES


@pytest.mark.slow
def test_commands_read_the_record() -> None:
    launch(2, "ok", "allreduce")
    started = "paceline launch -n 2 script.py ok allreduce"
    assert record()["environment"]["command"] == started
    for command in (["report", "run"], ["show", "run"]):
        said = run([PACELINE, *command], capture_output=True, text=True)
        assert said.returncode == 0, said.stderr
    assert started in Path("run/report.html").read_text()
    resumed = run([PACELINE, "train", "--resume", "run"], capture_output=True, text=True)
    assert resumed.returncode == 2
    assert "start its script again" in resumed.stderr


def test_a_script_that_is_asked_to_end_is_interrupted() -> None:
    process = started(sys.executable, "script.py", "endless", "allreduce")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    found = record()
    assert (found["status"], found["error"]) == ("interrupted", "interrupted by SIGTERM")
    assert found["result"]["steps"] >= 16


def test_a_killed_script_leaves_its_events() -> None:
    process = started(sys.executable, "script.py", "endless", "allreduce")
    process.kill()
    process.wait(60)
    with pytest.raises(BadRequest, match="holds a run that is not finished"):
        read_study("run")


@pytest.mark.slow
def test_a_rank_that_raises_is_named() -> None:
    assert "an odd batch" in launch(2, "raise", "allreduce", code=1)
    found = record()
    assert (found["status"], found["error"]) == ("failed", "rank 1: ValueError: an odd batch")
    assert len(found["workers"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_when_rank_0_is_ended_there_is_a_record(number: signal.Signals) -> None:
    process = started(PACELINE, "launch", "-n", "2", "script.py", "endless", "allreduce")
    os.kill(int(Path("process").read_text()), number)
    assert process.wait(100) == 1
    found, killed = record(), number == signal.SIGKILL
    assert found["status"] == ("failed" if killed else "interrupted")
    assert ("it was killed" if killed else "SIGTERM") in found["error"]
    assert (found["config"]["model"], found["config"]["workers"]) == ("Sequential", 2)


@pytest.mark.slow
def test_a_server_has_its_record() -> None:
    launch(3, "ok", "ps")
    *workers, server = record()["workers"]
    assert (server["role"], server["rank"]) == ("server", 2)
    sent = sum(w["payload_sent_bytes"] for w in workers)
    assert server["payload_received_bytes"] == sent == 2 * 8 * BYTES
