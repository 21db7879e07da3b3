"""Pairs of gossip workers: what the thread that replies to requests does at the edges."""

import threading

import pytest
import torch
from torch import nn

from paceline.errors import RunFailed
from paceline.registry import strategies
from paceline.replica.replica import Replica
from paceline.run.own_loop import Unrecorded
from paceline.run.rank import make_context
from paceline.strategies.parts.async_pairs import AsyncPairs
from paceline.strategies.parts.pairs import make_pairing
from paceline.transport.base import Transport
from paceline.transport.inproc import Hub


class FrozenFirst(nn.Module):
    """Its first region (float64) has no trainable parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=False)
        self.linear = nn.Linear(6, 3)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_region_without_trainable_parameters_sends_nothing(codec: str) -> None:
    """A receive of nothing is complete at once: the thread took it for a request (core.md 15)."""

    def body(line: Transport) -> tuple[int, int, torch.Tensor]:
        torch.manual_seed(line.rank)
        model = FrozenFirst()
        replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
        assert [r.grads.numel() for r in replica.regions] == [0, 21]
        ctx = make_context(
            line, strategies.build("gossip"), 2, codec=codec, seed=0, recorder=Unrecorded()
        )
        pairing, own = (
            make_pairing(ctx, ctx.codec, replica.regions),
            [r.trained for r in replica.regions],
        )
        partner = 1 - line.rank
        pairing.prepare(own)
        coming = pairing.listen(ctx.transport, partner)
        leaving = pairing.send(ctx.transport, partner)
        pairing.receive(ctx.transport, partner)
        for work in leaving:
            work.wait()
        pairing.average(own)
        return len(coming), len(leaving), own[1].clone()

    results = Hub(2).run(body)
    assert [r[:2] for r in results] == [(1, 1), (1, 1)]
    if codec == "none":
        torch.testing.assert_close(results[0][2], results[1][2])


def test_a_failure_after_the_last_exchange_is_raised_at_the_end() -> None:
    """core.md 32: only the next exchange raised it, and there may be none."""
    pairs = object.__new__(AsyncPairs)
    pairs._stop, pairs._thread = threading.Event(), threading.Thread(target=lambda: None)
    pairs._failure = RunFailed("the reply to worker 1 failed")
    pairs._count_served = lambda: None  # type: ignore[method-assign]
    pairs._thread.start()
    with pytest.raises(RunFailed, match="the reply to worker 1 failed"):
        pairs.stop()
