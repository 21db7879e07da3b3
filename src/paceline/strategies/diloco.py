"""DiLoCo (Douillard et al., 2023): local steps, then an outer step with Nesterov momentum on the
mean change of the workers' weights.

    w_p <- inner optimizer from w                H steps
    d   <- w - sum_p s_p w_p                     the outer gradient
    v   <- m v + d ;   w <- w - a (d + m v)      outer lr a, outer momentum m

It is made for hundreds of local steps between averages over slow links. The outer momentum
compensates for the rare averages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch

from paceline.errors import BadRequest
from paceline.registry import strategies
from paceline.strategies.base import Context
from paceline.strategies.parts.averaging import trained
from paceline.strategies.parts.local_steps import LocalSteps
from paceline.types import ReplicaLike


@strategies.register("diloco")
@dataclass
class DiLoCo(LocalSteps):
    """Local steps, then an outer step with Nesterov momentum on the workers' mean change."""

    every: Annotated[str, "inner steps between outer steps, or epoch"] = "16"
    outer_lr: Annotated[float, "1 with outer_momentum=0 is local SGD"] = 0.7
    outer_momentum: float = 0.9
    collective: Annotated[str, "the all-reduce: auto, native, ring, tree, ..."] = "auto"

    averages = False
    alone_is_serial = False  # one worker takes outer steps, too

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.outer_lr > 0 and 0 <= self.outer_momentum < 1):
            given = f"outer_lr={self.outer_lr:g}, outer_momentum={self.outer_momentum:g}"
            raise BadRequest(
                f"diloco: {given}: outer_lr must be above 0 and outer_momentum in [0, 1)"
            )

    def setup(self, ctx: Context, replica: ReplicaLike) -> None:
        super().setup(ctx, replica)
        own = [trained(r.params, r.grads) for r in replica.regions]
        self._common = [w.clone() for w in own]
        self._velocity = [torch.zeros_like(w) for w in own]
        self._moved = [ctx.transport.allocate(w.numel(), w.dtype, w.device) for w in own]

    def synchronise(self, replica: ReplicaLike, share: float) -> None:
        own = [trained(region.params, region.grads) for region in replica.regions]
        for weights, common, moved in zip(own, self._common, self._moved, strict=True):
            torch.sub(common, weights, out=moved).mul_(share)
        self._exchange.sum(self._moved)
        for weights, common, velocity, moved in zip(
            own, self._common, self._velocity, self._moved, strict=True
        ):
            velocity.mul_(self.outer_momentum).add_(moved)
            common.sub_(moved.add_(velocity, alpha=self.outer_momentum), alpha=self.outer_lr)
            weights.copy_(common)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "common": self._common, "velocity": self._velocity}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._common, self._velocity = state["common"], state["velocity"]
