"""Hierarchical all-reduce: sum inside each group (a host), ring between the groups' leaders, share
inside each group.

Only the leaders talk across hosts: the slow link carries 2 (H-1)/H of the buffer per host, however
many ranks a host has.
"""

from __future__ import annotations

from typing import Annotated

from paceline.collectives.algorithms.ring import share_only, share_reduce
from paceline.collectives.algorithms.tree import outwards, towards
from paceline.collectives.base import algorithm
from paceline.collectives.schedule import Round, Schedule, Transfer, followed_by
from paceline.errors import BadRequest


def together(parts: list[list[Round]]) -> list[Round]:
    """Several groups' rounds side by side."""
    longest = max((len(p) for p in parts), default=0)
    return [tuple(t for p in parts if r < len(p) for t in p[r]) for r in range(longest)]


def renamed(rounds: list[Round], members: list[int]) -> list[Round]:
    """A schedule over 0..n-1 played by these ranks."""
    return [
        tuple(Transfer(members[t.source], members[t.target], t.start, t.stop, t.adds) for t in r)
        for r in rounds
    ]


@algorithm("hierarchical")
def hierarchical(ranks: int, group: Annotated[int, "ranks per group (host)"] = 2) -> Schedule:
    """Trees inside groups, a ring between their leaders."""
    if group < 1:
        raise BadRequest(f"collective hierarchical: group={group}: 1 or more")
    groups = [list(range(start, min(start + group, ranks))) for start in range(0, ranks, group)]
    leaders, count = [members[0] for members in groups], len(groups)
    return followed_by(
        "hierarchical",
        count,
        ranks,
        ("reduce inside", together([towards(members, count) for members in groups])),
        ("share-reduce between", renamed(share_reduce(count), leaders)),
        ("share-only between", renamed(share_only(count), leaders)),
        ("broadcast inside", together([outwards(members, count) for members in groups])),
    )
