"""Validation, stopping, the best checkpoint, moving averages, schedules that look at results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.test_resume import SPECS
from tests.contract.test_train_options import ROWS, STEPS, follow, options
from tests.small import identical, make_pairs, small_net, weights_distance
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline import Run
from paceline.common.seeding import seed_everything
from paceline.errors import BadRequest
from paceline.objectives.metrics import Accuracy
from paceline.record import checkpoint
from paceline.record.reader import read_worker_events
from paceline.registry import metrics, schedules
from paceline.run.minutes import Minutes
from paceline.transport.inproc import Hub, InprocTransport

RunInproc = Callable[..., Run]
KINDS = ["serial", "allreduce", "ring-reduce", "local-sgd:every=2", "ps", "hogwild", "gossip"]


def evaluations(run: Run) -> list[dict[str, Any]]:
    return [e for e in read_worker_events(run.out)[0] if e["kind"] == "evaluation"]


@pytest.mark.parametrize("spec", KINDS)
def test_rules_look_at_the_validation_set(run_inproc: RunInproc, spec: str) -> None:
    run = run_inproc(**options(spec, validation=0.25, evaluate_every=4))
    seen = evaluations(run)
    assert [(e["on"], e["final"]) for e in seen[-2:]] == [("validation", False), ("test", True)]
    assert {e["on"] for e in seen[:-1]} == {"validation"}
    assert run.best["on"] == "validation"
    assert run.validation["accuracy"] == seen[-2]["accuracy"]
    assert run.test_accuracy == seen[-1]["accuracy"]
    without = run_inproc(**options(spec, evaluate_every=4))
    assert without.best["on"] == "test"
    assert without.validation is None


def test_a_share_is_taken_out_of_the_training_set(run_inproc: RunInproc) -> None:
    inputs, targets = make_pairs(ROWS)
    seen: list[float] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_net()

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                seen.extend(x[:, 0].tolist())
            return self.inner(x)

    run = run_inproc(
        data=((inputs, targets), make_pairs(20, seed=1)), model=Watched, validation=0.2, epochs=1
    )
    assert len(set(seen)) == run.samples == ROWS - 12


def test_a_set_of_ones_own(run_inproc: RunInproc) -> None:
    held = make_pairs(20, seed=1)  # the test set again
    run = run_inproc(**options(validation=held))
    assert run.validation["loss"] == run.test_loss
    assert run.validation["metrics"] == run.metrics


@pytest.mark.parametrize("spec", KINDS)
def test_patience(run_inproc: RunInproc, spec: str) -> None:
    run = run_inproc(
        **options(spec, lr=0.0, steps=100, evaluate_every=2, patience=3, best_by="loss")
    )
    assert run.steps == 8  # the first evaluation is the best; then three without a better one
    notices = [
        json.loads(line)["text"]
        for line in (Path(run.out) / "events" / "notices.jsonl").read_text().splitlines()
    ]
    assert "stopped after step 8: loss has not improved in 3 evaluations" in notices


def test_a_resumed_run_has_waited_already(run_inproc: RunInproc, tmp_path: Path) -> None:
    asked = options(lr=0.0, evaluate_every=2, patience=3, best_by="loss")
    out = str(tmp_path / "run")
    run_inproc(**{**asked, "steps": 5}, checkpoint_every=4, out=out)
    assert run_inproc(**{**asked, "steps": 100}, resume=out, out=out).steps == 8


@pytest.mark.parametrize("spec", ["serial", "allreduce", "ps", "local-sgd:every=2"])
def test_the_best_checkpoint_is_kept(run_inproc: RunInproc, spec: str) -> None:
    run = run_inproc(
        **options(spec, lr=2.0, steps=20, evaluate_every=2, keep="best,last", best_by="loss"),
    )
    folder = Path(run.out) / "checkpoints"
    kept = checkpoint.best_of(folder)
    during = [e for e in evaluations(run) if not e["final"]]
    best = min(during, key=lambda e: e["loss"])
    if run.best["step"] == run.steps:  # the final weights are the best
        assert kept is None
    else:
        assert kept is not None
        assert kept.name == f"step-{best['step']:08d}"
    assert len(list(folder.glob("step-*"))) <= 2
    assert run.best["value"] == min(e["loss"] for e in evaluations(run))


@pytest.mark.parametrize(
    ("keep", "left"), [("3", [8, 10, 12]), ("last", [12]), ("all", [2, 4, 6, 8, 10, 12])]
)
def test_what_is_kept(run_inproc: RunInproc, keep: str, left: list[int]) -> None:
    run = run_inproc(**options(checkpoint_every=2, keep=keep))
    found = sorted((Path(run.out) / "checkpoints").glob("step-*"))
    assert [int(path.name.removeprefix("step-")) for path in found] == left


def plain_average(decay: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    seed_everything(0)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    follow(model, optimizer, lambda: average.update_parameters(model))
    return model.state_dict(), average.module.state_dict()


@pytest.mark.parametrize("spec", KINDS)
def test_moving_average(run_inproc: RunInproc, spec: str, tmp_path: Path) -> None:
    run = run_inproc(**options(spec, ema=0.9))
    found = checkpoint.load_weights(Path(run.out) / "model-ema.safetensors")
    weights, average = plain_average(0.9)
    if spec == "serial":
        assert identical(found, average)
        assert identical(run.weights, weights)
    elif spec in ("allreduce", "ps"):
        assert weights_distance(found, average) < 1e-6
    assert weights_distance(found, run.weights) > 1e-4
    assert run.ema["loss"] != run.test_loss
    again = options(spec, ema=0.9)
    out = str(tmp_path / "again")
    run_inproc(**{**again, "steps": 6}, checkpoint_every=6, out=out)
    resumed = run_inproc(**again, resume=out, out=out)
    same = checkpoint.load_weights(Path(resumed.out) / "model-ema.safetensors")
    if spec != "hogwild":
        assert identical(same, found)


def test_several_metrics(run_inproc: RunInproc) -> None:
    run = run_inproc(**options(metric="mse,accuracy", loss="mse", data=regression(), model=line))
    assert list(run.metrics) == ["accuracy", "mse"]
    assert run.metric["name"] == "mse"
    with pytest.raises(BadRequest, match="Did you mean 'accuracy'"):
        run_inproc(**options(metric=["acuracy", "auc"]))


def regression() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    inputs, _ = make_pairs(40)
    return (inputs, inputs[:, :1]), (inputs[:10], inputs[:10, :1])


def line() -> nn.Module:
    return nn.Linear(6, 1)


@pytest.mark.parametrize("total", [7, 20, 100])
def test_one_cycle_is_pytorchs(total: int) -> None:
    ours = schedules.build("one-cycle")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=total, cycle_momentum=False
    )
    for step in range(total):
        assert 0.1 * ours(step, total) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        theirs.step() if step < total - 1 else None


@pytest.mark.parametrize("up", [True, False])
def test_plateau_is_pytorchs(up: bool) -> None:
    ours = schedules.build("plateau:patience=2,gamma=0.5")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="max" if up else "min", factor=0.5, patience=2
    )
    random = torch.Generator().manual_seed(int(up))
    for value in (torch.randn(60, generator=random).cumsum(0) * 0.01 + 3.0).tolist():
        ours.saw(value, up)
        theirs.step(value)
        assert ours(0, None) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)


@pytest.mark.parametrize("spec", ["serial", "allreduce", "ps", "local-sgd:every=2", "hogwild"])
def test_a_plateau_lowers_the_learning_rate(run_inproc: RunInproc, spec: str) -> None:
    asked = {"lr": 1e-9, "steps": 24, "evaluate_every": 2, "best_by": "loss"}
    flat = run_inproc(**options(spec, **asked, lr_schedule="plateau:patience=1,gamma=1e-3"))
    assert weights_distance(flat.weights, run_inproc(**options(spec, **asked)).weights) > 0


def test_minutes_are_counted_by_worker_0(run_inproc: RunInproc) -> None:
    run = run_inproc(**options("allreduce", steps=30, checkpoint_every="0.001s", keep="all"))
    assert len(list((Path(run.out) / "checkpoints").glob("step-*"))) > 3
    never = run_inproc(**options("allreduce", checkpoint_every="10min"))
    assert not list(Path(never.out).glob("checkpoints/step-*"))

    def body(transport: InprocTransport) -> list[int]:
        minutes, looked = Minutes(0.02 if transport.rank == 0 else 1e9, 0), []
        for step in range(1, 200):
            if minutes.looks(step):
                looked.append(step * (2 * minutes.due(step, transport) - 1))
        return looked

    first, second = Hub(2).run(body)
    assert first == second
    assert len(first) < 100


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"validation": 1}, "validation=1: it must be a share"),
        ({"validation": "0"}, "validation=0: it must be a share"),
        ({"validation": 0.001}, "of 60 training samples is none"),
        ({"patience": 0}, "patience=0"),
        ({"keep": "bets"}, "keep=bets: write best, last"),
        ({"keep": "0"}, "keep=0"),
        ({"ema": 1.0}, "ema=1"),
        ({"best_by": "auc"}, "best_by=auc: this run evaluates loss, accuracy"),
        ({"checkpoint_every": "0min"}, "more than 0 s"),
        ({"checkpoint_every": "soon"}, r"or a time \(10min, 90s\)"),
        ({"patience": 2, "data": make_pairs(60)}, "neither a test set nor a validation set"),
        ({"validation": 0.5, "privacy": "noise=1,clip=1"}, "without protection"),
    ],
)
def test_bad_values_are_refused(run_inproc: RunInproc, more: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        run_inproc(**{**options(), **more})


@pytest.mark.parametrize("spec", SPECS)
def test_every_strategy_honours_them_all(run_inproc: RunInproc, spec: str) -> None:
    run = run_inproc(
        **options(
            spec, validation=0.2, evaluate_every=4, patience=9, keep="best,last", ema=0.9,
            lr_schedule="plateau:patience=0", groups="*bias:lr=0.01", metric=["auc2", "accuracy"],
            best_by="loss", checkpoint_every="10min",
        )
    )  # fmt: skip
    assert run.steps == STEPS
    assert set(run.metrics) == {"auc2", "accuracy"}
    assert run.best["on"] == "validation"
    assert run.validation["ema"]["loss"] is not None
    assert (Path(run.out) / "model-ema.safetensors").is_file()
    kept = checkpoint.best_of(Path(run.out) / "checkpoints")
    assert (kept is None) == (run.best["step"] == STEPS)


@pytest.fixture(autouse=True)
def _another_metric() -> None:
    """A metric that nothing else registers."""

    class Halved(Accuracy):
        def value(self, state: Tensor) -> float:
            return super().value(state) / 2

    metrics.register("auc2")(Halved)
