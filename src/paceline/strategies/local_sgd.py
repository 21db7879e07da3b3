"""Local SGD: every worker makes H steps of its own, then the weights are averaged (Stich, "Local
SGD Converges Fast", 2019).

    w_p <- w_p - lr * g_p                      H times
    w   <- sum_p s_p w_p                       s_p: worker p's share of the samples since the last average

With H = 1 and plain SGD this is serial SGD on the whole batch. With momentum it is so only where
the workers' shares of the samples are the same in every step (the partial last step of an epoch
changes them), or with `optimizer_state=average`.

1/H of the bytes. `post=STEP` is post-local SGD (Lin et al., 2020): gradients are averaged in every
step up to there, when everything changes fast, and local steps begin after it. The optimizer's
memory is each worker's own (`keep`), averaged like the weights, or forgotten at every average
(`reset`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from paceline.codecs.base import Codec
from paceline.registry import strategies
from paceline.strategies.base import Context
from paceline.strategies.parts.averaging import OptimizerAverage
from paceline.strategies.parts.exchange import Exchange
from paceline.strategies.parts.local_steps import LocalSteps
from paceline.types import Batch, ReplicaLike


@strategies.register("local-sgd")
@dataclass
class LocalSGD(LocalSteps):
    """Steps of one's own; the weights are averaged every so many of them."""

    every: Annotated[str, "steps between averages, or epoch"] = "8"
    optimizer_state: Annotated[
        Literal["keep", "average", "reset"], "what happens to momentum at an average"
    ] = "keep"
    post: Annotated[int, "up to this step gradients are averaged in every step"] = 0
    collective: Annotated[str, "how the average is made: auto, native, ring, tree, ..."] = "auto"

    def setup(self, ctx: Context, replica: ReplicaLike) -> None:
        super().setup(ctx, replica)
        self._memory = OptimizerAverage(ctx)
        self._gradients = Exchange(ctx, replica, ctx.collective(self.collective), weights=False)

    def refuses(self, codec: Codec) -> str | None:
        if self.post and codec.biased:
            return (
                f"local-sgd:post={self.post} has momentum after the codec at first: use fp16, bf16,"
                " int8 or qsgd"
            )
        return None

    def scale(self, batch: Batch) -> float:
        return batch.share if batch.step < self.post else 1.0

    def step(self, replica: ReplicaLike, batch: Batch) -> None:
        if batch.step >= self.post:
            super().step(replica, batch)
            return
        self._gradients.sum([region.grads for region in replica.regions])
        replica.update(marked=not self._gradients.compresses)
        if batch.step + 1 == self.post:
            self._exchange.rebase(replica)

    def exchange(self, replica: ReplicaLike, share: float) -> None:
        self._exchange.average(replica, share)
        if self.optimizer_state == "average":
            self._memory.average(replica, share)
        elif self.optimizer_state == "reset":
            replica.optimizer.state.clear()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "gradients": self._gradients.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._gradients.load(state["gradients"])
