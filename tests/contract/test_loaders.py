"""A DataLoader means here what it means in a plain loop: its order, its batches, its passes."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.test_own_code import Rows, made, on_paces
from tests.small import small_net, trained_from
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import paceline
from paceline.common.seeding import random_states, set_random_states
from paceline.data.adopt import adopt
from paceline.data.batches import ShardBatches
from paceline.data.order import LoaderOrder, worker_0s
from paceline.data.passes import LoaderPasses
from paceline.data.shards import Cursor
from paceline.errors import BadRequest
from paceline.run.own_loop import Pace
from paceline.transport.inproc import Hub

RunInproc = Callable[..., paceline.Run]
CPU = torch.device("cpu")
N = 26


class Numbered(Dataset):
    """Sample i is the number i."""

    def __init__(self, samples: int = N) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.tensor([float(i)]), i


class WithNumpy(Sampler):
    """Draws with NumPy and Python, and draws when the pass begins, not at its first sample."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        order = np.random.permutation(len(self.data)).tolist()
        random.shuffle(order)
        return iter(order[torch.randint(3, ()) :] + order[:2])


class Lengths(Sampler):
    """A batch sampler with batches of different lengths."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[list[int]]:
        for part in torch.randperm(len(self.data)).tensor_split([1, 3, 6, 10, 15, 21]):
            yield part.tolist()


SAMPLERS: dict[str, Callable[[Dataset], dict[str, Any]]] = {
    "shuffle": lambda data: {"shuffle": True},
    "in order": lambda data: {},
    "a generator": lambda data: {
        "shuffle": True,
        "generator": torch.Generator().manual_seed(7),
    },
    "weighted": lambda data: {"sampler": WeightedRandomSampler([*range(1, N + 1)], 21)},
    "replacement": lambda data: {"sampler": RandomSampler(data, True, 40)},
    "subset": lambda data: {
        "sampler": SubsetRandomSampler(range(3, 20), torch.Generator().manual_seed(1))
    },
    "numpy": lambda data: {"sampler": WithNumpy(data)},
}


def plain_unions(how: str, batch: int, epochs: int, **more: Any) -> list[list[list[int]]]:
    """What a plain script sees in every step of every epoch."""
    data = Numbered()
    loader = DataLoader(data, batch_size=batch, **SAMPLERS[how](data), **more)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    return [[sorted(y.tolist()) for _, y in loader] for _ in range(epochs)]


@pytest.mark.parametrize("how", SAMPLERS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_two_workers_see_what_a_plain_script_sees_in_every_step(how: str, drop_last: bool) -> None:
    """A plain script with batches of 2b, and the same script with two workers and batches of b."""

    def body(pace: Pace) -> list[list[list[int]]]:
        data = Numbered()
        loader = DataLoader(data, batch_size=4, drop_last=drop_last, **SAMPLERS[how](data))
        torch.manual_seed(5 if pace.leads else 77)
        random.seed(5 if pace.leads else 78)
        np.random.seed(5 if pace.leads else 79)
        model, _, batches = pace.prepare(*made_quietly(lambda: nn.Linear(1, 1)), loader)
        if pace.rank == 1:
            next(iter(batches))  # a look, on one rank only
        seen = []
        for _ in range(3):
            seen.append([])
            for x, y in batches:
                torch.rand(1)  # dropout, say: it must not change the order
                seen[-1].append(y.tolist() if batches.current.weight else [])
                pace.step(model(x).mean())
        assert len(batches) == (len(seen[0]) if how != "numpy" else len(batches))
        return seen

    one, other = on_paces(2, body)
    unions = [
        [sorted(a + b) for a, b in zip(*epochs, strict=True)]
        for epochs in zip(one, other, strict=True)
    ]
    assert unions == plain_unions(how, 8, 3, drop_last=drop_last)


def made_quietly(net: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer; no random number is drawn."""
    states = torch.get_rng_state()
    model = net()
    torch.set_rng_state(states)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def test_one_worker_iterates_ones_own_loader() -> None:
    """With a model that draws (dropout), and augmentation in the training process."""

    class Augmented(Rows):
        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            x, y = super().__getitem__(i)
            return x + 0.1 * torch.randn(6), y

    def net() -> nn.Module:
        return nn.Sequential(small_net(), nn.Dropout(0.2))

    def weights(paced: bool) -> list[Tensor]:
        torch.manual_seed(4)
        loader = DataLoader(Augmented(20), batch_size=8, shuffle=True)
        return trained_from(loader, net(), paceline.join("serial") if paced else None)

    for a, b in zip(weights(True), weights(False), strict=True):
        assert torch.equal(a, b)


