"""Gather: each rank p sends its chunk p to the root, in one round."""

from __future__ import annotations

from paceline.collectives.algorithms.tree import from_root
from paceline.collectives.schedule import Schedule, Shape, Transfer, followed_by
from paceline.registry import operations

RULES = {"gather": "Every rank p sends its chunk p to the root at once, which keeps it."}


@operations.register("gather")
def gather(ranks: int, root: int = 0) -> Schedule:
    """One rank collects chunk p from each rank p."""
    root_first = from_root(ranks, root)
    return followed_by(
        "gather",
        ranks,
        ranks,
        ("gather", [tuple(Transfer(p, root, p, p + 1, False) for p in root_first[1:])]),
        rules=RULES,
        shape=Shape("star", (tuple(root_first),)),
    )
