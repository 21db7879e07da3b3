"""Private runs on real processes: all transports, secret keys, a killed worker, a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import make_pairs, small_net, weights_distance

import paceline
from paceline.errors import PacelineError
from paceline.privacy.ledger import read_account
from paceline.transport.mpi.transport import MpiTransport

DATA = (make_pairs(600), make_pairs(60, seed=1))


def run(out: Path, **options: Any) -> paceline.Run:
    defaults: dict[str, Any] = {
        "model": small_net, "data": DATA, "batch_size": 20, "lr": 0.1, "epochs": 4, "workers": 3,
        "threads": 1, "memory_format": "contiguous", "out": str(out), "progress": False,
        "privacy": "noise=1.0,clip=0.5",
    }  # fmt: skip
    return paceline.train(**{**defaults, **options})


@pytest.mark.parametrize("transport", ["shm", "gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def test_the_same_private_weights_on_every_transport(tmp_path: Path, transport: str) -> None:
    if transport == "mpi" and not MpiTransport.available():
        pytest.skip(f"no MPI: {MpiTransport.missing()}")
    options = {
        "epochs": 2,
        "strategy": "allreduce:collective=ring",
        "privacy": "noise=1.0,clip=0.5,secure=false",
    }
    reference = run(tmp_path / "reference", transport="inproc", **options)
    found = run(tmp_path / transport, transport=transport, **options)
    assert weights_distance(reference.weights, found.weights) < 1e-5
    assert found.record["privacy"]["epsilon"] == reference.record["privacy"]["epsilon"]
    assert found.record["privacy"]["private"] is False


LONG = [
    pytest.param(s, marks=pytest.mark.slow)
    for s in ("allreduce", "ps:consistency=ssp", "local-sgd", "psgd", "stepwise")
]


@pytest.mark.parametrize("strategy", ["ps:consistency=async", "gossip:mode=async", *LONG])
def test_private_strategies_learn_on_processes(tmp_path: Path, strategy: str) -> None:
    done = run(tmp_path / "run", strategy=strategy)
    assert done.test_accuracy > 0.8
    told = done.record["privacy"]
    assert told["steps"] == 40
    assert told["private"] is True


def test_no_two_workers_draw_alike(tmp_path: Path) -> None:
    """Workers are forked from one process. With inherited keys they would draw the same noise."""
    done = run(
        tmp_path / "run", strategy="allreduce", transport="shm", privacy="noise=1.0,reveal=true"
    )
    drawn = []
    for worker in range(3):
        lines = (Path(done.out) / "events" / f"worker-{worker}.jsonl").read_text().splitlines()
        drawn.append([e["drawn"] for e in map(json.loads, lines) if e["kind"] == "step"])
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


def test_a_killed_worker_has_spent_what_it_wrote_down(tmp_path: Path) -> None:
    with pytest.raises(PacelineError):
        run(
            tmp_path / "run",
            strategy="allreduce",
            transport="shm",
            faults=("die:rank=1,step=5",),
            checkpoint_every="2",
        )
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "failed"
    lines = read_account(tmp_path / "run")
    assert lines[0].steps >= 5
    assert record["privacy"]["steps"] == lines[0].steps
    more = paceline.train(
        resume=str(tmp_path / "run"),
        model=small_net,
        data=DATA,
        faults=(),
        progress=False,
        epochs=1,
    )
    assert more.record["privacy"]["steps"] == lines[0].steps + 10 - 4


@pytest.mark.slow
@pytest.mark.native_threads  # of vl-convert, which draws the charts
def test_a_study_of_private_runs_has_a_page_that_says_what_it_means(tmp_path: Path) -> None:
    plan = {
        "title": "private",
        "base": {
            "data": "fashion-mini",
            "model": "mlp:hidden=16",
            "steps": 8,
            "global_batch_size": 120,
        },
        "axes": {
            "strategy": ["allreduce"],
            "workers": [2],
            "privacy": ["noise=1.0", "noise=1.0,trust=curator"],
        },
        "also": [
            {"strategy": "serial", "privacy": "none"},
            {"strategy": "serial", "privacy": "noise=1.0,secure=false"},
        ],
        "all_cores": False,
    }
    paceline.study(plan, out=str(tmp_path / "study"), progress=False)
    page = (tmp_path / "study" / "report.html").read_text()
    assert "What privacy promises" in page
    assert "Every message is protected" in page
    assert "Only the released model is protected" in page
    assert "not private" in page
    assert ",epsilon," in (tmp_path / "study" / "results.csv").read_text().splitlines()[0]
