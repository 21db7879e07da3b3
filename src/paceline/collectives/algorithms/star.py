"""Star: all ranks send to rank 0, which adds and sends the sum back.

Two rounds, in which rank 0 does all the work.
"""

from __future__ import annotations

from paceline.collectives.base import algorithm
from paceline.collectives.schedule import Schedule, Shape, Transfer, followed_by

RULES = {
    "reduce": "All ranks send their buffers to rank 0 at once, which adds them to its own.",
    "broadcast": "Rank 0 sends the sum to all ranks at once.",
}


@algorithm("star")
def star(ranks: int) -> Schedule:
    """All ranks send to rank 0 and back: the traffic of one parameter server."""
    there = tuple(Transfer(p, 0, 0, 1, True) for p in range(1, ranks))
    back = tuple(Transfer(0, p, 0, 1, False) for p in range(1, ranks))
    return followed_by(
        "star",
        1,
        ranks,
        ("reduce", [there]),
        ("broadcast", [back]),
        rules=RULES,
        shape=Shape("star", (tuple(range(ranks)),)),
    )
