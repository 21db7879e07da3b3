"""Step-wise reduce: every step runs only the first half of a ring all-reduce, and each worker
continues with a partial average.

    chunk c visits the ranks c + r, c + r + 1, ...; rank p keeps, for each chunk, the mean over the
    ranks visited up to p

It takes half the bytes and half the rounds of a ring all-reduce, and the replicas drift apart.
`rotate` moves the start r on in every step, so that each worker's values reach every other worker
in turn. Without it the first rank never receives anything, and accuracy suffers (8 to 20 points on
MNIST at lr 0.05: docs/strategies.md). `chunked=false,rotate=false` is the scheme as it is usually
described: worker p continues with the mean of workers 0..p. With `full_every` the weights are
averaged exactly every so many steps; they always are at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor

from paceline.codecs.base import Codec
from paceline.collectives.algorithms.stepwise import counts
from paceline.collectives.base import schedule_of, usual
from paceline.collectives.execute import Executor
from paceline.collectives.schedule import Schedule
from paceline.errors import BadRequest
from paceline.registry import Spec, strategies
from paceline.strategies.base import Context, Strategy, Traits
from paceline.strategies.parts.averaging import average_weights
from paceline.strategies.parts.pattern import Exchange, Reduction, Setting
from paceline.strategies.parts.reference import Reference
from paceline.transport.together import allocate_like
from paceline.types import Batch

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.strategies.parts.saved import Saved


@strategies.register("stepwise")
@dataclass
class StepWise(Strategy):
    """Half an all-reduce in every step: each worker continues with a partial average."""

    chunked: Annotated[bool, "false: the whole buffer from rank to rank"] = True
    rotate: Annotated[bool, "start one rank further on in every step"] = True
    full_every: Annotated[int, "steps between exact averages; 0: only at the end"] = 0
    exchange: Annotated[Literal["weights", "gradients"], "what is averaged"] = "weights"

    traits = Traits(weighs_equally=True, noise_adds_up=False)

    def __post_init__(self) -> None:
        if self.full_every < 0:
            raise BadRequest(f"stepwise: full_every={self.full_every}: it must be 0 or more")
        self.traits = replace(
            self.traits,
            exchanges=self.exchange,
            update_last=self.exchange == "gradients" and not self.full_every,
        )

    def setup(self, ctx: Context, replica: Replica, saved: Saved | None = None) -> None:
        super().setup(ctx, replica, saved)
        # For each start: its executor, and for each chunk the number of ranks that it has visited.
        self._executors: list[tuple[Executor, list[int]]] = []
        for start in range(ctx.workers if self.rotate else 1):
            schedule = schedule_of(
                Spec("stepwise", {"chunked": self.chunked, "start": start}), ctx.workers
            )
            executor = Executor(schedule, ctx.peers, wire=ctx.codec.wire)
            self._executors.append((executor, counts(schedule, ctx.worker_index)))
        self._all_reduce = usual(ctx.peers)
        compresses = not ctx.codec.lossless and self.exchange == "weights"
        self._common = Reference([r.trained for r in replica.regions] if compresses else [])
        self._mean = [allocate_like(ctx.transport, w) for w in self._common.weights]
        if saved is not None:
            saved.fill("common", self._common.weights)

    def refuses(self, codec: Codec) -> str | None:
        if codec.wire is None:
            return (
                f"stepwise sends sums on, and messages of {codec.name} cannot be added: use fp16,"
                " bf16 or int8"
            )
        if codec.feedback:
            return (
                "stepwise sends sums of several workers, which have no error feedback: use"
                " feedback=false"
            )
        return None

    def pattern(self, step: int, setting: Setting) -> Sequence[Exchange]:
        start = step % setting.workers if self.rotate else 0
        options = {"chunked": self.chunked, "start": start}
        part = Reduction(str(Spec("stepwise", options)))
        full = self.full_every and (step + 1) % self.full_every == 0
        follows = setting.compressed and self.exchange == "weights" and setting.ends_epoch(step)
        return (part, Reduction("native", coded=False)) if full or follows else (part,)

    def scale(self, batch: Batch) -> float:
        return 1.0  # each worker's mean gradient; `_divide` averages over workers

    def step(self, replica: Replica, batch: Batch) -> None:
        executor, visited = self._executors[batch.step % len(self._executors)]
        gradients = self.exchange == "gradients"
        if not gradients:
            replica.update()
        buffers = [r.grads if gradients else r.trained for r in replica.regions]
        if self._common.weights:  # a codec encodes the change since the last common weights
            self._common.difference(buffers, buffers)
        for buffer in buffers:
            executor.run(buffer)
            self._divide(buffer, executor.schedule, visited)
        for buffer, common in zip(buffers, self._common.weights, strict=False):
            buffer.add_(common)
        if gradients:
            replica.update(marked=self.ctx.codec.lossless)
        if self.full_every and (batch.step + 1) % self.full_every == 0:
            average_weights(self.ctx, replica, 1 / self.ctx.workers, self._all_reduce)
            if self._common.weights:
                self._common.rebase(buffers)
        elif self._common.weights and batch.ends_epoch:
            self._follow(buffers)

    def _follow(self, weights: Sequence[Tensor]) -> None:
        """Move the common weights to the workers' mean: differences from it stay small.

        The workers keep their own weights. It costs one all-reduce per epoch.
        """
        for mean, own in zip(self._mean, weights, strict=True):
            torch.div(own, self.ctx.workers, out=mean)
            self._all_reduce.all_reduce(mean)
        self._common.rebase(self._mean)

    def _divide(self, buffer: Tensor, schedule: Schedule, visited: list[int]) -> None:
        for chunk, count in enumerate(visited):
            if count > 1:
                low, high = schedule.bounds(chunk, buffer.numel())
                buffer[low:high].div_(count)

    def state(self) -> dict[str, Any]:
        return {"common": self._common.weights}

    def finish(self, replica: Replica) -> None:
        average_weights(self.ctx, replica, 1 / self.ctx.workers, self._all_reduce)
