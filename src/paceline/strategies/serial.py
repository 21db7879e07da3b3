"""Serial SGD: one worker without exchanges, the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.registry import strategies
from paceline.strategies.base import Strategy
from paceline.types import Batch, ReplicaLike


@strategies.register("serial")
@dataclass
class Serial(Strategy):
    """Plain SGD with one worker: w <- w - lr * g."""

    replicas_identical = True
    exchanges = "nothing"
    most_workers = 1
    noise_adds_up = True

    def step(self, replica: ReplicaLike, batch: Batch) -> None:
        replica.update()
