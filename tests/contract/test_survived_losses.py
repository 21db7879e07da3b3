"""A strategy that declares `survives` goes on without a lost worker, at every moment of a run.

The workers are threads here (`inproc`), so every moment can be hit exactly. The same on processes
is in tests/multiprocess/test_survived_deaths.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_pairs
from tests.contract.test_resume import RunInproc, net_with_dropout, notices

from paceline.errors import PacelineError, PeerLost, RunFailed
from paceline.faults.kill import POINTS
from paceline.registry import strategies

SPECS = [
    "gossip",
    "gossip:topology=ring,every=2",
    "ps:consistency=async",
    "ps:consistency=async,exchange=weights",
]
STEPS = 6
BY_POINT = [f"kill:rank=1,at={point.replace(' ', '-')}" for point in POINTS]
INSIDE = [
    f"kill:rank=1,at={point},messages={count}"
    for point, counts in {
        "set-up": (1, 2, 4, 6),
        "exchange": (1, 2),
        "evaluate": (1, 2, 3, 5, 8),
        "save": (1, 2, 3, 4, 5, 6, 7),
        "finish": (1, 2, 3, 4, 5, 6, 8, 10),
    }.items()
    for count in counts
]
TWO = [
    "kill:rank=1,at=connect kill:rank=2,at=connect",
    "kill:rank=1,at=connect kill:rank=2,at=set-up,messages=2",
    "kill:rank=1,at=compute,step=2 kill:rank=2,at=compute,step=4",
    "kill:rank=1,at=save kill:rank=2,at=save",
    "kill:rank=1,at=save,messages=3 kill:rank=2,at=evaluate,step=4",
    "kill:rank=1,at=finish kill:rank=2,at=finish,messages=4",
]


def test_every_strategy_that_survives_is_here() -> None:
    named = {spec.partition(":")[0] for spec in SPECS}
    alone = {e.name for e in strategies if strategies.build(e.name).traits.survives}
    assert alone <= named
    assert all(strategies.build(spec).traits.survives for spec in SPECS)


def batch_norm() -> torch.nn.Module:
    """Its statistics are averaged in place, which a second try must not see."""
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )


def options(spec: str, workers: int = 3) -> dict[str, Any]:
    return {
        "model": batch_norm,
        "data": (make_pairs(96), make_pairs(20, seed=1)),
        "strategy": spec,
        "workers": workers,
        "batch_size": 4,
        "lr": 0.05,
        "momentum": 0.9,
        **({"servers": 2} if spec.startswith("ps") else {}),
    }


def members(out: Path) -> list[list[int]]:
    """The workers that made each checkpoint of a run."""
    found = sorted(out.glob("checkpoints/step-*/checkpoint.json"))
    return [json.loads(path.read_text())["members"] for path in found]


QUICK = [*BY_POINT, *INSIDE[1::5], *TWO[1::2]]
CASES = [
    pytest.param(
        spec,
        faults,
        marks=() if faults in QUICK and spec in (SPECS[0], SPECS[2]) else pytest.mark.slow,
    )
    for spec in SPECS
    for faults in (*BY_POINT, *INSIDE, *TWO)
]


@pytest.mark.parametrize(("spec", "faults"), CASES)
@pytest.mark.sampled(2)
def test_the_others_go_on(run_inproc: RunInproc, tmp_path: Path, spec: str, faults: str) -> None:
    out, killed = tmp_path / "run", [1, 2] if "rank=2" in faults else [1]
    run = run_inproc(
        **options(spec, 4),
        steps=STEPS,
        checkpoint_every=3,
        evaluate_every=4,
        faults=faults.split(),
        out=str(out),
    )
    assert run.record["status"] == "completed"
    assert run.steps == STEPS
    assert run.record["lost"] == killed
    for worker in killed:
        assert any(f"worker {worker}: died" in told for told in notices(run, "the others go on"))
    made = members(out)
    assert len(made) == 2
    assert all(set(range(4)) - set(killed) <= set(each) for each in made)
    assert made[-1] == sorted(made[-1])
    assert run.test_accuracy is not None
    assert all(bool(w.isfinite().all()) for w in run.weights.values())


@pytest.mark.parametrize("now", [2, 3])
@pytest.mark.parametrize("at", ["set-up", "save,messages=3"])
@pytest.mark.parametrize("spec", SPECS[::2])
@pytest.mark.sampled(2)
def test_its_checkpoints_resume(
    run_inproc: RunInproc, tmp_path: Path, spec: str, at: str, now: int
) -> None:
    out = tmp_path / "run"
    run_inproc(
        **options(spec),
        steps=STEPS,
        checkpoint_every=3,
        evaluate_every=2,
        faults=f"kill:rank=1,at={at}",
        out=str(out),
    )
    assert members(out)[-1] == [0, 2]
    again = run_inproc(
        **options(spec, now), steps=STEPS + 3, resume=str(out), out=str(out), faults=()
    )
    assert again.steps == STEPS + 3
    (said,) = notices(again)
    assert ("worker 1 had been lost" if now == 3 else "2 workers instead of 3") in said
    assert not again.record.get("lost")


@pytest.mark.parametrize("at", ["connect", "set-up", "exchange", "finish"])
@pytest.mark.parametrize("spec", ["gossip", "ps:consistency=async"])
def test_worker_0_is_needed(run_inproc: RunInproc, spec: str, at: str) -> None:
    with pytest.raises(RunFailed, match=r"worker 0: died .*, as"):
        run_inproc(**options(spec), steps=STEPS, evaluate_every=4, faults=f"kill:rank=0,at={at}")


def test_a_server_is_needed_and_worker_0_saves_its_weights(
    run_inproc: RunInproc, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    asked = options("ps:consistency=async")
    with pytest.raises(PacelineError, match=r"worker 4: died .*, as") as caught:
        # the server's second gradient of each of three workers: in the second step
        run_inproc(**asked, steps=STEPS, faults="kill:rank=4,at=set-up,messages=30", out=str(out))
    assert not isinstance(caught.value, PeerLost)
    (path,) = out.glob("checkpoints/step-*/checkpoint.json")
    assert json.loads(path.read_text())["workers"] == 0
    again = run_inproc(**asked, steps=STEPS, resume=str(out), out=str(out), faults=())
    assert again.steps == STEPS
    assert "a server was lost" in notices(again)[0]


@pytest.mark.parametrize("moment", ["finish,messages=4", "evaluate,step=4,messages=3"])
def test_what_was_half_done_is_undone(run_inproc: RunInproc, moment: str) -> None:
    """Killed in the middle of an average or just before it: the survivors' weights are the same."""
    point, _, rest = moment.partition(",")
    step = rest.partition(",messages")[0] if "step" in rest else ""
    before = f"kill:rank=2,at={point}{',' + step if step else ''}"
    asked = {**options("gossip"), "steps": STEPS, "evaluate_every": 4}
    early = run_inproc(**asked, faults=before)
    late = run_inproc(**asked, faults=f"kill:rank=2,at={moment}")
    for name, weights in early.weights.items():
        assert torch.equal(weights, late.weights[name]), name
    assert early.test_accuracy == late.test_accuracy


def test_a_dropout_net_with_a_codec_and_an_average(run_inproc: RunInproc) -> None:
    run = run_inproc(
        **{**options("gossip"), "model": lambda: net_with_dropout(0.3)},
        codec="int8",
        ema=0.9,
        steps=STEPS,
        faults="kill:rank=1,at=finish,messages=3",
    )
    assert run.record["lost"] == [1]
