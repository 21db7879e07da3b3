"""Broadcast along a binomial tree: the root's buffer reaches all ranks in ceil(log2 P) rounds."""

from __future__ import annotations

from paceline.collectives.algorithms.tree import from_root, outwards
from paceline.collectives.schedule import Schedule, Shape, followed_by
from paceline.registry import operations

RULES = {
    "broadcast": "In every round, each rank that holds the root's buffer sends it to one rank that"
    " does not. The number of holders doubles in every round."
}


@operations.register("broadcast")
def broadcast(ranks: int, root: int = 0) -> Schedule:
    """All ranks end with one rank's buffer."""
    members = from_root(ranks, root)
    return followed_by(
        "broadcast",
        1,
        ranks,
        ("broadcast", outwards(members, 1)),
        rules=RULES,
        shape=Shape("tree", (tuple(members),)),
    )
