"""What local SGD and DiLoCo have in common: steps of one's own, and an exchange of weights every so
many of them.
"""

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
    """A subclass has the options `every` and `collective`, and says what happens at an exchange."""

    every: str
    collective: str

    exchanges = "weights"
    noise_adds_up = False
    averages: ClassVar[bool] = (
        True  # whether what comes of an exchange is the average of the weights itself
    )

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
    def exchange(self, replica: ReplicaLike, share: float) -> None:
        """All workers come together; `share` is this worker's part of the samples since the last
        time.
        """

    def step(self, replica: ReplicaLike, batch: Batch) -> None:
        replica.update()
        self._shares.add(batch.weight, batch.global_weight)
        if due(self.every, batch.step + 1, batch.epoch + 1, batch.ends_epoch):
            self.exchange(replica, self._shares.take(self.ctx.workers))

    def finish(self, replica: ReplicaLike) -> None:
        if self._shares.total:
            self.exchange(replica, self._shares.take(self.ctx.workers))

    def state(self) -> dict[str, Any]:
        return {"shares": self._shares.state(), "exchange": self._exchange.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._shares.load(state["shares"])
        self._exchange.load(state["exchange"])
