"""Batch sizes in proportion to each worker's speed, so that no worker waits for the slowest.

    b_p <- G v_p / (v_1 + ... + v_P)     v_p: samples per second of worker p without the exchange

The global batch G stays, and gradients are weighted by samples, so a step is that of the global
batch. Every sample is seen once per epoch. Speeds are given (`2,1,1`, or seconds per batch:
`runtime:1.2,3.6`) or measured during training: over the last steps, averaged with the estimate
before.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline.common.intervals import due
from paceline.data.shards import Shards
from paceline.request.speeds import cut
from paceline.transport.base import Transport
from paceline.transport.metered import ALL_PEERS
from paceline.types import Batch

if TYPE_CHECKING:
    from paceline.run.worker import Worker

# In steps. A batch has a fixed cost besides the cost per sample, so the first estimate is off; four
# early corrections are enough.
FIRST_LOOKS = (5, 10, 15, 20)
KEEP = 0.5  # the share of the earlier estimate in each later one


def _typical(times: Sequence[float]) -> float:
    """Return the mean, with outliers cut at three times the median. Others wait for the mean."""
    most = 3 * statistics.median(times)
    return statistics.fmean(min(t, most) for t in times)


@dataclass
class Balance:
    """Measures one worker, and changes all workers' batch sizes together."""

    every: str
    shards: Shards
    peers: Transport  # of the workers
    speeds: list[float] = field(default_factory=list)  # the present estimate, in samples per second
    settled: bool = False  # resumed with an estimate: no early looks
    _steps: int = 0
    # seconds per sample of the steps since the last look
    _times: list[float] = field(default_factory=list)

    def saw(self, samples: float, seconds: float) -> None:
        """Note one step of this worker: its own seconds, without waiting for others."""
        # differences of clocks can be slightly negative
        if samples and seconds > 0:
            self._times.append(seconds / samples)

    def look(self, step: int, epoch: int, epoch_ended: bool) -> bool:
        """Adapt the batch sizes if that is due after this step. Returns whether they have changed.

        All workers call it together.
        """
        self._steps += 1
        early = self._steps in FIRST_LOOKS and not self.settled
        if not (early or due(self.every, step, epoch, epoch_ended)):
            return False
        measured = torch.zeros(self.peers.size, dtype=torch.float64)
        if self._times:
            measured[self.peers.rank] = 1 / _typical(self._times)
        self.peers.all_reduce(measured)
        self._times.clear()
        found: list[float] = measured.tolist()
        if not all(found):  # a worker without a sample has no speed
            return False
        kept = KEEP if self.speeds and not early else 0.0
        self.speeds = [
            kept * old + (1 - kept) * new
            for old, new in zip(self.speeds or found, found, strict=True)
        ]
        sizes = cut(sum(self.shards.batch_sizes), self.speeds)
        changed, self.shards.batch_sizes = sizes != self.shards.batch_sizes, sizes
        return changed

    def state(self) -> dict[str, Any]:
        return {"speeds": self.speeds, "batch_sizes": list(self.shards.batch_sizes)}

    def load(self, state: dict[str, Any]) -> None:
        if sum(state["batch_sizes"]) != sum(self.shards.batch_sizes):
            return  # the resumed run has another global batch
        self.shards.batch_sizes = tuple(state["batch_sizes"])
        self.speeds, self.settled = state["speeds"], bool(state["speeds"])


def look_at_balance(worker: Worker, balance: Balance, batch: Batch, own_s: float) -> None:
    """Adapt the batch sizes to the workers' speeds. Its time counts as exchange, not as work."""
    balance.saw(batch.weight, own_s)
    began = worker.now()
    changed = balance.look(worker.step, batch.epoch + 1, worker.batches.ended)
    worker.meter.add("balance", ALL_PEERS, 0, 0, 0, worker.now() - began)
    if changed and worker.leads:
        sizes, speeds = list(balance.shards.batch_sizes), balance.speeds
        worker.recorder.write("balance", step=worker.step, batch_sizes=sizes, samples_per_s=speeds)
