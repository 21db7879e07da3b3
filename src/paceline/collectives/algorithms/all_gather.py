"""All-gather: every rank ends with rank p's chunk p, for all p. P - 1 rounds; each rank sends
(P-1)/P of the buffer.
"""

from __future__ import annotations

from paceline.collectives.algorithms.ring import share_only
from paceline.collectives.schedule import Schedule, followed_by
from paceline.registry import operations

RULES = {
    "share-only": "In round r, rank p sends chunk (p - r) mod P to rank (p + 1) mod P, which"
    " replaces its own by it: first its own chunk p, then the chunk that it received last."
}


@operations.register("all-gather")
def all_gather(ranks: int) -> Schedule:
    """Every rank ends with each rank p's chunk p (a ring)."""
    return followed_by(
        "all-gather", ranks, ranks, ("share-only", share_only(ranks, own=0)), rules=RULES
    )
