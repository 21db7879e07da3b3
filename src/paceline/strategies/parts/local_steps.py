"""The common part of local SGD and DiLoCo: local steps, and an exchange every few steps."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from paceline.codecs.base import Codec
from paceline.common.intervals import due, interval
from paceline.strategies.base import Context, Strategy
from paceline.strategies.parts.averaging import Shares
from paceline.strategies.parts.exchange import Exchange
from paceline.types import Batch, ReplicaLike


class LocalSteps(Strategy):
    """A subclass has the options `every` and `collective`, and defines `synchronise`."""

    every: str
    collective: str

    exchanges = "weights"
    noise_adds_up = False
    averages: ClassVar[bool] = True  # whether `synchronise` averages the weights through Exchange

    def __post_init__(self) -> None:
        interval(f"{self.name}: every", self.every)

    def setup(self, ctx: Context, replica: ReplicaLike) -> None:
        super().setup(ctx, replica)
        self._shares = Shares()
        self._exchange = Exchange(
            ctx, replica, ctx.collective(self.collective), weights=self.averages
        )

    def refuses(self, codec: Codec) -> str | None:
        return None

    @abstractmethod
    def synchronise(self, replica: ReplicaLike, share: float) -> None:
        """Exchange with all workers; `share`: this worker's share of the samples since the last."""

    def step(self, replica: ReplicaLike, batch: Batch) -> None:
        replica.update()
        self._shares.add(batch.weight, batch.global_weight)
        if due(self.every, batch.step + 1, batch.epoch + 1, batch.ends_epoch):
            self.synchronise(replica, self._shares.take(self.ctx.workers))

    def finish(self, replica: ReplicaLike) -> None:
        if self._shares.total:
            self.synchronise(replica, self._shares.take(self.ctx.workers))

    def state(self) -> dict[str, Any]:
        return {"shares": self._shares.state(), "exchange": self._exchange.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._shares.load(state["shares"])
        self._exchange.load(state["exchange"])
