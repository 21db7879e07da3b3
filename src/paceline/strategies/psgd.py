"""Parallel SGD by averaging once (Zinkevich et al., "Parallelized Stochastic Gradient Descent",
2010).

    every worker trains alone on its own shard;  at the end  w <- sum_p (n_p / N) w_p

Nothing is sent in training. It works as long as the workers' weights do not diverge too far: with
small steps (lr 0.01 with momentum, or 0.1 without) it costs half a point on MNIST; with lr 0.05 and
momentum 0.9 the average of four workers is worse than each of them. Training ends by `epochs`, by
`steps`, or by local convergence: with `until_converged` each worker stops when its own weights have
converged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.collectives.base import usual
from paceline.registry import strategies
from paceline.strategies.base import Context, Strategy, Traits
from paceline.strategies.parts.averaging import Shares, average_weights
from paceline.types import Batch

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.strategies.parts.saved import Saved


@strategies.register("psgd")
@dataclass
class PSGD(Strategy):
    """Every worker trains alone on its own shard; the weights are averaged once, at the end."""

    traits = Traits(
        exchanges="nothing",
        in_step=False,
        decides_alone=True,
        shard="static",
        noise_adds_up=False,
    )

    def setup(self, ctx: Context, replica: Replica, saved: Saved | None = None) -> None:
        super().setup(ctx, replica, saved)
        self._shares = Shares(saved)

    def step(self, replica: Replica, batch: Batch) -> None:
        if batch.weight:  # otherwise the worker has used up its shard in this epoch
            replica.update()
        self._shares.add(batch.weight, batch.global_weight)
        self.ctx.transport.pause()

    def share(self) -> float:
        """Ask the others how many samples they had: nothing was agreed on in the steps."""
        own = self._shares.own
        total = torch.tensor([own], dtype=torch.float64)
        self.ctx.peers.uncounted().control.all_reduce(total)
        return own / float(total) if float(total) else 1 / self.ctx.workers

    def finish(self, replica: Replica) -> None:
        average_weights(self.ctx, replica, self.share(), usual(self.ctx.peers))
        self._shares.take(self.ctx.workers)

    def state(self) -> dict[str, Any]:
        return {"shares": self._shares.state()}
