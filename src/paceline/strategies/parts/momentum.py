"""Momentum before a codec: each worker keeps its own velocity and sends that.

    v_p <- m v_p + g_p (+ its share of the weight decay)
    send C(v_p) ;   w <- w - lr * sum_p C(v_p)

SGD with momentum is linear, so the sum of the workers' velocities is the velocity of the sum:
without a codec the result is the same. With a biased codec it is not: momentum applied to
compressed and delayed gradients keeps moving where the gradient no longer points (Lin et al., "Deep
Gradient Compression", 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.errors import BadRequest
from paceline.strategies.base import Context

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.strategies.parts.saved import Saved


@dataclass(frozen=True)
class _Rule:
    momentum: float
    nesterov: bool
    weight_decay: float


class Velocity:
    """Applies the momentum and weight decay of an SGD optimizer in place of the optimizer."""

    def __init__(self, replica: Replica) -> None:
        self._groups = replica.optimizer.param_groups
        self._slots = [region.grad_layout.slots for region in replica.regions]
        self._rules = [_Rule(0.0, False, 0.0) for _ in self._groups]
        self._spans: list[list[tuple[int, int, _Rule]]] = []
        self.velocities = [torch.zeros_like(region.grads) for region in replica.regions]
        self._take()

    @classmethod
    def taken(cls, ctx: Context, replica: Replica, saved: Saved | None = None) -> Velocity | None:
        """A `Velocity` if the codec is biased and the optimizer is SGD with momentum; else None.

        It sets the optimizer's momentum and weight decay to 0.
        """
        optimizer = replica.optimizer
        if not ctx.codec.biased or ctx.workers == 1 or not isinstance(optimizer, torch.optim.SGD):
            return None
        groups = optimizer.param_groups
        if not any(g["momentum"] for g in groups) or any(
            g["dampening"] or g["maximize"] for g in groups
        ):
            return None
        velocity = cls(replica)
        if saved is not None:
            saved.fill("velocity", velocity.velocities, "the workers' momentum")
        return velocity

    def _take(self) -> None:
        """Take momentum and weight decay out of the optimizer.

        Every step does it again, because a scheduler may have written them back.
        """
        found = [(g["momentum"], g["nesterov"], g["weight_decay"]) for g in self._groups]
        if self._spans and not any(momentum or decay for momentum, _, decay in found):
            return
        for index, (momentum, nesterov, decay) in enumerate(found):
            before = self._rules[index]
            rule = (
                momentum or before.momentum,
                nesterov or before.nesterov,
                decay or before.weight_decay,
            )
            self._rules[index] = _Rule(*rule)
            self._groups[index].update(momentum=0.0, nesterov=False, weight_decay=0.0)
        self._spans = [_spans(slots, self._rules) for slots in self._slots]

    def advance(self, replica: Replica, share: float) -> None:
        """Advance the velocities, and replace the gradients by what is to be sent.

        The gradients are already multiplied by this worker's share.
        """
        if replica.clip_norm is not None:
            raise BadRequest(
                "clip_norm cannot be combined with momentum and a biased codec, because momentum"
                " would come before the clipping: use --momentum 0"
            )
        self._take()
        for region, velocity, spans in zip(
            replica.regions, self.velocities, self._spans, strict=True
        ):
            weights = region.trained
            for low, high, rule in spans:
                grads, own = region.grads[low:high], velocity[low:high]
                if rule.weight_decay:
                    grads.add_(weights[low:high], alpha=rule.weight_decay * share)
                if rule.momentum:
                    own.mul_(rule.momentum).add_(grads)
                    if rule.nesterov:
                        grads.add_(own, alpha=rule.momentum)
                    else:
                        grads.copy_(own)

    def state(self) -> list[Tensor]:
        return self.velocities


def _spans(slots: Any, rules: list[_Rule]) -> list[tuple[int, int, _Rule]]:
    """Spans of consecutive slots with the same rule."""
    found: list[tuple[int, int, _Rule]] = []
    for slot in slots:
        rule = rules[slot.group]
        if found and found[-1][2] == rule and found[-1][1] == slot.offset:
            found[-1] = (found[-1][0], slot.offset + slot.numel, rule)
        else:
            found.append((slot.offset, slot.offset + slot.numel, rule))
    return found
