"""Several models and optimizers in one loop: a GAN, written as in PyTorch's tutorial."""

from typing import Any

import pytest
import torch
from tests.contract.test_own_code import made, on_paces, weights
from tests.small import make_pairs, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.data.shards import GlobalShards
from paceline.errors import BadRequest
from paceline.run.own_loop import Pace

ROWS = 14
bce = nn.functional.binary_cross_entropy_with_logits


def gan() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(7)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return (
        generator,
        critic,
        torch.optim.Adam(generator.parameters(), lr=0.01),
        torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.5),
    )


def data() -> tuple[Tensor, Tensor]:
    real, _ = make_pairs(ROWS, dtype=torch.float64)
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1)).double(), real


def losses(generator: nn.Module, critic: nn.Module, z: Tensor, real: Tensor) -> Any:
    fake = generator(z)
    ones, zeros = torch.ones(len(z), 1).double(), torch.zeros(len(z), 1).double()
    yield bce(critic(real), ones) + bce(critic(fake.detach()), zeros)
    yield bce(critic(fake), ones)


def tutorial(generator: nn.Module, critic: nn.Module, opt_g: Any, opt_d: Any, batches: Any) -> None:
    for z, real in batches:
        steps = losses(generator, critic, z, real)
        opt_d.zero_grad()
        next(steps).backward()
        opt_d.step()
        opt_g.zero_grad()
        next(steps).backward()  # leaves gradients in the critic, too
        opt_g.step()


def dcgan(generator: nn.Module, critic: nn.Module, opt_g: Any, opt_d: Any, batches: Any) -> None:
    """The same as DCGAN's tutorial writes it: two backward passes, and the models' zero_grad."""
    for z, real in batches:
        ones, zeros = torch.ones(len(z), 1).double(), torch.zeros(len(z), 1).double()
        critic.zero_grad()
        bce(critic(real), ones).backward()
        fake = generator(z)
        bce(critic(fake.detach()), zeros).backward()
        opt_d.step()
        generator.zero_grad()
        bce(critic(fake), ones).backward()
        opt_g.step()


@pytest.mark.parametrize("way", ["optimizer.step", "dcgan", "pace.step"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_gan_follows_the_plain_loop(way: str, workers: int) -> None:
    """14 rows, batches of 2 per worker: the last step is ragged, on three workers one has none."""

    def body(pace: Pace) -> list[Tensor]:
        generator, critic, opt_g, opt_d = gan()
        generator, opt_g, batches = pace.prepare(generator, opt_g, data(), batch_size=2)
        critic, opt_d, _ = pace.prepare(critic, opt_d)
        for _ in range(2):
            if way != "pace.step":
                plain = dcgan if way == "dcgan" else tutorial
                plain(generator, critic, opt_g, opt_d, batches)
                continue
            for z, real in batches:
                steps = losses(generator, critic, z, real)
                pace.step(next(steps), optimizer=opt_d)
                pace.step(next(steps), optimizer=opt_g)
        assert pace.check() == 0.0
        saved = pace.state_dict(optimizer=opt_d)
        assert torch.equal(saved["0.weight"], critic[0].weight)
        pace.finish()
        return [weights(generator), weights(critic)]

    generator, critic, opt_g, opt_d = gan()
    z, real = data()
    for epoch in range(2):
        rows = GlobalShards(ROWS, (2 * workers,), 0).order(epoch).split(2 * workers)
        tutorial(generator, critic, opt_g, opt_d, [(z[r], real[r]) for r in rows])
    for one, other in on_paces(workers, body):
        torch.testing.assert_close(one, weights(generator), rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(other, weights(critic), rtol=1e-11, atol=1e-13)


def test_a_graph_outlives_the_step_of_another_model_on_a_worker_without_samples() -> None:
    """Five batches of two: in the last step one worker has none, and restores the statistics of the
    generator's batch norm before the loop's backward pass through it.
    """

    def body(pace: Pace) -> list[Tensor]:
        _, critic, _, opt_d = gan()
        generator = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6)).double()
        opt_g = torch.optim.Adam(generator.parameters())
        loader = DataLoader(TensorDataset(*(t[:10] for t in data())), batch_size=2)
        critic, opt_d, batches = pace.prepare(critic, opt_d, loader)
        generator, opt_g, _ = pace.prepare(generator, opt_g)
        dcgan(generator, critic, opt_g, opt_d, batches)
        pace.finish()
        return [weights(generator), generator[1].running_mean]

    (one, mean), (other, other_mean) = on_paces(2, body)
    assert torch.equal(one, other)
    assert torch.isfinite(mean).all()
    assert torch.isfinite(other_mean).all()


@pytest.mark.parametrize("strategy", ["local-sgd:every=2", "gossip", "stepwise", "diloco:every=2"])
def test_each_pair_is_averaged_by_a_strategy_of_its_own(strategy: str) -> None:
    def body(pace: Pace) -> list[Tensor]:
        generator, critic, opt_g, opt_d = gan()
        _, _, batches = pace.prepare(generator, opt_g, data(), batch_size=2)
        pace.prepare(critic, opt_d)
        tutorial(generator, critic, opt_g, opt_d, batches)
        pace.finish()
        return [weights(generator), weights(critic)]

    one, other = on_paces(2, body, strategy)
    fresh = gan()
    for found, same, start in zip(one, other, fresh[:2], strict=True):
        torch.testing.assert_close(found, same, rtol=1e-12, atol=1e-14)
        assert not torch.equal(found, weights(start))


def test_a_pair_must_be_chosen() -> None:
    pace = paceline.join("serial")
    with pytest.raises(BadRequest, match=r"call pace\.prepare\(model, optimizer\) first"):
        pace.step()
    generator, critic, opt_g, opt_d = gan()
    pace.prepare(generator, opt_g)
    pace.prepare(critic, opt_d)
    loss = critic(torch.zeros(1, 6).double()).sum()
    with pytest.raises(BadRequest, match="2 optimizers were prepared on this pace: say which"):
        pace.step(loss)
    with pytest.raises(BadRequest, match=r"not one that was given to pace\.prepare"):
        pace.step(loss, optimizer=made(small_net)[1])


def test_parameters_belong_to_one_pair() -> None:
    pace = paceline.join("serial")
    model, optimizer = made(small_net)
    pace.prepare(model, optimizer)
    with pytest.raises(BadRequest, match="each parameter belongs to one pair"):
        pace.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("strategy", "reason"), [("psgd", "do not run in step"), ("hogwild", "share the memory")]
)
def test_strategies_that_keep_one_model_say_why(strategy: str, reason: str) -> None:
    def body(pace: Pace) -> None:
        generator, critic, opt_g, opt_d = gan()
        pace.prepare(generator, opt_g)
        pace.prepare(critic, opt_d)

    with pytest.raises(BadRequest, match=f"keeps one model together, because its workers {reason}"):
        on_paces(2, body, strategy)
