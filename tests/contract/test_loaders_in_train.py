"""A DataLoader in `train`: its order, samplers of one's own, what is not used, going on."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.test_loaders import SAMPLERS, N
from tests.contract.test_own_code import Rows, cross_entropy
from tests.small import identical, make_pairs, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, WeightedRandomSampler

import paceline
from paceline.data.adopt import adopt
from paceline.errors import BadRequest

RunInproc = Callable[..., paceline.Run]


def test_keys_of_any_kind(run_inproc: RunInproc) -> None:
    """A data set need not be indexed by numbers from 0."""
    xs, ys = make_pairs(12)
    samples = {f"s{i}": (x, y) for i, (x, y) in enumerate(zip(xs, ys, strict=True))}
    loader = DataLoader(samples, batch_size=4, sampler=[*samples][::-1])  # type: ignore[arg-type]
    run = run_inproc(
        data=(loader, None), batch_size=None, epochs=1, workers=2, memory_format="auto"
    )
    assert (run.steps, run.record["result"]["samples"]) == (2, 12)


def test_train_draws_the_order_of_an_epoch_from_the_seed(run_inproc: RunInproc) -> None:
    loader = DataLoader(Rows(20), batch_size=4, shuffle=True)
    run, again, other = (
        run_inproc(data=(loader, None), batch_size=None, epochs=2, seed=seed) for seed in (1, 1, 2)
    )
    assert all(
        torch.equal(a, b) for a, b in zip(*(r.weights.values() for r in (run, again)), strict=True)
    )
    assert not all(
        torch.equal(a, b) for a, b in zip(*(r.weights.values() for r in (run, other)), strict=True)
    )


@pytest.mark.parametrize("how", ["shuffle", "a generator", "weighted"])
def test_a_run_that_is_resumed_sees_the_same_batches(
    run_inproc: RunInproc, tmp_path: Path, how: str
) -> None:
    """In the middle of the second epoch; then with another number of workers, too."""

    def options(workers: int) -> dict[str, Any]:
        data = Rows(N)
        loader = DataLoader(data, 2, **SAMPLERS[how](data))
        common = {"batch_size": None, "strategy": "allreduce", "memory_format": "contiguous"}
        return {"data": (loader, None), "workers": workers, **common}

    out = str(tmp_path / "parts")
    whole = run_inproc(**options(2), steps=14)
    run_inproc(**options(2), steps=10, checkpoint_every=10, out=out)
    parts = run_inproc(**options(2), steps=14, out=out, resume=out)
    assert identical(whole.weights, parts.weights)
    other = str(tmp_path / "other")
    run_inproc(**options(2), steps=10, checkpoint_every=10, out=other)
    alone = run_inproc(**options(1), steps=14, out=other, resume=other)
    assert alone.steps == 14


@pytest.mark.parametrize("shuffle", [False, True])
def test_train_with_a_generator_of_the_loaders_is_the_plain_loop(
    run_inproc: RunInproc, shuffle: bool
) -> None:
    """One worker is the plain loop bit for bit; two workers follow it."""

    def loader(batch: int) -> DataLoader:
        return DataLoader(Rows(22), batch, shuffle, generator=torch.Generator().manual_seed(3))

    model = small_net().double()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = loader(8)
    for _ in range(3):
        for x, y in plain:
            optimizer.zero_grad()
            cross_entropy(model(x.double()), y).backward()
            optimizer.step()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net().double()
            self.net.load_state_dict(state)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.double())

    for workers in (1, 2):
        run = run_inproc(
            model=Net,
            data=(loader(8 // workers), None),
            batch_size=None,
            epochs=3,
            workers=workers,
            optimizer="sgd",
            lr=0.1,
            momentum=0.0,
        )
        for name, value in model.state_dict().items():
            assert torch.allclose(
                run.weights[f"net.{name}"], value, rtol=0, atol=0 if workers == 1 else 1e-12
            )


def test_a_test_loader_with_a_sampler_evaluates_on_what_it_gives(run_inproc: RunInproc) -> None:
    """As scripts do that split one data set by two samplers."""
    read: list[int] = []

    class Watched(Rows):
        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            read.append(i)
            return super().__getitem__(i)

    data = Watched(30)
    train = DataLoader(data, 4, sampler=SubsetRandomSampler(range(20)))
    test = DataLoader(data, 4, sampler=SubsetRandomSampler(range(20, 30)))
    samples = adopt((train, test)).test
    assert samples is not None
    assert len(samples) == 10
    read.clear()
    run = run_inproc(data=(train, test), batch_size=None, epochs=1, evaluate_every="epoch")
    assert run.record["result"]["samples"] == 20
    assert Counter(i for i in read if i >= 20).keys() == set(range(20, 30))
    assert run.test_accuracy * 10 == round(run.test_accuracy * 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": "static"}, "shard deals samples out in its own way"),
        ({"privacy": "noise=1.0"}, "privacy deals"),
        ({"balance": "2,1", "workers": 2}, "balance deals"),
        ({"global_batch_size": 8}, "global_batch_size deals"),
        ({"data_share": 0.5}, "data_share deals"),
        ({"validation": 0.5}, "validation deals"),
        ({"batch_size": (4, 2), "workers": 2}, "batch_size with several sizes"),
    ],
)
def test_a_sampler_of_ones_own_and_an_option_that_replaces_it(
    run_inproc: RunInproc, options: dict[str, Any], message: str
) -> None:
    loader = DataLoader(Rows(20), batch_size=4, sampler=WeightedRandomSampler([1.0] * 20, 20))
    with pytest.raises(BadRequest, match=message):
        run_inproc(**{"data": (loader, None), "batch_size": None, "steps": 1, **options})


def test_what_is_not_used_is_told(
    run_inproc: RunInproc, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = DataLoader(Rows(20), batch_size=4, num_workers=2, worker_init_fn=print)
    options = {"data": (loader, None), "batch_size": None, "steps": 1, "progress": True}
    run_inproc(**options, privacy="noise=1.0", strategy="allreduce")
    told = " ".join(capsys.readouterr().err.split())
    assert "privacy deals samples out in its own way and reads them in the training process" in told
    assert "not used: num_workers=2, worker_init_fn, shuffle=False" in told
    run_inproc(**options, balance="measured", strategy="allreduce", workers=2)
    told = " ".join(capsys.readouterr().err.split())
    assert "balance deals samples out in its own way and reads them in the training process" in told
    run_inproc(**{**options, "data": (DataLoader(Rows(20), batch_size=4), None)}, shard="static")
    assert "not used: shuffle=False" in " ".join(capsys.readouterr().err.split())
