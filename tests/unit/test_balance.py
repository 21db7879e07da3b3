"""Batch sizes by speed: cut in proportion, measured together, the mathematics untouched."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import make_pairs, small_net, weights_distance

from paceline import Run
from paceline.data.shards import Cursor, GlobalShards
from paceline.errors import BadRequest
from paceline.optim.schedules import Scaling, constant
from paceline.request.speeds import Speeds, cut
from paceline.run.balance import Balance
from paceline.transport.inproc import Hub, InprocTransport

RunInproc = Callable[..., Run]
DOUBLE = {"model": lambda: small_net(torch.float64), "data": make_pairs(60, dtype=torch.float64)}


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.integers(0, 500))
def test_everybody_gets_a_part_in_proportion(speeds: list[float], extra: int) -> None:
    whole = len(speeds) + extra
    sizes = cut(whole, speeds)
    assert sum(sizes) == whole
    assert min(sizes) >= 1
    exact = [whole * s / sum(speeds) for s in speeds]
    assert all(abs(a - b) <= len(speeds) + 1 for a, b in zip(sizes, exact, strict=True))


def test_plans_are_read() -> None:
    assert Speeds.read("2,1,1", 3).sizes(64) == (32, 16, 16)
    assert Speeds.read("runtime:1.2,3.6", 2).sizes(64) == (48, 16)
    assert Speeds.read("measured", 2).every == "20"
    assert Speeds.read("measured:every=epoch", 2).every == "epoch"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("2,1,1", "has 3 speeds for 2 workers"),
        ("runtime:1", "has 1 times for 2 workers"),
        ("2,0", "more than 0"),
        ("fast", "write measured"),
        ("measured:often=3", "knows every"),
        ("measured:every=0", "every=0"),
    ],
)
def test_bad_plans_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        Speeds.read(text, 2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"balance": "2,1,1"}, "3 speeds for 2 workers"),
        ({"balance": "measured", "shard": "static"}, "static shards are cut once"),
        (
            {"balance": "measured", "strategy": "ps:consistency=async"},
            "no worker waits for the slowest",
        ),
        ({"balance": "2,1", "batch_size": "8,4"}, "not both"),
        (
            {"balance": "measured", "strategy": "ddp", "transport": "gloo"},
            "work and waiting look alike",
        ),
        ({"balance": "measured", "strategy": "gossip"}, "weighs all workers equally"),
        ({"balance": "measured", "strategy": "stepwise"}, "weighs all workers equally"),
        ({"balance": "2,1", "batch_size": None, "global_batch_size": 1}, "cannot be cut"),
    ],
)
def test_what_cannot_be_balanced_is_refused(
    run_inproc: RunInproc, options: dict, sentence: str
) -> None:
    with pytest.raises(BadRequest, match=sentence):
        run_inproc(**{"strategy": "allreduce", "workers": 2, "steps": 2, **options})


@pytest.mark.parametrize(
    "strategy", ["allreduce", "ps", "ring-reduce:exchange=gradients", "allreduce:collective=tree"]
)
@pytest.mark.parametrize("balance", ["3,1", "runtime:1,5", "measured"])
def test_the_mathematics_is_that_of_the_global_batch(
    run_inproc: RunInproc, strategy: str, balance: str
) -> None:
    """Whatever the sizes, and whenever they change: serial SGD on the same global batches."""
    serial = run_inproc(**DOUBLE, batch_size=12, epochs=4, lr=0.05)
    faults = ["slow:rank=1,factor=3"] if balance == "measured" else []
    many = run_inproc(
        **DOUBLE,
        strategy=strategy,
        workers=2,
        batch_size=6,
        epochs=4,
        lr=0.05,
        balance=balance,
        faults=faults,
    )
    assert weights_distance(serial.weights, many.weights) < 1e-10
    assert sum(w["samples"] for w in many.record["workers"]) == 4 * 60


@given(
    st.integers(1, 200),
    st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=2), min_size=1, max_size=6),
)
def test_every_sample_once_an_epoch_however_sizes_change(
    samples: int, parts: list[list[int]]
) -> None:
    """The global batch stays; who takes how much of it changes in every step."""
    whole = 10
    shards, cursor, seen = GlobalShards(samples, (5, 5), seed=3), Cursor(), []
    for step in range(shards.steps_per_epoch):
        shards.batch_sizes = cut(whole, parts[step % len(parts)])
        for worker in range(2):
            seen += shards.take(cursor, worker).tolist()
        cursor = shards.advance(cursor)
    assert cursor == Cursor(1, 0)
    assert sorted(seen) == list(range(samples))


def test_sizes_follow_the_measured_speed() -> None:
    """Worker 1 needs three times as long per sample; on top of it a fixed cost per step."""

    def body(transport: InprocTransport) -> list[tuple[int, ...]]:
        shards = GlobalShards(10_000, (64, 64))
        balance, found = Balance("10", shards, transport), []
        for step in range(1, 61):
            samples = shards.batch_sizes[transport.rank]
            seconds = (1e-3 + 1e-4 * samples) * (3 if transport.rank == 1 else 1)
            balance.saw(samples, seconds)
            if balance.look(step, 1, False):
                found.append(shards.batch_sizes)
        return found

    first, second = Hub(2).run(body)
    assert first == second
    assert sum(first[-1]) == 128
    times = [(1e-3 + 1e-4 * first[-1][0]), 3 * (1e-3 + 1e-4 * first[-1][1])]
    assert max(times) / min(times) < 1.1


def test_changes_are_recorded_and_survive_a_resume(
    run_inproc: RunInproc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scripted times: worker 1 takes five times as long per sample."""
    saw = Balance.saw
    monkeypatch.setattr(
        Balance,
        "saw",
        lambda self, samples, seconds: saw(self, samples, samples * (1, 5)[self.peers.rank]),
    )
    out = str(tmp_path / "run")
    options = {
        "strategy": "allreduce",
        "workers": 2,
        "batch_size": 6,
        "balance": "measured:every=4",
        "out": out,
        "lr": 0.05,
    }
    run = run_inproc(**options, steps=24, checkpoint_every=24)
    changes = run.record["balance"]
    assert changes
    assert all(sum(c["batch_sizes"]) == 12 and len(c["samples_per_s"]) == 2 for c in changes)
    assert changes[-1]["batch_sizes"] == [10, 2]
    resumed = run_inproc(**options, steps=26, resume=out)
    steps = [w["samples"] for w in resumed.record["workers"]]
    assert steps[0] > steps[1]


