"""Averaging what workers hold: used by every strategy whose replicas drift apart."""

from __future__ import annotations

from torch import Tensor

from paceline.collectives.base import Collective
from paceline.strategies.base import Context
from paceline.types import ReplicaLike


class Shares:
    """Whose samples count how much since the last average: known to each worker without asking, for shards are pure."""

    def __init__(self) -> None:
        self.own = self.total = 0.0

    def add(self, own: float, total: float) -> None:
        self.own += own
        self.total += total

    def take(self, workers: int) -> float:
        """This worker's share; counting starts anew."""
        share = self.own / self.total if self.total else 1 / workers
        self.own = self.total = 0.0
        return share

    def state(self) -> list[float]:
        return [self.own, self.total]

    def load(self, state: list[float]) -> None:
        self.own, self.total = state


def average_weights(ctx: Context, replica: ReplicaLike, share: float, collective: Collective) -> None:
    """w <- sum_p share_p w_p, in place, on every worker."""
    if ctx.workers == 1:
        return
    for region in replica.regions:
        collective.all_reduce(trained(region.params, region.grads).mul_(share))


def trained(params: Tensor, grads: Tensor) -> Tensor:
    """The part of the parameters that is trained: it comes first, in the order of the gradients."""
    return params[: grads.numel()]


def average_optimizer(ctx: Context, replica: ReplicaLike, share: float) -> None:
    """The same for whatever the optimizer remembers (momentum, squared gradients), tensor by tensor in a fixed order."""
    if ctx.workers == 1:
        return
    for group in replica.optimizer.param_groups:
        for parameter in group["params"]:
            state = replica.optimizer.state.get(parameter, {})
            for key in sorted(state):
                value = state[key]
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1:
                    whole = value.contiguous().mul_(share)
                    ctx.peers.all_reduce(whole)
                    value.copy_(whole)
