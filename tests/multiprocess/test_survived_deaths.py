"""A worker of gossip or of an asynchronous parameter server is killed: the other processes go on.

tests/contract/test_survived_losses.py goes through every moment with threads; here real processes
die (SIGKILL), on shm and gloo.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_pairs, small_net

import paceline
from paceline.errors import RunFailed
from paceline.faults.kill import POINTS
from paceline.launch import forks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

SPECS = ["gossip", "gossip:mode=async", "ps:consistency=async"]
TRANSPORTS = ["shm", "gloo"]
STEPS = 8
MOMENTS = [f"at={point.replace(' ', '-')}" for point in POINTS] + [
    f"at={point},messages={count}"
    for point in ("set-up", "evaluate", "save", "finish")
    for count in (2, 4, 7)
]


def train(out: Path, spec: str, transport: str, workers: int, **options: Any) -> paceline.Run:
    servers = {"servers": 2} if spec.startswith("ps") else {}
    return paceline.train(
        **{
            "model": small_net,
            "data": (make_pairs(96), make_pairs(20, seed=1)),
            "strategy": spec,
            "transport": transport,
            "workers": workers,
            "threads": 1,
            "batch_size": 4,
            "steps": STEPS,
            "checkpoint_every": 3,
            "evaluate_every": 4,
            "progress": False,
            "out": str(out),
            **servers,
            **options,
        }
    )


def expect_survived(run: paceline.Run, killed: list[int], workers: int) -> None:
    assert run.record["status"] == "completed"
    assert run.steps == STEPS
    assert run.record.get("lost", []) == killed
    assert run.test_accuracy is not None
    told = (Path(run.out) / "events" / "notices.jsonl").read_text() if killed else ""
    for worker in killed:
        assert f"worker {worker} failed: its process was killed by SIGKILL" in told
    for path in Path(run.out).glob("checkpoints/step-*/checkpoint.json"):
        members = set(json.loads(path.read_text())["members"])
        assert set(range(workers)) - set(killed) <= members
        assert all((path.parent / f"worker-{m}.pt").is_file() for m in members)


def expect_resumed(out: Path, spec: str, transport: str, workers: int) -> None:
    again = train(out, spec, transport, workers, resume=str(out), steps=STEPS + 3, faults=())
    assert again.steps == STEPS + 3


QUICK = [
    ("ps:consistency=async", "shm", "at=set-up,messages=7"),
    ("gossip", "shm", "at=connect"),
    ("gossip", "gloo", "at=save,messages=4"),
    ("gossip:mode=async", "shm", "at=finish,messages=4"),
    ("ps:consistency=async", "gloo", "at=set-up"),
    ("ps:consistency=async", "shm", "at=evaluate,messages=4"),
]


@pytest.mark.parametrize(
    ("spec", "transport", "moment"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(case))
        for case in [(s, t, m) for s in SPECS for t in TRANSPORTS for m in MOMENTS]
    ],
)
def test_a_worker_dies(tmp_path: Path, spec: str, transport: str, moment: str) -> None:
    out = tmp_path / "run"
    run = train(out, spec, transport, 3, faults=f"kill:rank=1,{moment}")
    expect_survived(run, [1], 3)
    if (spec, transport, moment) not in QUICK:
        expect_resumed(out, spec, transport, 3)
        expect_resumed(out, spec, transport, 2)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    "faults",
    [
        "kill:rank=1,at=connect kill:rank=3,at=connect",
        "kill:rank=1,at=connect kill:rank=3,at=set-up,messages=3",
        "kill:rank=1,at=compute,step=2 kill:rank=3,at=compute,step=5",
        "kill:rank=1,at=save kill:rank=3,at=save",
        "kill:rank=1,at=finish kill:rank=3,at=finish,messages=5",
    ],
)
def test_two_of_four_die(tmp_path: Path, spec: str, transport: str, faults: str) -> None:
    run = train(tmp_path / "run", spec, transport, 4, faults=faults.split())
    expect_survived(run, [1, 3], 4)
    expect_resumed(tmp_path / "run", spec, transport, 4)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("rank", "who"), [(0, "worker 0"), (4, "worker 4")])
def test_worker_0_and_the_servers_are_needed(
    tmp_path: Path, transport: str, rank: int, who: str
) -> None:
    out, at = tmp_path / "run", "compute,step=3" if rank == 0 else "set-up,messages=40"
    with pytest.raises(RunFailed, match=f"{who} failed: its process was killed by SIGKILL"):
        train(out, "ps:consistency=async", transport, 3, faults=f"kill:rank={rank},at={at}")
    assert json.loads((out / "run.json").read_text())["status"] == "failed"
    rescued = [
        json.loads(path.read_text())["workers"]
        for path in out.glob("checkpoints/step-*/checkpoint.json")
    ]
    assert (0 in rescued) == (rank == 4)


@pytest.mark.parametrize("transport", [pytest.param("shm", marks=pytest.mark.slow), "gloo"])
def test_a_servers_end_after_a_workers_death_is_no_reason_to_rescue(
    tmp_path: Path, transport: str
) -> None:
    """The servers leave because worker 2 died: what resumes begins with what all had saved."""
    options: dict[str, Any] = {"codec": "topk:ratio=0.1", "keep": "all"}
    whole = train(tmp_path / "whole", "ps", transport, 3, **options)
    out, fault = tmp_path / "run", "kill:rank=2,at=compute,step=5"
    with pytest.raises(RunFailed, match="worker 2 failed: its process was killed by SIGKILL"):
        train(out, "ps", transport, 3, **options, faults=fault)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000003"]
    again = train(tmp_path / "again", "ps", transport, 3, **options, resume=str(out), faults=())
    for name, values in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], values)


@contextlib.contextmanager
def killed_after(rank: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Kill a rank so many seconds after the launcher has started all of them."""
    victims: list[int] = []
    listen = forks._listen

    def listens(pipes: Any, processes: Any, *rest: Any) -> Any:
        process = processes[rank]

        def kill() -> None:
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                victims.append(rank)

        timer = threading.Timer(seconds, kill)
        timer.start()
        try:
            return listen(pipes, processes, *rest)
        finally:
            timer.cancel()
            timer.join()

    monkeypatch.setattr(forks, "_listen", listens)
    yield victims
    monkeypatch.setattr(forks, "_listen", listen)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(30))
@pytest.mark.parametrize("spec", SPECS)
def test_killed_at_a_random_moment(
    tmp_path: Path, spec: str, trial: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(f"{spec} {trial}")
    transport = chance.choice(TRANSPORTS)
    out = tmp_path / "run"
    began = time.monotonic()
    train(tmp_path / "whole", spec, transport, 3)
    took = time.monotonic() - began
    with killed_after(chance.choice([1, 2]), chance.uniform(0, took), monkeypatch) as victims:
        run = train(out, spec, transport, 3)
    killed = run.record.get("lost", [])
    assert set(killed) <= set(victims)  # a rank that was killed after its end is not lost
    expect_survived(run, killed, 3)
    expect_resumed(out, spec, transport, 3)
