"""Messages with some numbers of a vector, and finding the largest numbers without sorting.

The vector is divided into blocks of 65,536 numbers. A message holds the sorted indices as 16 bits
each, and one count per block. With float32 values that is 6 bytes per number sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codecs.base import aligned, numbers_at

BLOCK_BITS = 16
SAMPLE = 1 << 16  # the size of the sample that estimates the threshold of the largest


def message_bytes(numel: int, count: int) -> int:
    return aligned(4 * _blocks(numel) + 6 * count)


def _blocks(numel: int) -> int:
    return -(-numel // (1 << BLOCK_BITS))


def write(values: Tensor, indices: Tensor, message: Tensor) -> int:
    """Write values[indices] and the (sorted) indices to a message; return the bytes used."""
    blocks, count = _blocks(values.numel()), indices.numel()
    counts, at = numbers_at(message, 0, blocks, torch.int32)
    counts.copy_(torch.bincount(indices >> BLOCK_BITS, minlength=blocks))
    chosen, at = numbers_at(message, at, count, torch.float32)
    chosen.copy_(values.index_select(0, indices))
    short, at = numbers_at(message, at, count, torch.int16)
    short.copy_(indices)  # the low 16 bits
    return aligned(at)


def read(message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Read (indices, values) from a message about a vector of `numel` numbers."""
    blocks = _blocks(numel)
    counts, at = numbers_at(message, 0, blocks, torch.int32)
    count = int(counts.sum())
    chosen, at = numbers_at(message, at, count, torch.float32)
    short, _ = numbers_at(message, at, count, torch.int16)
    bases = torch.arange(blocks, device=message.device) << BLOCK_BITS
    indices = torch.repeat_interleave(bases, counts.long(), output_size=count)
    return indices.add_(short.long() & 0xFFFF), chosen


def largest(values: Tensor, count: int, aside: Tensor) -> Tensor:
    """The sorted indices of the `count` largest magnitudes, exactly.

    A sample gives an estimated threshold, and only magnitudes above it are compared. `aside`, as
    long as `values`, ends with the magnitudes.
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
    while candidates.numel() < count:  # rare: the sample's threshold was too high
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
    """Estimate, from a sample, a magnitude that slightly more than `count` numbers exceed."""
    stride = max(1, magnitudes.numel() // SAMPLE)
    sample = magnitudes[::stride]
    expected = count / stride
    above = min(sample.numel(), int(expected + 4 * expected**0.5 + 8))
    return float(sample.kthvalue(sample.numel() - above + 1).values)
