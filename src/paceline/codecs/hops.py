"""Hop codecs decode, add and encode again at every hop of an all-reduce's schedule: each is a
`Wire` of the executor.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from paceline.codecs.base import Codec, State
from paceline.collectives.base import Collective
from paceline.collectives.moves import Sum
from paceline.collectives.wire import Wire
from paceline.types import Layout


class HopCodec(Codec):
    """A codec that ignores where tensors begin, so it can encode any span of a buffer."""

    kind = "hop"

    @property
    def wire(self) -> Wire:
        return self

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

    def sums(self, layout: Layout, schedule: str, workers: int) -> tuple[Sum, ...]:
        return (Sum(schedule, layout.numel, 4, self),)

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
            schedule = collective.schedule
            message = self.scratch("first", self.length(buffer.numel()), torch.uint8, buffer.device)
            with self.timer.encoding():
                for low, high in (
                    schedule.bounds(chunk, buffer.numel()) for chunk in range(schedule.chunks)
                ):
                    self.pack(buffer[low:high], message)  # by chunk, as the schedule sends them
                    self.unpack(message, sent[low:high])
                buffer.copy_(sent)
        collective.over(self).run(buffer)

    def encoding(self) -> AbstractContextManager[None]:
        return self.timer.encoding()

    def decoding(self) -> AbstractContextManager[None]:
        return self.timer.decoding()
