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
from paceline.collectives.schedule import Round, Schedule, Transfer, followed_by
from paceline.errors import BadRequest


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
    )
