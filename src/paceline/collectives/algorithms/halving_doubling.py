"""Recursive halving and doubling (Rabenseifner, 2004): the ring's bytes in a logarithmic number of
rounds.

Q is the largest power of two up to P. First each of the P - Q ranks beyond Q sends its buffer to a
partner, which adds it (fold). Then, at distance Q/2, Q/4, ..., 1, partners exchange halves of the
chunks that they are responsible for, and add (halving); then they exchange them in reverse order
without adding (doubling). At the end the partners send the result back (unfold).
"""

from __future__ import annotations

from paceline.collectives.base import algorithm
from paceline.collectives.schedule import Round, Schedule, Transfer, followed_by

RULES = {
    "fold": "Q is the largest power of two up to P. Every rank p >= Q sends its buffer to rank"
    " p - Q, which adds it.",
    "halving": "In round r, rank p and rank p XOR Q/2^(r+1) send each other one half of the chunks"
    " that they are responsible for, add what arrives, and are responsible for the other half.",
    "doubling": "The rounds of halving in reverse: partners send each other all sums that they"
    " hold, so the number of sums doubles in every round.",
    "unfold": "Every rank p - Q that has a partner p >= Q sends it the result.",
}


@algorithm("halving-doubling", tried=True)
def halving_doubling(ranks: int) -> Schedule:
    """Recursive halving, then doubling; any number of ranks."""
    inner = 1 << (ranks.bit_length() - 1)
    fold: Round = tuple(Transfer(p, p - inner, 0, inner, True) for p in range(inner, ranks))
    halving: list[Round] = []
    low, high = [0] * inner, [inner] * inner  # the chunks that each rank is responsible for
    distance = inner // 2
    while distance:
        transfers = []
        for p in range(inner):
            middle = (low[p] + high[p]) // 2
            keeps_low = not p & distance
            given = (middle, high[p]) if keeps_low else (low[p], middle)
            transfers.append(Transfer(p, p ^ distance, *given, True))
        for p in range(inner):
            middle = (low[p] + high[p]) // 2
            low[p], high[p] = (low[p], middle) if not p & distance else (middle, high[p])
        halving.append(tuple(transfers))
        distance //= 2
    doubling: list[Round] = [
        tuple(Transfer(t.target, t.source, t.start, t.stop, False) for t in transfers)
        for transfers in reversed(halving)
    ]
    unfold: Round = tuple(Transfer(p - inner, p, 0, inner, False) for p in range(inner, ranks))
    return followed_by(
        "halving-doubling",
        inner,
        ranks,
        ("fold", [fold]),
        ("halving", halving),
        ("doubling", doubling),
        ("unfold", [unfold]),
        rules=RULES,
    )
