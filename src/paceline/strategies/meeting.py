"""Two workers average their weights through a codec.

    both know r ;   a <- C(w_p - r), b <- C(w_q - r) are exchanged
    w_p <- w_p + (b - a) / 2 ;   w_q <- w_q + (a - b) / 2 ;   r <- r + (a + b) / 2

What one gains the other loses, so the sum over all workers stays what it was, whatever the codec leaves out; and what it
leaves out is still in w - r, so it goes with a later message. One reference for each pair that meets. (After CHOCO-SGD,
Koloskova et al., 2019, whose references are one for each worker.)
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from paceline.codecs.base import Codec
from paceline.strategies.averaging import trained
from paceline.strategies.base import Context
from paceline.strategies.wires import Inbox, Outbox
from paceline.transport.base import Work
from paceline.transport.metered import Metered
from paceline.types import RegionLike


class Meeting(Protocol):
    """One region's weights, and one partner. Both sides prepare, send, hear and average; who asks does so first."""

    def prepare(self, weights: Tensor) -> None: ...
    def listen(self, line: Metered, partner: int) -> Work: ...
    def send(self, line: Metered, partner: int) -> list[Work]: ...
    def hear(self, line: Metered, partner: int) -> None: ...
    def average(self, weights: Tensor) -> None: ...


def meeting(ctx: Context, codec: Codec, region: RegionLike) -> Meeting:
    return PlainMeeting(ctx, region) if codec.lossless else CodedMeeting(ctx, codec, region)


class PlainMeeting:
    """The weights themselves go to and fro."""

    def __init__(self, ctx: Context, region: RegionLike) -> None:
        own = trained(region.params, region.grads)
        self._sent = own.clone()
        self._heard = ctx.transport.allocate(own.numel(), own.dtype, own.device)

    def prepare(self, weights: Tensor) -> None:
        self._sent.copy_(weights)

    def listen(self, line: Metered, partner: int) -> Work:
        self._coming = line.irecv(self._heard, partner)
        return self._coming

    def send(self, line: Metered, partner: int) -> list[Work]:
        return [line.isend(self._sent, partner)]

    def hear(self, line: Metered, partner: int) -> None:
        self._coming.wait()

    def average(self, weights: Tensor) -> None:
        weights.add_(self._heard.sub_(self._sent), alpha=0.5)


class CodedMeeting:
    """What is far from what both know goes to and fro."""

    def __init__(self, ctx: Context, codec: Codec, region: RegionLike) -> None:
        own = trained(region.params, region.grads)
        self.reference = own.clone()  # all start from the same weights
        self._own = Outbox(ctx, codec.plain, region.grad_layout, own)
        self._other = Inbox(ctx, codec.plain, region.grad_layout, own)

    def prepare(self, weights: Tensor) -> None:
        """What will be said: how far these weights are from what both know."""
        torch.sub(weights, self.reference, out=self._own.values)
        self._own.write(self._own.values)
        self._own.said()

    def listen(self, line: Metered, partner: int) -> Work:
        return self._other.listen(line, partner)

    def send(self, line: Metered, partner: int) -> list[Work]:
        return self._own.send(line, partner)

    def hear(self, line: Metered, partner: int) -> None:
        self._other.read(line, partner)

    def average(self, weights: Tensor) -> None:
        """Half of what one is ahead of the other, in both directions; the same reference on both sides, bit for bit."""
        own, other = self._own.values, self._other.values
        weights.add_(other, alpha=0.5).sub_(own, alpha=0.5)
        self.reference.add_(own.add_(other), alpha=0.5)
