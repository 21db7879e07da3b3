"""Hop codecs decode, add and encode again at every hop of an all-reduce's schedule.

A chunk that the target will add is encoded from the sender's values. A final chunk is encoded once,
by its owner, which continues with the decoded copy. Ranks that forward a final chunk forward the
same bytes. So all ranks end with the same bits.
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
    """A codec that ignores where tensors begin, so it can encode any span of a buffer."""

    kind = "hop"

    @abstractmethod
    def length(self, numel: int) -> int:
        """The bytes of a message with `numel` numbers."""

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
        """Sum along the collective's schedule, or along a ring if it has none."""
        if sent is not None:
            schedule = self.hops(collective).schedule
            message = self.scratch("first", self.length(buffer.numel()), torch.uint8, buffer.device)
            with self.timer.encoding():
                for low, high in (
                    schedule.bounds(chunk, buffer.numel()) for chunk in range(schedule.chunks)
                ):
                    self.pack(buffer[low:high], message)  # by chunk, as the schedule sends them
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
    """What one rank does in one round."""

    leaving: list[tuple[int, bool]]  # chunks to encode and send, and whether each is final
    messages: list[Message]
    adding: list[tuple[int, Tensor]]  # received chunks to add, and the bytes of each
    placing: list[int]  # received chunks that are final


class EncodedHops:
    """Runs a schedule on a transport, with every message encoded by a codec."""

    def __init__(self, schedule: Schedule, transport: Transport, codec: Codec) -> None:
        assert isinstance(codec, HopCodec)
        self.schedule, self.transport, self.codec = schedule, transport, codec
        self._compiled: dict[
            tuple[int, torch.dtype, torch.device], tuple[list[_Round], list[Tensor]]
        ] = {}

    def run(self, buffer: Tensor) -> None:
        key = (buffer.numel(), buffer.dtype, buffer.device)
        if key not in self._compiled:
            self._compiled[key] = self._compile(buffer)
        rounds, encoded = self._compiled[key]
        chunks = [
            buffer[low:high]
            for low, high in (
                self.schedule.bounds(c, buffer.numel()) for c in range(self.schedule.chunks)
            )
        ]
        final: set[int] = set()
        timer = self.codec.timer
        for round_ in rounds:
            with timer.encoding():
                for chunk, stays in round_.leaving:
                    if chunk not in final:
                        self.codec.pack(chunks[chunk], encoded[chunk])
                        if stays:
                            self.codec.unpack(encoded[chunk], chunks[chunk])
                            final.add(chunk)
            with self.transport.together():
                for message in round_.messages:
                    message.start()
            for message in round_.messages:
                message.wait()
            with timer.decoding():
                for chunk, arrived in round_.adding:
                    values = self.codec.scratch(
                        "hop", chunks[chunk].numel(), buffer.dtype, buffer.device
                    )
                    self.codec.unpack(arrived, values)
                    chunks[chunk].add_(values)
                for chunk in round_.placing:
                    self.codec.unpack(encoded[chunk], chunks[chunk])
                    final.add(chunk)

    def _compile(self, buffer: Tensor) -> tuple[list[_Round], list[Tensor]]:
        """The rank's rounds, and memory for the encoded chunks.

        Encoded chunks lie back to back, so that one message can hold several.
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
        encoded = list(whole.split(lengths))

        def byte_span(transfer: Transfer) -> tuple[int, int]:
            return ends[transfer.start], ends[transfer.stop]

        rounds = []
        for transfers in schedule.rounds:
            round_ = _Round([], [], [], [])
            for t in transfers:
                low, high = byte_span(t)
                chunks = [c for c in range(t.start, t.stop) if lengths[c]]
                if not chunks:
                    continue
                if t.source == me:
                    round_.leaving += [(c, not t.adds) for c in chunks]
                    round_.messages.append(transport.sending(whole[low:high], t.target))
                elif t.target == me and t.adds:
                    aside = torch.empty(high - low, dtype=torch.uint8, device=device)
                    round_.adding += [(c, aside[ends[c] - low : ends[c + 1] - low]) for c in chunks]
                    round_.messages.append(transport.receiving(aside, t.source))
                elif t.target == me:
                    round_.placing += chunks
                    round_.messages.append(transport.receiving(whole[low:high], t.source))
            if round_.messages:
                rounds.append(round_)
        return rounds, encoded
