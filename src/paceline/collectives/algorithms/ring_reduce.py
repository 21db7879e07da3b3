"""Ring reduce: the whole buffer travels, unchunked. 0 -> 1 -> ... -> P-1 sums it, then the sum goes
round once more.

2(P-1) rounds of the whole buffer, one link busy at a time: the bytes of the chunked ring, P times
as long.
"""

from __future__ import annotations

from paceline.collectives.base import algorithm
from paceline.collectives.schedule import Round, Schedule, Transfer, followed_by


@algorithm("ring-reduce")
def ring_reduce(ranks: int) -> Schedule:
    """Unchunked ring: the sum is collected along the line, then passed round."""
    collect: list[Round] = [(Transfer(p, p + 1, 0, 1, True),) for p in range(ranks - 1)]
    share: list[Round] = [(Transfer((p - 1) % ranks, p, 0, 1, False),) for p in range(ranks - 1)]
    return followed_by("ring-reduce", 1, ranks, ("reduce", collect), ("share", share))