# --- learning rates for large batches


def test_the_learning_rate_grows_with_the_workers() -> None:
    linear, root = (
        Scaling.read("linear:warmup=10").applied(constant(), 4),
        Scaling.read("sqrt:warmup=0").applied(constant(), 4),
    )
    assert [linear(step, 100) for step in (0, 9, 50)] == [1.3, 4.0, 4.0]
    assert root(0, 100) == 2.0
    assert Scaling.read("linear").applied(constant(), 4)(9, 100) == 4.0  # a tenth of the run
    assert Scaling.read("none").applied(constant(), 4)(0, 100) == 1.0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("cubic", "linear"),
        ("linear:warmup=-1", "0 or more"),
        ("linear:steps=3", "its only option is warmup"),
    ],
)
def test_bad_scalings_are_refused(run_inproc: RunInproc, text: str, sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        run_inproc(strategy="allreduce", workers=2, steps=1, lr_scaling=text)


def test_a_batch_of_everything_does_not_grow(run_inproc: RunInproc) -> None:
    alone = run_inproc(**DOUBLE, batch_size="all", steps=4, lr=0.05)
    many = run_inproc(
        **DOUBLE,
        strategy="allreduce",
        workers=3,
        batch_size="all",
        steps=4,
        lr=0.05,
        lr_scaling="linear",
    )
    assert weights_distance(alone.weights, many.weights) < 1e-10


def test_scaling_is_what_a_larger_lr_would_be(run_inproc: RunInproc) -> None:
    scaled = run_inproc(
        **DOUBLE,
        strategy="allreduce",
        workers=3,
        batch_size=4,
        steps=8,
        lr=0.02,
        lr_scaling="linear:warmup=0",
    )
    by_hand = run_inproc(**DOUBLE, strategy="allreduce", workers=3, batch_size=4, steps=8, lr=0.06)
    assert weights_distance(scaled.weights, by_hand.weights) < 1e-12
    constant_batch = {
        "strategy": "allreduce",
        "workers": 3,
        "global_batch_size": 12,
        "steps": 8,
        "lr": 0.06,
    }
    same = run_inproc(**DOUBLE, **constant_batch, lr_scaling="linear")
    assert weights_distance(same.weights, by_hand.weights) < 1e-12


def test_a_run_without_balance_is_resumed_with_it(run_inproc: RunInproc, tmp_path: Path) -> None:
    options = {**DOUBLE, "strategy": "allreduce", "workers": 2, "global_batch_size": 12, "lr": 0.05}
    whole = run_inproc(**options, steps=6)
    begun = run_inproc(**options, steps=3, checkpoint_every=3)
    resumed = run_inproc(**options, steps=6, balance="measured", resume=str(begun.out))
    assert weights_distance(whole.weights, resumed.weights) < 1e-12
    begun = run_inproc(**options, steps=3, checkpoint_every=3, balance="measured")
    resumed = run_inproc(**options, steps=6, resume=str(begun.out))
    assert weights_distance(whole.weights, resumed.weights) < 1e-12
