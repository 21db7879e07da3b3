"""The common part of local SGD and DiLoCo: local steps, and an exchange every few steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.codecs.base import Codec
from paceline.common.intervals import due, interval
from paceline.strategies.base import Context, Strategy, Traits
from paceline.strategies.parts.averaging import Shares
from paceline.strategies.parts.exchange import Exchange
from paceline.strategies.parts.pattern import Exchange as Pattern
from paceline.strategies.parts.pattern import Reduction, Setting
from paceline.strategies.parts.prepared import prepared
from paceline.types import Batch

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.strategies.parts.saved import Saved


class LocalSteps(Strategy):
    """A subclass has the options `every` and `collective`, and defines `synchronise`."""

    every: str
    collective: str

    traits = Traits(exchanges="weights", noise_adds_up=False)
    averages: ClassVar[bool] = True  # whether `synchronise` averages the weights through Exchange

    def __post_init__(self) -> None:
        interval(f"{self.name}: every", self.every)

    def setup(self, ctx: Context, replica: Replica, saved: Saved | None = None) -> None:
        super().setup(ctx, replica, saved)
        self._shares = Shares(saved)
        whole = replica.regions if ctx.codec.lossless else []
        self._collective = prepared(ctx, self.collective, [r.grads for r in whole], saved)
        self._exchange = Exchange(
            ctx,
            replica,
            self._collective,
            weights=self.averages,
            saved=saved.part("exchange") if saved else None,
        )

    def refuses(self, codec: Codec) -> str | None:
        return None

    def pattern(self, step: int, setting: Setting) -> Sequence[Pattern]:
        return (Reduction(self.collective),) if setting.due(self.every, step) else ()

    @abstractmethod
    def synchronise(self, replica: Replica, share: float) -> None:
        """Exchange with all workers; `share`: this worker's share of the samples since the last."""

    def step(self, replica: Replica, batch: Batch) -> None:
        replica.update()
        self._shares.add(batch.weight, batch.global_weight)
        if due(self.every, batch.step + 1, batch.epoch + 1, batch.ends_epoch):
            self.synchronise(replica, self._shares.take(self.ctx.workers))

    def share(self) -> float:
        return self._shares.share(self.ctx.workers)

    def finish(self, replica: Replica) -> None:
        if self._shares.total:
            self.synchronise(replica, self._shares.take(self.ctx.workers))

    def state(self) -> dict[str, Any]:
        return {
            "shares": self._shares.state(),
            "exchange": self._exchange.state(),
            "collective": self._collective.choices,
        }
