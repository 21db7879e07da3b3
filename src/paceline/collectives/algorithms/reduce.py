"""Reduce along a binomial tree: the root ends with the sum of all buffers after ceil(log2 P)
rounds.
"""

from __future__ import annotations

from paceline.collectives.algorithms.tree import TOWARDS, from_root, towards
from paceline.collectives.schedule import Schedule, Shape, followed_by
from paceline.registry import operations


@operations.register("reduce")
def reduce(ranks: int, root: int = 0) -> Schedule:
    """One rank ends with the sum over all ranks; the other ranks end with partial sums."""
    members = from_root(ranks, root)
    return followed_by(
        "reduce",
        1,
        ranks,
        ("reduce", towards(members, 1)),
        rules={"reduce": TOWARDS},
        shape=Shape("tree", (tuple(members),)),
    )
