"""Hogwild (Recht et al., 2011): one set of weights in shared memory, which all workers update
without locks.

    w <- w - lr * g_p(w as it was when worker p read it)

The optimizer's state (momentum) is each worker's own, or shared like the weights. Each step records
`staleness`, the number of other workers' updates between reading the weights and changing them, and
`overlapped`, whether another worker was writing at the same time. For that, each worker sets a flag
in shared memory while it updates, and counts its updates. An update overlaps if another worker's
flag was set or its count changed around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor

from paceline.registry import strategies
from paceline.strategies.base import APPROXIMATELY, Context, Strategy, Traits, average_buffers
from paceline.strategies.parts.averaging import make_state, parameters_of
from paceline.types import Batch

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.strategies.parts.saved import Saved

CACHE_LINE = 8  # int64 numbers; every worker writes to its own cache lines


@strategies.register("hogwild")
@dataclass
class Hogwild(Strategy):
    """One set of weights in shared memory, updated by all workers without locks."""

    optimizer_state: Annotated[
        Literal["private", "shared"], "whether workers share momentum and other state"
    ] = "private"

    traits = Traits(
        exchanges="nothing",
        in_step=False,
        needs_shared_memory=True,
        resumes=APPROXIMATELY,
        not_private_because=(
            "updates mix number by number in shared memory, in an order that depends on how long"
            " each secret batch took, and there is no proof of what that reveals: use"
            " ps:consistency=async"
        ),
    )

    def setup(self, ctx: Context, replica: Replica, saved: Saved | None = None) -> None:
        super().setup(ctx, replica, saved)
        me, workers = ctx.worker_index, ctx.workers
        counters = ctx.transport.allocate(
            2 * workers * CACHE_LINE, torch.int64, torch.device("cpu")
        )
        if workers > 1:
            for index, region in enumerate(replica.regions):
                replica.live_in(index, ctx.peers.share(region.params))
            if self.optimizer_state == "shared":
                share_optimizer(ctx, replica)
            counters = ctx.peers.share(counters)
        self._counters = counters.numpy()
        self._others = [w * CACHE_LINE for w in range(workers) if w != me]
        self._mine, self._flags = me * CACHE_LINE, workers * CACHE_LINE
        self._seen = 0

    def _updates_of_others(self) -> int:
        return sum(int(self._counters[w]) for w in self._others)

    def _others_write(self) -> bool:
        return any(self._counters[self._flags + w] for w in self._others)

    def begin(self, replica: Replica, batch: Batch | None) -> None:
        self._seen = self._updates_of_others()

    def step(self, replica: Replica, batch: Batch) -> None:
        self.ctx.transport.pause()  # inproc: others run between this worker's read and write
        counters, before = self._counters, self._updates_of_others()
        staleness, overlapped = before - self._seen, self._others_write()
        counters[self._flags + self._mine] = 1
        if batch.weight:
            replica.update()
        counters[self._flags + self._mine] = 0
        counters[self._mine] += 1
        overlapped = overlapped or self._others_write() or self._updates_of_others() != before
        self.observed = {"staleness": staleness, "overlapped": overlapped}

    def consensus(self, replica: Replica) -> None:
        """Wait for all workers: then the shared weights are the consensus weights."""
        self.ctx.peers.barrier()
        average_buffers(self.ctx, replica)


def share_optimizer(ctx: Context, replica: Replica) -> None:
    """Make all workers use worker 0's optimizer state, in shared memory.

    It is the state that a checkpoint has restored, or a new one.
    """
    optimizer, parameters = replica.optimizer, parameters_of(replica.optimizer)
    new = [p for p in parameters if not optimizer.state.get(p)]
    make_state(optimizer, new)
    for parameter in new:
        if isinstance(step := optimizer.state[parameter].get("step"), Tensor):
            step.zero_()  # `make_state` took a step, which does not count
    for parameter in parameters:
        state: dict[str, Any] = optimizer.state[parameter]
        for key in sorted(state):
            value = state[key]
            if isinstance(value, Tensor):
                flat = ctx.transport.allocate(value.numel(), value.dtype, value.device)
                flat.as_strided(value.shape, value.stride()).copy_(value)
                state[key] = ctx.peers.share(flat).as_strided(value.shape, value.stride())
