"""Batches that the user's own code makes, and batches that stand in for a DataLoader."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.test_own_code import made, on_paces, weights
from tests.small import make_pairs, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
from paceline.errors import BadRequest
from paceline.run.own_loop import Pace

cross_entropy = nn.functional.cross_entropy


def noisy_batch() -> dict[str, Tensor]:
    """A Hugging Face style batch with random numbers of the default generator."""
    x, y = make_pairs(6)
    return {"inputs": x + torch.randn(6, 6), "labels": y}


def three_batches() -> Iterator[dict[str, Tensor]]:
    for _ in range(3):
        yield noisy_batch()


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))


def run(model: nn.Module, optimizer: Any, batches: Any, most: int = 5) -> int:
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        cross_entropy(model(batch["inputs"]), batch["labels"]).backward()
        optimizer.step()
        if number + 1 == most:
            break
    return number + 1


@pytest.mark.parametrize("kind", ["function", "generator", "generator function"])
def test_one_worker_draws_the_numbers_of_the_plain_loop(kind: str) -> None:
    plain, optimizer = made(dropping)
    torch.manual_seed(4)
    if kind == "function":
        run(plain, optimizer, (noisy_batch() for _ in range(5)))
    elif kind == "generator":
        run(plain, optimizer, three_batches())
    else:
        for _ in range(2):
            run(plain, optimizer, three_batches())
    source: Any = {
        "function": noisy_batch,
        "generator": three_batches(),
        "generator function": three_batches,
    }[kind]
    pace = paceline.join("allreduce")
    model, optimizer, batches = pace.prepare(*made(dropping), source)
    torch.manual_seed(4)
    for _ in range(2 if kind == "generator function" else 1):
        run(model, optimizer, batches)
    assert torch.equal(weights(model), weights(plain))
    assert batches.batch_size is None
    if kind == "generator":
        with pytest.raises(BadRequest, match="the generator of batches has ended"):
            run(model, optimizer, batches)
    with pytest.raises(TypeError, match="no length"):
        len(batches)


def test_a_break_does_not_end_a_generator() -> None:
    pace = paceline.join("serial")
    model, optimizer, batches = pace.prepare(*made(small_net), three_batches())
    assert run(model, optimizer, batches, most=1) == 1
    assert run(model, optimizer, batches) == 2


def test_workers_make_batches_of_their_own_that_count_equally() -> None:
    x, y = make_pairs(12, dtype=torch.float64)

    def double() -> nn.Module:
        return small_net(torch.float64)

    def body(pace: Pace) -> Tensor:
        def own() -> dict[str, Tensor]:
            return {"inputs": x[pace.rank :: 2], "labels": y[pace.rank :: 2]}

        model, optimizer, batches = pace.prepare(*made(double), own)
        run(model, optimizer, batches)
        pace.finish()
        return weights(model)

    plain, optimizer = made(double)
    run(plain, optimizer, [{"inputs": x, "labels": y}] * 5)
    for found in on_paces(2, body):
        torch.testing.assert_close(found, weights(plain), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("source", [noisy_batch, three_batches])
def test_a_loop_of_made_batches_goes_on_exactly(source: Any, tmp_path: Path) -> None:
    def trained(stop: bool) -> tuple[Pace, nn.Module, Any, Any]:
        pace = paceline.join("serial")
        return pace, *pace.prepare(*made(dropping), source)

    pace, model, optimizer, batches = trained(stop=True)
    torch.manual_seed(4)
    for number, batch in enumerate(batches):
        pace.step(cross_entropy(model(batch["inputs"]), batch["labels"]))
        if number == 1:
            pace.save(tmp_path)
        if number == 2:
            break
    other, again, optimizer, batches = trained(stop=False)
    other.load(tmp_path)
    run(again, optimizer, batches, most=1)
    assert (pace.steps, other.steps) == (3, 3)
    assert torch.equal(weights(model), weights(again))


def test_options_of_data_mean_nothing_for_made_batches() -> None:
    with pytest.raises(BadRequest, match="batch_size= and shard= mean nothing here"):
        paceline.join("serial").prepare(*made(small_net), noisy_batch, batch_size=3)


def test_batches_stand_in_for_a_dataloader() -> None:
    """What scripts ask of a loader: its data set, its batch size, `sampler.set_epoch`."""
    data = TensorDataset(*make_pairs(20))

    def body(pace: Pace) -> list[float]:
        sampler: Any = DistributedSampler(data, num_replicas=pace.workers, rank=pace.rank)
        loader = DataLoader(data, batch_size=5, sampler=sampler)
        model, _, batches = pace.prepare(*made(small_net), loader)
        assert batches.dataset is data
        assert (batches.batch_size, len(batches), len(batches.dataset)) == (5, 2, 20)
        seen: list[float] = []
        for epoch in range(2):
            batches.sampler.set_epoch(epoch)
            for x, y in batches:
                pace.step(cross_entropy(model(x), y))
                seen += x[:, 0].tolist()
        place = batches.state_dict()
        batches.load_state_dict(place)
        assert pace.epoch == 2
        return seen

    one, other = on_paces(2, body)
    assert sorted(one + other) == pytest.approx(sorted(data.tensors[0][:, 0].tolist() * 2))
    _, _, batches = paceline.join("serial").prepare(*made(small_net), make_pairs(20))
    assert batches.batch_size == 64
    batches.sampler.set_epoch(3)
