"""Messages from one rank to another through a codec, for parameter servers and gossip.

An `Outbox` encodes and sends several spans of the weights at once; an `Inbox` receives and decodes
them. The values are gradients, or, with `write_changes`, differences between weights and the
receiver's copy of them. What one message of differences leaves out is still part of the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.codecs.base import Codec, check_real
from paceline.strategies.base import Context
from paceline.strategies.parts.reference import Reference
from paceline.transport.base import Transport, Work
from paceline.types import Layout

Span = tuple[Layout, Tensor]  # the layout of a span's slots, and a tensor of its length and type


class EncodedSpan:
    """Memory for one span's message and for its decoded values."""

    def __init__(self, ctx: Context, codec: Codec, span: Span) -> None:
        self.layout, like = span
        check_real(self.layout, like.dtype, codec.name)
        self.codec = codec
        self.message = ctx.transport.allocate(
            codec.message_bytes(self.layout), torch.uint8, like.device
        )
        self.values = torch.zeros_like(like)
        self.used = ctx.transport.allocate(1, torch.int64, like.device)
        self.used.fill_(self.message.numel())

    @property
    def filled(self) -> Tensor:
        return self.message[: int(self.used)]

    def read(self) -> Tensor:
        """Decode the message into `values`, which the next message overwrites."""
        with self.codec.timer.decoding():
            self.codec.decode(self.filled, self.layout, self.values)
        return self.values


class Outbox:
    """Encodes values and sends them."""

    def __init__(self, ctx: Context, codec: Codec, spans: Sequence[Span]) -> None:
        self.codec = codec
        self.encoded = [EncodedSpan(ctx, codec, span) for span in spans]
        self.states = [codec.start(layout, ctx.random, ctx.shared_random) for layout, _ in spans]

    def write(self, values: Sequence[Tensor]) -> None:
        with self.codec.timer.encoding():
            for span, state, own in zip(self.encoded, self.states, values, strict=True):
                span.used.fill_(self.codec.encode(own, span.layout, span.message, state))

    def write_changes(self, weights: Sequence[Tensor], known: Reference) -> None:
        """Encode the differences between the weights and the receiver's copy of them.

        `known` is this side's record of that copy; the decoded differences are added to it.
        """
        differences = [span.values for span in self.encoded]
        known.difference(weights, differences)
        self.write(differences)
        known.advance([span.read() for span in self.encoded])

    def send(self, transport: Transport, to: int) -> list[Work]:
        """Send all messages; if their lengths vary, send all lengths first."""
        lengths = (
            [transport.isend(span.used, to) for span in self.encoded] if self.codec.varies else []
        )
        return [*lengths, *(transport.isend(span.filled, to) for span in self.encoded)]


class Inbox:
    """Receives messages: `listen` starts the receives, `read` waits for them and decodes."""

    def __init__(self, ctx: Context, codec: Codec, spans: Sequence[Span]) -> None:
        self.codec = codec
        self.encoded = [EncodedSpan(ctx, codec, span) for span in spans]
        self._coming: list[Work] = []

    def listen(self, transport: Transport, source: int) -> list[Work]:
        self._coming = [
            transport.expect(w.used if self.codec.varies else w.message, source)
            for w in self.encoded
        ]
        return self._coming

    def read(self, transport: Transport, source: int) -> list[Tensor]:
        for work in self._coming:
            work.wait()
        if self.codec.varies:
            for work in [transport.expect(span.filled, source) for span in self.encoded]:
                work.wait()
        self._coming = []
        return [span.read() for span in self.encoded]
