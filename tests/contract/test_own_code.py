"""A person's own model, data and loop mean here what they mean in plain PyTorch. The numbers are
those of issue 15.
"""

import atexit
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import make_pairs, small_net
from tests.small import Two
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    Subset,
    TensorDataset,
)

import paceline
from paceline.common.exits import end_quickly
from paceline.data.adopt import adopt
from paceline.data.shards import Cursor, Cuts, GlobalShards, StaticShards
from paceline.errors import BadRequest
from paceline.registry import strategies
from paceline.replica.buckets import Buckets
from paceline.replica.memory_format import measure_memory_format
from paceline.replica.replica import Replica
from paceline.request.config import Config
from paceline.run.own_loop import Pace
from paceline.transport.base import Transport
from paceline.transport.inproc import Hub
from paceline.types import Batch

RunInproc = Callable[..., paceline.Run]
cross_entropy = nn.functional.cross_entropy


def on_paces(workers: int, body: Callable[[Pace], Any], strategy: str = "allreduce") -> list[Any]:
    """`body(pace)` on every rank of an in-process line."""
    results = Hub(workers).run(
        lambda line: body(Pace(strategies.build(strategy), line, workers, "none", 0, 0))
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def made(net: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = net()
    return model, torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --- 4: memory_format=auto


class Tutorial(nn.Module):
    """The network of PyTorch's own CIFAR-10 tutorial: it flattens with `.view`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool, self.conv2 = (
            nn.Conv2d(3, 6, 5),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(6, 16, 5),
        )
        self.fc1, self.fc2, self.fc3 = (
            nn.Linear(16 * 5 * 5, 120),
            nn.Linear(120, 84),
            nn.Linear(84, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


def images(rows: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 32, 32), torch.arange(rows) % 10


def test_04_a_model_that_calls_view_trains_with_all_defaults(run_inproc: RunInproc) -> None:
    run = run_inproc(model=Tutorial, data=images(), memory_format="auto", steps=2, workers=1)
    assert run.record["config"]["memory_format"] == "contiguous"


def test_04_a_model_that_answers_otherwise_in_channels_last_stays_as_it_is() -> None:
    class BySteps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8 * 30 * 30, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return self.fc(x.as_strided((len(x), 8 * 30 * 30), (8 * 30 * 30, 1)))

    inputs, targets = images()
    assert measure_memory_format(BySteps(), cross_entropy, inputs, targets) == "contiguous"


def test_04_the_trial_leaves_every_random_state_alone() -> None:
    import random

    import numpy as np

    class Drawing(Tutorial):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(
                x * (1 + 0 * (random.random() + np.random.rand() + float(torch.rand(()))))
            )

    model, (inputs, targets) = Drawing(), images()
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    measure_memory_format(model, cross_entropy, inputs, targets)
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


# --- 5: a DataLoader's batch size and drop_last


class Rows(Dataset):
    def __init__(self, rows: int = 100) -> None:
        self.inputs, self.labels = make_pairs(rows)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.read.append(i)
        return self.inputs[i], self.labels[i]


def test_05_prepare_honours_a_loaders_batch_size_and_drop_last(
    capfd: pytest.CaptureFixture[str],
) -> None:
    loader = DataLoader(Rows(), batch_size=8, drop_last=True, shuffle=True)
    pace = paceline.join("serial")
    _, _, batches = pace.prepare(*made(small_net), loader)
    sizes = [len(y) for _, y in batches]
    assert len(batches) == len(loader) == len(sizes) == 12
    assert set(sizes) == {8}
    assert "paceline: " not in capfd.readouterr().err, "all of its settings are used"


def test_05_train_honours_drop_last(run_inproc: RunInproc) -> None:
    loader = DataLoader(Rows(), batch_size=8, drop_last=True)
    assert adopt(loader).notice == ""
    run = run_inproc(data=(loader, None), batch_size=None, epochs=2)
    assert (run.steps, run.record["result"]["samples"]) == (24, 192)
    run = run_inproc(data=(loader, None), batch_size=None, epochs=2, workers=5)
    assert (run.steps, run.record["result"]["samples"]) == (4, 160)


@given(
    st.integers(1, 60),
    st.lists(st.integers(0, 7), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_05_every_batch_is_full_where_the_rest_is_dropped(
    n: int, sizes: list[int], drop: bool, norm: bool, static: bool
) -> None:
    """And every sample comes exactly once where it is not; no batch has one row that could have
    two.
    """
    if not sum(sizes):
        return
    cuts = Cuts(drop, norm)
    try:
        shards: Any = (
            StaticShards(n, tuple(sizes), cuts=cuts)
            if static
            else GlobalShards(n, tuple(sizes), cuts=cuts)
        )
    except BadRequest:
        assert drop
        return
    cursor, seen, steps = Cursor(), [], 0
    while cursor.epoch == 0:
        counts = shards.counts(cursor)
        taken = [shards.take(cursor, w).tolist() for w in range(len(sizes))]
        assert tuple(map(len, taken)) == counts
        if drop:
            assert counts == tuple(sizes)
        if norm and not static and sum(counts) > 1 and counts != tuple(sizes):
            assert 1 not in counts
        seen += [i for part in taken for i in part]
        cursor, steps = shards.advance(cursor), steps + 1
    assert steps == shards.steps_per_epoch
    assert len(set(seen)) == len(seen)
    assert drop or sorted(seen) == list(range(n))


# --- 6: pace.backward means what loss.backward() means


def plain_loop(
    net: Callable[[], nn.Module], batches: list[tuple[Tensor, Tensor]], accumulate: int
) -> nn.Module:
    model, optimizer = made(net)
    for number, (x, y) in enumerate(batches):
        (cross_entropy(model(x), y) / accumulate).backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_06_accumulation_with_one_worker_is_the_plain_loop_bit_for_bit() -> None:
    inputs, targets = make_pairs(48)
    batches = list(zip(inputs.split(6), targets.split(6), strict=True))
    pace = paceline.join("serial")
    model, _, _ = pace.prepare(*made(small_net))
    for number, (x, y) in enumerate(batches):
        pace.backward(cross_entropy(model(x), y) / 4)
        if number % 4 == 3:
            pace.step()
    assert torch.equal(weights(model), weights(plain_loop(small_net, batches, 4)))


@pytest.mark.parametrize("workers", [2, 3])
def test_06_uneven_slices_that_accumulate_follow_serial_training(workers: int) -> None:
    """Seven rows a batch over two or three workers, two batches a step, as `loss / 2` is written
    everywhere.
    """
    inputs, targets = make_pairs(28, dtype=torch.float64)

    def net() -> nn.Module:
        return small_net(torch.float64)

    def body(pace: Pace) -> Tensor:
        model, _, _ = pace.prepare(*made(net))
        for number, (x, y) in enumerate(zip(inputs.split(7), targets.split(7), strict=True)):
            own = slice(pace.rank * 7 // workers, (pace.rank + 1) * 7 // workers)
            loss = cross_entropy(model(x[own]), y[own]) / 2
            pace.backward(loss, weight=len(y[own]))
            if number % 2:
                pace.step()
        pace.finish()
        return weights(model)

    expected = weights(
        plain_loop(net, list(zip(inputs.split(7), targets.split(7), strict=True)), 2)
    )
    for found in on_paces(workers, body):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("strategy", ["allreduce", "ring-reduce"])
def test_06_batches_of_prepare_that_accumulate_follow_serial_training(strategy: str) -> None:
    """Two workers with a quarter of each step's rows twice: one worker that has them at once."""
    data = make_pairs(48, dtype=torch.float64)

    def accumulated(pace: Pace) -> Tensor:
        model, _, batches = pace.prepare(*made(net), data, batch_size=4)
        for number, (x, y) in enumerate(batches):
            pace.backward(cross_entropy(model(x), y) / 2)
            if number % 2:
                pace.step()
        pace.finish()
        return weights(model)

    def at_once(pace: Pace) -> Tensor:
        model, _, batches = pace.prepare(*made(net), data, batch_size=16)
        for x, y in batches:
            pace.step(cross_entropy(model(x), y))
        return weights(model)

    def net() -> nn.Module:
        return small_net(torch.float64)

    expected = at_once(paceline.join("serial"))
    for found in on_paces(2, accumulated, strategy):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


# --- 7: an empty slice changes nothing


class Routed(nn.Module):
    """Batch norm, dropout, and a layer that only some inputs use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.2)
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(x))
        return self.left(x) if x[0, 0] > 0 else self.right(x)


@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:every=1"])
def test_07_an_empty_slice_leaves_no_trace(strategy: str) -> None:
    """Eight samples in batches of three, two workers: of the last two rows one worker has both, the
    other none.
    """
    data = make_pairs(8, dtype=torch.float64)

    def body(pace: Pace) -> dict[str, Any]:
        torch.manual_seed(5)
        model = Routed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        model, _, batches = pace.prepare(model, optimizer, data, batch_size=3)
        found: dict[str, Any] = {}
        for x, y in batches:
            before = (
                weights(model),
                model.norm.running_mean.clone(),
                int(model.norm.num_batches_tracked),
                torch.get_rng_state(),
            )
            empty = batches._given.weight == 0
            pace.step(cross_entropy(model(x), y))
            if empty:
                same = torch.equal(before[1], model.norm.running_mean) and before[2] == int(
                    model.norm.num_batches_tracked
                )
                found = {"same": same, "random": torch.equal(before[3], torch.get_rng_state())}
                found["untouched"] = [
                    bool(torch.signbit(r.grads).all()) for r in pace.replica.regions
                ]
                found["states"] = len(optimizer.state)
        return found

    results = on_paces(2, body, strategy)
    empty = [r for r in results if r]
    assert len(empty) == 1, "one worker had an empty slice"
    assert empty[0]["same"]
    assert empty[0]["random"]
    # there the exchange has brought the other worker's gradients by now
    if strategy != "allreduce":
        assert empty[0]["untouched"] == [True]


def test_07_it_equals_a_plain_loop_with_adamw_on_a_model_that_routes() -> None:
    """truth.md F2: 15 samples, two workers x 7, eight steps in float64; what is not used is not
    touched.
    """
    inputs, targets = make_pairs(15, dtype=torch.float64)

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = Two()
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    def body(pace: Pace) -> Tensor:
        model, _, batches = pace.prepare(*fresh(), (inputs, targets), batch_size=7)
        for _ in range(4):
            for x, y in batches:
                pace.step(cross_entropy(model(x), y))
        return weights(model)

    plain, optimizer = fresh()
    for epoch in range(4):
        for rows in GlobalShards(15, (14,), 0).order(epoch).split(14):
            optimizer.zero_grad()
            cross_entropy(plain(inputs[rows]), targets[rows]).backward()
            optimizer.step()
    for found in on_paces(2, body):
        torch.testing.assert_close(found, weights(plain), rtol=1e-12, atol=1e-13)


def test_07_servers_of_a_model_that_routes_end_when_the_workers_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """truth.md, the open point: three workers, two servers, and slices that are empty."""
    inputs, targets = make_pairs(13, dtype=torch.float64)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) if float(x[0, 0]) > 0 else self.right(x)

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = Two()
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    def body(line: Transport) -> Tensor | None:
        pace = Pace(strategies.build("ps"), line, 3, "none", 0, 0, build=fresh)
        if pace.ctx.role == "server":
            pace.serve()
            return None
        model, _, batches = pace.prepare(*fresh(), (inputs, targets), batch_size=4)
        for _ in range(4):
            for x, y in batches:
                pace.step(cross_entropy(model(x), y))
        pace.finish()
        return weights(model)

    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    end_quickly.cache_clear()
    results = Hub(5).run(body)
    assert [r for r in results if isinstance(r, BaseException)] == []
    assert results[3:] == [None, None]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert gc.freeze in at_exit, "five interpreters take long to end where cores are few"
    end_quickly.cache_clear()


# --- 8: what people expect


def test_08_workers_alone_mean_allreduce(run_inproc: RunInproc) -> None:
    assert str(run_inproc(workers=2, steps=1).record["config"]["strategy"]).startswith("allreduce")
    assert run_inproc(workers=1, steps=1).record["config"]["strategy"] == "serial"
    assert Config.make({"workers": 3, "strategy": "gossip"}).strategy.name == "gossip"


def test_08_a_dataset_is_not_read_before_the_first_step(run_inproc: RunInproc) -> None:
    large = Rows(5000)
    run_inproc(data=large, steps=1)
    assert len(set(large.read)) < 60
    large = Rows(5000)
    with pytest.raises(BadRequest, match="an attribute `classes`"):
        run_inproc(model="mlp", data=large, steps=1)
    assert len(large.read) <= 1
    large.classes = ["a", "b", "c"]
    for whole in (large, Subset(large, range(100, 4000)), ConcatDataset([large, large])):
        run_inproc(model="mlp:hidden=4", data=whole, steps=1)
    assert len(set(large.read)) < 100


def test_08_a_loader_with_a_distributed_sampler_is_cut_once() -> None:
    data = TensorDataset(torch.arange(64.0).view(64, 1), torch.arange(64))

    def body(pace: Pace) -> list[int]:
        sampler: Any = DistributedSampler(data, num_replicas=pace.workers, rank=pace.rank)
        loader = DataLoader(data, batch_size=4, sampler=sampler)
        model, _, batches = pace.prepare(*made(lambda: nn.Linear(1, 64)), loader)
        assert len(batches) == len(loader) == 8
        seen = []
        for x, y in batches:
            seen += y.tolist()
            pace.step(cross_entropy(model(x), y))
        return seen

    one, other = on_paces(2, body)
    assert sorted(one + other) == list(range(64))


def test_08_passes_behave_as_a_dataloaders() -> None:
    pace = paceline.join("serial")
    model, _, batches = pace.prepare(*made(small_net), make_pairs(40), batch_size=8)

    def one_pass(leave_after: int) -> list[list[float]]:
        seen = []
        for number, (x, y) in enumerate(batches):
            seen.append(x[:, 0].tolist())
            pace.step(cross_entropy(model(x), y))
            if number + 1 == leave_after:
                break
        return seen

    x, _ = next(iter(batches))
    assert (len(x), len(batches)) == (8, 5)
    first = one_pass(0)
    assert len(first) == 5, "a look at a batch consumes nothing"
    left = one_pass(2)
    whole = one_pass(0)
    assert (len(left), len(whole)) == (2, 5), "after a break the next pass is a whole one"
    assert first[0] != left[0] != whole[0], "every epoch has an order of its own"
    assert sorted(v for batch in whole for v in batch) == sorted(
        v for batch in first for v in batch
    )


def test_08_prepare_leaves_the_random_state_alone() -> None:
    class Augmented(Rows):
        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            x, y = super().__getitem__(i)
            return x + torch.randn(6), y

    def body(pace: Pace) -> tuple[Tensor, Tensor]:
        model, optimizer = made(small_net)
        torch.manual_seed(100 + pace.rank)
        expected = torch.randn(4, generator=torch.Generator().manual_seed(100 + pace.rank))
        pace.prepare(model, optimizer, Augmented(30), batch_size=4)
        return torch.randn(4), expected

    for found, expected in on_paces(2, body):
        assert torch.equal(found, expected)


# --- 9: four ways to be silently wrong


class FrozenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.inner(x)))


def test_09_frozen_batch_norm_stays_frozen(run_inproc: RunInproc) -> None:
    run = run_inproc(model=FrozenNorm, epochs=2)  # with evaluations in between
    assert float(run.weights["norm.running_mean"].abs().sum()) == 0.0
    model, _, _ = paceline.join("serial").prepare(*made(FrozenNorm))
    assert (model.training, model.inner.training, model.norm.training) == (True, True, False)
    pretrained = small_net().eval()
    paceline.join("serial").prepare(pretrained, torch.optim.SGD(pretrained.parameters(), lr=0.1))
    assert pretrained.training, "a model that comes in evaluation mode is trained in training mode"


@pytest.mark.parametrize("shard", ["global", "static"])
@pytest.mark.parametrize("workers", [2, 3])
def test_09_a_last_step_does_not_cut_batch_norm_into_single_rows(
    run_inproc: RunInproc, shard: str, workers: int
) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    for samples in range(3 * workers, 7 * workers):
        if shard == "global" and samples % (4 * workers) == 1:
            continue  # one row is left in all: serial training with this batch fails there too
        run = run_inproc(
            model=net,
            data=(make_pairs(samples), None),
            workers=workers,
            batch_size=4,
            shard=shard,
            epochs=1,
        )
        assert run.record["result"]["samples"] == samples


def test_09_an_optimizer_with_foreign_parameters_is_refused() -> None:
    model, extra = nn.Linear(2, 1), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [extra]}], lr=1.0)
    with pytest.raises(BadRequest, match=r"parameter 0 of group 1, of shape \(3,\)"):
        paceline.join("serial").prepare(model, optimizer)
    named = torch.optim.SGD([*model.named_parameters(), ("temperature", extra)], lr=1.0)
    with pytest.raises(BadRequest, match="temperature"):
        paceline.join("serial").prepare(model, named)


def test_09_a_gradient_that_comes_twice_under_overlap_raises() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(2):
                x = checkpoint(self.shared, x, use_reentrant=True)
            return self.last(x)

    model = Twice()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
    assert replica.flat is not None
    over: list[bool] = []

    def exchange(stretch: Tensor) -> None:
        if over:
            raise RuntimeError("the end of the thread that exchanges")

    buckets = replica.flat.buckets = Buckets(replica.regions, exchange, least_bytes=1)
    with pytest.raises(BadRequest, match=r"shared\.\w+ got its gradient twice"):
        replica.forward_backward(Batch(torch.randn(5, 4), torch.randn(5, 1), 5, 5, 0, 0), 1.0)
    over.append(True)
    with pytest.raises(RuntimeError, match="the end"):
        buckets.finish()
