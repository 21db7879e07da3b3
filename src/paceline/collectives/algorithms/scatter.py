"""Scatter: the root sends chunk p to each rank p, in one round."""

from __future__ import annotations

from paceline.collectives.algorithms.tree import from_root
from paceline.collectives.schedule import Schedule, Transfer, followed_by
from paceline.registry import operations


@operations.register("scatter")
def scatter(ranks: int, root: int = 0) -> Schedule:
    """One rank gives chunk p to each rank p."""
    others = from_root(ranks, root)[1:]
    return followed_by(
        "scatter",
        ranks,
        ranks,
        ("scatter", [tuple(Transfer(root, p, p, p + 1, False) for p in others)]),
    )
