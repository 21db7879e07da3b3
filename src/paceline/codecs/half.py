"""16 bits per number instead of 32.

`fp16` has 11 bits of precision and numbers up to 65,504. `bf16` has 8 bits of precision and
float32's range. Every hop adds in the same 16 bits, as decode, add, encode would. The owner of a
chunk rounds its sum once, so replicas stay identical.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from paceline.codecs.base import State, aligned, refuse_nonfinite
from paceline.codecs.hops import HopCodec
from paceline.codecs.packing import blocks
from paceline.collectives.base import Collective, Scheduled
from paceline.collectives.moves import Sum
from paceline.registry import codecs
from paceline.types import Layout


class Half(HopCodec):
    """A subclass defines the 16-bit type. Any all-reduce can add such numbers."""

    wire_dtype: ClassVar[torch.dtype]

    def length(self, numel: int) -> int:
        return aligned(2 * numel)

    def pack(self, values: Tensor, message: Tensor) -> None:
        halves = message[: 2 * values.numel()].view(self.wire_dtype)
        halves.copy_(values)
        aside = self.scratch(
            "magnitudes", min(values.numel(), 2 * blocks.SLICE), self.wire_dtype, values.device
        )
        for some in halves.split(2 * blocks.SLICE) if halves.numel() else ():
            refuse_nonfinite(torch.abs(some, out=aside[: some.numel()]).amax(), self.name)

    def unpack(self, message: Tensor, values: Tensor) -> None:
        values.copy_(message[: 2 * values.numel()].view(self.wire_dtype))

    def sums(self, layout: Layout, schedule: str, workers: int) -> tuple[Sum, ...]:
        return (Sum(schedule, layout.numel, self.wire_dtype.itemsize),)

    def reduce(
        self,
        buffer: Tensor,
        layout: Layout,
        collective: Collective,
        state: State,
        sent: Tensor | None = None,
    ) -> None:
        if not isinstance(collective, Scheduled) and not collective.transport.adds(self.wire_dtype):
            # The transport's all-reduce cannot add such numbers: decode and encode at every hop.
            super().reduce(buffer, layout, collective, state, sent)
            return
        transport, numel = collective.transport, buffer.numel()
        halves = self.scratch("halves", numel, self.wire_dtype, buffer.device, transport)
        with self.timer.encoding():
            halves.copy_(buffer)
            if sent is not None:
                sent.copy_(halves)
        collective.all_reduce(halves)
        with self.timer.decoding():
            buffer.copy_(halves)
            refuse_nonfinite(buffer.sum(), self.name)


@codecs.register("fp16")
@dataclass
class Float16(Half):
    """16 bits, 11 of them for precision; numbers up to 65,504."""

    feedback: Annotated[bool, "error feedback: add the rounding error to the next message"] = False
    wire_dtype = torch.float16


@codecs.register("bf16")
@dataclass
class BFloat16(Half):
    """16 bits, 8 of them for precision; float32's range."""

    feedback: Annotated[bool, "error feedback: add the rounding error to the next message"] = False
    wire_dtype = torch.bfloat16
