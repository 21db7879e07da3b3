"""8 bits per number and one scale per block of numbers: a block's largest magnitude becomes 127.

Every hop decodes, adds and encodes again. Rounding is to the nearest, so an error is at most 1/254
of the block's largest magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from paceline.codecs.base import aligned, numbers_at, refuse_nonfinite
from paceline.codecs.hops import HopCodec
from paceline.codecs.packing import blocks
from paceline.errors import BadRequest
from paceline.registry import codecs


@codecs.register("int8")
@dataclass
class Int8(HopCodec):
    """8 bits per number, and a scale per block."""

    block: Annotated[int, "numbers that share a scale"] = 512
    feedback: Annotated[bool, "error feedback: add the rounding error to the next message"] = False

    def check(self) -> None:
        if self.block < 1:
            raise BadRequest(f"int8: block={self.block}: it must be 1 or more")

    def length(self, numel: int) -> int:
        return aligned(4 * blocks.count(numel, self.block) + numel)

    def pack(self, values: Tensor, message: Tensor) -> None:
        scales, at = numbers_at(message, 0, blocks.count(values.numel(), self.block), torch.float32)
        bytes_, _ = numbers_at(message, at, values.numel(), torch.int8)
        aside = self.scratch("slice", max(blocks.SLICE, self.block), torch.float32, values.device)
        for span in blocks.block_spans(values.numel(), self.block):
            rows = values[span.start : span.stop].view(span.rows, span.width).float()
            work, own = (
                aside[: rows.numel()].view_as(rows),
                scales[span.first : span.first + span.rows],
            )
            blocks.scale(rows, work, own)
            torch.mul(rows, (127 / own).unsqueeze(1), out=work).round_()
            bytes_[span.start : span.stop].view_as(rows).copy_(work)
        refuse_nonfinite(scales, self.name)

    def unpack(self, message: Tensor, values: Tensor) -> None:
        scales, at = numbers_at(message, 0, blocks.count(values.numel(), self.block), torch.float32)
        bytes_, _ = numbers_at(message, at, values.numel(), torch.int8)
        for span in blocks.block_spans(values.numel(), self.block):
            rows = values[span.start : span.stop].view(span.rows, span.width)
            rows.copy_(bytes_[span.start : span.stop].view_as(rows))
            rows.mul_((scales[span.first : span.first + span.rows] / 127).unsqueeze(1))
