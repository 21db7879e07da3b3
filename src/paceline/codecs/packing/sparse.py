"""Some numbers out of many: how they travel, and how the largest are found without sorting.

Indices are sorted and cut into blocks of 65,536: 16 bits each, and one count per block. With
float32 values that is 6 bytes for each number that travels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codecs.base import aligned, part

BLOCK_BITS = 16
SAMPLE = 1 << 16  # numbers that are looked at to guess where the largest begin


def message_bytes(numel: int, count: int) -> int:
    return aligned(4 * _blocks(numel) + 6 * count)


def _blocks(numel: int) -> int:
    return -(-numel // (1 << BLOCK_BITS))


def write(values: Tensor, indices: Tensor, message: Tensor) -> int:
    """values[indices] with their (sorted) indices; returns the bytes used."""
    blocks, count = _blocks(values.numel()), indices.numel()
    counts, at = part(message, 0, blocks, torch.int32)
    counts.copy_(torch.bincount(indices >> BLOCK_BITS, minlength=blocks))
    chosen, at = part(message, at, count, torch.float32)
    chosen.copy_(values.index_select(0, indices))
    short, at = part(message, at, count, torch.int16)
    short.copy_(indices)  # the low 16 bits
    return aligned(at)


def read(message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """(indices, values) of a message about a vector of `numel`."""
    blocks = _blocks(numel)
    counts, at = part(message, 0, blocks, torch.int32)
    count = int(counts.sum())
    chosen, at = part(message, at, count, torch.float32)
    short, _ = part(message, at, count, torch.int16)
    bases = torch.arange(blocks, device=message.device) << BLOCK_BITS
    indices = torch.repeat_interleave(bases, counts.long(), output_size=count)
    return indices.add_(short.long() & 0xFFFF), chosen


def largest(values: Tensor, count: int, aside: Tensor) -> Tensor:
    """The sorted indices of the `count` largest magnitudes, exactly.

    A sample says roughly where the largest begin; only what is above that is looked at closely.
    `aside`, as long as `values`, is left with the magnitudes.
    """
    n, magnitudes = values.numel(), torch.abs(values, out=aside)
    if count >= n:
        return torch.arange(n, device=values.device)
    guess = _guess(magnitudes, count)
    candidates = (
        (magnitudes >= guess).nonzero().view(-1)
        if guess > 0
        else torch.arange(n, device=values.device)
    )
    while candidates.numel() < count:  # the sample was unlucky: rare
        guess /= 2
        if guess < 1e-38:
            candidates = torch.arange(n, device=values.device)
            break
        candidates = (magnitudes >= guess).nonzero().view(-1)
    if candidates.numel() == count:
        return candidates
    chosen = magnitudes.index_select(0, candidates).topk(count, sorted=False).indices
    return candidates.index_select(0, chosen).sort().values


def _guess(magnitudes: Tensor, count: int) -> float:
    """A magnitude that a little more than `count` are above, judged by a sample."""
    stride = max(1, magnitudes.numel() // SAMPLE)
    sample = magnitudes[::stride]
    expected = count / stride
    above = min(sample.numel(), int(expected + 4 * expected**0.5 + 8))
    return float(sample.kthvalue(sample.numel() - above + 1).values)
