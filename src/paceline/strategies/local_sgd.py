"""Local SGD: every worker takes H local steps, then the weights are averaged (Stich, "Local SGD
Converges Fast", 2019).

    w_p <- w_p - lr * g_p          H times
    w   <- sum_p s_p w_p           s_p: worker p's share of the samples since the last average

With H = 1 and plain SGD this is serial SGD on the whole batch. With momentum that holds only if the
workers' shares of the samples are the same in every step (the partial last step of an epoch changes
them), or with `optimizer_state=average`.

It sends 1/H of the bytes. `post=STEP` is post-local SGD (Lin et al., 2020): gradients are averaged
in every step up to STEP, while the weights change fast, and local steps begin after it. At an
average, each worker keeps its optimizer's state (`keep`), or the state is averaged like the weights
(`average`) or cleared (`reset`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from paceline.codecs.base import Codec
from paceline.errors import BadRequest
from paceline.registry import strategies
from paceline.strategies.base import Context
from paceline.strategies.parts.averaging import OptimizerAverage
from paceline.strategies.parts.exchange import Exchange
from paceline.strategies.parts.local_steps import LocalSteps
from paceline.strategies.parts.pattern import Exchange as Pattern
from paceline.strategies.parts.pattern import Reduction, Setting
from paceline.types import Batch

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.strategies.parts.saved import Saved


@strategies.register("local-sgd")
@dataclass
class LocalSGD(LocalSteps):
    """Each worker takes local steps; the weights are averaged every few steps."""

    every: Annotated[str, "steps between averages, or epoch"] = "8"
    optimizer_state: Annotated[
        Literal["keep", "average", "reset"], "what happens to momentum at an average"
    ] = "keep"
    post: Annotated[int, "up to this step, average gradients in every step"] = 0
    collective: Annotated[str, "the all-reduce: auto, native, ring, tree, ..."] = "auto"

    def setup(self, ctx: Context, replica: Replica, saved: Saved | None = None) -> None:
        super().setup(ctx, replica, saved)
        self._memory = OptimizerAverage(ctx)
        self._gradients = Exchange(
            ctx,
            replica,
            self._collective,
            weights=False,
            saved=saved.part("gradients") if saved else None,
        )

    def refuses(self, codec: Codec) -> str | None:
        if self.post and codec.biased:
            return (
                f"local-sgd:post={self.post} has momentum after the codec in its first steps, which"
                f" does not work with the biased codec {codec.name}: use fp16, bf16, int8 or qsgd"
            )
        return None

    def pattern(self, step: int, setting: Setting) -> Sequence[Pattern]:
        if self.optimizer_state == "average":
            raise BadRequest(
                "local-sgd:optimizer_state=average: how much is exchanged depends on the"
                " optimizer, so its cost cannot be predicted; use optimizer_state=keep, or measure"
                " it by paceline study"
            )
        if step < self.post:
            return (Reduction(self.collective),)
        return super().pattern(step, setting)

    def scale(self, batch: Batch) -> float:
        return batch.share if batch.step < self.post else 1.0

    def step(self, replica: Replica, batch: Batch) -> None:
        if batch.step >= self.post:
            super().step(replica, batch)
            return
        self._gradients.sum([region.grads for region in replica.regions])
        replica.update(marked=not self._gradients.compresses)
        if batch.step + 1 == self.post:
            self._exchange.rebase(replica)

    def skip(self, replica: Replica, batch: Batch) -> None:
        if batch.step >= self.post:
            super().skip(replica, batch)
        elif batch.step + 1 == self.post:
            self._exchange.rebase(replica)

    def synchronise(self, replica: Replica, share: float) -> None:
        self._exchange.average(replica, share)
        if self.optimizer_state == "average":
            self._memory.average(replica, share)
        elif self.optimizer_state == "reset":
            replica.optimizer.state.clear()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "gradients": self._gradients.state()}
