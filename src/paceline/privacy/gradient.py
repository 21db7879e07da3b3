"""One worker's private gradient: clipped sample by sample, divided by the *expected* batch size,
and noised.

    g_p = scale / b_p * ( sum_i min(1, C / |G_i|) G_i  +  C z N(0, 1) )        z: this worker's noise (guarantee.py)

With `adaptive`, C follows a quantile of the lengths: C <- C exp(-0.2 (share that was not clipped,
noised - wanted share)). The share costs a part of the noise, so that both together cost what the
noise alone would (Andrew et al., "Differentially Private Learning with Adaptive Clipping", 2021).
Where noise joins in the sum, so must C: the share is then of all workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.data.batches import rows
from paceline.errors import BadRequest, NotFinite
from paceline.objectives.losses import Loss
from paceline.privacy.bookkeeping import Bookkeeping
from paceline.privacy.checks import refuse_mixing, refuse_unequal_loss
from paceline.privacy.clip import Clipper, Loop
from paceline.privacy.noise import Noise
from paceline.privacy.settings import Settings
from paceline.types import Batch, RegionLike

PACE = 0.2  # of an adaptive clip norm
SHARE_NOISE = (
    1 / 20
)  # of the share that was not clipped: the standard deviation of the count over the expected batch


class Trained(Protocol):
    """What is needed of a replica."""

    model: nn.Module
    loss: Loss
    samples_seen: float

    @property
    def regions(self) -> Sequence[RegionLike]: ...
    @property
    def places(self) -> Sequence[tuple[nn.Parameter, Tensor]]: ...
    def formatted(self, inputs: Any) -> Any: ...
    def attach_gradients(self) -> None: ...


class PrivateGradient:
    """`noise`: of this worker, in units of the clip norm, one of `parts` that make the whole;
    `expected`: its batch.

    `together`: where all workers have one clip norm, how numbers are summed over them, and the
    expected batch of all.
    """

    def __init__(
        self,
        replica: Trained,
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
        self.drawn = 0  # in the last step; private
        self._sum_all = together[0] if together is not None else None
        self._counted = together[1] if together is not None else expected
        self._share: _Share | None = None
        if settings.adaptive:
            self._share = _Share.beside(noise, self._counted if parts > 1 else expected, parts)
            self._noise = self._share.left

    def try_out(self, inputs: Any, targets: Any, samples: int) -> None:
        """Refuse a model or a loss in which samples are not apart, before anything is trained."""
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
                f"privacy: buffer {changed[0]} changes with the data, and would be released as it"
                " is: leave it out"
            )

    def forward_backward(self, batch: Batch, scale: float) -> float:
        """As a replica's: gradients in the flat buffers, for `scale` times the mean; returns the
        mean loss (private).
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
        """Every sample adds +1/2 (not clipped) or -1/2, so that the count changes by a half at most
        with any one of them.
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
        """Nothing secret: the clip norm follows noised numbers."""
        return {"clip": self.clipper.bound}

    def load(self, state: dict[str, float]) -> None:
        self.clipper.bound = state["clip"]


@dataclass(frozen=True)
class _Share:
    """The noise of the count of samples that were not clipped, and what of the noise is left for
    the gradient.
    """

    noise: float
    left: float

    @classmethod
    def beside(cls, noise: float, expected: int, parts: int) -> _Share:
        """1/z^2 = 1/left^2 + 1/(2 s)^2 for the whole noise z and the count's s; each worker adds
        its part of both.
        """
        whole, own = noise * math.sqrt(parts), SHARE_NOISE * expected
        if whole >= 2 * own:
            raise BadRequest(
                "privacy: adaptive needs batches of more than"
                f" {math.ceil(whole / (2 * SHARE_NOISE))} with noise {whole:.3g}: {expected} is too"
                " few to count in"
            )
        left: float = (whole**-2 - (2 * own) ** -2) ** -0.5
        return cls(own / math.sqrt(parts), left / math.sqrt(parts))
