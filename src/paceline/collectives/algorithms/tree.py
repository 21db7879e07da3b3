"""Binomial tree: pairs, then pairs of pairs, until rank 0 has the sum; then the same way back.

2 ceil(log2 P) rounds of the whole buffer: few rounds, so it wins where latency counts and the
buffer is small.
"""

from __future__ import annotations

from paceline.collectives.base import algorithm
from paceline.collectives.schedule import Round, Schedule, Transfer, followed_by
from paceline.errors import BadRequest


def towards(members: list[int], chunks: int) -> list[Round]:
    """Everything is summed at the first member."""
    rounds: list[Round] = []
    distance = 1
    while distance < len(members):
        rounds.append(
            tuple(
                Transfer(members[i + distance], members[i], 0, chunks, True)
                for i in range(0, len(members) - distance, 2 * distance)
            )
        )
        distance *= 2
    return rounds


def outwards(members: list[int], chunks: int) -> list[Round]:
    """The first member's buffer reaches everybody."""
    return [
        tuple(Transfer(t.target, t.source, 0, chunks, False) for t in r)
        for r in reversed(towards(members, chunks))
    ]


@algorithm("tree")
def tree(ranks: int) -> Schedule:
    """Binomial tree: 2 log2(P) rounds of the whole buffer."""
    everybody = list(range(ranks))
    return followed_by(
        "tree", 1, ranks, ("reduce", towards(everybody, 1)), ("broadcast", outwards(everybody, 1))
    )


def from_root(ranks: int, root: int) -> list[int]:
    """All ranks, the root first."""
    if not 0 <= root < ranks:
        raise BadRequest(f"root={root}: there are ranks 0 to {ranks - 1}")
    return [(root + i) % ranks for i in range(ranks)]
