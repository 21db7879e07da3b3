"""`pace.save` and `pace.load`: a loop that goes on as if it had not stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.test_own_code import made, on_paces, weights
from tests.contract.test_own_loop_pairs import data as gan_data
from tests.contract.test_own_loop_pairs import gan, losses
from tests.small import make_pairs, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import BadRequest
from paceline.registry import strategies
from paceline.run.own_loop import Pace
from paceline.transport.inproc import Hub

cross_entropy = nn.functional.cross_entropy
STOP = 7  # in the middle of the second epoch of five steps


def noisy() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)
    )
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def momentous() -> tuple[nn.Module, torch.optim.Optimizer]:
    return made(small_net, weight_decay=0.01)


def loop(pace: Pace, parts: Any, path: Path, resumes: bool, before: bool) -> list[Tensor]:
    """Three epochs with a scheduler; saves at one step, or goes on from there."""
    more = pace.load(path) if resumes and before else None
    model, optimizer, batches = pace.prepare(*parts(), make_pairs(37), batch_size=8 // pace.workers)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    if resumes and not before:
        more = pace.load(path)
    if more is not None:
        scheduler.load_state_dict(more["scheduler"])
        assert (pace.steps, pace.epoch) == (STOP, 1)
    else:
        torch.manual_seed(10 + pace.rank)
    for _ in range(pace.epoch, 3):
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            if pace.steps == STOP and not resumes:
                pace.save(path, scheduler=scheduler.state_dict())
    pace.finish()
    assert pace.steps == 15
    return [weights(model), *(b.detach().clone() for b in model.buffers())]


def results(
    strategy: str, codec: str, parts: Any, path: Path, resumes: bool, workers: int = 2
) -> list[Any]:
    servers = int(strategies.build(strategy).traits.serves == "ranks")
    before = bool(servers) or "hogwild" in strategy

    def on_rank(line: Any) -> Any:
        pace = Pace(strategies.build(strategy), line, workers, codec, 0, 0, build=parts)
        if pace.ctx.role == "server":
            return pace.serve()
        return loop(pace, parts, path, resumes, before)

    found = Hub(workers + servers).run(on_rank)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found[:workers]


@pytest.mark.parametrize(
    ("strategy", "codec", "parts"),
    [
        ("allreduce", "none", noisy),
        ("allreduce", "topk:ratio=0.3", momentous),  # momentum before the codec, error feedback
        ("allreduce:exchange=weights", "none", momentous),
        ("allreduce:when=epoch", "none", momentous),
        ("ring-reduce", "none", noisy),
        ("local-sgd:every=4", "none", noisy),
        ("local-sgd:every=4,post=9", "none", momentous),
        ("diloco:every=4", "none", noisy),
        ("gossip", "none", noisy),
        ("gossip", "int8", momentous),
        ("stepwise", "none", momentous),
        ("ps", "none", noisy),
        ("ps:exchange=weights", "none", momentous),
    ],
)
def test_a_loop_goes_on_exactly(strategy: str, codec: str, parts: Any, tmp_path: Path) -> None:
    unbroken = results(strategy, codec, parts, tmp_path, resumes=False)
    resumed = results(strategy, codec, parts, tmp_path, resumes=True)
    for one, other in zip(unbroken, resumed, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)


def test_one_worker_goes_on_exactly_before_and_after_prepare(tmp_path: Path) -> None:
    unbroken = loop(paceline.join("serial"), noisy, tmp_path, False, False)
    for before in (True, False):
        resumed = loop(paceline.join("serial"), noisy, tmp_path, True, before)
        assert all(torch.equal(a, b) for a, b in zip(unbroken, resumed, strict=True))


@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:every=4"])
@pytest.mark.parametrize("workers", [1, 3])
def test_other_workers_go_on_and_are_told(
    strategy: str, workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(pace: Pace) -> Tensor:
        model, _, batches = pace.prepare(*momentous(), make_pairs(40), batch_size=4)
        for x, y in batches:
            pace.step(cross_entropy(model(x), y))
        pace.save(tmp_path)
        pace.finish()
        return weights(model)

    def again(pace: Pace) -> Tensor:
        model, optimizer, batches = pace.prepare(*momentous(), make_pairs(40), batch_size=4)
        pace.load(tmp_path)
        assert (pace.steps, pace.epoch) == (5, 1)
        assert len(optimizer.state) == 4
        start = pace.state_dict()
        for x, y in batches:
            pace.step(cross_entropy(model(x), y))
        pace.finish()
        return torch.cat([t.flatten() for t in start.values()])

    at_the_end = on_paces(2, body, strategy)
    for start in on_paces(workers, again, strategy):
        torch.testing.assert_close(start, at_the_end[0])
    assert f"going on from step 5: {workers} workers instead of 2" in capfd.readouterr().err


@pytest.mark.parametrize("at", [2, 6], ids=["in an epoch", "between epochs"])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 2), (2, 1), (2, 3)])
@pytest.mark.parametrize("own", [False, True], ids=["default", "own generator"])
def test_a_loaders_order_goes_on_with_any_number_of_workers(
    own: bool, before: int, after: int, at: int, tmp_path: Path
) -> None:
    """The samples of two epochs: those before the checkpoint and those after it, each once."""
    data = TensorDataset(torch.arange(24.0).view(24, 1), torch.arange(24))

    def body(pace: Pace, resumes: bool) -> list[int]:
        torch.manual_seed(11)
        generator = torch.Generator().manual_seed(5) if own else None
        loader = DataLoader(data, batch_size=2, shuffle=True, generator=generator)
        model, _, batches = pace.prepare(*made(lambda: nn.Linear(1, 24)), loader)
        if resumes:
            pace.load(tmp_path)
        seen: list[int] = []
        for _ in range(pace.epoch, 2):
            for x, y in batches:
                pace.step(cross_entropy(model(x), y))
                seen += [int(v) for v in y] if batches.current.weight else []
                if pace.steps * before == 2 * at == 4 and not resumes:
                    pace.save(tmp_path)
                    return seen
            if not resumes:
                pace.save(tmp_path)
                return seen
        return seen

    first = [i for part in on_paces(before, lambda pace: body(pace, False)) for i in part]
    second = [i for part in on_paces(after, lambda pace: body(pace, True)) for i in part]
    assert len(first) == 4 * at
    assert sorted(first + second) == sorted(2 * list(range(24)))
    if own and at == 6 and (before, after) == (1, 1):
        whole = DataLoader(
            data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5)
        )
        assert first + second == [int(v) for _ in range(2) for _, y in whole for v in y]


@pytest.mark.parametrize("loader", [False, True])
def test_epochs_that_are_left_by_break_go_on_exactly(loader: bool, tmp_path: Path) -> None:
    """Three of five batches an epoch, saved after the second: the next pass is a whole epoch."""

    def body(resumes: bool) -> Tensor:
        pace = paceline.join("serial")
        data: Any = make_pairs(20)
        if loader:
            data = DataLoader(TensorDataset(*data), batch_size=4, shuffle=True)
        torch.manual_seed(8)
        model, optimizer, batches = pace.prepare(
            *momentous(), data, **({} if loader else {"batch_size": 4})
        )
        if resumes:
            pace.load(tmp_path)
            assert pace.epoch == 2
        for epoch in range(pace.epoch, 4):
            for number, (x, y) in enumerate(batches):
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                if number == 2:
                    break
            if epoch == 1 and not resumes:
                pace.save(tmp_path)
        assert pace.steps == 12
        return weights(model)

    assert torch.equal(body(resumes=False), body(resumes=True))


def test_a_gan_goes_on_exactly(tmp_path: Path) -> None:
    def body(pace: Pace, resumes: bool) -> list[Tensor]:
        generator, critic, opt_g, opt_d = gan()
        _, _, batches = pace.prepare(generator, opt_g, gan_data(), batch_size=2)
        pace.prepare(critic, opt_d)
        if resumes:
            assert pace.load(tmp_path) == {"epoch": 1}
        for epoch in range(pace.epoch, 3):
            for z, real in batches:
                steps = losses(generator, critic, z, real)
                pace.step(next(steps), optimizer=opt_d)
                pace.step(next(steps), optimizer=opt_g)
            if epoch == 0 and not resumes:
                pace.save(tmp_path, epoch=epoch + 1)
        pace.finish()
        return [weights(generator), weights(critic)]

    unbroken = on_paces(2, lambda pace: body(pace, False), "local-sgd:every=3")
    resumed = on_paces(2, lambda pace: body(pace, True), "local-sgd:every=3")
    for one, other in zip(unbroken, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_look_at_a_batch_after_load_consumes_nothing(tmp_path: Path) -> None:
    pace = paceline.join("serial")
    model, _, batches = pace.prepare(*momentous(), make_pairs(20), batch_size=4)
    rest: list[Tensor] = []
    for number, (x, y) in enumerate(batches):
        if number == 2:  # before the third batch was used: it comes again
            pace.save(tmp_path)
        if number >= 2:
            rest.append(x)
        pace.step(cross_entropy(model(x), y))
    second = paceline.join("serial")
    _, _, batches = second.prepare(*momentous(), make_pairs(20), batch_size=4)
    second.load(tmp_path)
    next(iter(batches))
    assert [torch.equal(a, x) for a, (x, _) in zip(rest, batches, strict=True)] == [True] * 3


def test_what_cannot_be_saved_or_loaded_is_said(tmp_path: Path) -> None:
    pace = paceline.join("serial")
    with pytest.raises(BadRequest, match=r"pace\.prepare\(model, optimizer\) before pace\.save"):
        pace.save(tmp_path)
    with pytest.raises(BadRequest, match=r"has no checkpoint: pace\.save\(path\) makes one"):
        pace.load(tmp_path)
    model, optimizer, _ = pace.prepare(*momentous())
    with pytest.raises(BadRequest, match=r"contains a StepLR, .* give it a state_dict\(\)"):
        pace.save(tmp_path, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    pace.backward(cross_entropy(model(make_pairs(4)[0]), make_pairs(4)[1]))
    with pytest.raises(BadRequest, match="call it after the step"):
        pace.save(tmp_path)
    pace.step()
    pace.save(tmp_path)
    for parts, message in (
        (noisy, "was made with optimizer SGD, not Adam"),
        (lambda: made(lambda: nn.Linear(6, 3)), "another model|do not fit the model"),
    ):
        other = paceline.join("serial")
        other.prepare(*parts())
        with pytest.raises(BadRequest, match=message):
            other.load(tmp_path)
    two = paceline.join("serial")
    two.prepare(*momentous())
    two.prepare(*momentous())
    with pytest.raises(BadRequest, match=r"holds 1 pair\(s\) .* has prepared 2"):
        two.load(tmp_path)


def test_strategies_that_start_something_load_before_prepare(tmp_path: Path) -> None:
    def body(pace: Pace) -> None:
        pace.prepare(*momentous())
        pace.save(tmp_path)
        pace.load(tmp_path)

    with pytest.raises(BadRequest, match=r"call pace\.load\(path\) before pace\.prepare"):
        on_paces(2, body, "hogwild")


def test_with_servers_the_optimizers_state_is_not_here() -> None:
    """scripts.md D9: it was empty, and a script's own checkpoint lost the momentum."""

    def on_rank(line: Any) -> Any:
        pace = Pace(strategies.build("ps"), line, 1, "none", 0, 0, build=momentous)
        if pace.ctx.role == "server":
            return pace.serve()
        _, optimizer, _ = pace.prepare(*momentous())
        with pytest.raises(BadRequest, match=r"servers hold the optimizer's state.*pace\.save"):
            optimizer.state_dict()
        pace.finish()
        return True

    assert Hub(2).run(on_rank)[0] is True
