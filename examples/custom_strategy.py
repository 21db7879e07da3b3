"""A strategy of your own in 30 lines: average the weights less and less often.

    paceline train --plugin examples/custom_strategy.py --strategy patient:growth=1.5 \\
        --workers 2 --data fashion-mini

Paceline itself is unchanged: the strategy's options, help, checks and records follow from this
file.
"""

from dataclasses import dataclass
from typing import Annotated

from paceline.registry import strategies
from paceline.strategies.base import Strategy, Traits
from paceline.strategies.parts.averaging import average_weights


@strategies.register("patient")
@dataclass
class Patient(Strategy):
    """Averages weights after 1, 1.5, 2.25, ... steps: often at first, seldom later."""

    growth: Annotated[float, "how much longer each pause is than the one before"] = 1.5
    traits = Traits(exchanges="weights")

    def setup(self, ctx, replica):
        super().setup(ctx, replica)
        self.collective, self.pause, self.next = ctx.collective("auto"), 1.0, 1.0

    def step(self, replica, batch):
        replica.update()
        if batch.step + 1 >= self.next:
            average_weights(self.ctx, replica, 1 / self.ctx.workers, self.collective)
            self.pause *= self.growth
            self.next += self.pause

    def finish(self, replica):
        average_weights(self.ctx, replica, 1 / self.ctx.workers, self.collective)
