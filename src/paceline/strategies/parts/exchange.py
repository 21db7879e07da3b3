"""Sums of gradients and means of weights over all workers, through the run's codec.

Through a codec, what is averaged is each worker's change since the last common weights, because
changes are small where weights are not:

    d_p <- s_p (w_p - w) ;   w <- w + sum_p C(d_p) ;   w_p <- w
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.codecs.base import check_real
from paceline.collectives.base import Collective
from paceline.strategies.base import Context
from paceline.strategies.parts.averaging import average_weights
from paceline.strategies.parts.reference import Reference

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.strategies.parts.saved import Saved


class Exchange:
    """Sums one flat tensor per region over the workers, in place.

    `weights`: allocate memory to average weights, too.
    """

    def __init__(
        self,
        ctx: Context,
        replica: Replica,
        collective: Collective,
        *,
        weights: bool,
        saved: Saved | None = None,
    ) -> None:
        self.ctx, self.collective = ctx, collective
        self.compresses = ctx.workers > 1 and not ctx.codec.lossless
        self._layouts = [r.grad_layout for r in replica.regions]
        self._states: list[dict[str, Any]] = []
        self._common = Reference([])
        self._moved: list[Tensor] = []
        if self.compresses:
            for region, layout in zip(replica.regions, self._layouts, strict=True):
                check_real(layout, region.grads.dtype, ctx.codec.name)
                self._states.append(ctx.codec.start(layout, ctx.random, ctx.shared_random))
            if weights:
                own = [r.trained for r in replica.regions]
                self._common = Reference(own)
                self._moved = [ctx.transport.allocate(w.numel(), w.dtype, w.device) for w in own]
        if saved is not None:
            saved.fill("common", self._common.weights)
            self._states = saved.states("codec", self._states, f"what {ctx.codec.name} remembers")

    def sum(self, buffers: Sequence[Tensor]) -> None:
        if not self.compresses:
            for buffer in buffers:
                self.collective.all_reduce(buffer)
            return
        for buffer, layout, state in zip(buffers, self._layouts, self._states, strict=True):
            if buffer.numel():
                self.ctx.codec.reduce(buffer, layout, self.collective, state)

    def average(self, replica: Replica, share: float) -> None:
        """w <- sum_p share_p w_p, in place, on every worker."""
        if not self.compresses:
            average_weights(self.ctx, replica, share, self.collective)
            return
        own = [r.trained for r in replica.regions]
        self._common.difference(own, self._moved)
        for moved in self._moved:
            moved.mul_(share)
        self.sum(self._moved)
        self._common.advance(self._moved)
        self._common.give(own)

    def rebase(self, replica: Replica) -> None:
        """Take the current weights, which are the same on all workers, as the common weights."""
        if self._common.weights:
            self._common.rebase([r.trained for r in replica.regions])

    def state(self) -> dict[str, Any]:
        return {"codec": self._states, "common": self._common.weights}
