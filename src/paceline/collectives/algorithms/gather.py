"""Gather: each rank p sends its chunk p to the root, in one round."""

from __future__ import annotations

from paceline.collectives.algorithms.tree import from_root
from paceline.collectives.schedule import Schedule, Transfer, followed_by
from paceline.registry import operations


@operations.register("gather")
def gather(ranks: int, root: int = 0) -> Schedule:
    """One rank collects chunk p from each rank p."""
    others = from_root(ranks, root)[1:]
    return followed_by(
        "gather",
        ranks,
        ranks,
        ("gather", [tuple(Transfer(p, root, p, p + 1, False) for p in others)]),
    )
