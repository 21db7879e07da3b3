"""Small data, small models, distances of weights. Without pytest: other processes import it too."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn


def make_pairs(
    samples: int,
    inputs: int = 6,
    classes: int = 3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    centres = (
        torch.randn(classes, inputs, generator=torch.Generator().manual_seed(99), dtype=dtype) * 2
    )
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (samples,), generator=random)
    return centres[labels] + torch.randn(samples, inputs, generator=random, dtype=dtype), labels


def small_net(dtype: torch.dtype = torch.float32, inputs: int = 6, classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, classes)).to(dtype)


def trained_from(loader: Any, model: nn.Module, pace: Any = None) -> list[Tensor]:
    """Train for three epochs, leaving the second after one batch; in a plain loop, or with a pace
    of one worker.
    """
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = loader
    if pace is not None:
        model, optimizer, batches = pace.prepare(model, optimizer, loader)
    for epoch in range(3):
        for x, y in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            if pace is not None:
                pace.step(loss)
            else:
                loss.backward()
                optimizer.step()
            if epoch == 1:
                break
    return [p.detach().clone() for p in model.parameters()]


class Two(nn.Module):
    """Some samples use one layer, some the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        side = x[:, :1] > 0
        left = self.left(x) if bool(side.any()) else 0.0
        right = self.right(x) if not bool(side.all()) else 0.0
        return torch.where(side, left, right)


def weights_distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of any weight."""
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


def identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def shared_files() -> set[str]:
    """Files in shared memory, but for those of MPI, which other processes may use at the time."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sm_segment", "vader"))}
