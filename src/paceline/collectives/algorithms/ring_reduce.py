"""Ring reduce: the whole buffer, unchunked, is summed along 0 -> 1 -> ... -> P-1, then the sum is
sent around the ring.

2(P-1) rounds of the whole buffer with one link busy at a time: the same bytes as the chunked ring,
in P times the time.
"""

from __future__ import annotations

from paceline.collectives.base import algorithm
from paceline.collectives.schedule import Round, Schedule, Transfer, followed_by

RULES = {
    "reduce": "In round r, rank r sends the sum so far, the whole buffer, to rank r + 1, which adds"
    " it to its own.",
    "share": "In round r, rank (r - 1) mod P sends the whole sum to rank r, which replaces its own"
    " buffer by it.",
}


@algorithm("ring-reduce")
def ring_reduce(ranks: int) -> Schedule:
    """Unchunked ring: the buffer is summed from rank to rank, then the sum is sent around."""
    collect: list[Round] = [(Transfer(p, p + 1, 0, 1, True),) for p in range(ranks - 1)]
    share: list[Round] = [(Transfer((p - 1) % ranks, p, 0, 1, False),) for p in range(ranks - 1)]
    return followed_by("ring-reduce", 1, ranks, ("reduce", collect), ("share", share), rules=RULES)
