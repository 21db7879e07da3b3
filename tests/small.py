"""Small data, small models, and how far weights are apart: without pytest, for other
processes too.
"""

from __future__ import annotations

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


def weights_distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of any weight."""
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


def identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
