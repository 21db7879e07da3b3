"""Two workers average their weights, uncompressed or through a codec.

    both have the reference r ;   a <- C(w_p - r), b <- C(w_q - r) are exchanged
    w_p <- w_p + (b - a) / 2 ;   w_q <- w_q + (a - b) / 2 ;   r <- r + (a + b) / 2

Both workers' weights change by the same amount in opposite directions, so the sum over all workers
is preserved, whatever the codec leaves out. What it leaves out is still part of w - r, so a later
message sends it. Each pair of workers has its own reference. (After CHOCO-SGD, Koloskova et al.,
2019, which has one reference per worker.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.codecs.base import Codec
from paceline.strategies.base import Context
from paceline.strategies.parts.averaging import trained
from paceline.strategies.parts.mailbox import Inbox, Outbox, load_states
from paceline.transport.base import Work
from paceline.transport.metered import Metered
from paceline.types import RegionLike


class Pairing(Protocol):
    """Averages with one partner. Both sides prepare, send, receive and average.

    In asynchronous pairs the worker that sends a request does so first.
    """

    def prepare(self, weights: Sequence[Tensor]) -> None: ...
    def listen(self, transport: Metered, partner: int) -> list[Work]: ...
    def send(self, transport: Metered, partner: int) -> list[Work]: ...
    def receive(self, transport: Metered, partner: int) -> None: ...
    def average(self, weights: Sequence[Tensor]) -> None: ...


def make_pairing(ctx: Context, codec: Codec, regions: Sequence[RegionLike]) -> Pairing:
    return PlainPairing(ctx, regions) if codec.lossless else CodedPairing(ctx, codec, regions)


class PlainPairing:
    """Exchanges the weights themselves."""

    def __init__(self, ctx: Context, regions: Sequence[RegionLike]) -> None:
        own = [trained(r.params, r.grads) for r in regions]
        self._sent = [w.clone() for w in own]
        self._received = [ctx.transport.allocate(w.numel(), w.dtype, w.device) for w in own]
        self._coming: list[Work] = []

    def prepare(self, weights: Sequence[Tensor]) -> None:
        for sent, own in zip(self._sent, weights, strict=True):
            sent.copy_(own)

    def listen(self, transport: Metered, partner: int) -> list[Work]:
        self._coming = [transport.irecv(received, partner) for received in self._received]
        return self._coming

    def send(self, transport: Metered, partner: int) -> list[Work]:
        return [transport.isend(sent, partner) for sent in self._sent]

    def receive(self, transport: Metered, partner: int) -> None:
        for work in self._coming:
            work.wait()

    def average(self, weights: Sequence[Tensor]) -> None:
        for own, received, sent in zip(weights, self._received, self._sent, strict=True):
            own.add_(received.sub_(sent), alpha=0.5)


class CodedPairing:
    """Exchanges encoded differences from a reference that both sides have."""

    def __init__(self, ctx: Context, codec: Codec, regions: Sequence[RegionLike]) -> None:
        some = [r for r in regions if r.grads.numel()]
        own = [trained(r.params, r.grads) for r in some]
        self._there = [bool(r.grads.numel()) for r in regions]
        self.references = [w.clone() for w in own]  # all start from the same weights
        spans = [(r.grad_layout, w) for r, w in zip(some, own, strict=True)]
        self._out, self._in = (
            Outbox(ctx, codec.plain, spans),
            Inbox(ctx, codec.plain, spans),
        )

    def prepare(self, weights: Sequence[Tensor]) -> None:
        """Encode the difference between these weights and the reference."""
        for span, own, reference in zip(
            self._out.encoded, self._some(weights), self.references, strict=True
        ):
            torch.sub(own, reference, out=span.values)
        self._out.write([span.values for span in self._out.encoded])
        for span in self._out.encoded:
            span.read()

    def listen(self, transport: Metered, partner: int) -> list[Work]:
        return self._in.listen(transport, partner)

    def send(self, transport: Metered, partner: int) -> list[Work]:
        return self._out.send(transport, partner)

    def receive(self, transport: Metered, partner: int) -> None:
        self._in.read(transport, partner)

    def average(self, weights: Sequence[Tensor]) -> None:
        """Move the weights by half of the difference; the references stay bit-identical."""
        pairs = zip(
            self._some(weights), self.references, self._out.encoded, self._in.encoded, strict=True
        )
        for own, reference, sent, received in pairs:
            own.add_(received.values, alpha=0.5).sub_(sent.values, alpha=0.5)
            reference.add_(sent.values.add_(received.values), alpha=0.5)

    def _some(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return [w for w, there in zip(weights, self._there, strict=True) if there]

    def state(self) -> dict[str, Any]:
        return {"references": self.references, "codec": self._out.states}

    def load(self, state: dict[str, Any]) -> None:
        for own, kept in zip(self.references, state["references"], strict=True):
            own.copy_(kept)
        load_states(self._out, state["codec"])
