"""QSGD (Alistarh et al., 2017): a few levels per block, and stochastic rounding, so that the mean
is exact.

    s = 2^(bits-1) - 1 levels
    q = floor(s x / max|block| + u),  u uniform in [0, 1)
    decoded:  q max|block| / s

It is unbiased, so it needs no error feedback, but it adds noise. With 4 bits a byte holds two
numbers, with 2 bits four.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from paceline.codecs.base import GatherCodec, State, aligned, numbers_at, refuse_nonfinite
from paceline.codecs.packing import blocks
from paceline.codecs.packing import random as draws
from paceline.errors import BadRequest
from paceline.registry import codecs
from paceline.types import Layout


@codecs.register("qsgd")
@dataclass
class QSGD(GatherCodec):
    """A few bits per number, with stochastic rounding: unbiased."""

    bits: Annotated[int, "2, 4 or 8"] = 4
    block: Annotated[int, "numbers that share a scale"] = 512
    feedback: Annotated[bool, "error feedback: add the rounding error to the next message"] = False

    def check(self) -> None:
        if self.bits not in (2, 4, 8):
            raise BadRequest(f"qsgd: bits={self.bits}: it must be 2, 4 or 8")
        if self.block < 1 or self.block % (8 // self.bits):
            raise BadRequest(
                f"qsgd: block={self.block}: it must be a multiple of {8 // self.bits}, so that"
                " blocks fill bytes"
            )
        self._generators = draws.Generators()

    def start(
        self, layout: Layout, random: torch.Generator, shared_random: torch.Generator
    ) -> State:
        return draws.start(random)

    def message_bytes(self, layout: Layout) -> int:
        n = layout.numel
        return aligned(4 * blocks.count(n, self.block) + blocks.packed_bytes(n, self.bits))

    def encode(self, values: Tensor, layout: Layout, message: Tensor, state: State) -> int:
        n, device, levels = values.numel(), values.device, 2 ** (self.bits - 1) - 1
        scales, at = numbers_at(message, 0, blocks.count(n, self.block), torch.float32)
        size = max(blocks.SLICE, self.block)
        aside, chance = (
            self.scratch(name, size, torch.float32, device) for name in ("slice", "chance")
        )
        codes = self.scratch("codes", size, torch.int8, device)
        random64 = self.scratch("random", -(-size // 4), torch.int64, device)
        generator = self._generators.seeded(draws.next_seed(state), device)
        for span in blocks.block_spans(n, self.block):
            rows = values[span.start : span.stop].view(span.rows, span.width).float()
            count = rows.numel()
            work, own = aside[:count].view_as(rows), scales[span.first : span.first + span.rows]
            blocks.scale(rows, work, own)
            torch.mul(rows, (levels / own).unsqueeze(1), out=work)
            draws.noise(generator, random64, chance[:count])
            work.view(-1).add_(chance[:count]).floor_().clamp_(-levels, levels).add_(levels)
            codes[:count].copy_(work.view(-1))
            first = at + span.start * self.bits // 8
            target = message[first : first + blocks.packed_bytes(count, self.bits)]
            blocks.pack(codes[:count].view(torch.uint8), self.bits, target)
        refuse_nonfinite(scales, self.name)
        return message.numel()

    def decode(self, message: Tensor, layout: Layout, values: Tensor) -> None:
        n, levels = values.numel(), 2 ** (self.bits - 1) - 1
        scales, at = numbers_at(message, 0, blocks.count(n, self.block), torch.float32)
        codes = self.scratch("decoded", max(blocks.SLICE, self.block), torch.uint8, values.device)
        for span in blocks.block_spans(n, self.block):
            rows = values[span.start : span.stop].view(span.rows, span.width)
            count, first = rows.numel(), at + span.start * self.bits // 8
            blocks.unpack(
                message[first : first + blocks.packed_bytes(count, self.bits)],
                self.bits,
                codes[:count],
            )
            rows.copy_(codes[:count].view_as(rows))
            rows.sub_(levels).mul_(
                (scales[span.first : span.first + span.rows] / levels).unsqueeze(1)
            )
