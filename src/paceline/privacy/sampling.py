"""Poisson sampling: each sample is in a step with the same probability, independently of others.

Each worker draws from its own fixed shard with a secret key of its own. A step reveals only the
*expected* size of its batch, which is public: `weight` and `global_weight` hold that size, never
the number of samples that were drawn. A worker whose batch is empty still takes part in the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.data.base import Samples
from paceline.data.batches import ShardBatches
from paceline.data.content import split, to_device
from paceline.data.shards import StaticShards
from paceline.types import Batch


class Coins:
    """Draws subsets of 0 .. n-1: each number with the same probability, independently."""

    def __init__(self, count: int, rate: float, key: bytes) -> None:
        self.count, self.rate = count, rate
        self._random = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))

    def throw(self) -> Tensor:
        """Draw one subset.

        The gap between two chosen numbers has a geometric distribution, so only the gaps are drawn.
        """
        if self.rate >= 1.0:
            return torch.arange(self.count)
        expected = self.count * self.rate
        heads = (
            np.cumsum(self._random.geometric(self.rate, int(expected + 5 * expected**0.5) + 8)) - 1
        )
        while heads[-1] < self.count:
            heads = np.concatenate(
                [
                    heads,
                    heads[-1] + np.cumsum(self._random.geometric(self.rate, 8 + int(expected / 4))),
                ]
            )
        return torch.from_numpy(heads[: np.searchsorted(heads, self.count)])


def steps_per_epoch(samples: int, expected: int) -> int:
    """Return the number of steps in which each sample is drawn once on average."""
    return max(1, round(samples / expected))


class PoissonBatches:
    """Yields batches without end. An epoch is `steps_per_epoch` steps."""

    def __init__(
        self, samples: Samples, shards: StaticShards, worker: int, device: torch.device, key: bytes
    ) -> None:
        self.samples, self.worker, self.device = samples, worker, device
        self.own, self.sizes = shards.chunks[worker], shards.batch_sizes
        self.coins = Coins(len(self.own), rate_of(shards, worker), key)
        self.steps_per_epoch = steps_per_epoch(len(samples), sum(self.sizes))
        self.step, self.ended = 0, False

    @property
    def epochs_done(self) -> int:
        return self.step // self.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        while True:
            chosen = self.own.index_select(0, self.coins.throw())
            inputs, targets = (
                to_device(split(self.samples.batch(chosen)), self.device)
                if len(chosen)
                else (None, None)
            )
            epoch = self.epochs_done
            self.ended = (self.step + 1) % self.steps_per_epoch == 0
            batch = Batch(
                inputs,
                targets,
                self.sizes[self.worker],
                sum(self.sizes),
                epoch,
                self.step,
                self.ended,
            )
            self.step += 1
            yield batch

    def give_back(self) -> None:
        self.step -= 1

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "shards": {"kind": "poisson", "epoch": self.epochs_done}}

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class ShuffledBatches(ShardBatches):
    """Yields batches in a fixed shuffled order, as without privacy.

    The weights are the expected sizes, also in the last step of an epoch.
    """

    def __iter__(self) -> Iterator[Batch]:
        sizes = self.shards.batch_sizes
        for batch in super().__iter__():
            yield replace(batch, weight=sizes[self.worker], global_weight=sum(sizes))


def rate_of(shards: StaticShards, worker: int) -> float:
    """Return the probability that a sample of this worker is in a step."""
    return min(1.0, shards.batch_sizes[worker] / len(shards.chunks[worker]))
