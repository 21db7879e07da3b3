"""Peer: Opacus, in each of its ways of making samples' gradients. It gets the same batches, and its
own noise and clipping.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

MODES = ("hooks", "functorch", "ew", "ghost")


def opacus_step(
    mode: str, model: nn.Module, batch_size: int, noise: float, clip: float
) -> Callable[[Tensor, Tensor], None]:
    """One step on one batch: forward, backward, clip, noise, update with momentum."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus import PrivacyEngine

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        loader = DataLoader(
            TensorDataset(torch.zeros(batch_size, 1), torch.zeros(batch_size)),
            batch_size=batch_size,
        )
        made: Any = PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            criterion=nn.CrossEntropyLoss(),
            noise_multiplier=noise,
            max_grad_norm=clip,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
    private, stepper = made[0], made[1]
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()

    def step(inputs: Tensor, targets: Tensor) -> None:
        stepper.zero_grad()
        criterion(private(inputs), targets).backward()
        stepper.step()

    return step
