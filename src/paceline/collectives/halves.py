"""The two halves of an all-reduce, and the exchange of everything with everybody.

reduce-scatter   rank p ends with the sum of chunk p                   P - 1 rounds, (P-1)/P of the buffer sent
all-gather       everybody ends with rank p's chunk p, for all p       P - 1 rounds, (P-1)/P of the buffer sent
all-to-all       rank p's chunk q becomes rank q's chunk p             P rounds of swaps, (P-1)/P of the buffer sent
"""

from __future__ import annotations

from paceline.collectives.ring import share_only, share_reduce
from paceline.collectives.schedule import Round, Schedule, Transfer, followed_by
from paceline.registry import operations


@operations.register("reduce-scatter")
def reduce_scatter(ranks: int) -> Schedule:
    """Rank p ends with everybody's sum of chunk p (a ring)."""
    return followed_by("reduce-scatter", ranks, ranks, ("share-reduce", share_reduce(ranks, start=1)))


@operations.register("all-gather")
def all_gather(ranks: int) -> Schedule:
    """Everybody ends with each rank p's chunk p (a ring)."""
    return followed_by("all-gather", ranks, ranks, ("share-only", share_only(ranks, own=0)))


@operations.register("all-to-all")
def all_to_all(ranks: int) -> Schedule:
    """Rank p's chunk q and rank q's chunk p change places; the chunks must be of one length."""
    swaps: list[Round] = []
    for r in range(ranks):
        partners = [(p, (r - p) % ranks) for p in range(ranks)]
        swaps.append(tuple(Transfer(p, q, q, q + 1, False, at=p) for p, q in partners if p != q))
    return followed_by("all-to-all", ranks, ranks, ("swap", swaps))
