"""Options of `train`: each is proved against a plain loop; every strategy honours or refuses it.

A plain loop takes the same batches in the same order, and computes as PyTorch's own recipes do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.contract.test_resume import SPECS
from tests.small import identical, make_pairs, small_net, weights_distance
from torch import Tensor, nn
from torch._dynamo.utils import counters

from paceline import Run
from paceline.common.seeding import seed_everything
from paceline.data.shards import Cursor, GlobalShards
from paceline.errors import BadRequest, NotFinite
from paceline.record.reader import read_worker_events
from paceline.registry import strategies

RunInproc = Callable[..., Run]
STEPS, ROWS, BATCH = 12, 60, 8
IN_STEP = ["allreduce", "allreduce:collective=ring", "ring-reduce", "local-sgd:every=1", "ps"]


def batches(size: int, count: int) -> Iterator[list[tuple[Tensor, Tensor, bool]]]:
    """The batches of each step: `count` of them, fewer at the end of an epoch."""
    inputs, targets = make_pairs(ROWS)
    shards, cursor = GlobalShards(ROWS, (size,), 0), Cursor()
    parts: list[tuple[Tensor, Tensor, bool]] = []
    while True:
        rows = shards.take(cursor, 0)
        following = shards.advance(cursor)
        parts.append((inputs[rows], targets[rows], following.epoch != cursor.epoch))
        cursor = following
        if len(parts) == count or parts[-1][2]:
            yield parts
            parts = []


def plain(
    *,
    size: int = BATCH,
    accumulate: int = 1,
    clip_norm: float | None = None,
    dtype: torch.dtype | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
) -> dict[str, Tensor]:
    """A loop as PyTorch's documentation writes it."""
    seed_everything(0)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    steps = batches(size, accumulate)
    for _ in range(STEPS):
        parts = next(steps)
        total = sum(len(targets) for _, targets, _ in parts)
        for inputs, targets, _ in parts:
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                value = loss(model(inputs), targets) * (len(targets) / total)
            scaler.scale(value).backward()
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model.state_dict()


def follow(model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[], object]) -> None:
    """Make the steps of a plain loop; call `after` at the end of each."""
    steps = batches(BATCH, 1)
    for _ in range(STEPS):
        ((inputs, targets, _),) = next(steps)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        after()


def options(spec: str = "serial", workers: int = 2, **more: Any) -> dict[str, Any]:
    workers = 1 if spec == "serial" else workers
    return {
        "strategy": spec,
        "workers": workers,
        "lr": 0.05,
        "momentum": 0.9,
        "steps": STEPS,
        "batch_size": BATCH // workers,
        **more,
    }


@pytest.mark.parametrize(
    "more",
    [{"accumulate": 3}, {"clip_norm": 0.1}, {"accumulate": 4, "clip_norm": 0.1}],
    ids=str,
)
def test_one_worker_is_the_plain_loop(run_inproc: RunInproc, more: dict[str, Any]) -> None:
    assert identical(run_inproc(**options(**more)).weights, plain(**more))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_one_worker_with_autocast_is_the_plain_loop(run_inproc: RunInproc, name: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    found = run_inproc(**options(precision=name, clip_norm=0.5)).weights
    assert identical(found, plain(dtype=dtype, clip_norm=0.5))
    assert weights_distance(found, plain(clip_norm=0.5)) > 1e-5  # it is not float32


@pytest.mark.parametrize("spec", IN_STEP)
@pytest.mark.parametrize("more", [{"accumulate": 3}, {"clip_norm": 0.1}], ids=str)
def test_two_workers_are_the_plain_loop_on_both_batches(
    run_inproc: RunInproc, spec: str, more: dict[str, Any]
) -> None:
    if strategies.build(spec).traits.exchanges == "weights" and "clip_norm" in more:
        pytest.skip("each worker clips its own gradient before the weights are averaged")
    found = run_inproc(**options(spec, **more)).weights
    assert weights_distance(found, plain(**more)) < 2e-6


def overflowing(outputs: Tensor, targets: Tensor) -> Tensor:
    """Like cross-entropy, but the gradient of a batch with a rare row overflows in float16."""
    return nn.functional.cross_entropy(outputs, targets) * (
        1e4 if bool((targets[:1] == 2).all()) else 1.0
    )


@pytest.mark.parametrize("spec", [*IN_STEP, "allreduce:when=epoch", "gossip", "stepwise"])
def test_an_overflow_on_one_worker_skips_the_step_on_all(run_inproc: RunInproc, spec: str) -> None:
    skipped: list[set[int]] = [set(), set()]
    run = run_inproc(**options(spec, precision="fp16", loss=overflowing))
    for rank, steps in enumerate(skipped):
        events = [e for e in run_events(run, rank) if e["kind"] == "step"]
        steps.update(e["step"] for e in events)
    assert skipped[0] == skipped[1] == set(range(1, STEPS + 1))
    assert all(bool(torch.isfinite(w).all()) for w in run.weights.values())


def test_overflows_are_skipped_as_in_the_plain_loop(run_inproc: RunInproc) -> None:
    found = run_inproc(**options(precision="fp16", loss=overflowing)).weights
    expected = plain(dtype=torch.float16, loss=overflowing)
    assert identical(found, expected)
    assert weights_distance(found, plain(loss=overflowing)) > 1e-2  # steps were skipped


def run_events(run: Run, rank: int) -> list[dict[str, Any]]:
    return read_worker_events(run.out)[rank]


def test_a_loss_that_never_is_finite_ends_the_run(run_inproc: RunInproc) -> None:
    def bad(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets) * float("nan")

    with pytest.raises(NotFinite, match="not finite at any loss scale"):
        run_inproc(**options(precision="fp16", loss=bad) | {"data": make_pairs(60), "steps": 50})


ALL = {"accumulate": 2, "clip_norm": 0.5, "precision": "bf16"}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("more", [ALL, {"precision": "fp16"}], ids=["all", "fp16"])
def test_every_strategy_honours_or_refuses(
    run_inproc: RunInproc, spec: str, more: dict[str, Any]
) -> None:
    refuses = more == {"precision": "fp16"} and "consistency=" in spec
    if refuses:
        with pytest.raises(BadRequest, match="do not wait for each other: use bf16"):
            run_inproc(**options(spec, **more))
        return
    found = run_inproc(**options(spec, **more))
    assert found.steps == STEPS
    assert found.samples > (1 if more is ALL else 0) * STEPS * BATCH  # two batches in a step


@pytest.mark.parametrize(
    "more",
    [{"accumulate": 0}, {"clip_norm": 0.0}, {"clip_norm": float("nan")}, {"precision": "fp8"}],
    ids=str,
)
def test_bad_values_are_refused(run_inproc: RunInproc, more: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(more))):
        run_inproc(**options(**more))


