"""Broadcast along a binomial tree: the root's buffer reaches all ranks in ceil(log2 P) rounds."""

from __future__ import annotations

from paceline.collectives.algorithms.tree import from_root, outwards
from paceline.collectives.schedule import Schedule, followed_by
from paceline.registry import operations


@operations.register("broadcast")
def broadcast(ranks: int, root: int = 0) -> Schedule:
    """All ranks end with one rank's buffer."""
    return followed_by("broadcast", 1, ranks, ("broadcast", outwards(from_root(ranks, root), 1)))
