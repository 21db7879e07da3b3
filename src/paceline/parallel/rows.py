"""Who needs which rows of an image: the halo transfers of a layer, as data.

Each rank owns a span of the rows of every image. To compute its rows of a layer's output it needs
some rows of the input; those that other ranks own are sent. What a rank needs, intersected with
what others own, is all there is to it: any kernel, stride, padding, dilation and uneven split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Span = tuple[int, int]  # the rows [low, high)


@dataclass(frozen=True)
class Window:
    """How a convolution or a pooling looks at rows."""

    kernel: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    ceil: bool = False  # a last window that is not full counts too (ceil_mode of pooling)

    def outputs(self, rows: int) -> int:
        """How many rows the output has."""
        reach = self.dilation * (self.kernel - 1) + 1
        room = rows + 2 * self.padding - reach
        count = (room + (self.stride - 1 if self.ceil else 0)) // self.stride + 1
        if self.ceil and (count - 1) * self.stride >= rows + self.padding:
            count -= 1  # the last one would begin in the padding
        return max(0, count)

    def looked_at(self, span: Span) -> Span:
        """The input rows of some output rows, beyond the image where there is padding."""
        low, high = span
        if low >= high:
            return 0, 0
        first = low * self.stride - self.padding
        last = (high - 1) * self.stride - self.padding + self.dilation * (self.kernel - 1)
        return first, last + 1

    def needs(self, span: Span, rows: int) -> Span:
        """The input rows of some output rows, within the image."""
        low, high = self.looked_at(span)
        low, high = max(0, low), min(rows, high)
        return (low, high) if low < high else (0, 0)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rank `source` sends the rows [low, high) that it owns to rank `target`."""

    source: int
    target: int
    low: int
    high: int


@dataclass(frozen=True)
class Halo:
    """A movement of rows: each rank's own rows before, the rows that it holds after.

    It is a linear map from the rows before to the rows after.
    """

    owned: tuple[Span, ...]
    held: tuple[Span, ...]
    transfers: tuple[Rows, ...]  # also from a rank to itself: rows that it keeps
    adds: bool = False  # rows that arrive several times are summed

    def sent(self, rank: int) -> int:
        """The rows that a rank sends to others."""
        return sum(t.high - t.low for t in self.transfers if t.source == rank != t.target)


def even(rows: int, ranks: int) -> tuple[Span, ...]:
    """Rows in spans of nearly equal length."""
    ends = [rows * rank // ranks for rank in range(ranks + 1)]
    return tuple(pairwise(ends))


def halo(owned: Sequence[Span], needed: Sequence[Span]) -> Halo:
    """The transfers after which each rank holds the rows that it needs."""
    transfers = []
    for target, (low, high) in enumerate(needed):
        for source, (start, stop) in enumerate(owned):
            first, last = max(low, start), min(high, stop)
            if first < last:
                transfers.append(Rows(source, target, first, last))
    return Halo(tuple(owned), tuple(needed), tuple(transfers))


def transposed(movement: Halo) -> Halo:
    """The adjoint map: rows go back to where they came from, and are summed there.

    A backward pass moves gradients so.
    """
    back = tuple(Rows(t.target, t.source, t.low, t.high) for t in movement.transfers)
    return Halo(movement.held, movement.owned, back, not movement.adds)


def proved(movement: Halo, rows: int) -> tuple[str, ...]:
    """What is wrong with a movement, by symbolic execution; nothing: it is proved.

    Every row is owned by one rank, and every rank gets each row that it needs once, from its owner.
    """
    wrong = []
    owners: dict[int, list[int]] = {row: [] for row in range(rows)}
    for rank, (low, high) in enumerate(movement.owned):
        for row in range(low, high):
            owners.setdefault(row, []).append(rank)
    wrong += [f"row {row} has {len(who)} owners" for row, who in owners.items() if len(who) != 1]
    for rank, (low, high) in enumerate(movement.held):
        got: dict[int, int] = {}
        for t in movement.transfers:
            if t.target != rank:
                continue
            for row in range(t.low, t.high):
                got[row] = got.get(row, 0) + 1
                if owners.get(row) != [t.source]:
                    wrong.append(f"rank {t.source} sends row {row}, which it does not own")
        for row in range(low, high):
            if got.pop(row, 0) != 1:
                wrong.append(f"rank {rank} does not get row {row} once")
        wrong += [f"rank {rank} gets row {row}, which it does not need" for row in got]
    return tuple(wrong)