def test_a_resumed_run_accumulates_and_scales_as_before(
    run_inproc: RunInproc, tmp_path: Any
) -> None:
    asked, out = options("allreduce", accumulate=3, precision="fp16"), str(tmp_path / "run")
    run_inproc(**{**asked, "steps": 5}, checkpoint_every=5, out=out)
    resumed = run_inproc(**asked, resume=out, out=out)
    assert identical(resumed.weights, run_inproc(**asked).weights)


def test_groups_have_their_own_rate_and_decay(run_inproc: RunInproc) -> None:
    seed_everything(0)
    model = small_net()
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD(
        [
            {"params": [p for n, p in named.items() if n.endswith("bias")], "weight_decay": 0.0},
            {"params": [named["2.weight"]], "lr": 0.5},
            {"params": [named["0.weight"]]},
        ],
        lr=0.05,
        momentum=0.9,
        weight_decay=0.1,
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    follow(model, optimizer, schedule.step)
    asked = {
        "groups": {"*bias": {"weight_decay": 0}, "2.*": {"lr": 0.5}},
        "weight_decay": 0.1,
        "lr_schedule": "step:every=5,gamma=0.5",
    }
    assert identical(run_inproc(**options(**asked)).weights, model.state_dict())
    for spec in ("allreduce", "ps", "ring-reduce", "local-sgd:every=1"):
        found = run_inproc(**options(spec, **asked)).weights
        assert weights_distance(found, model.state_dict()) < 2e-6
    texts = ["*bias:weight_decay=0", "2.*:lr=0.5"]
    again = run_inproc(**options(**{**asked, "groups": texts})).weights
    assert identical(again, model.state_dict())


COMPILED = ("serial", "allreduce")


@pytest.mark.parametrize(
    "spec", [s if s in COMPILED else pytest.param(s, marks=pytest.mark.slow) for s in SPECS]
)
def test_every_strategy_compiles(run_inproc: RunInproc, spec: str) -> None:
    asked = options(spec)
    torch.compiler.reset()  # after eight models of one kind PyTorch compiles no more
    before = counters["frames"]["ok"]
    found = run_inproc(**asked, compile="aot_eager")
    assert counters["frames"]["ok"] > before
    expected = run_inproc(**asked)
    if strategies.build(spec).traits.resumes.same == "exact":
        assert weights_distance(found.weights, expected.weights) < 1e-5
    assert list(found.weights) == list(expected.weights)
    assert found.steps == STEPS


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"groups": "head"}, "write a pattern of names"),
        ({"groups": "head.*:lr=1"}, "fits no trainable parameter"),
        ({"groups": "*:lr=x"}, "is not a number"),
        ({"groups": "*:lr=-1"}, "must be 0 or more"),
        ({"groups": "*:beta=1"}, "SGD has no option 'beta'; a group may set lr, momentum"),
        ({"groups": {"*": 3}}, "needs a dict of options"),
        ({"compile": "indcutor"}, "Did you mean 'inductor'"),
        ({"compile": True, "privacy": "noise=1,clip=1"}, "compile cannot be used with privacy"),
        ({"accumulate": 2, "privacy": "noise=1,clip=1"}, "accumulate cannot be used with privacy"),
        ({"clip_norm": 1, "strategy": "ps", "servers": 2, "workers": 2}, "requires one server"),
    ],
)
def test_more_bad_values_are_refused(
    run_inproc: RunInproc, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadRequest, match=says):
        run_inproc(**{**options(), **more})


def test_a_device_is_found(run_inproc: RunInproc) -> None:
    found = run_inproc(**options(device="auto")).record["config"]["device"]
    assert found == ("cuda" if torch.cuda.is_available() else "cpu")
