"""Step-wise reduce: an all-reduce without its second half. A rank goes on with what it has heard so
far.

    chunked   the share-reduce half of the ring: chunk c sets out from rank c + start and is added up along the ring, so rank p
              ends with chunk c's sum over the ranks that it has visited: p - c - start + 1 of them (mod P)
    literal   0 -> 1 -> ... -> P-1 with the whole buffer: rank p ends with the sum over 0 .. p

Half the bytes and half the rounds of a ring all-reduce. Who has heard whom follows from the
schedule (`counts`). With a start that moves on from step to step everybody is heard by everybody in
turn; fixed, the head of the line hears nobody, ever.
"""

from __future__ import annotations

from typing import Annotated

from paceline.collectives.algorithms.ring import share_reduce
from paceline.collectives.schedule import Round, Schedule, Transfer, followed_by, states
from paceline.errors import BadRequest
from paceline.registry import operations


@operations.register("stepwise")
def stepwise(
    ranks: int,
    chunked: Annotated[bool, "false: the whole buffer along the line"] = True,
    start: Annotated[int, "where chunk 0 (or the line) begins"] = 0,
) -> Schedule:
    """The first half of a ring only: each rank keeps the sum till it."""
    if not 0 <= start < ranks:
        raise BadRequest(f"stepwise: start={start}: a rank, 0 to {ranks - 1}")
    if chunked:
        return followed_by("stepwise", ranks, ranks, ("share-reduce", share_reduce(ranks, start)))
    line = [(start + i) % ranks for i in range(ranks)]
    collect: list[Round] = [(Transfer(line[i], line[i + 1], 0, 1, True),) for i in range(ranks - 1)]
    return followed_by("stepwise", 1, ranks, ("reduce", collect))


def counts(schedule: Schedule, rank: int) -> list[int]:
    """Of how many ranks' parts each chunk holds at the end."""
    return [sum(holding) for holding in states(schedule)[-1][rank]]
