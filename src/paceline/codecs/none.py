"""No compression: the buffer itself is sent."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.codecs.base import Codec, State, aligned
from paceline.collectives.base import Collective
from paceline.collectives.moves import Sum
from paceline.registry import codecs
from paceline.types import Layout


@codecs.register("none")
@dataclass
class NoCodec(Codec):
    """The numbers themselves, uncompressed."""

    kind = "none"
    lossless = True

    def message_bytes(self, layout: Layout) -> int:
        return aligned(8 * layout.numel)  # enough for the widest numbers

    def encode(self, values: Tensor, layout: Layout, message: Tensor, state: State) -> int:
        message[: values.nbytes].view(values.dtype).copy_(values)
        return values.nbytes

    def decode(self, message: Tensor, layout: Layout, values: Tensor) -> None:
        values.copy_(message[: values.nbytes].view(values.dtype))

    def sums(self, layout: Layout, schedule: str, workers: int) -> tuple[Sum, ...]:
        return (Sum(schedule, layout.numel, 4),)

    def reduce(
        self,
        buffer: Tensor,
        layout: Layout,
        collective: Collective,
        state: State,
        sent: Tensor | None = None,
    ) -> None:
        if sent is not None:
            sent.copy_(buffer)
        collective.all_reduce(buffer)
