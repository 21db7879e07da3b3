"""Blocks of numbers that share one scale, and bits packed into bytes, for quantising codecs.

Long vectors are processed in spans that fit into a core's cache, so that every pass but the first
is cheap.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SLICE = 1 << 17  # elements
SMALLEST = 1e-30  # the least scale, which avoids division by zero


class BlockSpan(NamedTuple):
    """A span of a vector: `rows` blocks, one per row. The vector's last block may be shorter."""

    start: int
    stop: int
    rows: int
    first: int  # the index of its first block

    @property
    def width(self) -> int:
        return (self.stop - self.start) // self.rows


def block_spans(numel: int, block: int) -> Iterator[BlockSpan]:
    whole, step = numel // block, max(1, SLICE // block)
    for first in range(0, whole, step):
        rows = min(step, whole - first)
        yield BlockSpan(first * block, (first + rows) * block, rows, first)
    if numel % block:
        yield BlockSpan(whole * block, numel, 1, whole)


def count(numel: int, block: int) -> int:
    return -(-numel // block)


def scale(rows: Tensor, aside: Tensor, out: Tensor) -> None:
    """Write the largest magnitude of each row to `out`."""
    torch.amax(torch.abs(rows, out=aside), dim=1, out=out)
    out.clamp_min_(SMALLEST)  # NaN stays NaN


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Pack numbers below 2**bits (uint8) into bytes: byte i holds numbers i, i + length/per, ..."""
    per = 8 // bits
    short = out.numel()
    out.copy_(codes[:short])
    for turn in range(1, per):
        span = codes[turn * short : (turn + 1) * short]
        out[: span.numel()].add_(span, alpha=1 << (bits * turn))


def unpack(packed: Tensor, bits: int, codes: Tensor) -> None:
    """Unpack into `codes` what `pack` packed."""
    per, short = 8 // bits, packed.numel()
    for turn in range(per):
        span = codes[turn * short : (turn + 1) * short]
        torch.bitwise_right_shift(packed[: span.numel()], bits * turn, out=span)
    codes.bitwise_and_((1 << bits) - 1)


def packed_bytes(numel: int, bits: int) -> int:
    return -(-numel * bits // 8)


def pack_bits(flags: Tensor, out: Tensor) -> None:
    """Pack flags into bits, the first one into the lowest bit of the first byte."""
    if flags.device.type == "cpu":
        out.copy_(torch.from_numpy(np.packbits(flags.numpy(), bitorder="little")))
        return
    padded = torch.zeros(8 * out.numel(), dtype=torch.uint8, device=flags.device)
    padded[: flags.numel()] = flags
    weights = 2 ** torch.arange(8, device=flags.device)
    out.copy_((padded.view(-1, 8) * weights).sum(1))


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """Unpack bits into uint8 numbers, 0 or 1."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=numel, bitorder="little"))
    return ((packed.view(-1, 1) >> torch.arange(8, device=packed.device)) & 1).reshape(-1)[:numel]
