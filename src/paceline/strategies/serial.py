"""Serial SGD: one worker without exchanges, the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.registry import strategies
from paceline.strategies.base import Strategy, Traits
from paceline.types import Batch

if TYPE_CHECKING:
    from paceline.replica.replica import Replica


@strategies.register("serial")
@dataclass
class Serial(Strategy):
    """Plain SGD with one worker: w <- w - lr * g."""

    traits = Traits(
        exchanges="nothing", replicas_identical=True, most_workers=1, noise_adds_up=True
    )

    def step(self, replica: Replica, batch: Batch) -> None:
        replica.update()
