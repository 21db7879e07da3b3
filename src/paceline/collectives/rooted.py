"""From one rank to all, and from all to one: broadcast and reduce along a binomial tree, gather and scatter in one round.

broadcast   root's buffer                         -> everybody          ceil(log2 P) rounds
reduce      the sum of all buffers                -> root               ceil(log2 P) rounds
gather      rank p's chunk p                      -> root's chunk p     1 round
scatter     root's chunk p                        -> rank p's chunk p   1 round
"""

from __future__ import annotations

from paceline.collectives.schedule import Schedule, Transfer, followed_by
from paceline.collectives.tree import outwards, towards
from paceline.errors import BadRequest
from paceline.registry import operations


def from_root(ranks: int, root: int) -> list[int]:
    """All ranks, the root first."""
    if not 0 <= root < ranks:
        raise BadRequest(f"root={root}: there are ranks 0 to {ranks - 1}")
    return [(root + i) % ranks for i in range(ranks)]


@operations.register("broadcast")
def broadcast(ranks: int, root: int = 0) -> Schedule:
    """One rank's buffer reaches everybody."""
    return followed_by("broadcast", 1, ranks, ("broadcast", outwards(from_root(ranks, root), 1)))


@operations.register("reduce")
def reduce(ranks: int, root: int = 0) -> Schedule:
    """One rank ends with everybody's sum; what the others end with is of no use."""
    return followed_by("reduce", 1, ranks, ("reduce", towards(from_root(ranks, root), 1)))


@operations.register("gather")
def gather(ranks: int, root: int = 0) -> Schedule:
    """One rank collects chunk p from each rank p."""
    others = from_root(ranks, root)[1:]
    return followed_by("gather", ranks, ranks, ("gather", [tuple(Transfer(p, root, p, p + 1, False) for p in others)]))


@operations.register("scatter")
def scatter(ranks: int, root: int = 0) -> Schedule:
    """One rank gives chunk p to each rank p."""
    others = from_root(ranks, root)[1:]
    return followed_by("scatter", ranks, ranks, ("scatter", [tuple(Transfer(root, p, p, p + 1, False) for p in others)]))
