"""Ring all-reduce (Patarasuk & Yuan, 2009): the buffer in P chunks, every link busy in every round.

    share-reduce   round r: rank p sends chunk p - r to p + 1, which adds it        (P - 1 rounds)
                   now rank p holds the sum over all ranks of chunk p + 1
    share-only     round r: rank p sends chunk p + 1 - r to p + 1, which keeps it   (P - 1 rounds)

Each rank sends 2 (P-1)/P of the buffer, the least that an all-reduce can do.
"""

from __future__ import annotations

from paceline.collectives.base import algorithm
from paceline.collectives.schedule import Round, Schedule, Transfer, followed_by

RULES = {
    "share-reduce": "In round r, rank p sends chunk (p - r) mod P to rank (p + 1) mod P, which adds"
    " it to its own. After P - 1 rounds, rank p holds the sum of chunk (p + 1) mod P.",
    "share-only": "In round r, rank p sends chunk (p + 1 - r) mod P to rank (p + 1) mod P, which"
    " replaces its own by it. After P - 1 rounds, every rank holds every sum.",
}


def share_reduce(ranks: int, start: int = 0) -> list[Round]:
    """Rounds in which chunk c travels from rank c + start around the ring and is summed."""
    return [
        tuple(
            Transfer(p, (p + 1) % ranks, c := (p - r - start) % ranks, c + 1, True)
            for p in range(ranks)
        )
        for r in range(ranks - 1)
    ]


def share_only(ranks: int, own: int = 1) -> list[Round]:
    """Rounds in which rank p sends chunk p + own, then always the chunk that it received last."""
    return [
        tuple(
            Transfer(p, (p + 1) % ranks, c := (p + own - r) % ranks, c + 1, False)
            for p in range(ranks)
        )
        for r in range(ranks - 1)
    ]


@algorithm("ring", tried=True)
def ring(ranks: int) -> Schedule:
    """Chunked ring: 2(P-1) rounds, each rank sends 2(P-1)/P of the buffer."""
    return followed_by(
        "ring",
        ranks,
        ranks,
        ("share-reduce", share_reduce(ranks)),
        ("share-only", share_only(ranks)),
        rules=RULES,
    )
