"""Hierarchical all-reduce: reduce inside each group (a host), ring between the groups' leaders,
broadcast inside each group.

Only the leaders send across hosts, so each of H hosts sends 2 (H-1)/H of the buffer over the slow
link, however many ranks it has.
"""

from __future__ import annotations

from typing import Annotated

from paceline.collectives.algorithms.ring import share_only, share_reduce
from paceline.collectives.algorithms.tree import outwards, towards
from paceline.collectives.base import algorithm
from paceline.collectives.schedule import Round, Schedule, Shape, Transfer, followed_by
from paceline.errors import BadRequest

# i is the number of a group, G the number of groups.
RULES = {
    "reduce inside": "In every group, a binomial tree adds the members' buffers into the leader's.",
    "share-reduce between": "In round r, the leader of group i sends chunk (i - r) mod G to the"
    " leader of group (i + 1) mod G, which adds it to its own.",
    "share-only between": "In round r, the leader of group i sends chunk (i + 1 - r) mod G to the"
    " leader of group (i + 1) mod G, which replaces its own by it.",
    "broadcast inside": "In every group, a binomial tree sends the leader's sum to the members.",
}


def merged(groups: list[list[Round]]) -> list[Round]:
    """Several groups' rounds, run at the same time."""
    longest = max((len(g) for g in groups), default=0)
    return [tuple(t for g in groups if r < len(g) for t in g[r]) for r in range(longest)]


def renumbered(rounds: list[Round], members: list[int]) -> list[Round]:
    """Rounds over ranks 0..n-1, with these members in place of the ranks."""
    return [
        tuple(Transfer(members[t.source], members[t.target], t.start, t.stop, t.adds) for t in r)
        for r in rounds
    ]


@algorithm("hierarchical")
def hierarchical(ranks: int, group: Annotated[int, "ranks per group (host)"] = 2) -> Schedule:
    """Trees inside groups, a ring between their leaders."""
    if group < 1:
        raise BadRequest(f"collective hierarchical: group={group}: it must be 1 or more")
    groups = [list(range(start, min(start + group, ranks))) for start in range(0, ranks, group)]
    leaders, count = [members[0] for members in groups], len(groups)
    return followed_by(
        "hierarchical",
        count,
        ranks,
        ("reduce inside", merged([towards(members, count) for members in groups])),
        ("share-reduce between", renumbered(share_reduce(count), leaders)),
        ("share-only between", renumbered(share_only(count), leaders)),
        ("broadcast inside", merged([outwards(members, count) for members in groups])),
        rules=RULES,
        shape=Shape("groups", tuple(map(tuple, groups))),
    )
