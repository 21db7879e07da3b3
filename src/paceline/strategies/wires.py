"""Numbers from one rank to one other, through a codec: what parameter servers and gossip send.

`Outbox` and `Inbox` are the two ends for what is sent as it is (gradients). `Outbox.follow` sends weights instead: both ends
know what the other has, and only the difference from that travels, so whatever a message leaves out is still in the next
difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codecs.base import Codec, check_real
from paceline.strategies.base import Context
from paceline.transport.base import Work
from paceline.transport.metered import Metered
from paceline.types import Layout


class Wire:
    """Messages about one stretch of the weights. `like` is such a stretch."""

    def __init__(self, ctx: Context, codec: Codec, layout: Layout, like: Tensor) -> None:
        check_real(layout, like.dtype, codec.name)
        self.codec, self.layout = codec, layout
        self.message = ctx.transport.allocate(codec.message_bytes(layout), torch.uint8, like.device)
        self.values = torch.zeros_like(like)
        self.used = torch.zeros(1, dtype=torch.int64)


class Outbox(Wire):
    def __init__(self, ctx: Context, codec: Codec, layout: Layout, like: Tensor) -> None:
        super().__init__(ctx, codec, layout, like)
        self.state = codec.start(layout, ctx.random, ctx.shared_random)

    def write(self, values: Tensor) -> None:
        with self.codec.clock.encoding():
            self.used.fill_(self.codec.encode(values, self.layout, self.message, self.state))

    def follow(self, weights: Tensor, known: Tensor) -> None:
        """A message about how far the weights are from what the other side knows, which it then knows."""
        torch.sub(weights, known, out=self.values)
        self.write(self.values)
        known.add_(self.said())

    def said(self) -> Tensor:
        """What the message amounts to."""
        with self.codec.clock.decoding():
            self.codec.decode(self.message[: int(self.used)], self.layout, self.values)
        return self.values

    def send(self, line: Metered, to: int) -> list[Work]:
        works = [line.isend(self.used, to)] if self.codec.varies else []
        return [*works, line.isend(self.message[: int(self.used)], to)]


class Inbox(Wire):
    """Receives are made ready before (`listen`), and read when they are there (`read`)."""

    def __init__(self, ctx: Context, codec: Codec, layout: Layout, like: Tensor) -> None:
        super().__init__(ctx, codec, layout, like)
        self.used.fill_(self.message.numel())
        self._coming: Work | None = None

    def listen(self, line: Metered, source: int) -> Work:
        self._coming = line.expect(self.used if self.codec.varies else self.message, source)
        return self._coming

    def read(self, line: Metered, source: int) -> Tensor:
        """What the message says; the tensor is used again by the next one."""
        assert self._coming is not None
        self._coming.wait()
        if self.codec.varies:
            line.expect(self.message[: int(self.used)], source).wait()
        self._coming = None
        with self.codec.clock.decoding():
            self.codec.decode(self.message[: int(self.used)], self.layout, self.values)
        return self.values
