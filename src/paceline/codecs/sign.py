"""One bit per number, and a scale per tensor: its mean magnitude (signSGD, Bernstein et al., 2018,
with error feedback).

    decoded  x  =  mean|tensor| * sign(x)

One scale for the whole vector fails at larger learning rates, because layers differ too much. With
momentum applied before the codec, and with error feedback, it costs next to no accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from paceline.codecs.base import GatherCodec, State, aligned, numbers_at, refuse_nonfinite
from paceline.codecs.packing import blocks
from paceline.registry import codecs
from paceline.types import Layout


@codecs.register("sign")
@dataclass
class Sign(GatherCodec):
    """One bit per number, and a scale per tensor."""

    feedback: Annotated[bool, "error feedback: add what is left out to the next message"] = True

    biased = True

    def message_bytes(self, layout: Layout) -> int:
        return aligned(4 * len(layout.slots) + blocks.packed_bytes(layout.numel, 1))

    def encode(self, values: Tensor, layout: Layout, message: Tensor, state: State) -> int:
        scales, at = numbers_at(message, 0, len(layout.slots), torch.float32)
        aside = self.scratch("slice", blocks.SLICE, values.dtype, values.device)
        flags = self.scratch("flags", blocks.SLICE, torch.bool, values.device)
        for index, slot in enumerate(layout.slots):
            scales[index] = _mean_magnitude(slot.span(values), aside)
        for start in range(0, values.numel(), blocks.SLICE):
            here = values[start : start + blocks.SLICE]
            torch.signbit(here, out=flags[: here.numel()])
            first = at + start // 8
            blocks.pack_bits(
                flags[: here.numel()], message[first : first + blocks.packed_bytes(here.numel(), 1)]
            )
        refuse_nonfinite(scales, self.name)
        return message.numel()

    def decode(self, message: Tensor, layout: Layout, values: Tensor) -> None:
        scales, at = numbers_at(message, 0, len(layout.slots), torch.float32)
        for start in range(0, values.numel(), blocks.SLICE):
            here, first = values[start : start + blocks.SLICE], at + start // 8
            bits = blocks.unpack_bits(
                message[first : first + blocks.packed_bytes(here.numel(), 1)], here.numel()
            )
            here.copy_(bits).mul_(-2).add_(1)
        for slot, scale in zip(layout.slots, scales.tolist(), strict=True):
            slot.span(values).mul_(scale)


def _mean_magnitude(values: Tensor, aside: Tensor) -> float | Tensor:
    if not values.numel():
        return 0.0
    sums = [
        torch.abs(span, out=aside[: span.numel()]).sum(dtype=torch.float32)
        for span in values.split(blocks.SLICE)
    ]
    return torch.stack(sums).sum() / values.numel()
