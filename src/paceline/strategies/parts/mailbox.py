"""Numbers from one rank to one other, through a codec: what parameter servers and gossip send.

`Outbox` and `Inbox` are the two ends, each for some stretches of the weights at once. What is sent
may be values (gradients), or, by `follow`, how far weights are from what the other side knows of
them: whatever a message leaves out is then still in the next difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.codecs.base import Codec, check_real
from paceline.strategies.base import Context
from paceline.transport.base import Work
from paceline.transport.metered import Metered
from paceline.types import Layout

Stretch = tuple[Layout, Tensor]  # where its tensors lie, and something as long as it is


class Wire:
    """Messages about one stretch."""

    def __init__(self, ctx: Context, codec: Codec, stretch: Stretch) -> None:
        self.layout, like = stretch
        check_real(self.layout, like.dtype, codec.name)
        self.codec = codec
        self.message = ctx.transport.allocate(
            codec.message_bytes(self.layout), torch.uint8, like.device
        )
        self.values = torch.zeros_like(like)
        self.used = torch.full((1,), self.message.numel(), dtype=torch.int64, device=like.device)

    @property
    def filled(self) -> Tensor:
        return self.message[: int(self.used)]

    def read(self) -> Tensor:
        """What the message says; the tensor is used again by the next one."""
        with self.codec.timer.decoding():
            self.codec.decode(self.filled, self.layout, self.values)
        return self.values


class Outbox:
    def __init__(self, ctx: Context, codec: Codec, stretches: Sequence[Stretch]) -> None:
        self.codec = codec
        self.wires = [Wire(ctx, codec, stretch) for stretch in stretches]
        self.states = [
            codec.start(layout, ctx.random, ctx.shared_random) for layout, _ in stretches
        ]

    def write(self, values: Sequence[Tensor]) -> None:
        with self.codec.timer.encoding():
            for wire, state, own in zip(self.wires, self.states, values, strict=True):
                wire.used.fill_(self.codec.encode(own, wire.layout, wire.message, state))

    def follow(self, weights: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        """Messages about how far the weights are from what the other side knows, which it then
        knows.
        """
        for wire, own, theirs in zip(self.wires, weights, known, strict=True):
            torch.sub(own, theirs, out=wire.values)
        self.write([wire.values for wire in self.wires])
        for wire, theirs in zip(self.wires, known, strict=True):
            theirs.add_(wire.read())

    def send(self, line: Metered, to: int) -> list[Work]:
        """All lengths before all messages, where they differ: the other side must know them to be
        ready.
        """
        lengths = [line.isend(wire.used, to) for wire in self.wires] if self.codec.varies else []
        return [*lengths, *(line.isend(wire.filled, to) for wire in self.wires)]


class Inbox:
    """Receives are made ready before (`listen`), and read when they are there (`read`)."""

    def __init__(self, ctx: Context, codec: Codec, stretches: Sequence[Stretch]) -> None:
        self.codec = codec
        self.wires = [Wire(ctx, codec, stretch) for stretch in stretches]
        self._coming: list[Work] = []

    def listen(self, line: Metered, source: int) -> list[Work]:
        self._coming = [
            line.expect(w.used if self.codec.varies else w.message, source) for w in self.wires
        ]
        return self._coming

    def read(self, line: Metered, source: int) -> list[Tensor]:
        for work in self._coming:
            work.wait()
        if self.codec.varies:
            for work in [line.expect(wire.filled, source) for wire in self.wires]:
                work.wait()
        self._coming = []
        return [wire.read() for wire in self.wires]


def load_states(outbox: Outbox, states: Sequence[dict[str, Any]]) -> None:
    """What the codec remembered in an earlier run; nothing, where that was cut otherwise."""
    if len(states) == len(outbox.states):
        outbox.states = list(states)
