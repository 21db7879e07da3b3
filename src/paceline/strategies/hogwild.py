"""Hogwild (Recht et al., 2011): one set of weights in shared memory, and everybody updates it
without asking anybody.

    w <- w - lr * g_p(w as it was when worker p read it)          no locks, no turns

The optimizer's memory (momentum) is each worker's own, or shared like the weights. What is
recorded, per step: `overlapped`, whether another worker was writing at the same time (each worker
sets a flag in shared memory while it updates, and counts its updates; an update overlaps when,
around it, another's flag was set or another's count changed), and `staleness`, how many updates of
others came between reading the weights and changing them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from paceline.registry import strategies
from paceline.strategies.base import Context, Strategy, average_buffers
from paceline.strategies.parts.averaging import make_state, parameters_of
from paceline.types import Batch, ReplicaLike

LINE = 8  # int64 numbers: every worker writes on a cache line of its own


@strategies.register("hogwild")
@dataclass
class Hogwild(Strategy):
    """One set of weights in shared memory, updated by all workers without locks."""

    optimizer_state: Annotated[Literal["private", "shared"], "momentum and the like"] = "private"

    exchanges = "nothing"
    in_step = False
    needs_shared_memory = True
    resumes_exactly = False
    not_private_because = (
        "updates mix number by number in shared memory, in an order that depends on how long each"
        " secret batch took, and nobody has proved what that reveals: use ps:consistency=async"
    )

    def setup(self, ctx: Context, replica: ReplicaLike) -> None:
        super().setup(ctx, replica)
        me, workers = ctx.worker_index, ctx.workers
        board = ctx.transport.allocate(2 * workers * LINE, torch.int64, torch.device("cpu"))
        if workers > 1:
            for index, region in enumerate(replica.regions):
                replica.live_in(index, ctx.peers.share(region.params))
            if self.optimizer_state == "shared":
                share_optimizer(ctx, replica)
            board = ctx.peers.share(board)
        self._board = board.numpy()
        self._others = [w * LINE for w in range(workers) if w != me]
        self._mine, self._flags = me * LINE, workers * LINE
        self._seen = 0

    def _updates_of_others(self) -> int:
        return sum(int(self._board[w]) for w in self._others)

    def _somebody_writes(self) -> bool:
        return any(self._board[self._flags + w] for w in self._others)

    def scale(self, batch: Batch) -> float:
        self._seen = self._updates_of_others()  # the weights are read now
        return 1.0

    def step(self, replica: ReplicaLike, batch: Batch) -> None:
        # where ranks take turns, others come in between reading and writing
        self.ctx.transport.pause()
        board, before = self._board, self._updates_of_others()
        staleness, overlapped = before - self._seen, self._somebody_writes()
        board[self._flags + self._mine] = 1
        if batch.weight:
            replica.update()
        board[self._flags + self._mine] = 0
        board[self._mine] += 1
        overlapped = overlapped or self._somebody_writes() or self._updates_of_others() != before
        self.observed = {"staleness": staleness, "overlapped": overlapped}

    def consensus(self, replica: ReplicaLike) -> None:
        """Its own weights are everybody's, once everybody has come here."""
        self.ctx.peers.barrier()
        average_buffers(self.ctx, replica)


def share_optimizer(ctx: Context, replica: ReplicaLike) -> None:
    """All workers use worker 0's optimizer state, in shared memory: what a checkpoint has restored,
    or that of a beginning.
    """
    optimizer, parameters = replica.optimizer, parameters_of(replica.optimizer)
    new = [p for p in parameters if not optimizer.state.get(p)]
    make_state(optimizer, new)
    for parameter in new:
        if isinstance(step := optimizer.state[parameter].get("step"), Tensor):
            step.zero_()  # making it was not a step
    for parameter in parameters:
        state: dict[str, Any] = optimizer.state[parameter]
        for key in sorted(state):
            value = state[key]
            if isinstance(value, Tensor):
                flat = ctx.transport.allocate(value.numel(), value.dtype, value.device)
                flat.as_strided(value.shape, value.stride()).copy_(value)
                state[key] = ctx.peers.share(flat).as_strided(value.shape, value.stride())
