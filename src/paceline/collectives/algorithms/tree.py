"""Binomial tree: pairs of ranks add, then pairs of pairs, until rank 0 has the sum, which is then
broadcast along the same tree.

2 ceil(log2 P) rounds of the whole buffer. Few rounds make it fast for small buffers, where latency
dominates.
"""

from __future__ import annotations

from paceline.collectives.base import algorithm
from paceline.collectives.schedule import Round, Schedule, Shape, Transfer, followed_by
from paceline.errors import BadRequest

# A member is a rank's place in the tree, counted from the root, which is member 0.
TOWARDS = (
    "In round r, every member p that is an odd multiple of 2^r sends its sum to member p - 2^r,"
    " which adds it. The number of senders halves in every round."
)
OUTWARDS = (
    "The rounds of the reduction in reverse: every member that holds the result sends it to the"
    " member that had sent to it. The number of holders doubles in every round."
)
RULES = {"reduce": TOWARDS, "broadcast": OUTWARDS}


def towards(members: list[int], chunks: int) -> list[Round]:
    """Rounds after which the first member has the sum of all members' buffers."""
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
    """Rounds after which all members have the first member's buffer."""
    return [
        tuple(Transfer(t.target, t.source, 0, chunks, False) for t in r)
        for r in reversed(towards(members, chunks))
    ]


# It sends whole buffers: above this size it is never the fastest.
@algorithm("tree", tried=True, up_to_bytes=1 << 20)
def tree(ranks: int) -> Schedule:
    """Binomial tree: 2 log2(P) rounds of the whole buffer."""
    members = list(range(ranks))
    return followed_by(
        "tree",
        1,
        ranks,
        ("reduce", towards(members, 1)),
        ("broadcast", outwards(members, 1)),
        rules=RULES,
        shape=Shape("tree", (tuple(members),)),
    )


def from_root(ranks: int, root: int) -> list[int]:
    """All ranks, the root first."""
    if not 0 <= root < ranks:
        raise BadRequest(f"root={root}: the ranks are 0 to {ranks - 1}")
    return [(root + i) % ranks for i in range(ranks)]
