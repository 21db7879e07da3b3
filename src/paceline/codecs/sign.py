"""One bit each, and a scale per tensor: its mean magnitude (signSGD, Bernstein et al., 2018, with
error feedback).

    decoded  x  =  mean|tensor| * sign(x)

A scale for the whole vector instead of one per tensor breaks at larger learning rates: layers
differ too much. With momentum taken before it, and what is left out remembered, it costs next to no
accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from paceline.codecs.base import GatherCodec, State, aligned, part, refuse_nonfinite
from paceline.codecs.packing import blocks
from paceline.registry import codecs
from paceline.types import Layout


@codecs.register("sign")
@dataclass
class Sign(GatherCodec):
    """One bit each, and a scale per tensor."""

    feedback: Annotated[bool, "remember what is left out"] = True

    biased = True

    def message_bytes(self, layout: Layout) -> int:
        return aligned(4 * len(layout.slots) + blocks.packed_bytes(layout.numel, 1))

    def encode(self, values: Tensor, layout: Layout, message: Tensor, state: State) -> int:
        scales, at = part(message, 0, len(layout.slots), torch.float32)
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
        scales, at = part(message, 0, len(layout.slots), torch.float32)
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
        torch.abs(piece, out=aside[: piece.numel()]).sum(dtype=torch.float32)
        for piece in values.split(blocks.SLICE)
    ]
    return torch.stack(sums).sum() / values.numel()
