"""8 bits and one scale for every block of numbers: the block's largest magnitude is 127.

Decoded, added and encoded again at every hop; rounding is to the nearest, so an error is at most
1/254 of the block's largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from paceline.codecs.base import aligned, part, refuse_nonfinite
from paceline.codecs.hops import HopCodec
from paceline.codecs.packing import blocks
from paceline.errors import BadRequest
from paceline.registry import codecs


@codecs.register("int8")
@dataclass
class Int8(HopCodec):
    """8 bits, and a scale for every block."""

    block: Annotated[int, "numbers that share a scale"] = 512
    feedback: Annotated[bool, "remember what is rounded off"] = False

    def check(self) -> None:
        if self.block < 1:
            raise BadRequest(f"int8: block={self.block}: 1 or more")

    def length(self, numel: int) -> int:
        return aligned(4 * blocks.count(numel, self.block) + numel)

    def pack(self, values: Tensor, message: Tensor) -> None:
        scales, at = part(message, 0, blocks.count(values.numel(), self.block), torch.float32)
        bytes_, _ = part(message, at, values.numel(), torch.int8)
        aside = self.scratch("slice", max(blocks.SLICE, self.block), torch.float32, values.device)
        for piece in blocks.pieces(values.numel(), self.block):
            rows = values[piece.start : piece.stop].view(piece.rows, piece.width).float()
            work, own = (
                aside[: rows.numel()].view_as(rows),
                scales[piece.first : piece.first + piece.rows],
            )
            blocks.scale(rows, work, own)
            torch.mul(rows, (127 / own).unsqueeze(1), out=work).round_()
            bytes_[piece.start : piece.stop].view_as(rows).copy_(work)
        refuse_nonfinite(scales, self.name)

    def unpack(self, message: Tensor, values: Tensor) -> None:
        scales, at = part(message, 0, blocks.count(values.numel(), self.block), torch.float32)
        bytes_, _ = part(message, at, values.numel(), torch.int8)
        for piece in blocks.pieces(values.numel(), self.block):
            rows = values[piece.start : piece.stop].view(piece.rows, piece.width)
            rows.copy_(bytes_[piece.start : piece.stop].view_as(rows))
            rows.mul_((scales[piece.first : piece.first + piece.rows] / 127).unsqueeze(1))
