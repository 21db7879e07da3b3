"""All-to-all: rank p's chunk q becomes rank q's chunk p. P rounds of swaps; each rank sends (P-1)/P
of the buffer.
"""

from __future__ import annotations

from paceline.collectives.schedule import Round, Schedule, Transfer, followed_by
from paceline.registry import operations

RULES = {
    "swap": "In round r, rank p sends chunk q = (r - p) mod P to rank q, which keeps it as its"
    " chunk p. Rank q sends its chunk p to rank p in the same round; p = q pauses."
}


@operations.register("all-to-all")
def all_to_all(ranks: int) -> Schedule:
    """Ranks p and q swap p's chunk q and q's chunk p; all chunks must have the same length."""
    swaps: list[Round] = []
    for r in range(ranks):
        partners = [(p, (r - p) % ranks) for p in range(ranks)]
        swaps.append(tuple(Transfer(p, q, q, q + 1, False, at=p) for p, q in partners if p != q))
    return followed_by("all-to-all", ranks, ranks, ("swap", swaps), rules=RULES)
