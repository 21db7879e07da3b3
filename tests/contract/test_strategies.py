"""The contract of all registered strategies, checked in-process with many scheduler seeds.

Strategies that declare `needs_processes` are checked in tests/multiprocess.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.conftest import identical, make_pairs, small_net, weights_distance
from torch import nn

from paceline import Run
from paceline.data.shards import GlobalShards
from paceline.errors import BadRequest, PeerLost
from paceline.record.reader import read_events
from paceline.registry import strategies
from paceline.replica.replica import Replica
from paceline.strategies.base import Strategy, expect_identical
from paceline.transport.base import ring_bytes
from paceline.types import Batch

RunInproc = Callable[..., Run]
INPROC = [e.name for e in strategies if not e.make.traits.needs_processes]
SEVERAL = [n for n in INPROC if strategies.entry(n).make.traits.most_workers is None]


def plain_loop(seed: int, epochs: int, dropout: float = 0.0) -> dict[str, torch.Tensor]:
    """Serial SGD as a plain loop, on the same order of samples."""
    inputs, targets = make_pairs(60)
    torch.manual_seed(seed)
    model = net_with_dropout(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        for part in GlobalShards(60, (8,), seed).order(epoch).split(8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[part]), targets[part]).backward()
            optimizer.step()
    return model.state_dict()


def net_with_dropout(share: float) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(share), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "name", [n for n in INPROC if strategies.entry(n).make.traits.alone_is_serial]
)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_one_worker_is_serial_bit_for_bit(run_inproc: RunInproc, name: str, dropout: float) -> None:
    model = lambda: net_with_dropout(dropout)  # noqa: E731
    run = run_inproc(
        model=model, strategy=name, epochs=3, lr=0.05, seed=5, evaluate_every=4, shard="global"
    )
    assert identical(run.weights, plain_loop(5, 3, dropout))


@pytest.mark.parametrize("name", INPROC)
def test_the_same_seed_gives_the_same_run(run_inproc: RunInproc, name: str) -> None:
    workers = 1 if name not in SEVERAL else 3
    runs = [run_inproc(strategy=name, workers=workers, seed=s) for s in (1, 1, 2)]
    assert identical(runs[0].weights, runs[1].weights)
    assert runs[0].train_loss == runs[1].train_loss
    assert not identical(runs[0].weights, runs[2].weights)


class Checked(Strategy):
    """Any strategy, with a look at the replicas after every step."""

    def __init__(self, inner: Strategy) -> None:
        self.inner, self.traits = inner, inner.traits

    name = "checked"

    def setup(self, ctx, replica: Replica) -> None:
        self.ctx = ctx
        self.inner.setup(ctx, replica)

    def step(self, replica: Replica, batch: Batch) -> None:
        self.inner.step(replica, batch)
        expect_identical(self.ctx, replica, f"after step {batch.step + 1}")

    def finish(self, replica: Replica) -> None:
        self.inner.finish(replica)

    def consensus(self, replica: Replica):
        return self.inner.consensus(replica)


@pytest.mark.parametrize(
    "name", [n for n in SEVERAL if strategies.entry(n).make.traits.replicas_identical]
)
@pytest.mark.parametrize("scheduler", range(4))
@pytest.mark.parametrize("init", ["broadcast", "seed"])
def test_replicas_are_identical_where_declared(
    run_inproc: RunInproc, name: str, scheduler: int, init: str
) -> None:
    run = run_inproc(
        strategy=Checked(strategies.build(name)), workers=3, seed=scheduler, init=init, steps=6
    )
    assert run.record["status"] == "completed"


@pytest.mark.parametrize("name", SEVERAL)
def test_the_loss_falls(run_inproc: RunInproc, name: str) -> None:
    run = run_inproc(strategy=name, workers=2, epochs=8, lr=0.05)
    assert run.test_accuracy > 0.8


def test_metered_bytes_are_the_predicted_ones(run_inproc: RunInproc) -> None:
    """A ring's bytes: 2(P-1)*4n per step summed over workers, and `ring_bytes` per worker."""
    for workers in (1, 2, 3, 4):
        run = run_inproc(strategy="allreduce", workers=workers, steps=5)
        n = sum(p.numel() for p in small_net().parameters())
        sent = [w["payload_sent_bytes"] for w in run.record["workers"]]
        assert sum(sent) == 2 * (workers - 1) * 4 * n * 5
        assert sent == [5 * ring_bytes(n, 4, r, workers)[0] for r in range(workers)]
        assert [w["messages_sent"] for w in run.record["workers"]] == [
            5 * 2 * (workers - 1)
        ] * workers


class DiesAt(nn.Module):
    """A model that raises in its third forward pass on one worker only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(6, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == 3 and len(x) == 5:
            raise PeerLost(None, "as a test wanted it")
        return self.inner(x)


@pytest.mark.parametrize("name", SEVERAL)
def test_a_dead_worker_ends_the_run_with_its_record(
    run_inproc: RunInproc, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "dead"
    with pytest.raises(PeerLost):
        run_inproc(model=DiesAt, strategy=name, workers=2, batch_size="4,5", out=str(out))
    record = Run.open(out).record
    assert record["status"] == "failed"
    assert record["error"]
    steps = [
        e["step"] for e in read_events(out / "events" / "worker-0.jsonl") if e["kind"] == "step"
    ]
    every_step = name in ("allreduce", "ring-reduce", "stepwise", "ps")
    assert steps == [1, 2] if every_step else steps[:2] == [1, 2]


def test_uneven_batches_and_an_empty_slice_step_together(run_inproc: RunInproc) -> None:
    serial = run_inproc(strategy="serial", batch_size=13, steps=10)
    uneven = run_inproc(strategy="allreduce", workers=3, batch_size="9,0,4", steps=10)
    assert [w["samples"] for w in uneven.record["workers"]][1] == 0
    assert weights_distance(serial.weights, uneven.weights) < 1e-5


def test_serial_takes_one_worker() -> None:
    import paceline

    with pytest.raises(BadRequest, match="runs 1 worker"):
        paceline.train(data=make_pairs(9), model=small_net, strategy="serial", workers=2)
