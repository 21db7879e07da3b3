"""PyTorch's DistributedDataParallel on the plain model, as a reference (Li et al., "PyTorch
Distributed", 2020).

DDP takes the *unweighted* mean of the workers' gradients. Each worker's loss is multiplied by
P * share, so that batches of different sizes are weighted by their samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.codecs.base import Codec
from paceline.errors import BadRequest
from paceline.registry import strategies
from paceline.strategies.base import Context, Strategy
from paceline.transport.c10d.store import LONG
from paceline.types import Batch, ReplicaLike


@strategies.register("ddp")
@dataclass
class DDP(Strategy):
    """PyTorch's DistributedDataParallel, unchanged, for comparison."""

    bucket_cap_mb: Annotated[int, "DDP's bucket size in MiB"] = 25

    replicas_identical = True
    not_private_because = (
        "it exchanges gradients inside the backward pass, before they can be clipped: use allreduce"
    )
    flat = False
    needs_processes = True
    skips_empty = False

    def setup(self, ctx: Context, replica: ReplicaLike) -> None:
        super().setup(ctx, replica)
        if ctx.transport.store is None:
            raise BadRequest(
                f"ddp requires a torch.distributed store, which transport {ctx.transport.kind} does"
                " not have: use --transport gloo"
            )
        dist.init_process_group(
            ctx.transport.c10d(),
            store=dist.PrefixStore("ddp", ctx.transport.store),
            rank=ctx.transport.rank,
            world_size=ctx.transport.size,
            timeout=(
                LONG
                if ctx.transport.patience.watched
                else timedelta(seconds=ctx.transport.deadline_s)
            ),
        )
        replica.forward = DistributedDataParallel(replica.model, bucket_cap_mb=self.bucket_cap_mb)
        self._gradients = sum(p.numel() for p in replica.model.parameters() if p.requires_grad)
        self._itemsize = next(replica.model.parameters()).element_size()

    def refuses(self, codec: Codec) -> str | None:
        return "PyTorch exchanges ddp's gradients, without our codecs: use strategy allreduce"

    def scale(self, batch: Batch) -> float:
        return batch.share * self.ctx.workers

    def step(self, replica: ReplicaLike, batch: Batch) -> None:
        # The all-reduce happened inside the backward pass.
        self.ctx.transport.note_all_reduce(self._gradients, self._itemsize)
        replica.update()

    def consensus(self, replica: ReplicaLike) -> None:
        for buffer in replica.model.buffers():
            self.ctx.peers.broadcast(buffer)

    def finish(self, replica: ReplicaLike) -> None:
        replica.forward = replica.model
        dist.destroy_process_group()
