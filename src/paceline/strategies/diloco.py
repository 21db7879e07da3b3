"""DiLoCo (Douillard et al., 2023): local steps, then an outer step with Nesterov momentum on the
mean change of the workers' weights.

    w_p <- inner optimizer from w                H steps
    d   <- w - sum_p s_p w_p                     the outer gradient
    v   <- m v + d ;   w <- w - a (d + m v)      outer lr a, outer momentum m

It is made for hundreds of local steps between averages over slow links. The outer momentum
compensates for the rare averages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch

from paceline.errors import BadRequest
from paceline.registry import strategies
from paceline.strategies.base import Context
from paceline.strategies.parts.local_steps import LocalSteps
from paceline.strategies.parts.reference import Reference

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.strategies.parts.saved import Saved


@strategies.register("diloco")
@dataclass
class DiLoCo(LocalSteps):
    """Local steps, then an outer step with Nesterov momentum on the workers' mean change."""

    every: Annotated[str, "inner steps between outer steps, or epoch"] = "16"
    outer_lr: Annotated[float, "1 with outer_momentum=0 is local SGD"] = 0.7
    outer_momentum: float = 0.9
    collective: Annotated[str, "the all-reduce: auto, native, ring, tree, ..."] = "auto"

    traits = replace(LocalSteps.traits, alone_is_serial=False)  # one worker takes outer steps, too
    averages = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.outer_lr > 0 and 0 <= self.outer_momentum < 1):
            given = f"outer_lr={self.outer_lr:g}, outer_momentum={self.outer_momentum:g}"
            raise BadRequest(
                f"diloco: {given}: outer_lr must be above 0 and outer_momentum in [0, 1)"
            )

    def setup(self, ctx: Context, replica: Replica, saved: Saved | None = None) -> None:
        super().setup(ctx, replica, saved)
        own = [r.trained for r in replica.regions]
        self._common = Reference(own)
        self._velocity = [torch.zeros_like(w) for w in own]
        self._moved = [ctx.transport.allocate(w.numel(), w.dtype, w.device) for w in own]
        if saved is not None:
            saved.fill("common", self._common.weights)
            saved.fill("velocity", self._velocity)

    def synchronise(self, replica: Replica, share: float) -> None:
        own = [region.trained for region in replica.regions]
        self._common.difference(own, self._moved)
        for moved in self._moved:
            moved.mul_(-share)  # the outer gradient
        self._exchange.sum(self._moved)
        for velocity, moved in zip(self._velocity, self._moved, strict=True):
            velocity.mul_(self.outer_momentum).add_(moved)
            moved.add_(velocity, alpha=self.outer_momentum)
        self._common.advance(self._moved, alpha=-self.outer_lr)
        self._common.give(own)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "common": self._common.weights, "velocity": self._velocity}
