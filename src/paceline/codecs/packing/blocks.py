"""Numbers in blocks with one scale each, and bits packed into bytes: what the quantising codecs
share.

Long vectors are worked on in slices that fit into a core's cache, so that every pass but the first
costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SLICE = 1 << 17  # elements
SMALLEST = 1e-30  # scales below it count as this: nothing is divided by nothing


class Piece(NamedTuple):
    """A slice of a vector as rows of blocks (the last one may be a shorter row), and which blocks
    they are.
    """

    start: int
    stop: int
    rows: int
    first: int  # block

    @property
    def width(self) -> int:
        return (self.stop - self.start) // self.rows


def pieces(numel: int, block: int) -> Iterator[Piece]:
    whole, step = numel // block, max(1, SLICE // block)
    for first in range(0, whole, step):
        rows = min(step, whole - first)
        yield Piece(first * block, (first + rows) * block, rows, first)
    if numel % block:
        yield Piece(whole * block, numel, 1, whole)


def count(numel: int, block: int) -> int:
    return -(-numel // block)


def scale(rows: Tensor, aside: Tensor, out: Tensor) -> None:
    """The largest magnitude of each row."""
    torch.amax(torch.abs(rows, out=aside), dim=1, out=out)
    out.clamp_min_(SMALLEST)  # NaN stays NaN


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Numbers below 2**bits (uint8), several to a byte: byte i holds numbers i, i + length/per, ...
    (2 or 4 bits).
    """
    per = 8 // bits
    short = out.numel()
    out.copy_(codes[:short])
    for turn in range(1, per):
        part = codes[turn * short : (turn + 1) * short]
        out[: part.numel()].add_(part, alpha=1 << (bits * turn))


def unpack(packed: Tensor, bits: int, codes: Tensor) -> None:
    """The reverse, into `codes`."""
    per, short = 8 // bits, packed.numel()
    for turn in range(per):
        part = codes[turn * short : (turn + 1) * short]
        torch.bitwise_right_shift(packed[: part.numel()], bits * turn, out=part)
    codes.bitwise_and_((1 << bits) - 1)


def packed_bytes(numel: int, bits: int) -> int:
    return -(-numel * bits // 8)


def pack_bits(flags: Tensor, out: Tensor) -> None:
    """One bit each, the first in the lowest bit of the first byte."""
    if flags.device.type == "cpu":
        out.copy_(torch.from_numpy(np.packbits(flags.numpy(), bitorder="little")))
        return
    padded = torch.zeros(8 * out.numel(), dtype=torch.uint8, device=flags.device)
    padded[: flags.numel()] = flags
    weights = 2 ** torch.arange(8, device=flags.device)
    out.copy_((padded.view(-1, 8) * weights).sum(1))


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """uint8 0 or 1."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=numel, bitorder="little"))
    return ((packed.view(-1, 1) >> torch.arange(8, device=packed.device)) & 1).reshape(-1)[:numel]
