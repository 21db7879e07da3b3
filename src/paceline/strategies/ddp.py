"""PyTorch's DistributedDataParallel on the plain model, as a reference (Li et al., "PyTorch
Distributed", 2020).

DDP takes the *unweighted* mean of the workers' gradients. Each worker's loss is multiplied by
P * share, so that batches of different sizes are weighted by their samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.codecs.base import Codec
from paceline.errors import BadRequest
from paceline.registry import strategies
from paceline.strategies.base import Context, Resumes, Strategy, Traits
from paceline.strategies.parts.end_of_backward import EndOfBackward
from paceline.strategies.parts.pattern import Exchange, Reduction, Setting
from paceline.transport.c10d.sockets import Sockets
from paceline.transport.c10d.transport import timeout_of
from paceline.types import Batch

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.strategies.parts.saved import Saved


@strategies.register("ddp")
@dataclass
class DDP(Strategy):
    """PyTorch's DistributedDataParallel, unchanged, for comparison."""

    bucket_cap_mb: Annotated[int, "DDP's bucket size in MiB"] = 25

    traits = Traits(
        replicas_identical=True,
        flat=False,
        needs_processes=True,
        skips_empty=False,
        update_last=True,
        resumes=Resumes(
            "told",
            after_loss="told",
            damaged="told",
            why="PyTorch's DDP orders its buckets anew after the first step, so that sums of three"
            " or more workers may differ in their last digit from those of an unbroken run",
        ),
        not_private_because=(
            "it exchanges gradients inside the backward pass, before they can be clipped: use"
            " allreduce"
        ),
    )

    def setup(self, ctx: Context, replica: Replica, saved: Saved | None = None) -> None:
        super().setup(ctx, replica, saved)
        if ctx.transport.store is None:
            raise BadRequest(
                f"ddp requires a torch.distributed store, which transport {ctx.transport.kind} does"
                " not have: use --transport gloo"
            )
        patience = ctx.transport.patience
        with patience.blocking("the set-up of DDP"), Sockets() as sockets:
            dist.init_process_group(
                ctx.transport.c10d(),
                store=dist.PrefixStore("ddp", ctx.transport.store),
                rank=ctx.transport.rank,
                world_size=ctx.transport.size,
                timeout=timeout_of(patience),
            )
            # DDP does not copy worker 0's buffers to all in each step: batch statistics are
            # averaged over the workers when they are needed, as with the other strategies.
            wrapper = DistributedDataParallel(
                replica.model, bucket_cap_mb=self.bucket_cap_mb, forward_sync_buffers=False
            )
        self._end = EndOfBackward(wrapper, patience, sockets.shut)
        replica.forward, replica.without_exchange = wrapper, wrapper.no_sync
        self._gradients = sum(p.numel() for p in replica.model.parameters() if p.requires_grad)
        self._itemsize = next(replica.model.parameters()).element_size()

    def refuses(self, codec: Codec) -> str | None:
        return "PyTorch exchanges ddp's gradients, without our codecs: use strategy allreduce"

    def pattern(self, step: int, setting: Setting) -> Sequence[Exchange]:
        """One all-reduce; DDP cuts it into buckets and overlaps it with the backward pass."""
        return (Reduction("native", coded=False),)

    def scale(self, batch: Batch) -> float:
        return batch.share * self.ctx.workers

    def step(self, replica: Replica, batch: Batch) -> None:
        # The all-reduce happened inside the backward pass.
        self._end.over()
        self.ctx.transport.note_all_reduce(self._gradients, self._itemsize)
        replica.update()

    def finish(self, replica: Replica) -> None:
        replica.forward = replica.model
        dist.destroy_process_group()
