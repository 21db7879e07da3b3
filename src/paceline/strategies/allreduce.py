"""Synchronous data-parallel SGD: all workers are averaged in every step.

    exchange=gradients   g <- sum_p (b_p / B) g_p ;  w <- w - lr * g    (w is the same on all)
    exchange=weights     w_p <- w - lr * g_p      ;  w <- sum_p (b_p / B) w_p
    when=epoch           gradients are summed over the epoch and applied once: full-batch descent

Worker p has b_p of the step's B samples. The weighted mean of the workers' gradients is the
gradient of the whole batch, so P workers with b samples each follow serial SGD with a batch of P*b,
with any optimizer and any shares b_p / B (Goyal et al., "Accurate, Large Minibatch SGD", 2017).

For plain SGD, averaging weights instead gives the same result. With momentum it does so only if the
shares do not change between steps: each worker has its own velocity, which this step's share
weights although earlier shares made it. The partial last step of an epoch changes the shares,
unless it divides in the same proportions. For Adam, which is not linear, the results differ.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor

from paceline.codecs.base import Codec
from paceline.errors import BadRequest
from paceline.registry import strategies
from paceline.strategies.base import Context, Strategy, Traits
from paceline.strategies.parts.exchange import Exchange
from paceline.strategies.parts.momentum import Velocity
from paceline.strategies.parts.pattern import Exchange as Pattern
from paceline.strategies.parts.pattern import Reduction, Setting
from paceline.strategies.parts.prepared import prepared
from paceline.types import Batch

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.strategies.parts.saved import Saved


@strategies.register("allreduce")
@dataclass
class AllReduce(Strategy):
    """Averages all workers in every step; with exchange=gradients it equals serial SGD on the
    whole batch.
    """

    collective: Annotated[str, "the all-reduce: auto, native, ring, tree, ..."] = "auto"
    exchange: Annotated[Literal["gradients", "weights"], "what is averaged"] = "gradients"
    when: Annotated[
        Literal["step", "epoch"], "epoch: gradients are summed over the epoch and applied once"
    ] = "step"

    traits = Traits(replicas_identical=True)

    def __post_init__(self) -> None:
        if (self.exchange, self.when) == ("weights", "epoch"):
            raise BadRequest(
                f"{self.name}: when=epoch requires exchange=gradients; to average weights once per"
                " epoch, use local-sgd:every=epoch"
            )
        self.traits = replace(
            self.traits,
            exchanges=self.exchange,
            noise_adds_up=self.exchange == "gradients",
            update_last=(self.exchange, self.when) == ("gradients", "step"),
        )

    def setup(self, ctx: Context, replica: Replica, saved: Saved | None = None) -> None:
        super().setup(ctx, replica, saved)
        self._overlaps = (
            ctx.overlap
            and ctx.workers > 1
            and ctx.codec.lossless
            and (self.exchange, self.when) == ("gradients", "step")
        )
        whole = [] if self._overlaps or not ctx.codec.lossless else replica.regions
        self._collective = prepared(ctx, self.collective, [r.grads for r in whole], saved)
        self._exchange = Exchange(
            ctx,
            replica,
            self._collective,
            weights=self.exchange == "weights",
            saved=saved.part("exchange") if saved else None,
        )
        self._velocity = (
            Velocity.taken(ctx, replica, saved) if self.exchange == "gradients" else None
        )
        self._collected = (
            [torch.zeros_like(r.grads) for r in replica.regions] if self.when == "epoch" else []
        )
        self._samples = 0.0
        if saved is not None:
            saved.fill("collected", self._collected, "the sum of this epoch's gradients")
            self._samples = float(saved["samples"]) if saved.own else 0.0
        if self._overlaps:
            # Only the time that `step` waits at the end is counted.
            self._hidden = ctx.peers.aside()
            buckets = replica.all_reduce_in_buckets(self._sum_bucket)
            self._collective = prepared(ctx, self.collective, buckets, saved, self._hidden)
            ctx.peers.settle(self._hidden.take(), 0.0)  # what measuring has sent

    def refuses(self, codec: Codec) -> str | None:
        return None

    def pattern(self, step: int, setting: Setting) -> Sequence[Pattern]:
        if self.when == "epoch" and not setting.ends_epoch(step):
            return ()
        return (Reduction(self.collective),)

    def step(self, replica: Replica, batch: Batch) -> None:
        if self.exchange == "weights":
            replica.update()
            self._exchange.average(replica, batch.share)
        elif self.when == "epoch":
            self._collect(replica, batch)
        elif self._overlaps:
            began = time.perf_counter()
            replica.await_buckets()
            self.ctx.peers.settle(self._hidden.take(), time.perf_counter() - began)
            replica.update()
        else:
            self._sum_gradients(replica, batch)
            replica.update(marked=not self._exchange.compresses)

    def _sum_bucket(self, bucket: Tensor) -> None:
        self._collective.all_reduce(bucket)

    def _sum_gradients(self, replica: Replica, batch: Batch) -> None:
        if self._velocity is not None:
            self._velocity.advance(replica, batch.share)
        self._exchange.sum([region.grads for region in replica.regions])

    def _collect(self, replica: Replica, batch: Batch) -> None:
        """Add this step's gradients, weighted by its samples; update at the end of the epoch."""
        self._samples += batch.global_weight
        for collected, region in zip(self._collected, replica.regions, strict=True):
            collected.add_(region.grads, alpha=batch.global_weight)
        if batch.ends_epoch:
            self._apply(replica, batch)

    def _apply(self, replica: Replica, batch: Batch) -> None:
        for collected, region in zip(self._collected, replica.regions, strict=True):
            region.grads.copy_(collected).div_(self._samples)
            collected.zero_()
        self._samples = 0.0
        self._sum_gradients(replica, batch)
        replica.update(marked=False)

    def skip(self, replica: Replica, batch: Batch) -> None:
        if self.when == "epoch" and batch.ends_epoch and self._samples:
            self._apply(replica, batch)
        else:
            super().skip(replica, batch)

    def state(self) -> dict[str, Any]:
        return {
            "exchange": self._exchange.state(),
            "velocity": self._velocity.state() if self._velocity is not None else [],
            "collective": self._collective.choices,
            "collected": self._collected,
            "samples": self._samples,
        }
