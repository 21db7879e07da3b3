"""A collective of one's own that `auto` tries: a sum along a line of ranks, then the way back."""

from paceline.collectives.base import algorithm
from paceline.collectives.schedule import Schedule, Transfer, followed_by


@algorithm("line", tried=True)
def line(ranks: int) -> Schedule:
    """The last rank sends to the one before it, which adds, and so on; then the way back."""
    there = [(Transfer(r, r - 1, 0, 1, True),) for r in range(ranks - 1, 0, -1)]
    back = [(Transfer(r, r + 1, 0, 1, False),) for r in range(ranks - 1)]
    return followed_by("line", 1, ranks, ("there", there), ("back", back))
