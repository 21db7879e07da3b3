"""Step-wise reduce: every step the first half of a ring only. A worker goes on with the average *till it*.

    chunk c visits the ranks c + r, c + r + 1, ...; rank p keeps, for each chunk, the mean of those visited up to p

Half the bytes and half the rounds of a ring all-reduce; the replicas drift apart. `rotate` moves the start r on from step to
step, so that everybody is heard by everybody in turn; without it the head of the line never hears anybody, and accuracy
suffers (8 to 20 points on MNIST at lr 0.05: docs/strategies.md). `chunked=false,rotate=false` is the scheme as it is usually
described: worker p goes on with the mean of workers 0..p. `full_every` makes an exact average now and then; there is always one
at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from paceline.collectives.base import schedule_of
from paceline.collectives.execute import Executor
from paceline.collectives.stepwise import counts
from paceline.errors import BadRequest
from paceline.registry import Spec, strategies
from paceline.strategies.averaging import average_weights, trained
from paceline.strategies.base import Context, Strategy
from paceline.types import Batch, ReplicaLike


@strategies.register("stepwise")
@dataclass
class StepWise(Strategy):
    """Half an all-reduce in every step: each worker goes on with the average till it."""

    chunked: Annotated[bool, "false: the whole buffer along the line"] = True
    rotate: Annotated[bool, "the line starts one further on in every step"] = True
    full_every: Annotated[int, "steps between exact averages; 0: at the end only"] = 0
    exchange: Annotated[Literal["weights", "gradients"], "what is averaged"] = "weights"

    def __post_init__(self) -> None:
        if self.full_every < 0:
            raise BadRequest(f"stepwise: full_every={self.full_every}: 0 or more")
        self.exchanges = self.exchange

    def setup(self, ctx: Context, replica: ReplicaLike) -> None:
        super().setup(ctx, replica)
        self._line: list[tuple[Executor, list[int]]] = []  # for each start: what runs it, and how many each chunk has visited
        for start in range(ctx.workers if self.rotate else 1):
            schedule = schedule_of(Spec("stepwise", {"chunked": self.chunked, "start": start}), ctx.workers)
            self._line.append((Executor(schedule, ctx.peers), counts(schedule, ctx.worker_index)))
        self._all = ctx.collective("auto")

    def scale(self, batch: Batch) -> float:
        return 1.0  # each worker's own mean gradient: what arrives is a mean over workers, whatever is exchanged

    def step(self, replica: ReplicaLike, batch: Batch) -> None:
        executor, visited = self._line[batch.step % len(self._line)]
        gradients = self.exchange == "gradients"
        if not gradients:
            replica.update()
        for region in replica.regions:
            buffer = region.grads if gradients else trained(region.params, region.grads)
            executor.run(buffer)
            self._divide(buffer, executor, visited)
        if gradients:
            replica.update()
        if self.full_every and (batch.step + 1) % self.full_every == 0:
            average_weights(self.ctx, replica, 1 / self.ctx.workers, self._all)

    def _divide(self, buffer: torch.Tensor, executor: Executor, visited: list[int]) -> None:
        for chunk, count in enumerate(visited):
            if count > 1:
                low, high = executor.schedule.bounds(chunk, buffer.numel())
                buffer[low:high].div_(count)

    def finish(self, replica: ReplicaLike) -> None:
        average_weights(self.ctx, replica, 1 / self.ctx.workers, self._all)
