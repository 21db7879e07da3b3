"""Typical mistakes in a loop of the user's own end in a sentence, not in wrong numbers."""

from typing import Any

import pytest
import torch
from tests.contract.test_own_code import made, on_paces
from tests.small import make_pairs, small_net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import BadRequest
from paceline.run.own_loop import Pace

cross_entropy = nn.functional.cross_entropy


def prepared(*, data: bool = True, **options: Any) -> Any:
    pace = paceline.join("serial")
    given = (make_pairs(16), 8) if data else ()
    return pace, *pace.prepare(*made(small_net, **options), *given)


@pytest.mark.parametrize("zero_first", [True, False])
def test_a_forgotten_step_raises_at_the_next_pass(zero_first: bool) -> None:
    pace, model, optimizer, batches = prepared()

    def one_pass() -> None:
        for x, y in batches:
            if zero_first:
                optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if not zero_first:
                optimizer.zero_grad()

    one_pass()
    with pytest.raises(BadRequest, match="a whole pass over the batches, but no step was made"):
        one_pass()
    with pytest.raises(BadRequest, match="the whole loop, but no step was made"):
        pace.finish()


def test_a_step_after_a_whole_pass_is_no_mistake() -> None:
    pace, model, optimizer, batches = prepared()
    for _ in range(2):
        for x, y in batches:
            (cross_entropy(model(x), y) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    pace.finish()
    assert pace.steps == 2


@pytest.mark.parametrize("way", ["optimizer.step", "pace.step", "synchronize"])
def test_a_loop_over_ones_own_loader_raises_with_several_workers(way: str) -> None:
    """All workers would train on the same samples."""

    def body(pace: Pace) -> int:
        model, optimizer = made(small_net)
        loader = DataLoader(TensorDataset(*make_pairs(16)), batch_size=4)
        pace.prepare(model, optimizer, loader)
        for x, y in loader:  # not what `prepare` has returned
            loss = cross_entropy(model(x), y)
            if way == "pace.step":
                pace.step(loss)
                continue
            loss.backward()
            if way == "synchronize":
                pace.synchronize()
            optimizer.step()
        return pace.steps

    assert on_paces(1, body, "serial") == [4]
    with pytest.raises(BadRequest, match="other batches than those that"):
        on_paces(2, body)


def test_optimizer_step_after_pace_step_raises() -> None:
    pace, model, optimizer, batches = prepared()
    x, y = next(iter(batches))
    pace.step(cross_entropy(model(x), y))
    with pytest.raises(BadRequest, match=r"leave optimizer\.step\(\) out"):
        optimizer.step()


def test_a_second_step_without_a_backward_pass_raises_with_several_workers() -> None:
    def body(pace: Pace) -> None:
        model, optimizer, _ = pace.prepare(*made(small_net))
        x, y = make_pairs(8)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.step()

    with pytest.raises(BadRequest, match="without a backward pass since the last step"):
        on_paces(2, body)
    pace, model, optimizer, _ = prepared(data=False)  # alone it is what PyTorch does
    x, y = make_pairs(8)
    cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.step()
    assert pace.steps == 2


def test_gradients_that_the_loop_sets_itself_are_exchanged() -> None:
    """Evolution strategies and the like: no backward pass at all."""

    def body(pace: Pace) -> list[float]:
        model, optimizer, _ = pace.prepare(*made(lambda: nn.Linear(1, 1, bias=False), momentum=0))
        before = model.weight.item()
        for _ in range(2):
            model.weight.grad = torch.full((1, 1), 1.0 + 2 * pace.rank)
            optimizer.step()
        return [before - model.weight.item()]

    for (moved,) in on_paces(2, body):
        assert moved == pytest.approx(2 * 0.1 * 2.0)


def test_both_ways_of_a_backward_pass_in_one_step_raise() -> None:
    pace, model, _, batches = prepared()
    x, y = next(iter(batches))
    pace.backward(cross_entropy(model(x), y))
    cross_entropy(model(x), y).backward()
    with pytest.raises(BadRequest, match=r"were mixed in one step"):
        pace.step()


@pytest.mark.parametrize("how", ["group", "added", "unfrozen"])
def test_a_parameter_that_comes_later_raises(how: str) -> None:
    pace = paceline.join("serial")
    model, optimizer = made(small_net)
    model[2].bias.requires_grad_(how != "unfrozen")
    model, optimizer, batches = pace.prepare(model, optimizer, make_pairs(16), batch_size=8)
    match = r"2\.bias was added to the model, or began to be trained, after pace\.prepare"
    if how == "group":
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        match = "the optimizer has other parameters"
    elif how == "added":
        model[2].extra = nn.Parameter(torch.zeros(1))
        match = match.replace("bias", "extra")
    else:
        model[2].bias.requires_grad_(True)

    def one_pass() -> None:
        for x, y in batches:
            pace.step(cross_entropy(model(x), y))

    with pytest.raises(BadRequest, match=match):
        one_pass()


def test_a_layer_that_is_frozen_later_stays_as_it_is() -> None:
    pace, model, optimizer, batches = prepared(weight_decay=0.5)
    for x, y in batches:
        pace.step(cross_entropy(model(x), y))
    model[0].requires_grad_(False)
    kept = model[0].weight.clone()
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert torch.equal(kept, model[0].weight)
    pace.finish()


@pytest.mark.parametrize("strategy", ["local-sgd:every=8", "stepwise:full_every=0"])
def test_different_numbers_of_steps_are_told_at_the_end(strategy: str) -> None:
    def body(pace: Pace) -> None:
        model, optimizer, _ = pace.prepare(*made(small_net))
        x, y = make_pairs(8)
        for _ in range(3 + (pace.rank if strategy.startswith("local") else 0)):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        pace.finish()

    if strategy.startswith("local"):
        with pytest.raises(BadRequest, match="worker 0 3, worker 1 4"):
            on_paces(2, body, strategy)
    else:
        on_paces(2, body, strategy)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: paceline.join("allreduce", servers=1), "servers=1: strategy allreduce has none"),
        (lambda: paceline.join("ps", servers=0), "servers=0: strategy ps has 1 or more"),
        (lambda: paceline.join("allreduce", transport="pigeon"), "unknown transport 'pigeon'"),
        (lambda: with_data(make_pairs(8), batch_size=0), "batch_size=0: it must be 1 or more"),
        (lambda: with_data(make_pairs(8), shard="odd"), "shard='odd': allowed are global, static"),
        (lambda: with_data("mnist"), "is a text: give what paceline.load_data"),
        (lambda: one_step(clip_norm=0), "clip_norm=0: it must be more than 0"),
        (lambda: one_step(weight=-1), "weight=-1: it must be 0 or more"),
        (lambda: one_step(weight=float("nan")), "weight=nan: it must be 0 or more"),
    ],
)
def test_values_that_mean_nothing_are_refused(call: Any, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        call()


def with_data(data: Any, **options: Any) -> None:
    paceline.join("serial").prepare(*made(small_net), data, **options)


def one_step(**options: Any) -> None:
    pace, model, _, _ = prepared(data=False)
    x, y = make_pairs(8)
    pace.step(cross_entropy(model(x), y), **options)
