"""When strategies equal serial SGD on the whole batch: docs/strategies.md, row by row."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.conftest import make_pairs, small_net, weights_distance

from paceline import Run

RunInproc = Callable[..., Run]
GRADIENTS = ["allreduce", "ring-reduce:exchange=gradients", "ps"]
WEIGHTS = ["ring-reduce", "allreduce:exchange=weights", "local-sgd:every=1", "ps:exchange=weights"]
UNEVEN, EVEN = (
    60,
    55,
    # samples, in batches of 4 and 7: the last step of an epoch has 2 and 3, or the same as all
    # others
)


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)  # type: ignore[arg-type]


def from_serial(run_inproc: RunInproc, strategy: str, samples: int, **how: object) -> float:
    """The distance of two workers' weights from serial SGD's after 30 steps."""
    options = {
        "model": lambda: small_net(torch.float64),
        "data": make_pairs(samples, dtype=torch.float64),
        "steps": 30,
        **how,
    }
    serial = run_inproc(**options, strategy="serial", batch_size=11)
    return weights_distance(
        serial.weights,
        run_inproc(**options, strategy=strategy, workers=2, batch_size="4,7").weights,
    )


@pytest.mark.parametrize("strategy", GRADIENTS)
def test_exchanged_gradients_are_serial_sgd_whatever_the_shares(
    run_inproc: RunInproc, strategy: str
) -> None:
    for momentum in (0.0, 0.9):
        assert from_serial(run_inproc, strategy, UNEVEN, lr=0.05, momentum=momentum) < 1e-12
    assert from_serial(run_inproc, strategy, UNEVEN, optimizer=adam) < 1e-9


@pytest.mark.parametrize("strategy", WEIGHTS)
def test_averaged_weights_are_serial_sgd_only_where_the_shares_stay(
    run_inproc: RunInproc, strategy: str
) -> None:
    """If a bound no longer holds, change docs/strategies.md and the strategies' docstrings, too."""
    assert from_serial(run_inproc, strategy, UNEVEN, lr=0.05, momentum=0.0) < 1e-12
    assert from_serial(run_inproc, strategy, EVEN, lr=0.05, momentum=0.9) < 1e-12
    assert from_serial(run_inproc, strategy, UNEVEN, lr=0.05, momentum=0.9) > 1e-3
    assert from_serial(run_inproc, strategy, EVEN, optimizer=adam) > 1e-3


def test_averaged_momentum_makes_averaged_weights_exact(run_inproc: RunInproc) -> None:
    assert (
        from_serial(
            run_inproc, "local-sgd:every=1,optimizer_state=average", UNEVEN, lr=0.05, momentum=0.9
        )
        < 1e-12
    )


def test_the_documentation_says_when() -> None:
    text = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
    assert "| SGD with momentum | change, as in a partial last step | exact | not exact |" in text
    for strategy in WEIGHTS:
        assert f"`{strategy}`" in text
