"""Sums of gradients and means of weights over all workers, through the run's codec.

Through a codec, what is averaged is each worker's change since the last common weights, because
changes are small where weights are not:

    d_p <- s_p (w_p - w) ;   w <- w + sum_p C(d_p) ;   w_p <- w
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.codecs.base import check_real
from paceline.collectives.base import Collective
from paceline.strategies.base import Context
from paceline.strategies.parts.averaging import average_weights, trained
from paceline.types import ReplicaLike


class Exchange:
    """Sums one flat tensor per region over the workers, in place.

    `weights`: allocate memory to average weights, too.
    """

    def __init__(
        self, ctx: Context, replica: ReplicaLike, collective: Collective, *, weights: bool
    ) -> None:
        self.ctx, self.collective = ctx, collective
        self.compresses = ctx.workers > 1 and not ctx.codec.lossless
        self._layouts = [r.grad_layout for r in replica.regions]
        self._states: list[dict[str, Any]] = []
        self._common: list[Tensor] = []
        self._moved: list[Tensor] = []
        if self.compresses:
            for region, layout in zip(replica.regions, self._layouts, strict=True):
                check_real(layout, region.grads.dtype, ctx.codec.name)
                self._states.append(ctx.codec.start(layout, ctx.random, ctx.shared_random))
            if weights:
                own = [trained(r.params, r.grads) for r in replica.regions]
                self._common = [w.clone() for w in own]
                self._moved = [ctx.transport.allocate(w.numel(), w.dtype, w.device) for w in own]

    def sum(self, buffers: Sequence[Tensor]) -> None:
        if not self.compresses:
            for buffer in buffers:
                self.collective.all_reduce(buffer)
            return
        for buffer, layout, state in zip(buffers, self._layouts, self._states, strict=True):
            if buffer.numel():
                self.ctx.codec.reduce(buffer, layout, self.collective, state)

    def average(self, replica: ReplicaLike, share: float) -> None:
        """w <- sum_p share_p w_p, in place, on every worker."""
        if not self.compresses:
            average_weights(self.ctx, replica, share, self.collective)
            return
        own = [trained(r.params, r.grads) for r in replica.regions]
        for weights, common, moved in zip(own, self._common, self._moved, strict=True):
            torch.sub(weights, common, out=moved).mul_(share)
        self.sum(self._moved)
        for weights, common, moved in zip(own, self._common, self._moved, strict=True):
            weights.copy_(common.add_(moved))

    def rebase(self, replica: ReplicaLike) -> None:
        """Take the current weights, which are the same on all workers, as the common weights."""
        for common, region in zip(self._common, replica.regions, strict=False):
            common.copy_(trained(region.params, region.grads))

    def state(self) -> dict[str, Any]:
        return {"codec": self._states, "common": self._common}

    def load(self, state: dict[str, Any]) -> None:
        self._states = state["codec"]
        for common, kept in zip(self._common, state["common"], strict=True):
            common.copy_(kept)
