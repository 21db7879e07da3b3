"""Reduce-scatter: rank p ends with the sum of all ranks' chunk p. P - 1 rounds; each rank sends
(P-1)/P of the buffer.
"""

from __future__ import annotations

from paceline.collectives.algorithms.ring import share_reduce
from paceline.collectives.schedule import Schedule, followed_by
from paceline.registry import operations

RULES = {
    "share-reduce": "In round r, rank p sends chunk (p - r - 1) mod P to rank (p + 1) mod P, which"
    " adds it to its own. After P - 1 rounds, rank p holds the sum of chunk p."
}


@operations.register("reduce-scatter")
def reduce_scatter(ranks: int) -> Schedule:
    """Rank p ends with the sum of all ranks' chunk p (a ring)."""
    return followed_by(
        "reduce-scatter",
        ranks,
        ranks,
        ("share-reduce", share_reduce(ranks, start=1)),
        rules=RULES,
    )
