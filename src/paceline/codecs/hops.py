"""Messages that are decoded, added to and encoded again at every hop, along any all-reduce's
schedule.

A chunk that is to be added at its target is encoded from what its sender holds. A chunk that is
final is encoded once, by its owner, who goes on with the decoded copy; whoever passes it on passes
on the same bytes. So all ranks end with the same bits.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.codecs.base import Codec, State
from paceline.collectives.base import Collective, Scheduled, schedule_of
from paceline.collectives.schedule import Schedule, Transfer
from paceline.transport.base import Message, Transport
from paceline.types import Layout


class HopCodec(Codec):
    """A codec that does not care where tensors begin: any stretch of numbers is a message."""

    kind = "hop"

    @abstractmethod
    def length(self, numel: int) -> int:
        """Bytes of a message with so many numbers."""

    @abstractmethod
    def pack(self, values: Tensor, message: Tensor) -> None: ...
    @abstractmethod
    def unpack(self, message: Tensor, values: Tensor) -> None: ...

    def message_bytes(self, layout: Layout) -> int:
        return self.length(layout.numel)

    def encode(self, values: Tensor, layout: Layout, message: Tensor, state: State) -> int:
        self.pack(values, message)
        return self.length(values.numel())

    def decode(self, message: Tensor, layout: Layout, values: Tensor) -> None:
        self.unpack(message, values)

    def reduce(
        self,
        buffer: Tensor,
        layout: Layout,
        collective: Collective,
        state: State,
        sent: Tensor | None = None,
    ) -> None:
        """Along the collective's own schedule, or a ring where it has none."""
        if sent is not None:
            schedule = self.hops(collective).schedule
            message = self.scratch("first", self.length(buffer.numel()), torch.uint8, buffer.device)
            with self.clock.encoding():
                for low, high in (
                    schedule.bounds(chunk, buffer.numel()) for chunk in range(schedule.chunks)
                ):
                    self.pack(buffer[low:high], message)  # chunk by chunk, as they will travel
                    self.unpack(message, sent[low:high])
                buffer.copy_(sent)
        self.hops(collective).run(buffer)

    def hops(self, collective: Collective) -> EncodedHops:
        key = id(collective)
        if key not in self._hops:
            transport = collective.transport
            schedule = (
                collective.schedule
                if isinstance(collective, Scheduled)
                else schedule_of("ring", transport.size)
            )
            self._hops[key] = EncodedHops(schedule, transport, self)
        return self._hops[key]

    def _prepare(self) -> None:
        super()._prepare()
        self._hops: dict[int, EncodedHops] = {}


@dataclass
class _Round:
    """One rank's part of a round: chunks to encode (and whether they are final), messages, and what
    is done with what came.
    """

    leaving: list[tuple[int, bool]]
    messages: list[Message]
    adding: list[tuple[int, Tensor]]  # (chunk, its bytes)
    placing: list[int]


class EncodedHops:
    """A schedule bound to a transport and a codec."""

    def __init__(self, schedule: Schedule, transport: Transport, codec: Codec) -> None:
        assert isinstance(codec, HopCodec)
        self.schedule, self.transport, self.codec = schedule, transport, codec
        self._plans: dict[
            tuple[int, torch.dtype, torch.device], tuple[list[_Round], list[Tensor]]
        ] = {}

    def run(self, buffer: Tensor) -> None:
        key = (buffer.numel(), buffer.dtype, buffer.device)
        if key not in self._plans:
            self._plans[key] = self._plan(buffer)
        rounds, wire = self._plans[key]
        chunks = [
            buffer[low:high]
            for low, high in (
                self.schedule.bounds(c, buffer.numel()) for c in range(self.schedule.chunks)
            )
        ]
        final: set[int] = set()
        clock = self.codec.clock
        for part in rounds:
            with clock.encoding():
                for chunk, stays in part.leaving:
                    if chunk not in final:
                        self.codec.pack(chunks[chunk], wire[chunk])
                        if stays:
                            self.codec.unpack(wire[chunk], chunks[chunk])
                            final.add(chunk)
            with self.transport.together():
                for message in part.messages:
                    message.start()
            for message in part.messages:
                message.wait()
            with clock.decoding():
                for chunk, arrived in part.adding:
                    values = self.codec.scratch(
                        "hop", chunks[chunk].numel(), buffer.dtype, buffer.device
                    )
                    self.codec.unpack(arrived, values)
                    chunks[chunk].add_(values)
                for chunk in part.placing:
                    self.codec.unpack(wire[chunk], chunks[chunk])
                    final.add(chunk)

    def _plan(self, buffer: Tensor) -> tuple[list[_Round], list[Tensor]]:
        """Memory for every chunk's message, back to back, so that several chunks are one
        message.
        """
        schedule, transport, me = self.schedule, self.transport, self.transport.rank
        sizes = [
            high - low
            for low, high in (schedule.bounds(c, buffer.numel()) for c in range(schedule.chunks))
        ]
        lengths = [self.codec.length(size) if size else 0 for size in sizes]
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + length)
        device = buffer.device
        whole = torch.empty(ends[-1], dtype=torch.uint8, device=device)
        wire = list(whole.split(lengths))

        def stretch(transfer: Transfer) -> tuple[int, int]:
            return ends[transfer.start], ends[transfer.stop]

        rounds = []
        for transfers in schedule.rounds:
            part = _Round([], [], [], [])
            for t in transfers:
                low, high = stretch(t)
                chunks = [c for c in range(t.start, t.stop) if lengths[c]]
                if not chunks:
                    continue
                if t.source == me:
                    part.leaving += [(c, not t.adds) for c in chunks]
                    part.messages.append(transport.sending(whole[low:high], t.target))
                elif t.target == me and t.adds:
                    aside = torch.empty(high - low, dtype=torch.uint8, device=device)
                    part.adding += [(c, aside[ends[c] - low : ends[c + 1] - low]) for c in chunks]
                    part.messages.append(transport.receiving(aside, t.source))
                elif t.target == me:
                    part.placing += chunks
                    part.messages.append(transport.receiving(whole[low:high], t.source))
            if part.messages:
                rounds.append(part)
        return rounds, wire
