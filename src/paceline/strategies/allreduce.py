"""Synchronous data-parallel SGD: gradients are averaged every step.

    g <- sum_p (b_p / B) g_p        over all workers p, b_p of the step's B samples each
    w <- w - lr * g                 on every worker, on the same w

The weighted mean of the workers' gradients is the gradient of the whole batch, so P workers with b samples each follow
serial SGD with a batch of P*b (Goyal et al., "Accurate, Large Minibatch SGD", 2017).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from paceline.registry import strategies
from paceline.strategies.base import Context, Strategy
from paceline.types import Batch, ReplicaLike


@strategies.register("allreduce")
@dataclass
class AllReduce(Strategy):
    """Gradients averaged over all workers in every step; the same as serial SGD on the whole batch."""

    collective: Annotated[str, "how the gradients are summed: auto, native, ..."] = "auto"

    replicas_identical = True

    def setup(self, ctx: Context, replica: ReplicaLike) -> None:
        super().setup(ctx, replica)
        self._collective = ctx.collective(self.collective)
        for region in replica.regions:
            self._collective.prepare(region.grads)
        if self._collective.choices:
            ctx.recorder.write("choice", collective=self._collective.choices)
        self._codec_states = [ctx.codec.start(r.grad_layout, ctx.random, ctx.shared_random) for r in replica.regions]

    def step(self, replica: ReplicaLike, batch: Batch) -> None:
        for region, state in zip(replica.regions, self._codec_states, strict=True):
            self.ctx.codec.reduce(region.grads, region.grad_layout, self._collective, state)
        replica.update(marked=self.ctx.codec.lossless)

    def state(self) -> dict[str, Any]:
        return {"codec": self._codec_states, "collective": self._collective.choices}

    def load_state(self, state: dict[str, Any]) -> None:
        self._codec_states = state["codec"]
        self._collective.obey(state["collective"])
