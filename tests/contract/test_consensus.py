"""The consensus weights: what is evaluated and saved is what the next average would give."""

from typing import Any

import pytest
import torch
from tests.contract.test_own_code import made, on_paces
from tests.small import make_pairs, small_net
from torch import Tensor, nn

from paceline.run.own_loop import Pace


@pytest.mark.parametrize("strategy", ["local-sgd:every=8", "psgd"])
def test_consensus_weighs_workers_by_samples_as_the_average_does(strategy: str) -> None:
    """core.md 35: it weighed all workers equally, also where one has three times the samples."""
    inputs, targets = make_pairs(32)

    def body(pace: Pace) -> list[dict[str, Tensor]]:
        model, _, _ = pace.prepare(*made(small_net))
        rows = slice(0, 24) if pace.leads else slice(24, 32)
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
            pace.step(loss, weight=len(targets[rows]))
        agreed = pace.state_dict()
        pace.finish()
        return [agreed, pace.state_dict()]

    for agreed, averaged in on_paces(2, body, strategy):
        torch.testing.assert_close(agreed, averaged)


class Counting(nn.Module):
    """Replaces its integer buffer in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + len(x)
        return self.linear(x)


def test_an_integer_buffer_that_a_module_replaces_is_still_synchronised() -> None:
    """core.md 34: all workers take worker 0's integers at the end."""

    def body(pace: Pace) -> Any:
        inputs, targets = make_pairs(8)
        model, _, _ = pace.prepare(*made(Counting))
        rows = slice(0, 5) if pace.leads else slice(5, 8)
        loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
        pace.step(loss, weight=len(targets[rows]))
        pace.finish()
        return int(model.seen)

    assert on_paces(2, body) == [5, 5]
