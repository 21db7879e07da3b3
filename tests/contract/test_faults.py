"""Injected faults take effect and show in the record."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.conftest import identical, make_pairs, small_net

import paceline
from paceline import Run
from paceline.errors import BadRequest, RunFailed
from paceline.faults.link import RATES, TIMES, SlowLink, parse_unit
from paceline.transport.inproc import Hub

RunInproc = Callable[..., Run]


@pytest.mark.processes
def test_a_slow_worker_computes_and_the_other_waits(tmp_path: Path) -> None:
    class Steady(torch.nn.Linear):
        """Two milliseconds per pass, so that the factor is seen above the noise."""

        def __init__(self) -> None:
            super().__init__(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.002)
            return super().forward(x)

    options = {"strategy": "allreduce", "workers": 2, "threads": 1, "batch_size": 4, "epochs": 3}
    run = paceline.train(
        model=Steady,
        data=make_pairs(64),
        out=str(tmp_path / "r"),
        faults="slow:rank=1,factor=6",
        **options,
    )
    quick, slow = run.record["workers"]
    assert slow["compute_s"] > quick["compute_s"]
    assert quick["idle_s"] > slow["idle_s"]


@pytest.mark.processes
@pytest.mark.parametrize("fault", ["die:rank=1,step=3", "drop:rank=1,step=3"])
def test_death_at_a_step(tmp_path: Path, run_inproc: RunInproc, fault: str) -> None:
    with pytest.raises(RunFailed, match="before step 3"):
        run_inproc(strategy="allreduce", workers=2, faults=fault)
    options = {
        "strategy": "allreduce",
        "workers": 2,
        "threads": 1,
        "batch_size": 8,
        "faults": fault,
    }
    with pytest.raises(RunFailed, match="worker 1"):
        paceline.train(model=small_net, data=make_pairs(60), out=str(tmp_path / "r"), **options)
    assert Run.open(tmp_path / "r").steps == 2


@pytest.mark.parametrize(
    ("fault", "when"),
    [
        ("kill:rank=1,at=connect", "at connect, step 0"),
        ("kill:rank=1,at=set-up", "at set up, step 0"),
        ("kill:rank=1,at=exchange,step=3", "at exchange, step 3"),
        ("kill:rank=1,at=finish,messages=1", "1 messages after finish"),
    ],
)
def test_killed_at_a_point(run_inproc: RunInproc, fault: str, when: str) -> None:
    with pytest.raises(RunFailed, match=f"worker 1: died {when}, as"):
        run_inproc(strategy="local-sgd", workers=2, faults=fault)


@pytest.mark.processes
def test_a_signal_at_a_point(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="worker 1 failed: its process was killed by SIGTERM"):
        paceline.train(
            model=small_net,
            data=make_pairs(60),
            out=str(tmp_path / "r"),
            strategy="allreduce",
            workers=2,
            threads=1,
            batch_size=8,
            faults="kill:rank=1,at=load,step=2,signal=SIGTERM",
        )
    assert Run.open(tmp_path / "r").steps == 2


def test_faults_do_not_touch_the_mathematics(run_inproc: RunInproc) -> None:
    plain = run_inproc(strategy="allreduce:collective=ring", workers=3, steps=5)
    both = ["slow:rank=0,factor=2", "link:bandwidth=1gbit,latency=10us"]
    slow = run_inproc(strategy="allreduce:collective=ring", workers=3, steps=5, faults=both)
    assert identical(plain.weights, slow.weights)
    sent = [[w["payload_sent_bytes"] for w in run.record["workers"]] for run in (plain, slow)]
    assert sent[0] == sent[1]


def test_a_link_takes_its_time() -> None:
    """100 kB at 8 Mbit/s: a tenth of a second per message."""

    def body(transport) -> float:
        link = SlowLink(transport, 1e-6, 0.0)
        began = time.perf_counter()
        if link.rank == 0:
            link.send(torch.zeros(25_000), 1)
        else:
            link.recv(torch.zeros(25_000), 0)
        return time.perf_counter() - began

    assert Hub(2).run(body)[0] >= 0.1


def test_units_and_mistakes(run_inproc: RunInproc) -> None:
    assert parse_unit("100mbit", RATES, "x") == 1e8
    assert parse_unit("1.5 ms", TIMES, "x") == 0.0015
    assert parse_unit("0", RATES, "x") == 0
    for fault, message in (
        ("link:bandwidth=100", "units"),
        ("link:latency=-1ms", "units"),
        ("slow:factor=0.5", "1 or more"),
        ("slow:rank=7", "no rank 7"),
        ("kill:at=lunch", "allowed are connect, set up, load, compute, exchange, evaluate, save"),
        ("kill:signal=SIGINT", "SIGKILL, SIGSTOP, SIGSEGV, SIGTERM"),
        ("kill:signal=SIGSEGV", "needs ranks that are processes"),
        ("kill:step=-1", "0 or more"),
        ("kill:at=connect,messages=1", "before it connects"),
        ("nosuch", "unknown fault"),
    ):
        with pytest.raises(BadRequest, match=message):
            run_inproc(faults=fault)
