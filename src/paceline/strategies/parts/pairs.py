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
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from paceline.codecs.base import Codec
from paceline.strategies.base import Context
from paceline.strategies.parts.mailbox import Inbox, Outbox
from paceline.strategies.parts.reference import Reference
from paceline.transport.base import Transport, Work

if TYPE_CHECKING:
    from paceline.replica.flat import Region
    from paceline.strategies.parts.saved import Saved


class Pairing(Protocol):
    """Averages with one partner. Both sides prepare, send, receive and average.

    In asynchronous pairs the worker that sends a request does so first.
    """

    def prepare(self, weights: Sequence[Tensor]) -> None: ...
    def listen(self, transport: Transport, partner: int) -> list[Work]: ...
    def send(self, transport: Transport, partner: int) -> list[Work]: ...
    def receive(self, transport: Transport, partner: int) -> None: ...
    def average(self, weights: Sequence[Tensor]) -> None: ...


def make_pairing(ctx: Context, codec: Codec, regions: Sequence[Region]) -> Pairing:
    return PlainPairing(ctx, regions) if codec.lossless else CodedPairing(ctx, codec, regions)


class PlainPairing:
    """Exchanges the weights themselves.

    A region without trainable parameters sends no message. Its receive would be complete at once,
    and a thread that waits for any request would take that for one.
    """

    def __init__(self, ctx: Context, regions: Sequence[Region]) -> None:
        own = _some([r.trained for r in regions])
        self._sent = [ctx.transport.allocate(w.numel(), w.dtype, w.device) for w in own]
        self._received = [ctx.transport.allocate(w.numel(), w.dtype, w.device) for w in own]
        self._coming: list[Work] = []

    def prepare(self, weights: Sequence[Tensor]) -> None:
        for sent, own in zip(self._sent, _some(weights), strict=True):
            sent.copy_(own)

    def listen(self, transport: Transport, partner: int) -> list[Work]:
        self._coming = [transport.expect(received, partner) for received in self._received]
        return self._coming

    def send(self, transport: Transport, partner: int) -> list[Work]:
        return [transport.isend(sent, partner) for sent in self._sent]

    def receive(self, transport: Transport, partner: int) -> None:
        for work in self._coming:
            work.wait()

    def average(self, weights: Sequence[Tensor]) -> None:
        for own, received, sent in zip(_some(weights), self._received, self._sent, strict=True):
            own.add_(received.sub_(sent), alpha=0.5)


class CodedPairing:
    """Exchanges encoded differences from a reference that both sides have."""

    def __init__(
        self,
        ctx: Context,
        codec: Codec,
        regions: Sequence[Region],
        saved: Saved | None = None,
    ) -> None:
        some = [r for r in regions if r.grads.numel()]
        own = [r.trained for r in some]
        self._reference = Reference(own)  # all start from the same weights
        spans = [(r.grad_layout, w) for r, w in zip(some, own, strict=True)]
        self._out, self._in = (
            Outbox(ctx, codec.plain, spans),
            Inbox(ctx, codec.plain, spans),
        )
        if saved is not None:
            saved.fill("references", self._reference.weights)
            self._out.states = saved.states("codec", self._out.states, "what the codec remembers")

    def prepare(self, weights: Sequence[Tensor]) -> None:
        """Encode the difference between these weights and the reference."""
        differences = [span.values for span in self._out.encoded]
        self._reference.difference(_some(weights), differences)
        self._out.write(differences)
        for span in self._out.encoded:
            span.read()

    def listen(self, transport: Transport, partner: int) -> list[Work]:
        return self._in.listen(transport, partner)

    def send(self, transport: Transport, partner: int) -> list[Work]:
        return self._out.send(transport, partner)

    def receive(self, transport: Transport, partner: int) -> None:
        self._in.read(transport, partner)

    def average(self, weights: Sequence[Tensor]) -> None:
        """Move the weights by half of the difference; the references stay bit-identical."""
        pairs = list(zip(_some(weights), self._out.encoded, self._in.encoded, strict=True))
        for own, sent, received in pairs:
            own.add_(received.values, alpha=0.5).sub_(sent.values, alpha=0.5)
        self._reference.advance([s.values.add_(r.values) for _, s, r in pairs], alpha=0.5)

    def state(self) -> dict[str, Any]:
        return {"references": self._reference.weights, "codec": self._out.states}


def _some(weights: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that have elements: a region may have no trainable parameter."""
    return [w for w in weights if w.numel()]
