"""A loop that is written for plain PyTorch: its optimizer's step keeps the workers together."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.contract.test_own_code import made, on_paces, weights
from tests.small import Two, make_pairs, small_net
from torch import Tensor, nn

import paceline
from paceline.data.shards import GlobalShards
from paceline.errors import BadRequest
from paceline.registry import strategies
from paceline.run.own_loop import Pace
from paceline.strategies.base import traits_of
from paceline.transport.inproc import Hub

cross_entropy = nn.functional.cross_entropy
IN_STEP = ["allreduce", "ring-reduce", "ring-reduce:exchange=gradients", "local-sgd:every=1"]


def double_net() -> nn.Module:
    return small_net(torch.float64)


def tutorial(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, set_to_none: bool = True
) -> None:
    """The loop of PyTorch's tutorials."""
    for x, y in batches:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


def union(rows: int, per_step: int, epochs: int = 2) -> list[tuple[Tensor, Tensor]]:
    """The batches that all workers have together."""
    inputs, targets = make_pairs(rows, dtype=torch.float64)
    return [
        (inputs[some], targets[some])
        for epoch in range(epochs)
        for some in GlobalShards(rows, (per_step,), 0).order(epoch).split(per_step)
    ]


# --- optimizer.step()


@pytest.mark.parametrize("strategy", ["serial", "allreduce", "local-sgd", "gossip", "stepwise"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_one_worker_is_the_plain_loop_bit_for_bit(strategy: str, set_to_none: bool) -> None:
    inputs, targets = make_pairs(48)
    batches = list(zip(inputs.split(6), targets.split(6), strict=True))
    model, optimizer = made(small_net, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    pace = paceline.join(strategy)
    same = (model, optimizer)
    model, optimizer, _ = pace.prepare(model, optimizer)
    assert (model, optimizer) == same
    plain, other = made(small_net, weight_decay=0.1)
    follower = torch.optim.lr_scheduler.StepLR(other, 1, gamma=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            tutorial(model, optimizer, batches, set_to_none)
            scheduler.step()
            tutorial(plain, other, batches, set_to_none)
            follower.step()
    pace.finish()
    assert torch.equal(weights(model), weights(plain))
    assert pace.steps == 24


@pytest.mark.parametrize("strategy", IN_STEP)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_unchanged_loop_follows_the_plain_loop_on_all_samples(
    strategy: str, set_to_none: bool
) -> None:
    """22 rows over three workers of three: the last step has shares of 4, 0 and 0, or alike."""
    data = make_pairs(22, dtype=torch.float64)

    def body(pace: Pace) -> Tensor:
        # no momentum: where weights are averaged, changing shares weigh it differently
        model, optimizer = made(double_net, momentum=0.0)
        model, optimizer, batches = pace.prepare(model, optimizer, data, batch_size=3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(2):
            tutorial(model, optimizer, batches, set_to_none)
            scheduler.step()
        assert pace.check() < 1e-15
        pace.finish()
        return weights(model)

    plain, optimizer = made(double_net, momentum=0.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    batches = union(22, 9)
    for epoch in range(2):
        tutorial(plain, optimizer, batches[3 * epoch : 3 * epoch + 3])
        scheduler.step()
    for found in on_paces(3, body, strategy):
        torch.testing.assert_close(found, weights(plain), rtol=1e-12, atol=1e-14)


def test_plain_accumulation_follows_serial_training_also_where_shares_change() -> None:
    """Two batches a step, the second of the last pair ragged: each counts by its own shares."""
    data = make_pairs(22, dtype=torch.float64)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        optimizer.zero_grad()
        for number, (x, y) in enumerate(batches):
            (cross_entropy(model(x), y) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()

    def body(pace: Pace) -> Tensor:
        model, optimizer, batches = pace.prepare(*made(double_net), data, batch_size=3)
        for _ in range(2):
            loop(model, optimizer, batches)
        pace.finish()
        return weights(model)

    plain, optimizer = made(double_net)
    batches = union(22, 6)
    for epoch in range(2):
        loop(plain, optimizer, batches[4 * epoch : 4 * epoch + 4])
    for found in on_paces(2, body):
        torch.testing.assert_close(found, weights(plain), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_untouched_parameters_stay_untouched(set_to_none: bool) -> None:
    """With empty slices, AdamW, and `zero_grad` both ways: a zero is a gradient, None is not."""
    data = make_pairs(15, dtype=torch.float64)

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = Two()
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    def body(pace: Pace) -> Tensor:
        model, optimizer, batches = pace.prepare(*fresh(), data, batch_size=2)
        for _ in range(2):
            tutorial(model, optimizer, batches, set_to_none)
        return weights(model)

    plain, optimizer = fresh()
    tutorial(plain, optimizer, union(15, 4), set_to_none)
    for found in on_paces(2, body):
        torch.testing.assert_close(found, weights(plain), rtol=1e-12, atol=1e-13)


def test_an_optimizer_without_its_model() -> None:
    inputs, targets = make_pairs(16, dtype=torch.float64)

    def body(pace: Pace) -> Tensor:
        model, optimizer = made(double_net)
        assert pace.optimizer(optimizer) is optimizer
        own = slice(pace.rank, None, pace.workers)
        tutorial(model, optimizer, [(inputs[own], targets[own])] * 3)
        pace.finish()
        return weights(model)

    plain, optimizer = made(double_net)
    tutorial(plain, optimizer, [(inputs, targets)] * 3)
    for found in on_paces(2, body):
        torch.testing.assert_close(found, weights(plain), rtol=1e-12, atol=1e-14)


def runs_inproc(name: str) -> bool:
    traits = traits_of(strategies.entry(name).make)
    return not traits.needs_processes and traits.most_workers is None


@pytest.mark.parametrize("strategy", sorted(filter(runs_inproc, strategies.names())))
def test_optimizer_step_does_what_pace_step_does(strategy: str) -> None:
    """For every strategy, also with servers: the two ways of writing a loop are one."""
    data = make_pairs(22, dtype=torch.float64)
    servers = int(strategies.build(strategy).traits.serves == "ranks")

    def trained(body: Callable[[Any, Any, Pace], None]) -> list[Any]:
        def on_rank(line: Any) -> Any:
            fresh = lambda: made(double_net)  # noqa: E731
            pace = Pace(strategies.build(strategy), line, 2, "none", 0, 0, build=fresh)
            if pace.ctx.role == "server":
                pace.serve()
                return None
            model, optimizer, batches = pace.prepare(*fresh(), data, batch_size=3)
            for _ in range(2):
                for x, y in batches:
                    body(optimizer, cross_entropy(model(x), y), pace)
            pace.finish()
            return weights(model)

        return Hub(2 + servers).run(on_rank)[:2]

    def plainly(optimizer: torch.optim.Optimizer, loss: Tensor, pace: Pace) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    paced = trained(lambda optimizer, loss, pace: pace.step(loss))
    for one, other in zip(trained(plainly), paced, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_closures_and_later_schedulers_work() -> None:
    inputs, targets = make_pairs(12)
    pace = paceline.join("serial")
    model, optimizer, _ = pace.prepare(*made(small_net))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert optimizer.step(closure).item() < first
    assert isinstance(optimizer, torch.optim.SGD)
    pace.finish()
    optimizer.step()  # what comes after the loop is the person's own


# --- pace.synchronize()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, pace: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if pace is not None:
            pace.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@pytest.mark.parametrize("strategy", ["allreduce", "ring-reduce:exchange=gradients"])
def test_clipping_after_synchronize_is_that_of_the_whole_batch(strategy: str) -> None:
    data = make_pairs(22, dtype=torch.float64)

    def body(pace: Pace) -> Tensor:
        model, optimizer, batches = pace.prepare(*made(double_net), data, batch_size=3)
        for _ in range(2):
            clipped(model, optimizer, batches, pace)
        pace.finish()
        return weights(model)

    plain, optimizer = made(double_net)
    clipped(plain, optimizer, union(22, 6), None)
    for found in on_paces(2, body, strategy):
        torch.testing.assert_close(found, weights(plain), rtol=1e-12, atol=1e-14)


def test_with_one_worker_clipping_needs_nothing() -> None:
    batches = [make_pairs(8)] * 4
    model, optimizer, _ = paceline.join("allreduce").prepare(*made(small_net))
    clipped(model, optimizer, batches, None)
    plain, other = made(small_net)
    clipped(plain, other, batches, None)
    assert torch.equal(weights(model), weights(plain))


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_gradients_that_were_not_synchronised_raises(foreach: bool) -> None:
    def body(pace: Pace) -> None:
        x, y = make_pairs(8)
        model, optimizer, _ = pace.prepare(*made(small_net))
        cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
        optimizer.step()

    with pytest.raises(BadRequest, match=r"call pace\.synchronize\(\) before"):
        on_paces(2, body)


def test_where_weights_are_exchanged_clipping_is_each_workers_own() -> None:
    def body(pace: Pace) -> Tensor:
        model, optimizer, batches = pace.prepare(*made(small_net), make_pairs(20), batch_size=5)
        clipped(model, optimizer, batches, pace if pace.rank else None)
        pace.finish()
        return weights(model)

    one, other = on_paces(2, body, "local-sgd:every=2")
    assert torch.equal(one, other)


@pytest.mark.parametrize("strategy", ["allreduce:when=epoch", "local-sgd:every=4,post=3"])
def test_strategies_that_cannot_synchronize_apart_say_so(strategy: str) -> None:
    def body(pace: Pace) -> None:
        x, y = make_pairs(8)
        model, _, _ = pace.prepare(*made(small_net))
        cross_entropy(model(x), y).backward()
        pace.synchronize()

    with pytest.raises(BadRequest, match=r"use pace\.step\(clip_norm=\.\.\.\)"):
        on_paces(2, body, strategy)


def test_a_backward_pass_after_synchronize_raises() -> None:
    def body(pace: Pace) -> None:
        x, y = make_pairs(8)
        model, optimizer, _ = pace.prepare(*made(small_net))
        cross_entropy(model(x), y).backward()
        pace.synchronize()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    with pytest.raises(BadRequest, match="after the last backward pass"):
        on_paces(2, body)


# --- GradScaler


def scaled(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor]],
    clip: Callable[[torch.amp.GradScaler], None] = lambda scaler: None,
) -> tuple[float, list[bool]]:
    """The loop of PyTorch's AMP page, on the CPU; return the last scale and which steps moved."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    moved = []
    for x, y in batches:
        before = weights(model)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        clip(scaler)
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(before, weights(model)))
    return scaler.get_scale(), moved


def with_inf(rows: int, at: int) -> list[tuple[Tensor, Tensor]]:
    inputs, targets = make_pairs(rows)
    inputs[at] = 1e5  # inf in float16
    return list(zip(inputs.split(8), targets.split(8), strict=True))


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("adam", [False, True])
def test_gradscaler_with_one_worker_is_the_plain_loop_bit_for_bit(
    unscale: bool, adam: bool
) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = made(small_net)
        return model, torch.optim.Adam(model.parameters(), fused=True) if adam else optimizer

    def clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., None]:
        def unscale_and_clip(scaler: torch.amp.GradScaler) -> None:
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

        return unscale_and_clip

    batches = with_inf(40, 11)
    plain, other = fresh()
    expected = scaled(plain, other, batches, clip(plain, other))
    assert expected[1] == [True, False, True, True, True]
    model, optimizer, _ = paceline.join("allreduce").prepare(*fresh())
    assert scaled(model, optimizer, batches, clip(model, optimizer)) == expected
    assert torch.equal(weights(model), weights(plain))


@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:every=1", "local-sgd:every=2"])
@pytest.mark.parametrize("way", ["step", "unscale", "clip"])
def test_an_inf_on_one_worker_skips_the_step_on_all(strategy: str, way: str) -> None:
    batches = with_inf(40, 11)

    def body(pace: Pace) -> Any:
        model, optimizer, _ = pace.prepare(*made(small_net))

        def clip(scaler: torch.amp.GradScaler) -> None:
            if way != "step":
                scaler.unscale_(optimizer)
            if way == "clip":
                pace.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

        own = [(x[pace.rank :: 2], y[pace.rank :: 2]) for x, y in batches]
        found = scaled(model, optimizer, own, clip)
        pace.finish()
        return *found, weights(model)

    def plain_clip(scaler: torch.amp.GradScaler) -> None:
        if way == "clip":
            scaler.unscale_(other)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)

    plain, other = made(small_net)
    scale, _ = scaled(plain, other, batches, plain_clip)
    results = on_paces(2, body, strategy)
    for found, moved, result in results:
        assert found == scale, "all scalers lower their scale together"
        assert [moved[0], *moved[2:]] == [True] * 4
        if strategy != "local-sgd:every=2":  # there the average moves the weights
            assert moved[1] is False
        assert torch.isfinite(result).all()
        if strategy == "allreduce":  # to float16's rounding
            torch.testing.assert_close(result, weights(plain), rtol=2e-3, atol=2e-3)


def test_unscaled_gradients_that_are_clipped_unsynchronised_raise() -> None:
    def body(pace: Pace) -> None:
        model, optimizer, _ = pace.prepare(*made(small_net))

        def clip(scaler: torch.amp.GradScaler) -> None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        scaled(model, optimizer, [make_pairs(8)], clip)

    with pytest.raises(BadRequest, match=r"pace\.synchronize\(\) before"):
        on_paces(2, body)
