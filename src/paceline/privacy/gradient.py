"""One worker's private gradient: clipped sample by sample, divided by the *expected* batch size,
and noised.

    g_p = scale / b_p * ( sum_i min(1, C / |G_i|) G_i  +  C z N(0, 1) )

z is this worker's noise (guarantee.py) and b_p its expected batch. With `adaptive`, C follows a
quantile of the gradients' lengths:

    C <- C exp(-0.2 (share - wanted share))

where `share` is the noised share of samples that were not clipped. The gradient gets more noise, so
that gradient and share together cost as much epsilon as the gradient alone would (Andrew et al.,
"Differentially Private Learning with Adaptive Clipping", 2021). Where each worker adds only a part
of the noise, C must be the same on all workers, so the share is taken over all workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.data.content import rows
from paceline.errors import BadRequest, NotFinite
from paceline.privacy.bookkeeping import Bookkeeping
from paceline.privacy.checks import refuse_mixing, refuse_unequal_loss
from paceline.privacy.clip import Clipper, Loop
from paceline.privacy.noise import Noise
from paceline.privacy.settings import Settings
from paceline.types import Batch

if TYPE_CHECKING:
    from paceline.replica.replica import Replica

PACE = 0.2  # the rate at which an adaptive clip norm changes
SHARE_NOISE = 1 / 20  # standard deviation of the noised share of samples that were not clipped


class PrivateGradient:
    """Computes the private gradients of one worker.

    noise: this worker's, in units of the clip norm; one of `parts` that make the whole
    expected: the expected size of this worker's batch
    together: where all workers share one clip norm, a function that sums a tensor over them, and
        the expected size of their batches together
    """

    def __init__(
        self,
        replica: Replica,
        settings: Settings,
        noise: float,
        key: bytes,
        expected: int,
        parts: int = 1,
        together: tuple[Callable[[Tensor], None], int] | None = None,
    ) -> None:
        refuse_mixing(replica.model)
        refuse_unequal_loss(replica.loss)
        self.replica, self.settings, self.expected = replica, settings, expected
        self.source = Noise(key)
        self._noise = noise
        kind = Loop if settings.clipping == "loop" else Bookkeeping
        self.clipper: Clipper = kind(
            replica.model, replica.loss, replica.places, settings.clip, settings.per_layer
        )
        self.drawn = 0  # samples in the last step (private)
        self._sum_all = together[0] if together is not None else None
        self._counted = together[1] if together is not None else expected
        self._share: _Share | None = None
        if settings.adaptive:
            self._share = _Share.beside(noise, self._counted if parts > 1 else expected, parts)
            self._noise = self._share.left

    def try_out(self, inputs: Any, targets: Any, samples: int) -> None:
        """Refuse a model or a loss that mixes samples, before the first step."""
        buffers = [b.clone() for b in self.replica.model.buffers()]
        if isinstance(self.clipper, Bookkeeping):
            self.clipper.try_out(self.replica.formatted(inputs), targets, samples)
        else:
            with torch.no_grad():
                self.replica.model(self.replica.formatted(inputs))
        changed = [
            name
            for (name, buffer), before in zip(
                self.replica.model.named_buffers(), buffers, strict=True
            )
            if not torch.equal(buffer, before)
        ]
        if changed:
            raise BadRequest(
                f"privacy: buffer {changed[0]} changes with the data and would be released without"
                " noise: remove it from the model"
            )

    def forward_backward(self, batch: Batch, scale: float) -> float:
        """Put `scale` times the private mean gradient into the flat buffers.

        Returns the mean loss, which is not protected.
        """
        replica, loss = self.replica, 0.0
        lengths = torch.zeros(0)
        self.drawn = 0
        if batch.inputs is None:
            for region in replica.regions:
                region.grads.zero_()
        else:
            self.drawn = rows(batch.targets)
            loss, lengths = self.clipper(replica.formatted(batch.inputs), batch.targets, self.drawn)
            if not math.isfinite(loss):
                raise NotFinite(f"the loss is {loss} at step {batch.step + 1}: try a smaller lr")
        factor = scale / self.expected
        for region in replica.regions:
            if region.grads.numel():
                self.source.add(region.grads, factor, factor * self.clipper.bound * self._noise)
        replica.attach_gradients()
        replica.samples_seen += batch.weight
        if self._share is not None:
            self._follow(lengths)
        return loss

    def _follow(self, lengths: Tensor) -> None:
        """Adapt the clip norm to the lengths of this step's gradients.

        Each sample adds +1/2 (not clipped) or -1/2 to the count, so one sample changes it by at
        most 1/2.
        """
        assert self._share is not None
        halves = float((lengths <= self.clipper.bound).sum()) - len(lengths) / 2
        count = torch.tensor(
            [halves + self._share.noise * self.source.number()], dtype=torch.float64
        )
        if self._sum_all is not None:
            self._sum_all(count)
        unclipped = float(count) / self._counted + 0.5
        self.clipper.bound *= math.exp(-PACE * (unclipped - self.settings.adaptive))

    def state(self) -> dict[str, float]:
        """Return the clip norm, which depends on the data through noised numbers only."""
        return {"clip": self.clipper.bound}

    def load(self, state: dict[str, float]) -> None:
        self.clipper.bound = state["clip"]


@dataclass(frozen=True)
class _Share:
    """How the noise is divided between the gradient and the count of unclipped samples."""

    noise: float  # of the count
    left: float  # of the gradient

    @classmethod
    def beside(cls, noise: float, expected: int, parts: int) -> _Share:
        """Solve 1/z^2 = 1/left^2 + 1/(2 s)^2 for the whole noise z and the count's noise s.

        Each worker adds its part of both.
        """
        whole, own = noise * math.sqrt(parts), SHARE_NOISE * expected
        if whole >= 2 * own:
            raise BadRequest(
                "privacy: adaptive with noise"
                f" {whole:.3g} needs batches of more than {math.ceil(whole / (2 * SHARE_NOISE))};"
                f" {expected} samples are too few"
            )
        left: float = (whole**-2 - (2 * own) ** -2) ** -0.5
        return cls(own / math.sqrt(parts), left / math.sqrt(parts))
