"""Half of the bits: 16 instead of 32.

`fp16` has 11 bits of precision and ends at 65,504; `bf16` has 8 bits and float32's range. Sums are
made in the same 16 bits at every hop, as decode, add, encode would; the owner of a chunk rounds its
sum once, so replicas stay identical.
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
from paceline.registry import codecs
from paceline.types import Layout


class Half(HopCodec):
    """A subclass says which 16 bits. Any all-reduce can add them as they are."""

    wire: ClassVar[torch.dtype]

    def length(self, numel: int) -> int:
        return aligned(2 * numel)

    def pack(self, values: Tensor, message: Tensor) -> None:
        halves = message[: 2 * values.numel()].view(self.wire)
        halves.copy_(values)
        aside = self.scratch(
            "magnitudes", min(values.numel(), 2 * blocks.SLICE), self.wire, values.device
        )
        for some in halves.split(2 * blocks.SLICE) if halves.numel() else ():
            refuse_nonfinite(torch.abs(some, out=aside[: some.numel()]).amax(), self.name)

    def unpack(self, message: Tensor, values: Tensor) -> None:
        values.copy_(message[: 2 * values.numel()].view(self.wire))

    def reduce(
        self,
        buffer: Tensor,
        layout: Layout,
        collective: Collective,
        state: State,
        sent: Tensor | None = None,
    ) -> None:
        if not isinstance(collective, Scheduled) and not collective.transport.adds(self.wire):
            super().reduce(
                buffer, layout, collective, state, sent
            )  # hop by hop: the transport cannot add such numbers itself
            return
        halves = self.scratch("halves", buffer.numel(), self.wire, buffer.device)
        with self.clock.encoding():
            halves.copy_(buffer)
            if sent is not None:
                sent.copy_(halves)
        collective.all_reduce(halves)
        with self.clock.decoding():
            buffer.copy_(halves)
            refuse_nonfinite(buffer.sum(), self.name)


@codecs.register("fp16")
@dataclass
class Float16(Half):
    """16 bits, 11 of them for precision; numbers up to 65,504."""

    feedback: Annotated[bool, "remember what is rounded off"] = False
    wire = torch.float16


@codecs.register("bf16")
@dataclass
class BFloat16(Half):
    """16 bits, 8 of them for precision; float32's range."""

    feedback: Annotated[bool, "remember what is rounded off"] = False
    wire = torch.bfloat16
