"""Scatter: the root sends chunk p to each rank p, in one round."""

from __future__ import annotations

from paceline.collectives.algorithms.tree import from_root
from paceline.collectives.schedule import Schedule, Shape, Transfer, followed_by
from paceline.registry import operations

RULES = {"scatter": "The root sends chunk p to every rank p at once, which keeps it."}


@operations.register("scatter")
def scatter(ranks: int, root: int = 0) -> Schedule:
    """One rank gives chunk p to each rank p."""
    root_first = from_root(ranks, root)
    return followed_by(
        "scatter",
        ranks,
        ranks,
        ("scatter", [tuple(Transfer(root, p, p, p + 1, False) for p in root_first[1:])]),
        rules=RULES,
        shape=Shape("star", (tuple(root_first),)),
    )