def test_an_epoch_of_one_worker_ends_as_the_loader_does() -> None:
    """Also where the sampler does not know its length."""

    class Unknown(Sampler):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    pace = paceline.join("serial")
    model, _, batches = pace.prepare(
        *made(lambda: nn.Linear(1, 1)), DataLoader(Numbered(), batch_size=4, sampler=Unknown())
    )
    for _ in range(2):
        seen = []
        for x, y in batches:
            seen += y.tolist()
            pace.step(model(x).mean())
        assert seen == list(range(10))
    assert batches._inner.epochs_done == 2


def test_a_batch_sampler_of_ones_own_gives_one_batch_to_each_worker(run_inproc: RunInproc) -> None:
    """D2 and D3: nothing is cut twice, nothing is left out."""
    data = Numbered()

    def body(pace: Pace) -> tuple[list[int], list[float]]:
        torch.manual_seed(pace.rank)
        loader = DataLoader(data, batch_sampler=Lengths(data))
        model, _, batches = pace.prepare(*made_quietly(lambda: nn.Linear(1, 1)), loader)
        assert len(batches) == 3  # ceil(7 / 3)
        seen, weights = [], []
        for x, y in batches:
            batch = batches.current
            weights.append((batch.weight, batch.global_weight))
            seen += y.tolist() if batch.weight else []
            pace.step(model(x).mean())
        return seen, weights

    results = on_paces(3, body)
    assert sorted(i for seen, _ in results for i in seen) == list(range(N))
    assert [w for _, w in results] == [
        [(1, 6), (4, 15), (5, 5)],
        [(2, 6), (5, 15), (0, 5)],
        [(3, 6), (6, 15), (0, 5)],
    ]
    loader = DataLoader(Rows(N), batch_sampler=Lengths(data))
    for workers in (1, 2):
        run = run_inproc(data=(loader, None), batch_size=None, epochs=2, workers=workers)
        assert run.record["result"]["samples"] == 2 * N
        assert run.steps == 2 * -(-7 // workers)


def ordered(loader: DataLoader, workers: int, **given: Any) -> ShardBatches:
    return ShardBatches(adopt(loader).train, LoaderOrder(loader, workers, **given), 0, CPU)


def test_the_order_goes_on_after_a_checkpoint_also_with_other_workers() -> None:
    for how in SAMPLERS:
        data = Numbered()
        loader = DataLoader(data, batch_size=2, **SAMPLERS[how](data))
        for carried in (False, True):
            (start,) = Hub(1).run(partial(worker_0s, loader, random_states()))
            given = {"states": start} if carried else {"seed": 3}

            whole = ordered(loader, 2, **given)
            seen, saved = [], {}
            for batch in whole:
                seen.append(batch.targets.tolist())
                if len(seen) == 10:
                    saved = whole.state()
                if len(seen) == 20:
                    break
            again = ordered(loader, 2, **given)
            again.restore(saved)
            assert [b.targets.tolist() for b, _ in zip(again, range(10))] == seen[10:]  # noqa: B905
            alone = ordered(loader, 1, **given)
            alone.restore(saved)
            assert next(iter(alone)).targets.tolist() == seen[10]


def test_given_back_batches_come_again_also_across_epochs() -> None:
    loader = DataLoader(Numbered(10), batch_size=4, shuffle=True)
    batches = ShardBatches(adopt(loader).train, LoaderOrder(loader, 1, seed=1), 0, CPU)
    every = iter(batches)
    first = [next(every) for _ in range(3)]
    assert [b.ends_epoch for b in first] == [False, False, True]
    batches.give_back()
    assert torch.equal(next(every).targets, first[2].targets)
    next(every)
    batches.give_back()
    assert batches.cursor == Cursor(1, 0)


@pytest.mark.parametrize("own", [False, True], ids=["default", "own generator"])
def test_the_pass_of_one_worker_goes_on_after_a_restore(own: bool) -> None:
    """What `pace.save` and `pace.load` need: also a batch that was not used comes again.

    A sampler draws once more from a generator of its own when its pass ends.
    """

    def passes() -> LoaderPasses:
        torch.manual_seed(8)
        generator = torch.Generator().manual_seed(9) if own else None
        return LoaderPasses(DataLoader(Numbered(12), 3, shuffle=True, generator=generator), CPU)

    whole = passes()
    expected = [b.inputs[1].tolist() for b, _ in zip(whole, range(8), strict=False)]
    for used in range(7):
        first = passes()
        every = iter(first)
        seen = [next(every).inputs[1].tolist() for _ in range(used)]
        assert seen == expected[:used]
        state, random_state = first.state(), random_states()
        for given_back in (False, True):
            if given_back:
                set_random_states(random_state)
                next(every)
                first.give_back()
                state, random_state = first.state(), random_states()
            again = passes()
            again.restore(state)
            set_random_states(random_state)
            again.begin_epoch(anew=True)
            rest = [b.inputs[1].tolist() for b, _ in zip(again, range(8 - used), strict=False)]
            assert rest == expected[used:]
            assert again.epochs_done == 2


def test_an_endless_sampler() -> None:
    """As scripts that count iterations have: no epoch ends, and nobody draws for ever."""

    class Endless(Sampler):
        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(0)

        def __iter__(self) -> Iterator[int]:
            while True:
                yield from torch.randperm(10, generator=self.generator).tolist()

    def body(pace: Pace) -> list[int]:
        loader = DataLoader(Numbered(), batch_size=2, sampler=Endless())
        model, _, batches = pace.prepare(*made_quietly(lambda: nn.Linear(1, 1)), loader)
        with pytest.raises(TypeError, match="no length"):
            len(batches)
        seen = []
        for x, y in batches:
            seen += y.tolist()
            pace.step(model(x).mean())
            if pace.steps == 5:
                break
        return seen

    one, other = on_paces(2, body)
    assert Counter(one + other) == Counter([*range(10)] * 2)


def test_a_distributed_sampler_is_replaced_by_the_whole_order(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """D3. In every step the workers see what DDP's workers see, and `set_epoch` counts."""
    data = Numbered(24)

    def ddp(rank: int) -> list[list[list[int]]]:
        sampler = DistributedSampler(data, 2, rank, seed=9)
        loader = DataLoader(data, batch_size=3, sampler=sampler)
        seen = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            seen.append([y.tolist() for _, y in loader])
        return seen

    def body(pace: Pace) -> list[list[list[int]]]:
        sampler = DistributedSampler(data, pace.workers, pace.rank, seed=9)
        loader = DataLoader(data, batch_size=3, sampler=sampler)
        model, _, batches = pace.prepare(*made_quietly(lambda: nn.Linear(1, 1)), loader)
        assert len(batches) == len(loader) == 4
        seen = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            seen.append([])
            for x, y in batches:
                seen[-1].append(y.tolist())
                pace.step(model(x).mean())
        return seen

    def unions(pair: list[Any]) -> list[list[list[int]]]:
        return [
            [sorted(a + b) for a, b in zip(*epochs, strict=True)]
            for epochs in zip(*pair, strict=True)
        ]

    assert unions(on_paces(2, body)) == unions([ddp(0), ddp(1)])
    assert capfd.readouterr().err.count("DistributedSampler is replaced") == 1


def test_a_pass_after_a_break_is_a_new_epoch_on_all_workers() -> None:
    """D4: and a look at a batch on one worker changes nothing."""

    def body(pace: Pace) -> list[list[int]]:
        loader = DataLoader(Numbered(16), batch_size=2, shuffle=True)
        model, _, batches = pace.prepare(*made_quietly(lambda: nn.Linear(1, 1)), loader)
        passes = []
        for leave_after in (0, 2, 0):
            if pace.leads:
                assert len(next(iter(batches))[0]) == 2
            passes.append([])
            for number, (x, y) in enumerate(batches):
                passes[-1] += y.tolist()
                pace.step(model(x).mean())
                if number + 1 == leave_after:
                    break
        return passes

    one, other = on_paces(2, body)
    assert [len(seen) for seen in one] == [8, 4, 8]
    assert sorted(one[0] + other[0]) == sorted(one[2] + other[2]) == list(range(16))
    assert len(set(one[1] + other[1])) == 8
    assert one[0] != one[2]


def test_dummy_samples_leave_a_buffer_where_it_is() -> None:
    """r22: what holds a buffer still holds it after a step with dummy samples."""

    def body(pace: Pace) -> bool:
        net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        held = net[1].running_mean
        loader = DataLoader(Numbered(6), batch_size=4)
        model, _, batches = pace.prepare(*made_quietly(lambda: net), loader)
        for x, _ in batches:
            pace.step(model(x).mean())
        assert bool(held.any()) == (pace.rank < 2), "the third worker has dummy samples only"
        return net[1].running_mean is held

    assert all(on_paces(3, body))


def test_workers_with_loaders_of_different_lengths_are_told() -> None:
    """A script that cuts the data itself and hands each worker its own part."""

    def body(pace: Pace) -> None:
        loader = DataLoader(Numbered(10 + pace.rank), batch_size=2)
        pace.prepare(*made_quietly(lambda: nn.Linear(1, 1)), loader)

    with pytest.raises(BadRequest, match="10 samples in 5 batches, and this worker's has 11 in 6"):
        on_paces(2, body)


def test_no_worker_has_a_lone_row_with_batch_norm() -> None:
    """17 rows in batches of 8: the second worker would have one row in the last step."""

    def body(pace: Pace) -> list[tuple[float, int]]:
        net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        loader = DataLoader(Numbered(9), batch_size=4)
        model, _, batches = pace.prepare(*made_quietly(lambda: net), loader, batch_size=8)
        seen = []
        for x, y in batches:
            seen.append((batches.current.weight, len(y)))
            pace.step(model(x).mean())
        return seen

    assert on_paces(2, body) == [[(7, 7)], [(2, 2)]]


def test_a_batch_size_of_ones_own() -> None:
    data = Numbered(20)
    pace = paceline.join("serial")
    sampler = SubsetRandomSampler(range(10))
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    _, _, batches = pace.prepare(*made(lambda: nn.Linear(1, 1)), loader, batch_size=5)
    assert sorted(i for _, y in batches for i in y.tolist()) == list(range(10))
    assert len(batches) == 2
    pace = paceline.join("serial")
    own = DataLoader(data, batch_sampler=Lengths(data))
    with pytest.raises(BadRequest, match=r"batch sampler of its own \(Lengths\)"):
        pace.prepare(*made(lambda: nn.Linear(1, 1)), own, batch_size=5)
    few = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 8, True))
    with pytest.raises(BadRequest, match="shard=static deals samples out itself"):
        paceline.join("serial").prepare(
            *made(lambda: nn.Linear(1, 1)), DataLoader(data, sampler=sampler), shard="static"
        )
    assert len(LoaderOrder(few, 1).counts(Cursor())) == 1
