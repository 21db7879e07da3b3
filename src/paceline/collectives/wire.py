"""Encoded messages of a schedule: what a wire packs, sends, adds and places in each round.

A chunk that the target will add is packed from the sender's values. A final chunk is packed once,
by its owner, which goes on with the unpacked copy; ranks that forward it forward the same bytes. So
all ranks end with the same bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from paceline.collectives.schedule import Schedule
from paceline.transport.base import Message, Transport


class Wire(Protocol):
    """How a span of numbers is written into a message."""

    def length(self, numel: int) -> int:
        """The bytes of a message with `numel` numbers."""

    def pack(self, values: Tensor, message: Tensor) -> None: ...
    def unpack(self, message: Tensor, values: Tensor) -> None: ...
    def encoding(self) -> AbstractContextManager[None]: ...
    def decoding(self) -> AbstractContextManager[None]: ...


@dataclass
class CodedRound:
    """A round with encoded messages: (chunk of the buffer, its bytes) for each that is moved."""

    messages: list[Message] = field(default_factory=list)
    packs: list[tuple[Tensor, Tensor, bool]] = field(default_factory=list)  # and: it is final
    adds: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    places: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def coded_rounds(
    schedule: Schedule, flat: Tensor, memory: CodedMemory, transport: Transport
) -> list[CodedRound]:
    """One rank's rounds on a buffer, with encoded messages. Empty chunks are left out."""
    me, ends = transport.rank, memory.ends
    final: set[int] = set()
    asides = iter(memory.asides)

    def chunk(c: int) -> Tensor:
        low, high = schedule.bounds(c, flat.numel())
        return flat[low:high]

    rounds = []
    for transfers in schedule.rounds:
        round_, arrived = CodedRound(), set()
        for t in transfers:
            low, high = ends[t.start], ends[t.stop]
            chunks = [c for c in range(t.start, t.stop) if ends[c + 1] > ends[c]]
            if not chunks or me not in (t.source, t.target):
                continue
            if t.source == me:
                for c in chunks:
                    if c not in final:
                        encoded = memory.whole[ends[c] : ends[c + 1]]
                        round_.packs.append((chunk(c), encoded, not t.adds))
                        final |= set() if t.adds else {c}
                round_.messages.append(transport.sending(memory.whole[low:high], t.target))
            elif t.adds:
                aside = next(asides)
                spans = [(c, aside[ends[c] - low : ends[c + 1] - low]) for c in chunks]
                round_.adds += [(chunk(c), span) for c, span in spans]
                round_.messages.append(transport.receiving(aside, t.source))
            else:
                spans = [(c, memory.whole[ends[c] : ends[c + 1]]) for c in chunks]
                round_.places += [(chunk(c), span) for c, span in spans]
                round_.messages.append(transport.receiving(memory.whole[low:high], t.source))
                arrived |= set(chunks)
        final |= arrived
        if round_.messages:
            rounds.append(round_)
    return rounds


class CodedMemory:
    """Memory for encoded chunks, back to back, so that one message can hold several."""

    def __init__(
        self, schedule: Schedule, buffer: Tensor, wire: Wire, transport: Transport
    ) -> None:
        self.ends = [0]
        for c in range(schedule.chunks):
            low, high = schedule.bounds(c, buffer.numel())
            self.ends.append(self.ends[-1] + (wire.length(high - low) if high > low else 0))
        lengths = [
            self.ends[t.stop] - self.ends[t.start]
            for transfers in schedule.rounds
            for t in transfers
            if t.target == transport.rank and t.adds and self.ends[t.stop] > self.ends[t.start]
        ]

        def bytes_of(length: int) -> Tensor:
            return transport.allocate(length, torch.uint8, buffer.device)

        self.whole = bytes_of(self.ends[-1])
        self.asides = [bytes_of(length) for length in lengths]
        longest = max((high - low for low, high in _bounds(schedule, buffer)), default=0)
        self.values = torch.empty(longest, dtype=buffer.dtype, device=buffer.device)


def _bounds(schedule: Schedule, buffer: Tensor) -> list[tuple[int, int]]:
    return [schedule.bounds(c, buffer.numel()) for c in range(schedule.chunks)]
