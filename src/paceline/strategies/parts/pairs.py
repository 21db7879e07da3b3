"""Two workers average their weights, as they are or through a codec.

    both know r ;   a <- C(w_p - r), b <- C(w_q - r) are exchanged
    w_p <- w_p + (b - a) / 2 ;   w_q <- w_q + (a - b) / 2 ;   r <- r + (a + b) / 2

What one gains the other loses, so the sum over all workers stays what it was, whatever the codec
leaves out; and what it leaves out is still in w - r, so it goes with a later message. One reference
for each pair that meets. (After CHOCO-SGD, Koloskova et al., 2019, whose references are one for
each worker.)
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


class Meeting(Protocol):
    """With one partner. Both sides prepare, send, hear and average; who asks does so first."""

    def prepare(self, weights: Sequence[Tensor]) -> None: ...
    def listen(self, line: Metered, partner: int) -> list[Work]: ...
    def send(self, line: Metered, partner: int) -> list[Work]: ...
    def hear(self, line: Metered, partner: int) -> None: ...
    def average(self, weights: Sequence[Tensor]) -> None: ...


def meeting(ctx: Context, codec: Codec, regions: Sequence[RegionLike]) -> Meeting:
    return PlainMeeting(ctx, regions) if codec.lossless else CodedMeeting(ctx, codec, regions)


class PlainMeeting:
    """The weights themselves go to and fro."""

    def __init__(self, ctx: Context, regions: Sequence[RegionLike]) -> None:
        own = [trained(r.params, r.grads) for r in regions]
        self._sent = [w.clone() for w in own]
        self._heard = [ctx.transport.allocate(w.numel(), w.dtype, w.device) for w in own]
        self._coming: list[Work] = []

    def prepare(self, weights: Sequence[Tensor]) -> None:
        for sent, own in zip(self._sent, weights, strict=True):
            sent.copy_(own)

    def listen(self, line: Metered, partner: int) -> list[Work]:
        self._coming = [line.irecv(heard, partner) for heard in self._heard]
        return self._coming

    def send(self, line: Metered, partner: int) -> list[Work]:
        return [line.isend(sent, partner) for sent in self._sent]

    def hear(self, line: Metered, partner: int) -> None:
        for work in self._coming:
            work.wait()

    def average(self, weights: Sequence[Tensor]) -> None:
        for own, heard, sent in zip(weights, self._heard, self._sent, strict=True):
            own.add_(heard.sub_(sent), alpha=0.5)


class CodedMeeting:
    """What is far from what both know goes to and fro."""

    def __init__(self, ctx: Context, codec: Codec, regions: Sequence[RegionLike]) -> None:
        some = [r for r in regions if r.grads.numel()]
        own = [trained(r.params, r.grads) for r in some]
        self._there = [bool(r.grads.numel()) for r in regions]
        self.references = [w.clone() for w in own]  # all start from the same weights
        stretches = [(r.grad_layout, w) for r, w in zip(some, own, strict=True)]
        self._out, self._in = (
            Outbox(ctx, codec.plain, stretches),
            Inbox(ctx, codec.plain, stretches),
        )

    def prepare(self, weights: Sequence[Tensor]) -> None:
        """What will be said: how far these weights are from what both know."""
        for wire, own, reference in zip(
            self._out.wires, self._some(weights), self.references, strict=True
        ):
            torch.sub(own, reference, out=wire.values)
        self._out.write([wire.values for wire in self._out.wires])
        for wire in self._out.wires:
            wire.read()

    def listen(self, line: Metered, partner: int) -> list[Work]:
        return self._in.listen(line, partner)

    def send(self, line: Metered, partner: int) -> list[Work]:
        return self._out.send(line, partner)

    def hear(self, line: Metered, partner: int) -> None:
        self._in.read(line, partner)

    def average(self, weights: Sequence[Tensor]) -> None:
        """Half of what one is ahead of the other, in both directions; the same reference on both
        sides, bit for bit.
        """
        pairs = zip(
            self._some(weights), self.references, self._out.wires, self._in.wires, strict=True
        )
        for own, reference, said, heard in pairs:
            own.add_(heard.values, alpha=0.5).sub_(said.values, alpha=0.5)
            reference.add_(said.values.add_(heard.values), alpha=0.5)

    def _some(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return [w for w, there in zip(weights, self._there, strict=True) if there]

    def state(self) -> dict[str, Any]:
        return {"references": self.references, "codec": self._out.states}

    def load(self, state: dict[str, Any]) -> None:
        for own, kept in zip(self.references, state["references"], strict=True):
            own.copy_(kept)
        load_states(self._out, state["codec"])
