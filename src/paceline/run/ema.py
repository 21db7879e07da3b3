"""An exponential moving average of the weights (Polyak averaging), evaluated beside them.

    e <- d e + (1 - d) w       after every step; it starts as the weights after the first step

Each worker averages its own weights. Where workers' weights differ, the mean of their averages is
the average of their mean, because the rule is linear.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.replica.replica import Replica
from paceline.strategies.base import Context
from paceline.transport.together import allocate_like


class Ema:
    """The moving average of one worker's weights, in flat tensors."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.weights: list[Tensor] = []
        self._mean: list[Tensor] = []

    @torch.no_grad()
    def update(self, replica: Replica) -> None:
        if not self.weights:
            self.weights = [held.detach().clone() for held in replica.held]
            return
        for average, held in zip(self.weights, replica.held, strict=True):
            average.lerp_(held.detach(), 1.0 - self.decay)

    def agreed(self, ctx: Context, identical: bool) -> Sequence[Tensor]:
        """The mean of all workers' averages. All workers call it together."""
        if identical or ctx.peers.size == 1 or not self.weights:
            return self.weights
        self._mean = self._mean or [allocate_like(ctx.transport, w) for w in self.weights]
        for mean, own in zip(self._mean, self.weights, strict=True):
            torch.div(own, ctx.peers.size, out=mean)
            ctx.peers.all_reduce(mean)
        return self._mean
