"""P workers weighted by samples = serial SGD on the union."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.conftest import identical, weights_distance
from torch import Tensor, nn

from paceline import Run
from paceline.registry import models
from paceline.replica.replica import Replica
from paceline.transport.inproc import Hub, InprocTransport
from paceline.types import Batch

RunInproc = Callable[..., Run]

X = torch.tensor([[0.5, 1.5], [2, 1], [1, 1.5], [1, 0.5], [2.5, 2]], dtype=torch.float64)
Y = torch.tensor([[1, 0], [1, 0], [0, 1], [1, 0], [0, 1]], dtype=torch.float64)


def lecture_net() -> nn.Module:
    """2-3-2, sigmoid, biases in the last column of the slides' matrices."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 2), nn.Sigmoid()).double()
    w1 = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 1]], dtype=torch.float64)
    w2 = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1]], dtype=torch.float64)
    with torch.no_grad():
        net[0].weight.copy_(w1[:, :2])
        net[0].bias.copy_(w1[:, 2])
        net[2].weight.copy_(w2[:, :3])
        net[2].bias.copy_(w2[:, 3])
    return net


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * ((outputs - targets) ** 2).sum(1).mean()


def gradient_of_two_workers(weighted: bool) -> float:
    """dL/dw1_11 after the exchange, three rows on one worker and two on the other."""

    def body(transport: InprocTransport) -> float:
        net = lecture_net()
        replica = Replica(net, torch.optim.SGD(net.parameters(), lr=0.1), half_square)
        rows = slice(0, 3) if transport.rank == 0 else slice(3, 5)
        batch = Batch(X[rows], Y[rows], len(X[rows]), 5, 0, 0)
        replica.forward_backward(batch, batch.share if weighted else 0.5)
        transport.all_reduce(replica.regions[0].grads)
        return float(net[0].weight.grad[0, 0])

    first, second = Hub(2).run(body)
    assert first == second
    return first


def test_the_worked_example() -> None:
    net = lecture_net()
    forward = net(X[:2]).detach()
    torch.testing.assert_close(
        forward,
        torch.tensor([[0.941, 0.873], [0.950, 0.868]], dtype=torch.float64),
        atol=5e-4,
        rtol=0,
    )
    half_square(net(X), Y).backward()
    assert float(net[0].weight.grad[0, 0]) == pytest.approx(0.0014978, abs=5e-8)
    assert gradient_of_two_workers(weighted=True) == pytest.approx(
        float(net[0].weight.grad[0, 0]), abs=1e-16
    )
    assert gradient_of_two_workers(weighted=False) == pytest.approx(0.0014838, abs=5e-8)


def images(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 28, 28, generator=random, dtype=dtype), torch.randint(
        0, 10, (count,), generator=random
    )


FINE, COARSE = (torch.float64, 1e-10), (torch.float32, 1e-3)
PAIRWISE = [  # every pair of values; the rest of the product is slow
    ("7,6", *FINE, "contiguous"),
    ("7,6", *COARSE, "channels_last"),
    ("6,2,5", *FINE, "channels_last"),
    ("6,2,5", *COARSE, "contiguous"),
]
THE_REST = [
    ("7,6", *FINE, "channels_last"),
    ("7,6", *COARSE, "contiguous"),
    ("6,2,5", *FINE, "contiguous"),
    ("6,2,5", *COARSE, "channels_last"),
]


@pytest.mark.parametrize(
    ("batch_sizes", "dtype", "bound", "memory_format"),
    [*PAIRWISE, *(pytest.param(*case, marks=pytest.mark.slow) for case in THE_REST)],
)
def test_several_workers_follow_serial_for_50_steps(
    run_inproc: RunInproc, dtype: torch.dtype, bound: float, batch_sizes: str, memory_format: str
) -> None:
    """The course's network, uneven batches, momentum, no dropout, partial last steps of every
    epoch.
    """
    options = {
        "model": (
            lambda: models.build("cnn:dropout=0", input_shape=(1, 28, 28), classes=10).to(dtype)
        ),
        "data": images(201, dtype),
        "lr": 0.05,
        "steps": 50,
        "memory_format": memory_format,
    }
    serial = run_inproc(**options, strategy="serial", batch_size=13)
    many = run_inproc(
        **options, strategy="allreduce", workers=len(batch_sizes.split(",")), batch_size=batch_sizes
    )
    assert weights_distance(serial.weights, many.weights) < bound
    assert many.steps == serial.steps == 50
    assert many.samples == serial.samples
    assert not identical(
        serial.weights, run_inproc(**{**options, "steps": 1}, batch_size=13).weights
    )


def test_untouched_parameters_follow_serial_too(run_inproc: RunInproc) -> None:
    """Each row uses one of two heads; in some steps one worker or none uses a head."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(2, 2, dtype=torch.float64) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(len(x), 2, dtype=torch.float64)
            for which, head in enumerate(self.heads):
                rows = (x[:, 0] > 1.0) == bool(which)
                if rows.any():
                    out = out.index_put((rows.nonzero()[:, 0],), head(x[rows]))
            return out

    random = torch.Generator().manual_seed(0)
    data = (
        torch.randn(40, 2, generator=random, dtype=torch.float64),
        torch.randint(0, 2, (40,), generator=random),
    )
    options = {
        "model": TwoHeads,
        "data": data,
        "lr": 0.1,
        "weight_decay": 0.1,
        "steps": 30,
        "optimizer": "adam",
    }
    serial = run_inproc(**options, batch_size=3)
    many = run_inproc(**options, strategy="allreduce", workers=3, batch_size=1)
    assert weights_distance(serial.weights, many.weights) < 1e-10


def test_batch_statistics_are_averaged_by_samples(run_inproc: RunInproc) -> None:
    """After one step the running mean is 0.1 times the mean over all rows of all workers."""
    rows = torch.arange(12.0).view(12, 1)
    options = {"data": (rows, torch.zeros(12, 1)), "steps": 1, "loss": "mse", "metric": "none"}
    make = lambda: nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))  # noqa: E731
    run = run_inproc(model=make, strategy="allreduce", workers=2, batch_size="8,4", **options)
    assert float(run.weights["0.running_mean"]) == pytest.approx(0.1 * float(rows.mean()), abs=1e-6)
    assert int(run.weights["0.num_batches_tracked"]) == 1


def test_another_number_of_workers_goes_on_from_the_checkpoint(
    run_inproc: RunInproc, tmp_path: Path
) -> None:
    """Same global batch: 2 workers for a while, then 3, then 1, end where serial ends."""
    options = {
        "model": lambda: models.build("linear", input_shape=(1, 28, 28), classes=10).double(),
        "data": images(70, torch.float64),
    }
    serial = run_inproc(**options, global_batch_size=12, steps=20)
    out = str(tmp_path / "changing")
    run_inproc(
        **options,
        strategy="allreduce",
        workers=2,
        global_batch_size=12,
        steps=8,
        checkpoint_every=4,
        out=out,
    )
    run_inproc(
        **options,
        strategy="allreduce",
        workers=3,
        global_batch_size=12,
        steps=15,
        checkpoint_every=15,
        out=out,
        resume=out,
    )
    last = run_inproc(
        **options, strategy="serial", workers=1, global_batch_size=12, steps=20, out=out, resume=out
    )
    assert weights_distance(serial.weights, last.weights) < 1e-12
    assert (last.steps, last.samples) == (serial.steps, serial.samples)
