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

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from paceline.codecs.base import Codec
from paceline.codecs.hops import EncodedHops, HopCodec
from paceline.collectives.algorithms.stepwise import counts
from paceline.collectives.base import schedule_of
from paceline.collectives.execute import Executor
from paceline.collectives.schedule import Schedule
from paceline.errors import BadRequest
from paceline.registry import Spec, strategies
from paceline.strategies.base import Context, Strategy
from paceline.strategies.parts.averaging import average_weights, trained
from paceline.types import Batch, ReplicaLike


@strategies.register("stepwise")
@dataclass
class StepWise(Strategy):
    """Half an all-reduce in every step: each worker continues with a partial average."""

    chunked: Annotated[bool, "false: the whole buffer from rank to rank"] = True
    rotate: Annotated[bool, "start one rank further on in every step"] = True
    full_every: Annotated[int, "steps between exact averages; 0: only at the end"] = 0
    exchange: Annotated[Literal["weights", "gradients"], "what is averaged"] = "weights"

    noise_adds_up = False

    def __post_init__(self) -> None:
        if self.full_every < 0:
            raise BadRequest(f"stepwise: full_every={self.full_every}: it must be 0 or more")
        self.exchanges = self.exchange

    def setup(self, ctx: Context, replica: ReplicaLike) -> None:
        super().setup(ctx, replica)
        # For each start: its executor, and for each chunk the number of ranks that it has visited.
        self._executors: list[tuple[Executor | EncodedHops, list[int]]] = []
        for start in range(ctx.workers if self.rotate else 1):
            schedule = schedule_of(
                Spec("stepwise", {"chunked": self.chunked, "start": start}), ctx.workers
            )
            executor = (
                Executor(schedule, ctx.peers)
                if ctx.codec.lossless
                else EncodedHops(schedule, ctx.peers, ctx.codec)
            )
            self._executors.append((executor, counts(schedule, ctx.worker_index)))
        self._all_reduce = ctx.collective("auto")
        compresses = not ctx.codec.lossless and self.exchange == "weights"
        self._common = (
            [trained(r.params, r.grads).clone() for r in replica.regions] if compresses else []
        )

    def refuses(self, codec: Codec) -> str | None:
        if not isinstance(codec.plain, HopCodec):
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

    def scale(self, batch: Batch) -> float:
        return 1.0  # each worker's mean gradient; `_divide` averages over workers

    def step(self, replica: ReplicaLike, batch: Batch) -> None:
        executor, visited = self._executors[batch.step % len(self._executors)]
        gradients = self.exchange == "gradients"
        if not gradients:
            replica.update()
        for index, region in enumerate(replica.regions):
            buffer = region.grads if gradients else trained(region.params, region.grads)
            if self._common:  # a codec encodes the change since the last common weights
                buffer.sub_(self._common[index])
            executor.run(buffer)
            self._divide(buffer, executor.schedule, visited)
            if self._common:
                buffer.add_(self._common[index])
        if gradients:
            replica.update(marked=self.ctx.codec.lossless)
        if self.full_every and (batch.step + 1) % self.full_every == 0:
            average_weights(self.ctx, replica, 1 / self.ctx.workers, self._all_reduce)
            for common, region in zip(self._common, replica.regions, strict=False):
                common.copy_(trained(region.params, region.grads))

    def _divide(self, buffer: torch.Tensor, schedule: Schedule, visited: list[int]) -> None:
        for chunk, count in enumerate(visited):
            if count > 1:
                low, high = schedule.bounds(chunk, buffer.numel())
                buffer[low:high].div_(count)

    def state(self) -> dict[str, Any]:
        return {"common": self._common}

    def load_state(self, state: dict[str, Any]) -> None:
        for common, kept in zip(self._common, state["common"], strict=True):
            common.copy_(kept)

    def finish(self, replica: ReplicaLike) -> None:
        average_weights(self.ctx, replica, 1 / self.ctx.workers, self._all_reduce)
