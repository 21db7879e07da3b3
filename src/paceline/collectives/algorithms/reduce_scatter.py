"""Reduce-scatter: rank p ends with the sum of all ranks' chunk p. P - 1 rounds; each rank sends
(P-1)/P of the buffer.
"""

from __future__ import annotations

from paceline.collectives.algorithms.ring import share_reduce
from paceline.collectives.schedule import Schedule, followed_by
from paceline.registry import operations


@operations.register("reduce-scatter")
def reduce_scatter(ranks: int) -> Schedule:
    """Rank p ends with the sum of all ranks' chunk p (a ring)."""
    return followed_by(
        "reduce-scatter", ranks, ranks, ("share-reduce", share_reduce(ranks, start=1))
    )
